"""`_templated_ring_attention` beside torch's own, on gloo, and beside one device; the rest is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from attnspan import torch_compat as ours
from attnspan.errors import AttentionError
from attnspan.torch_compat import (
    _context_parallel_shard,
    _cp_options,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _templated_ring_attention,
    _templated_ring_attention_backward,
    context_parallel,
    context_parallel_unshard,
)
from tests.processes import spawn
from tests.torch_compat.harness import alone, close, on_ranks, whole

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _beside_torchs(world):
    rank = world.rank
    group, told = init_device_mesh("cpu", (dist.get_world_size(),)).get_group(), 0
    for balanced, causal in ((True, True), (False, True), (False, False)):
        for method in ("allgather", "alltoall"):
            query, key, value, grad = torch.randn(
                4, 2, 3, 8, 16, generator=torch.Generator().manual_seed(rank)
            ).unbind()
            found = []
            for kind in (theirs, ours):
                kind._cp_options.enable_load_balance = balanced
                kind.set_rotate_method(method)
                out, lse = kind._templated_ring_attention(group, 2, FORWARD, query, key, value, is_causal=causal)
                named = grad, "grad_out", query, key, value, out, lse, causal
                grads = kind._templated_ring_attention_backward(group, 2, BACKWARD.default, *named, dropout_p=0.0)
                found.append((out, lse, *grads))
            torch.testing.assert_close(*found)
            told += 1
    return told


def test_it_is_torchs_ring():
    assert spawn(2, _beside_torchs) == [6, 6]


def attended(mesh, tensors, is_causal):
    """Output and gradients, by the ring."""
    ring = mesh, 2
    out, lse = _templated_ring_attention(*ring, FORWARD, *tensors, is_causal=is_causal)
    given = 2 * out, "grad_out", *tensors, out, lse, is_causal
    return out, *_templated_ring_attention_backward(*ring, BACKWARD.default, *given, dropout_p=0.0)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["spans", "head-tail"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_one_devices_attention(ranks, kind, is_causal):
    length = 4 * ranks
    expected = alone(length, is_causal)

    def run(mesh):
        balancer = _HeadTailLoadBalancer(length, ranks, "cpu") if kind == "head-tail" else None
        parts = _context_parallel_shard(mesh, whole(length), [2] * 3, balancer)
        return context_parallel_unshard(mesh, list(attended(mesh, parts, is_causal)), [2] * 4)

    assert all(close(found, expected) for found in on_ranks(ranks, run))


def test_it_is_served_inside_a_context():
    expected = alone(8)

    def run(mesh):
        buffers = whole(8)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), torch.no_grad():
            found = attended(mesh, buffers, True)
        return context_parallel_unshard(mesh, list(found), [2] * 4)

    assert all(close(found, expected) for found in on_ranks(2, run))


def ringed(tensors=None, seq_dim=2, balancer=None, **options):
    def run(mesh):
        parts = whole(4) if tensors is None else tensors(mesh.rank)
        if balancer is not None:
            parts = _context_parallel_shard(mesh, whole(8), [2] * 3, balancer)
        _templated_ring_attention(mesh, seq_dim, FORWARD, *parts, **options)

    return run


REFUSALS = {
    "another dim": (ringed(seq_dim=1), ValueError, "seq_dim must be 2"),
    "dropout": (ringed(dropout_p=0.5), NotImplementedError, "dropout_p must be 0, got 0.5: each hop would draw again"),
    "gradients": (
        ringed(lambda rank: [x.requires_grad_() for x in whole(4)]),
        AttentionError,
        "query, key and value must not require gradients",
    ),
    "other keys, causal": (
        ringed(lambda rank: [whole(4)[0], *whole(6)[1:]], is_causal=True),
        NotImplementedError,
        "is_causal must be False where queries and keys are of different lengths, got 4 and 6",
    ),
    "unequal shards": (ringed(lambda rank: whole(4 + rank)), AttentionError, r"key must have as many .* got \[4, 5\]"),
    "odd head-tail shards": (
        ringed(lambda rank: whole(3), is_causal=True),
        NotImplementedError,
        r"got 3 tokens a rank in HeadTail\(ranks=2\)",
    ),
    "another order": (
        ringed(balancer=_PerDocumentHeadTailLoadBalancer([[3, 5]], 2, "cpu"), is_causal=True),
        NotImplementedError,
        "causal attention by a ring is for spans and even head-tail shards",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_is_refused(name):
    run, error, says = REFUSALS[name]
    with pytest.raises(error, match=says):
        on_ranks(2, run)


def test_rows_without_keys_are_zero():
    """An op may say so of a row; torch's merge makes NaN of two of them."""

    def op(query, key, value, is_causal):
        lse = torch.full(query.shape[:-1], -torch.inf)
        return torch.zeros_like(query), lse

    def run(mesh):
        _cp_options.enable_load_balance = False
        return _templated_ring_attention(mesh, 2, op, *whole(4))

    for out, lse in on_ranks(2, run):
        assert not out.any()
        assert lse.isneginf().all()


def padded(*args, **kwargs):
    return [F.pad(x, (0, 28)) if x.dim() == 3 else x for x in FORWARD(*args, **kwargs)]


def column(*args, **kwargs):
    return [x.unsqueeze(-1) if x.dim() == 3 else x for x in FORWARD(*args, **kwargs)]


def test_lse_may_be_padded_or_a_column():
    """As the efficient kernel pads it, and as cuDNN returns it."""
    expected = F.scaled_dot_product_attention(*whole(8))

    def run(mesh):
        parts = _context_parallel_shard(mesh, whole(8), [2] * 3)
        found = [_templated_ring_attention(mesh, 2, op, *parts) for op in (padded, column)]
        assert [lse.shape for _, lse in found] == [(2, 2, 4), (2, 2, 4, 1)]
        return context_parallel_unshard(mesh, [out for out, _ in found], [2] * 2)

    assert all(close(found, [expected] * 2) for found in on_ranks(2, run))
