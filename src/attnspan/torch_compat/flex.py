"""torch's FlexAttention names: a rank's part of a BlockMask, and keys gathered from all ranks.

torch gathers all keys and calls flex_attention on them with a BlockMask of this rank's queries; a score_mod then sees
positions of the shard. Here such a BlockMask remembers what it is a part of (`Part`), and inside a styled module, or a
context, flex_attention is the session's: the whole mask, global positions for the score_mod too, gradients on every
device. Used by itself, it fits keys that `flex_cp_allgather` gathered, as in torch.

[Note: order of keys] They lie as the ranks hold them, one after another: the layout's order, not the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import AttentionError, ShardError
from attnspan.layouts import Layout
from attnspan.layouts.run import Runs
from attnspan.masks import Mask, MaskMod
from attnspan.parallel.flex import check_filled, mask_of, only
from attnspan.parallel.moves import Gathered
from attnspan.plan import Plan
from attnspan.plan.local_blocks import local_block_mask
from attnspan.torch_compat.balancers import _create_default_load_balancer, _LoadBalancer, layout_of
from attnspan.torch_compat.options import _cp_options
from attnspan.torch_compat.ranks import Ranks, ranks_of
from attnspan.torch_compat.sdpa import PART, Part
from attnspan.transports.group import Group

BLOCK = 128


def _create_cp_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: Group,
    load_balancer: _LoadBalancer | None = None,
) -> BlockMask:
    """This rank's rows of the BlockMask of a mask_mod over the whole sequence. Any length will do.

    Without a load balancer, for sequences in the default order: head-tail, unless the options balance nothing.
    """
    ranks = ranks_of(device_mesh)
    if Q_LEN != KV_LEN:
        raise AttentionError(f"KV_LEN must be Q_LEN, {Q_LEN}: queries and keys are one sequence, got {KV_LEN}")
    device = ranks.transport.device
    balancer = load_balancer or _create_default_load_balancer(Q_LEN, ranks.transport.ranks, device)
    rows, heads = B or 1, H or 1
    fn = only(mask_mod, rows, heads, device=device)
    mask = MaskMod(fn, rows, lengths=(Q_LEN, KV_LEN), device=device, heads=heads)
    return part_of_mask(mask, ranks, layout_of(balancer, ranks.transport.ranks)[0], (BLOCK, BLOCK))


def block_mask_part(block_mask: BlockMask, ranks: Ranks, layout: Layout) -> BlockMask:
    """This rank's rows of a BlockMask."""
    return part_of_mask(mask_of(block_mask), ranks, layout, block_mask.BLOCK_SIZE)


def part_of_mask(mask: Mask, ranks: Ranks, layout: Layout, size: Any) -> BlockMask:
    """This rank's rows of a mask, which remember the whole. See [Note: order of keys]."""
    assert mask.natural_len is not None, "a BlockMask is for one length"
    session = ranks.session(layout, mask.natural_len, _cp_options.strategy)
    check_filled(session.sharding.sizes)
    plan = Plan(mask, layout, session.seq_len, "gather")
    every = [_gathered(layout, session.seq_len, row) for row in range(layout.rows)]
    device = ranks.transport.device
    parts = [local_block_mask(plan, session.rank, keys=keys, block_size=size, device=device) for keys in every]
    part = parts[0] if len(parts) == 1 else _joined(parts)
    whole = session.prepare(mask)
    setattr(part, PART, Part(session, whole.attend, None))
    return part


def _gathered(layout: Layout, seq_len: int, row: int) -> Runs:
    return tuple(run for rank in range(layout.ranks) for run in layout.runs(seq_len, rank, row))


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS_BACK = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def _joined(parts: list[BlockMask]) -> BlockMask:
    """Row r of the r-th BlockMask, for batch rows whose keys lie differently."""
    lists = {
        name: torch.cat([getattr(part, name)[row : row + 1] for row, part in enumerate(parts)])
        for name in (*LISTS, *LISTS_BACK)
    }
    asks = [part.mask_mod for part in parts]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = asks[0](b, h, q_idx, kv_idx)
        for row, ask in enumerate(asks[1:], start=1):
            allowed = torch.where(b == row, ask(b, h, q_idx, kv_idx), allowed)
        return allowed

    return BlockMask(seq_lengths=parts[0].seq_lengths, BLOCK_SIZE=parts[0].BLOCK_SIZE, mask_mod=mask_mod, **lists)  # type: ignore[arg-type]


def flex_cp_allgather(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, rank after rank; backward sums over ranks what belongs to each.

    `pg_name` is the name of a process group; a group, a mesh or a virtual world will do as well. Ranks may hold unequal
    numbers of tokens.
    """
    named: Any = pg_name
    group: Any = dist.distributed_c10d._resolve_process_group(named) if isinstance(pg_name, str) else pg_name
    transport = ranks_of(group).transport
    if k.shape[seq_dim] != v.shape[seq_dim]:
        raise ShardError(
            f"k and v must have as many tokens in dim {seq_dim}, got shapes {tuple(k.shape)} and {tuple(v.shape)}"
        )
    said = transport.agree(str(k.shape[seq_dim]).encode(), "the number of keys")
    sizes = [int(each) for each in said]
    whole = [
        Gathered.apply(x.movedim(seq_dim, 0), transport, sizes, "flex_cp_allgather").movedim(0, seq_dim) for x in (k, v)
    ]
    return whole[0].contiguous(), whole[1].contiguous()
