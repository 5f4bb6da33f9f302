"""Dropout inside models on real ranks, each with a generator: blocks, attached models, checkpoints, compiled code.

The oracle's dropout is drawn by the seeds that calls draw: one number below 2**63 - 1 for each, of torch's generator on
the CPU. So a model that is seeded alike drops alike on one rank and on several.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import attnspan as span
from attnspan.errors import AttnspanError
from attnspan.testing import loopback
from tests import oracle
from tests.parallel.models import model, parallel, result, same, whole
from tests.processes import spawn

LENGTH = 13
DOCUMENTS = span.Causal() & span.Documents([4, 9])
P, SEED = 0.3, 11


def seeds(count):
    torch.manual_seed(SEED)
    return [int(torch.randint(2**63 - 1, (), device="cpu")) for _ in range(count)]


def attend_densely(seed, query, key, value, mask=DOCUMENTS, **options):
    allowed = mask.dense(query.shape[2])
    drop = oracle.dropped(P, seed, (*query.shape[:3], key.shape[2]))
    return oracle.dense(query @ key.mT * query.shape[-1] ** -0.5, allowed, [(allowed, value)], drop)[0]


def expected():
    """(out, gradients) of the model on one device."""
    mine = model()
    for layer, seed in zip(mine.layers, seeds(2), strict=True):
        layer.sdpa = functools.partial(attend_densely, seed)
    return result(mine, mine(whole(LENGTH)))


def session(world):
    return span.ContextParallel(world, seq_len=LENGTH, mask=DOCUMENTS)


def in_block(world):
    cp, mine = session(world), model(dropout_p=P)
    torch.manual_seed(SEED)
    with cp.sdpa():
        return parallel(cp, mine, mine, whole(LENGTH))


def attached(world, again, compiled=False):
    cp, mine = session(world), model(again=again, dropout_p=P)
    with cp.attach(mine):
        run = torch.compile(mine, fullgraph=True, backend="aot_eager") if compiled else mine
        torch.manual_seed(SEED)
        return parallel(cp, mine, run, whole(LENGTH))


def multi_head(world):
    """nn.MultiheadAttention draws as SDPA does, in training alone."""
    cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Full())
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, dropout=P, batch_first=True).double()
    own = cp.shard(whole(LENGTH))
    found = []
    for train in (True, False):
        layer.train(train)
        torch.manual_seed(SEED)
        with cp.sdpa():
            out = layer(own, own, own, need_weights=False)[0]
        found.append(cp.unshard(out.detach()))
    return found


def torchs_names(world):
    from torch.distributed.device_mesh import init_device_mesh

    from attnspan.torch_compat import context_parallel, context_parallel_unshard

    mesh = init_device_mesh("cpu", (world.ranks,))
    query, key, value = (x.clone() for x in qkv())
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
        torch.manual_seed(SEED)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=P)
    return context_parallel_unshard(mesh, [out], [2])[0]


def qkv():
    return torch.randn(3, 2, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()


def refusal(world):
    """What a rank is told whose generator went on alone, after calls that were right."""
    cp = session(world)
    query = cp.shard(whole(LENGTH)).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.manual_seed(SEED)
    cp.attention(query, query, query, dropout_p=P)
    if world.rank:
        torch.rand(1)
    with pytest.raises(AttnspanError) as error:
        cp.attention(query, query, query, dropout_p=P)
    return str(error.value)


def live(world):
    return {
        "block": in_block(world),
        "reentrant": attached(world, "reentrant"),
        "non-reentrant": attached(world, "non-reentrant"),
        "multi-head": multi_head(world),
        "torch's names": torchs_names(world),
        "refusal": refusal(world),  # which ends the group
    }


def test_models_drop_on_two_ranks_what_they_drop_on_one():
    true, (one,) = expected(), loopback(1).run(multi_head)
    assert not torch.equal(*one)
    for told in spawn(2, live, timeout=120):
        for way in ("block", "reentrant", "non-reentrant"):
            same(told[way], true)
        query, key, value = qkv()
        dense = attend_densely(*seeds(1), query, key, value, span.Causal())
        torch.testing.assert_close(told["torch's names"], dense, rtol=1e-12, atol=1e-12)
        assert "out of step" in told["refusal"]
        assert "dropout_seed=" in told["refusal"]
        torch.testing.assert_close(told["multi-head"], one, rtol=1e-12, atol=1e-12)


def test_compiled_code_takes_any_seed_and_is_not_compiled_for_each():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def rank(world):
        cp = session(world)
        query = whole(LENGTH).unflatten(-1, (2, 8)).transpose(1, 2)

        def attend(query, seed):
            return cp.attention(query, query, query, dropout_p=P, dropout_seed=seed)

        fast = torch.compile(attend, fullgraph=True, backend=graphs)
        return all(torch.equal(fast(query, seed), attend(query, seed)) for seed in (1, 2, 3, 2**40, 2**63 - 1))

    assert loopback(1).run(rank) == [True]
    assert graphs.frame_count == 2  # for one number, and for any
    torch._dynamo.reset()


def test_a_generator_that_is_used_twice_in_compiled_code_is_drawn_from_twice():
    torch._dynamo.reset()

    def rank(world):
        cp = session(world)
        query = whole(LENGTH).unflatten(-1, (2, 8)).transpose(1, 2)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def both(query):
            return [cp.attention(query, query, query, dropout_p=P) for _ in range(2)]

        return torch.equal(*both(query.requires_grad_()))

    assert loopback(1).run(rank) == [False]
    torch._dynamo.reset()


@pytest.mark.parametrize("again", [None, "reentrant", "non-reentrant"])
def test_compiled_models_drop_and_recompute(again):
    torch._dynamo.reset()
    (found,) = loopback(1).run(lambda world: attached(world, again, compiled=True))
    same(found, expected())
    torch._dynamo.reset()
