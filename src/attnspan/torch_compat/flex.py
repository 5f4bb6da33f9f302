"""torch's FlexAttention name: a rank's part of a BlockMask.

torch gathers all keys and calls flex_attention on them with a BlockMask of this rank's queries; a score_mod then sees
positions of the shard. Here such a BlockMask remembers what it is a part of (`WholeMask`), and inside a styled module
or a context, flex_attention is the session's: the whole mask, global positions for the score_mod too, gradients on
every device. Used by itself, it fits keys that `flex_cp_allgather` (allgather.py) gathered, as in torch.

[Note: order of keys] They lie as the ranks hold them, one after another: the layout's order, not the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import AttentionError, ShardError, integer
from attnspan.layouts import Layout
from attnspan.layouts.run import Runs
from attnspan.masks import Mask, MaskMod
from attnspan.parallel.block_masks import for_single, mask_of
from attnspan.parallel.flex_checks import check_filled
from attnspan.plan import Plan
from attnspan.plan.local_blocks import local_block_mask
from attnspan.torch_compat.balancers import _LoadBalancer, layout_of
from attnspan.torch_compat.errors import AttentionNotImplemented, ShardNotImplemented
from attnspan.torch_compat.options import _cp_options
from attnspan.torch_compat.ranks import MeshRanks, ranks_of
from attnspan.torch_compat.sdpa import PART, WholeMask
from attnspan.transports.group import Group

BLOCK = 128

BlockSize = int | tuple[int, int]


def _create_cp_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: Group,
    load_balancer: _LoadBalancer | BlockSize | None = None,
    BLOCK_SIZE: BlockSize | _LoadBalancer | None = BLOCK,
) -> BlockMask:
    """This rank's rows of the BlockMask of a mask_mod over the whole sequence. Any length and block size will do.

    Without a load balancer, for sequences in the order in which a context would cut now: see [Note: order of sequences]
    in ranks.py. torch 2.13 has no BLOCK_SIZE and torch 2.15 does; by place, it and the load balancer may come in either
    order.
    """
    ranks = ranks_of(device_mesh)
    if Q_LEN != KV_LEN:
        raise AttentionNotImplemented(f"KV_LEN must be Q_LEN, {Q_LEN}: queries and keys are one sequence, got {KV_LEN}")
    balancer, size = _told_apart(load_balancer, BLOCK_SIZE)
    device = ranks.transport.device
    layout = ranks.default(Q_LEN).layout if balancer is None else layout_of(balancer, ranks.transport.ranks)[0]
    rows, heads = B or 1, H or 1
    fn = for_single(mask_mod, rows, heads, device=device)
    mask = MaskMod(fn, rows, lengths=(Q_LEN, KV_LEN), device=device, heads=heads)
    return part_of_mask(mask, ranks, layout, size)


def _told_apart(*arguments: Any) -> tuple[Any, tuple[int, int]]:
    """A load balancer and a block size, whichever comes first."""
    sizes = [each for each in arguments if isinstance(each, int | tuple | list)]
    balancers = [each for each in arguments if each is not None and not isinstance(each, int | tuple | list)]
    if len(balancers) > 1 or len(sizes) > 2 or (len(sizes) == 2 and sizes[1] != BLOCK):
        raise AttentionError(f"load_balancer and BLOCK_SIZE must be one of each, got {arguments}")
    size = sizes[0] if sizes else BLOCK
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2:
        raise AttentionError(f"BLOCK_SIZE must be a whole number or two, got {size!r}")
    query, key = (integer("BLOCK_SIZE", each, at_least=1, error=AttentionError) for each in pair)
    return (balancers[0] if balancers else None), (query, key)


def block_mask_part(block_mask: BlockMask, ranks: MeshRanks, layout: Layout) -> BlockMask:
    return part_of_mask(mask_of(block_mask), ranks, layout, block_mask.BLOCK_SIZE)


def part_of_mask(mask: Mask, ranks: MeshRanks, layout: Layout, size: Any) -> BlockMask:
    """This rank's rows of a mask, which remember the whole. See [Note: order of keys]."""
    assert mask.natural_len is not None, "a BlockMask is for one length"
    session = ranks.session(layout, mask.natural_len, _cp_options.strategy)
    try:
        check_filled(session.sharding.sizes)
    except ShardError as refused:
        raise ShardNotImplemented(str(refused)) from None
    plan = Plan(mask, layout, session.seq_len, "gather")
    every = [_gathered(layout, session.seq_len, row) for row in range(layout.rows)]
    device = ranks.transport.device
    parts = [local_block_mask(plan, session.rank, keys=keys, block_size=size, device=device) for keys in every]
    part = parts[0] if len(parts) == 1 else _joined(parts)
    setattr(part, PART, WholeMask(session.spec, session.attention_for(mask).attend, None))
    return part


def _gathered(layout: Layout, seq_len: int, row: int) -> Runs:
    return tuple(run for rank in range(layout.ranks) for run in layout.runs(seq_len, rank, row))


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS_BACK = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def _joined(parts: list[BlockMask]) -> BlockMask:
    """Row r of the r-th BlockMask, for batch rows whose keys lie differently."""
    lists: dict[str, Any] = {
        name: torch.cat([getattr(part, name)[row : row + 1] for row, part in enumerate(parts)])
        for name in (*LISTS, *LISTS_BACK)
    }
    asks = [part.mask_mod for part in parts]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = asks[0](b, h, q_idx, kv_idx)
        for row, ask in enumerate(asks[1:], start=1):
            allowed = torch.where(b == row, ask(b, h, q_idx, kv_idx), allowed)
        return allowed

    return BlockMask(seq_lengths=parts[0].seq_lengths, BLOCK_SIZE=parts[0].BLOCK_SIZE, mask_mod=mask_mod, **lists)
