"""What cannot be served exactly is refused on every rank, with the reason; nothing is left half done."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from attnspan.errors import AttentionError, AttnspanError, MaskError, ShardError
from attnspan.masks import Causal
from attnspan.torch_compat import (
    _context_parallel_shard,
    _ContextParallel,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from tests.torch_compat.harness import on_ranks, whole

SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX
TOKENS = torch.arange(8).view(1, 8)


def inside(*buffers, **arguments):
    """SDPA in a context, with some arguments."""

    def run(mesh):
        tensors = whole(8)
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            F.scaled_dot_product_attention(*tensors, **arguments)

    return run


def entering(buffers, dims, kept=None):
    def run(mesh):
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept):
            raise AssertionError("entered")

    return run


def twice(mesh):
    tokens = TOKENS.clone()
    both = [tokens], [1]
    with context_parallel(mesh, buffers=both[0], buffer_seq_dims=both[1]):
        entering(*both)(mesh)


def grouped(mesh):
    query, key, value = whole(8, heads=4, kv_heads=2)
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2] * 3):
        F.scaled_dot_product_attention(query, key, value, is_causal=True)


def crossing(mesh):
    """Queries of 8 tokens, keys of 6: another sequence, which the context was not told of."""
    query, (key, value, _) = whole(8)[0], whole(6)
    with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
        part = slice(0, 3)
        F.scaled_dot_product_attention(query, key[:, :, part], value[:, :, part])


def styled(*arguments):
    return lambda mesh: _ContextParallel(*arguments)._apply(torch.nn.Identity(), mesh)


def branching(b, h, q_idx, kv_idx):
    return bool(q_idx >= kv_idx)


def block_mask():
    return create_block_mask(Causal().mask_mod(), None, None, 256, 256, device="cpu")


computed = torch.ones(1, 8, requires_grad=True) * 2

REFUSALS = {
    "a mask": (
        inside(attn_mask=torch.ones(8, 8, dtype=torch.bool)),
        "attn_mask must be None: torch's names take causal and full attention alone",
    ),
    "dropout": (
        inside(is_causal=True, dropout_p=1.0),
        "dropout_p must be a number in [0, 1), got 1.0",
    ),
    "grouped heads, unsaid": (grouped, "enable_gqa must be True where query and key have different numbers of heads"),
    "keys of another sequence": (crossing, "key must hold this rank's 4 of 8 tokens, got 3"),
    "a computed buffer": (
        entering([computed], [1]),
        "buffers: a tensor of shape (1, 8) was computed and requires gradients, so it cannot be cut in place; use "
        "_context_parallel_shard(mesh, [tensor], [dim]), or compute it inside",
    ),
    "a shorter buffer": (
        entering([TOKENS, torch.arange(6).view(1, 6)], [1, 1]),
        "tensor must be whole, with seq_len=8 tokens in dim 1, got shape (1, 6)",
    ),
    "a longer buffer that is no table": (
        entering([TOKENS, torch.arange(10).view(1, 10)], [1, 1]),
        "tensor must be whole, with seq_len=8 tokens in dim 1, got shape (1, 10)",
    ),
    "a dim too few": (
        entering([TOKENS, TOKENS], [1]),
        "buffer_seq_dims must have one dim for each of the buffers, [0, 1], got [0]",
    ),
    "a dim that is not there": (
        entering([TOKENS], [2]),
        "a buffer's dim must be one of its 2, got 2 for shape (1, 8)",
    ),
    "no list": (entering(TOKENS, 1), "buffers and buffer_seq_dims must be two lists or two dicts, got Tensor and int"),
    "one buffer with two dims": (
        entering([TOKENS, TOKENS], [1, 0]),
        "buffers: a tensor of shape (1, 8) comes twice, with dims 1 and 0",
    ),
    "a BlockMask in a context": (
        lambda mesh: entering([block_mask()], [2])(mesh),
        "buffers must be tensors, got BlockMask",
    ),
    "restoring what is no buffer": (
        entering([TOKENS], [1], {TOKENS.clone()}),
        "no_restore_buffers must be among buffers, got another tensor",
    ),
    "a buffer of a context around": (
        twice,
        "buffers: that of shape (1, 4) is a shard already, in a context around",
    ),
    "a shard": (
        lambda mesh: entering(_context_parallel_shard(mesh, [TOKENS], [1]), [1])(mesh),
        "tensor is a shard already; shard the whole one, and once",
    ),
    "other names for dims": (
        lambda mesh: _context_parallel_shard(mesh, {"x": TOKENS}, {"y": 1}),
        "seq_dims must have one dim for each of the buffers, ['x'], got ['y']",
    ),
    "another order": (
        lambda mesh: context_parallel_unshard(
            mesh, _context_parallel_shard(mesh, [TOKENS], [1]), [1], _HeadTailLoadBalancer(8, 2, "cpu")
        ),
        "tensor is rank 0's part of 8 tokens in Contiguous(ranks=2)",
    ),
    "a load balancer for another length": (
        lambda mesh: context_parallel_unshard(mesh, [torch.arange(3)], [0], _HeadTailLoadBalancer(8, 2, "cpu")),
        "shards of [3, 3] tokens are no sequence of 8 in HeadTail(ranks=2)",
    ),
    "a rotate method": (
        lambda mesh: set_rotate_method("ring"),
        "rotate_method must be one of allgather, alltoall, got 'ring'",
    ),
    "another dim for attention": (
        styled(1, SDPA),
        "seq_dim must be 2, that of (batch, heads, tokens, head dim), got 1",
    ),
    "another attention": (
        styled(2, "sdpa"),
        "attention_type must be AttentionType.FLEX or AttentionType.SDPA, got 'sdpa'",
    ),
    "another dim for flex": (styled(1, FLEX), "seq_dim must be 2, that of (batch, heads, tokens, head dim), got 1"),
    "a BlockMask of keys of another length": (
        lambda mesh: _create_cp_block_mask(Causal().mask_mod(), 1, 1, 256, 128, mesh),
        "KV_LEN must be Q_LEN, 256: queries and keys are one sequence, got 128",
    ),
    "a BlockMask where a rank has no tokens": (
        lambda mesh: _create_cp_block_mask(Causal().mask_mod(), 1, 1, 1, 1, mesh),
        "block_mask: rank 1 has no tokens, and there is no BlockMask of no queries",
    ),
    "a mask_mod that cannot be evaluated": (
        lambda mesh: _create_cp_block_mask(branching, 1, 1, 256, 256, mesh),
        "branching could not be evaluated as a mask_mod",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_is_refused(name):
    run, says = REFUSALS[name]
    told = []

    def rank(mesh):
        try:
            run(mesh)
        except AttnspanError as refused:
            told.append(refused)
        else:
            told.append(None)

    on_ranks(2, rank)
    said = [str(refused) for refused in told]
    assert [text.startswith(says) for text in said].count(True) >= 1, said
    assert all(isinstance(refused, AttentionError | ShardError | MaskError) for refused in told)
    assert TOKENS.tolist() == [list(range(8))], "buffers are as they were"


def test_attention_by_another_function_is_refused():
    def run(mesh):
        tensors = whole(8)
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors)

    with pytest.raises(AttentionError, match="would see this rank's tokens alone"):
        on_ranks(2, run)
