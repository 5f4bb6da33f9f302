"""The BlockMask of one rank: its own queries, in the order of its shard, against keys as they were received.

A rank that gathers keys and calls FlexAttention itself needs the part of the mask that its queries see, by blocks of
its own rows. Bands give it in O(blocks) where the mask is ours; of a function, only blocks that its cover leaves open
are evaluated, row of blocks by row of blocks, so that S x S never exists. Every n-th position (a striped layout) is
evaluated too.

Batch rows and heads that differ have lists of their own. Lengths need be no multiple of blocks, nor blocks square.
Shapes: I blocks of own queries, J blocks of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnspan.errors import PlanError
from attnspan.layouts.run import Run, Runs, positions_of, tokens_in
from attnspan.masks.band import ceil_div
from attnspan.masks.block_sparse import size_pair
from attnspan.masks.program import Program
from attnspan.masks.tracing import traced
from attnspan.plan.geometry import Geometry
from attnspan.plan.plan import Plan

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from attnspan.masks.mask import MaskFunction


def local_block_mask(
    plan: Plan,
    rank: int,
    *,
    keys: Runs | None = None,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """A rank's part of a plan's mask, for FlexAttention over its queries and `keys` (all of them in order, if None).

    Its mask_mod is called with rows of the shard and columns of `keys`.

    >>> from attnspan.layouts import HeadTail
    >>> from attnspan.masks import Causal
    >>> plan = Plan(Causal(), HeadTail(ranks=2), seq_len=512)
    >>> local_block_mask(plan, rank=0).kv_num_blocks.tolist()  # rows 0-127 and 384-511: a diagonal each
    [[[1, 1]]]
    >>> local_block_mask(plan, rank=0).full_kv_num_blocks.tolist()
    [[[0, 3]]]
    """
    from attnspan.masks.blocks import BlockLists, classified

    size, device = size_pair("block_size", block_size), torch.empty(0, device=device).device
    keys = (Run(0, plan.key_len),) if keys is None else keys
    shards = [plan.layout.runs(plan.seq_len, rank, row) for row in range(plan.batch_rows)]
    lengths = tokens_in(shards[0]), tokens_in(keys)
    if 0 in lengths:
        raise PlanError(f"rank {rank} has {lengths[0]} queries and {lengths[1]} keys: there is no block to list")
    mask_mod = plan.mask.mask_mod(plan.seq_len, plan.key_len)
    program, heads = traced(mask_mod, error=PlanError).on(device), plan.mask.heads
    shape = plan.batch_rows, ceil_div(lengths[0], size[0]), ceil_div(lengths[1], size[1])
    lists = BlockLists.empty(shape, device, heads)
    places = torch.stack([positions_of(runs) for runs in shards]).to(device), positions_of(keys).to(device)
    for row, queries in enumerate(shards):
        columns, partial = plan.band_columns(row)
        geometry = Geometry(columns, (queries,), (keys,), partial)
        full, some, open_IJ = classified(geometry.tiles(0, keys), (shape[1], shape[2]), size, device)
        each = _evaluated(program, row, heads, (places[0][row], places[1]), open_IJ, size)
        for head in range(heads):
            found_some, found_full = each[0][head], each[1][head]
            lists.put(row, torch.where(open_IJ, found_full, full), torch.where(open_IJ, found_some, some), head)
    return lists.block_mask(_local(program, *places), lengths, size)


def _evaluated(
    program: Program,
    row: int,
    heads: int,
    places: tuple[torch.Tensor, torch.Tensor],
    open_IJ: torch.Tensor,
    size: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the blocks left open: those that hold anything and those that are full, (heads, I, J) each."""
    rows, cols = places
    some, full = (torch.zeros(heads, *open_IJ.shape, dtype=torch.bool, device=open_IJ.device) for _ in range(2))
    batch, every = torch.tensor([row], device=rows.device), torch.arange(heads, device=rows.device)
    padded = torch.nn.functional.pad(cols, (0, -len(cols) % size[1])).view(-1, size[1])
    inside = torch.arange(padded.numel(), device=rows.device).view_as(padded) < len(cols)
    for i in open_IJ.any(1).nonzero().flatten().tolist():
        chosen = open_IJ[i].nonzero().flatten()
        queries = rows[i * size[0] : (i + 1) * size[0]]
        with torch.no_grad():
            allowed = program.over(batch, every, queries, padded[chosen].flatten())
        allowed = (
            allowed.expand(1, heads, len(queries), -1)[0].reshape(heads, len(queries), -1, size[1]) & inside[chosen]
        )
        some[:, i, chosen] = allowed.any(-1).any(1)
        full[:, i, chosen] = allowed.all(-1).all(1) & (len(queries) == size[0])
    return some, full


def _local(program: Program, rows: torch.Tensor, cols: torch.Tensor) -> MaskFunction:
    """The mask at rows of a shard and columns of the keys; `rows` (R, n), `cols` (m,)."""
    run, captured, alike = program.function, program.captured, rows.shape[0] == 1

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        position = rows[0, q_idx] if alike else rows[b, q_idx]
        return run(None, b, h, position, cols[kv_idx], *captured)

    return mask_mod
