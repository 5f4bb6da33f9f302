"""DTensors and parallelize_module, on real processes: two ranks, and a mesh of tensor and context parallel ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import attnspan as span
from attnspan.errors import AttentionError
from attnspan.testing import loopback
from tests.devices import here, mesh_of
from tests.parallel.models import WIDTH, dense, model, parallel, same, whole
from tests.processes import on_backends, spawn

LENGTH = 12
MASK = span.Causal() & span.Documents([5, 7])


def said(call):
    """The words of a refusal."""
    try:
        call()
    except AttentionError as refused:
        return str(refused)
    return "nothing was refused"


def _styled(world):
    """Everything on two ranks: a list of refusals."""
    mesh = mesh_of(2)
    cp = span.ContextParallel(mesh, seq_len=LENGTH, mask=MASK)
    true = dense(model(), whole(LENGTH), MASK)

    # parallelize_module with plain tensors, also under checkpointing
    for again in (None, "reentrant", "non-reentrant"):
        mine = parallelize_module(model(again=again), mesh, {"layers.*": span.ContextParallelStyle(cp)})
        same(parallel(cp, mine, mine, whole(LENGTH)), true)
    assert cp.report().calls == 6

    # with DTensors, which come back as they were
    mine = parallelize_module(model(), mesh, {"layers.*": span.ContextParallelStyle(cp)})
    shard = cp.shard(whole(LENGTH)).detach()

    def run(x):
        carried = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        for layer in mine.layers:
            out = layer(carried)
            assert isinstance(out, DTensor)
            assert (out.placements, out.shape) == ((Shard(1),), carried.shape)
            carried = carried + out
        return carried.to_local()

    same(parallel(cp, mine, run, whole(LENGTH)), true)

    # attention itself
    q, k, v = (cp.shard(whole(LENGTH).unflatten(-1, (2, -1)).transpose(1, 2), dim=2) for _ in range(3))
    as_dtensors = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False).requires_grad_() for x in (q, k, v)]
    out, lse = cp.attention(*as_dtensors, return_lse=True)
    expected, expected_lse = cp.attention(q, k, v, return_lse=True)
    assert torch.equal(out.to_local(), expected)
    assert torch.equal(lse.to_local(), expected_lse)
    assert (out.placements, tuple(out.shape)) == ((Shard(2),), (2, 2, LENGTH, 8))
    out.sum().backward()
    assert all(x.grad.placements == (Shard(2),) for x in as_dtensors)
    with cp.sdpa():
        inside = torch.nn.functional.scaled_dot_product_attention(*as_dtensors, is_causal=True)
    assert torch.equal(inside.to_local(), expected)

    # refusals
    odd = span.ContextParallel(mesh, seq_len=13, mask=span.Causal(), layout=span.Contiguous(2))
    uneven = DTensor.from_local(odd.shard(torch.randn(1, 2, 13, 8), dim=2), mesh, [Shard(2)], run_check=False)
    by_heads = DTensor.from_local(q, mesh, [Shard(1)], run_check=False)
    partial = DTensor.from_local(shard, mesh, [Partial()], run_check=False)
    other = DTensor.from_local(shard[:, 1:], mesh, [Shard(1)], run_check=False)
    return [
        said(lambda: odd.attention(uneven, uneven, uneven)),
        said(lambda: cp.attention(as_dtensors[0], k, v)),
        said(lambda: cp.attention(by_heads, by_heads, by_heads)),
        said(lambda: mine.layers[0](partial)),
        said(lambda: mine.layers[0](other)),
        said(lambda: span.ContextParallelStyle(mesh)),
        said(lambda: parallelize_module(mine, mesh, {"layers.0": span.ContextParallelStyle(cp)})),
    ]


@on_backends(2)
def test_modules_and_dtensors_on_two_ranks(ranks, backend):
    for words in spawn(ranks, _styled, backend=backend):
        uneven, mixed, by_heads, partial, other, style, twice = words
        assert uneven.startswith(
            "a DTensor of 13 tokens has [7, 6] on its ranks, the session's layout [6, 7]; use plain"
        )
        assert mixed == "query, key and value must all be DTensors or all plain tensors, got DTensor, Tensor, Tensor"
        assert by_heads.startswith("query must be sharded on dim 2 over the session's ranks, got S")
        assert partial.startswith("a DTensor argument must be sharded or replicated, got (P")
        assert other.startswith(
            "a DTensor argument must be sharded on its 12 tokens over the session's ranks, got shape"
        )
        assert style == "ContextParallelStyle needs a ContextParallel, got DeviceMesh"
        assert "is attached already" in twice


def _with_heads(world):
    """Context parallel and tensor parallel: heads are sharded over the other axis of the mesh."""
    mesh = mesh_of(2, 2, names=("cp", "tp"))
    cp = span.ContextParallel(mesh["cp"], seq_len=LENGTH, mask=MASK)
    x = whole(LENGTH).unflatten(-1, (4, -1)).transpose(1, 2)  # (2, 4, 12, 4)
    true = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=here(MASK.dense(LENGTH)))
    local = cp.shard(x, dim=2).chunk(2, dim=1)[mesh.get_local_rank("tp")]
    carried = DTensor.from_local(local, mesh, [Shard(2), Shard(1)], run_check=False)
    out = cp.attention(carried, carried, carried)
    assert (out.placements, out.shape) == ((Shard(2), Shard(1)), x.shape)
    found = cp.unshard(out.redistribute(mesh, [Shard(2), Replicate()]).to_local(), dim=2)
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
    only = DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False)  # tokens are plain shards
    assert torch.equal(cp.attention(only, only, only).to_local(), out.to_local())
    split = DTensor.from_local(local, mesh, [Shard(2), Shard(3)], run_check=False)
    words = said(lambda: cp.attention(split, split, split))
    dist.barrier()
    return words


@on_backends(4)
def test_heads_may_be_sharded_over_another_axis(ranks, backend):
    for words in spawn(ranks, _with_heads, backend=backend):
        assert words.startswith("query must be replicated, or sharded on batch or heads, over other mesh axes, got S")


def test_a_style_on_virtual_ranks_takes_plain_tensors():
    true = dense(model(), whole(LENGTH), MASK)

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=MASK), model()
        style = span.ContextParallelStyle(cp)
        for layer in mine.layers:
            style._apply(layer, None)  # as parallelize_module does it
        same(parallel(cp, mine, mine, whole(LENGTH)), true)
        assert isinstance(mine.layers[0].enter, nn.Linear)
        assert mine.layers[0].enter.in_features == WIDTH

    loopback(2).run(rank)
