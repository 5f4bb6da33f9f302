"""Sessions beside one another: another mask is another session, asked for as often as one likes; several masks share
one layout; and compiled code takes any of them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan.errors import AttentionError
from attnspan.layouts import Balanced, HeadTail
from attnspan.masks import Causal, Documents, Full, SlidingWindow
from attnspan.parallel import ContextParallel, session_spec
from attnspan.parallel import family as family_module
from attnspan.testing import loopback
from tests.parallel.model import Dense, Llama

S = 16
PACKS = [[16], [5, 11], [3, 3, 10]]
PAIR = {"full": Causal(), "window": SlidingWindow(4)}


def packed(lengths):
    return Causal() & Documents(lengths)


def tensors(heads=2):
    return torch.sin(torch.arange(3 * 2 * heads * S * 4.0).view(3, 2, heads, S, 4) * 1.7).double().unbind()


def attended(cp, *tensors, **options):
    """Attention on whole tensors, through a session."""
    return cp.unshard(cp.attention(*cp.shard(tensors, dim=2), **options), dim=2)


def dense(mask, query, key, value):
    return Dense(mask, S).attention(query, key, value)


# ---- attention_for ---------------------------------------------------------------------------------------------------


def test_a_session_is_asked_for_attention_by_name_by_mask_or_for_its_only_one():
    def rank(world):
        query, key, value = tensors()
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        shards = cp.shard((query, key, value), dim=2)
        for attend in (cp.attention_for(), cp.attention_for(Causal()), cp.attention_for("")):
            torch.testing.assert_close(attend(*shards), cp.attention(*shards), rtol=0, atol=0)
        pair = cp.with_mask(PAIR, layout=cp.layout)
        for name, mask in PAIR.items():
            out = pair.unshard(pair.attention_for(name)(*shards), dim=2)
            torch.testing.assert_close(out, dense(mask, query, key, value))
        with pytest.raises(AttentionError, match=r"^mask must name one of the session's masks, 'full' or 'window'"):
            pair.attention_for()

    loopback(2).run(rank)


def test_a_scale_counts_in_cross_attention_as_in_attention():
    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        shards = cp.shard(tensors(), dim=2)
        usual, other = cp.cross(cp, Causal())(*shards), cp.cross(cp, Causal(), scale=0.3)(*shards)
        torch.testing.assert_close(usual, cp.attention(*shards))
        torch.testing.assert_close(other, cp.attention_for(scale=0.3)(*shards))
        assert not torch.allclose(usual, other)  # twin: another scale is another result

    loopback(2).run(rank)


# ---- with_mask -------------------------------------------------------------------------------------------------------


def test_another_mask_is_another_session_and_the_same_mask_the_same():
    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=packed(PACKS[0]), strategy="ring", kernel="reference", scale=0.5)
        other = cp.with_mask(packed(PACKS[1]))
        assert other is not cp
        assert other.options == cp.options
        assert other.with_mask(packed(PACKS[1])) is cp.with_mask(packed(PACKS[1])) is other
        assert other.with_mask(cp.mask) is cp
        longer = other.with_mask(packed([20, 10]), seq_len=30)
        assert (longer.seq_len, longer.layout.natural_len) == (30, 30)
        assert cp.with_mask(Causal(), seq_len=30) is not cp.with_mask(Causal())

    loopback(2).run(rank)


def test_the_layout_that_was_asked_for_stays_and_auto_is_balanced_anew():
    def rank(world):
        fixed = ContextParallel(world, seq_len=S, mask=Causal(), layout=HeadTail(2))
        assert fixed.with_mask(packed(PACKS[1])).layout == HeadTail(2)
        auto = ContextParallel(world, seq_len=S, mask=Causal())
        assert auto.with_mask(packed(PACKS[1])).layout == Balanced(packed(PACKS[1]), ranks=2, chunk=1)

    loopback(2).run(rank)


def test_a_layout_that_one_session_keeps_is_not_that_of_its_relatives():
    """They remember sessions together; what a child with a layout of its own asked for first, its parent got too."""
    packs = [packed(lengths) for lengths in PACKS]

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        child = cp.with_mask(packs[1], layout=HeadTail(2))
        assert child.with_mask(packs[2]).layout == HeadTail(2)
        assert cp.with_mask(packs[2]).layout == Balanced(packs[2], ranks=2, chunk=1)
        assert cp.with_mask(packs[1]).layout == Balanced(packs[1], ranks=2, chunk=1)
        assert child.with_mask(Causal()).layout == HeadTail(2)
        assert cp.with_mask(Causal()) is cp
        assert child.with_mask(packs[1]) is cp.with_mask(packs[1], layout=HeadTail(2)) is child

    loopback(2).run(rank)


def test_sessions_that_were_not_used_for_long_are_forgotten_but_live_on(monkeypatch):
    monkeypatch.setattr(family_module, "MAX_KEPT", 2)

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        first, second = (cp.with_mask(packed(lengths)) for lengths in PACKS[1:])
        assert cp.with_mask(second.mask) is second
        assert cp.with_mask(Causal()) is not cp  # the oldest of three
        query, key, value = tensors()
        out = attended(first, query, key, value)
        torch.testing.assert_close(out, dense(first.mask, query, key, value))

    loopback(2).run(rank)


def test_asking_again_neither_lays_out_nor_plans_again(monkeypatch):
    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        made = cp.with_mask(packed(PACKS[1]))
        monkeypatch.delattr(session_spec, "Plan")
        monkeypatch.delattr(session_spec, "Sharding")
        assert cp.with_mask(packed(PACKS[1])) is made
        with pytest.raises(NameError):  # twin: a new one needs them
            cp.with_mask(packed(PACKS[2]))

    loopback(1).run(rank)


def test_sessions_live_at_once_and_their_forwards_and_backwards_may_interleave():
    query, key, value = tensors()

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=packed(PACKS[0]))
        sessions = [cp.with_mask(packed(lengths)) for lengths in PACKS]
        leaves = [[x.clone().requires_grad_() for x in (query, key, value)] for _ in sessions]
        outs = [attended(session, *each) for session, each in zip(sessions, leaves, strict=True)]
        for out in reversed(outs):
            out.square().sum().backward()
        for session, out, each in zip(sessions, outs, leaves, strict=True):
            own = [x.clone().requires_grad_() for x in (query, key, value)]
            true = dense(session.mask, *own)
            true.square().sum().backward()
            torch.testing.assert_close(out, true)
            # Every rank has the loss, and the part of the gradient that its tokens make: together, so many times it.
            cp.average_gradients(each)
            for found, expected in zip(each, own, strict=True):
                torch.testing.assert_close(found.grad, expected.grad)

    loopback(3).run(rank)


# ---- several masks ---------------------------------------------------------------------------------------------------


def test_masks_by_name_share_one_layout_that_is_balanced_over_both():
    query, key, value = tensors()

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=PAIR, weights={"full": 1, "window": 5})
        assert cp.layout == Balanced(list(PAIR.values()), weights=[1, 5], ranks=2, chunk=1)
        for name, mask in PAIR.items():
            assert cp.plan_of(name).mask == mask
            torch.testing.assert_close(attended(cp, query, key, value, mask=name), dense(mask, query, key, value))
        packs = {name: mask & Documents(PACKS[1]) for name, mask in PAIR.items()}
        other = cp.with_mask(packs)
        assert other.layout.weights == (1, 5)
        out = attended(other, query, key, value, mask="window")
        torch.testing.assert_close(out, dense(packs["window"], query, key, value))

    loopback(2).run(rank)


def test_a_layout_over_two_masks_is_fairer_than_one_over_either():
    masks, length, ranks = [Causal(), SlidingWindow(64)], 4096, 4
    together = Balanced(masks, ranks=ranks, chunk=16)
    work = [sum(each) for each in zip(*(together.work_per_rank(mask, length) for mask in masks), strict=True)]
    assert max(work) * ranks / sum(work) < 1.02


WRONG = {
    "no name": (lambda cp: cp.attention(*tensors()), "mask must name one of the session's masks, 'full' or 'window'"),
    "another name": (
        lambda cp: cp.plan_of("widow"),
        "mask must be one of full, window, got 'widow'; did you mean 'win",
    ),
    "the mask": (lambda cp: cp.mask, "mask must name one of the session's masks, 'full' or 'window'"),
    "no mask": (
        lambda cp: cp.with_mask("causal"),
        "mask must be a mask such as Causal(), or a dict of them by name, got",
    ),
    "an empty dict": (lambda cp: cp.with_mask({}), "mask must be a mask such as Causal(), or a dict of them by name"),
    "no weight": (lambda cp: cp.with_mask({"full": Causal(), "near": Causal()}), "weights must have one for each mask"),
    "a layout by name": (
        lambda cp: ContextParallel(cp.transport, seq_len=S, mask=PAIR, layout="striped"),
        "layout must be 'auto' or a layout such as HeadTail(ranks=2), got 'striped'",
    ),
    "other ranks": (
        lambda cp: ContextParallel(cp.transport, seq_len=S, mask=PAIR, layout=HeadTail(3)),
        "layout must have the group's 2 ranks, got HeadTail(ranks=3)",
    ),
    "no tokens": (lambda cp: cp.with_mask(PAIR, seq_len=0), "seq_len must be a whole number >= 1, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_session_is_refused(name):
    wrong, message = WRONG[name]

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=PAIR, weights={"full": 1, "window": 2})
        with pytest.raises(AttentionError) as error:
            wrong(cp)
        assert message in str(error.value)

    loopback(2).run(rank)


# ---- compiled code ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled(function, backend) -> (the same compiled whole, the count of its compilations)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()

    def compile_whole(function, backend="aot_eager"):
        counter = CompileCounterWithBackend(backend)
        return torch.compile(function, fullgraph=True, backend=counter), counter

    yield compile_whole
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_block_compiles_whole_with_a_session_for_an_argument_and_once_for_all_documents(compiled, backend):
    def rank(world):
        block, x = Llama().layers[0], torch.sin(torch.arange(2 * S * 16.0)).view(2, S, 16).requires_grad_()
        fast, counter = compiled(block, backend)
        cp = ContextParallel(world, seq_len=S, mask=packed(PACKS[0]))
        outs = []
        for each in (cp, *(cp.with_mask(packed(lengths)) for lengths in PACKS[1:])):
            found, true = ([run(x, each.positions, each)] for run in (fast, block))
            for results in (found, true):
                results += torch.autograd.grad(results[0].square().sum(), [x, *block.parameters()])
            # Compiled matmuls may sum in another order than eager ones.
            torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)
            outs.append(found[0])
        assert counter.frame_count == 1
        assert not torch.equal(outs[0], outs[1])  # the masks do differ

    loopback(1).run(rank)


# Dynamo makes an autograd function's context in the way that torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_positions_masks_by_name_sinks_and_lse_compile(compiled):
    def layers(query, key, value, sinks, cp):
        query = query + cp.positions[:, None]
        near, lse = cp.attention(query, key, value, mask="window", sinks=sinks, return_lse=True)
        return near.square().sum() + lse.sin().sum() + cp.attention(query, key, value, mask="full").sum()

    def rank(world):
        leaves = [*(x.clone().requires_grad_() for x in tensors()), torch.ones(2, dtype=torch.float64).requires_grad_()]
        fast, counter = compiled(layers)
        cp = ContextParallel(world, seq_len=S, mask=PAIR)
        for lengths in PACKS:
            each = cp.with_mask({name: mask & Documents(lengths) for name, mask in PAIR.items()})
            found, true = (torch.autograd.grad(run(*leaves, each), leaves) for run in (fast, layers))
            torch.testing.assert_close(found, true)
        assert counter.frame_count == 1

    loopback(1).run(rank)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_session_of_one_process_is_plain_pytorch():
    mask, (query, key, value) = packed([5, 11]), tensors()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    cp = ContextParallel(torch.device("cpu"), seq_len=S, mask=mask)
    assert (cp.rank, cp.ranks, cp.positions.tolist()) == (0, 1, list(range(S)))
    out = attended(cp, *leaves)
    torch.testing.assert_close(out, dense(mask, query, key, value))
    assert cp.mean_loss(out.sum((1, 3)), torch.ones(2, S, dtype=torch.bool)).item() == pytest.approx(
        out.sum((1, 3)).mean().item()
    )
    torch.autograd.grad(out.sum(), leaves)
    other = ContextParallel(torch.device("cpu"), seq_len=S, mask=Causal())
    torch.testing.assert_close(other.cross(cp)(query, key, value), dense(Full(), query, key, value))
