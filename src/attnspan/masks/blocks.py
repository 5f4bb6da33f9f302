"""A FlexAttention BlockMask from bands: which blocks of the score matrix are partly and which wholly allowed.

`create_block_mask` evaluates every pair. Here a band is cut into strips, one per row of blocks, and within a
strip the blocks it covers from edge to edge are one interval::

            j0      j1
    · · ░ ░ █ █ █ █ ░ · ·      ░ the strip's ends: pairs counted in closed form
                               █ between them: every row of the strip, whole blocks

Intervals and ends go into a table of differences along the key blocks, whose running sum is the number of
allowed pairs of each block. Bands are disjoint, so a block is full when that number is its size, whichever
bands it came from.

Cost: O(blocks) time and memory (a BlockMask names every block itself), never S x S.
Shapes: I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from attnspan.masks.band import Band, ceil_div
from attnspan.masks.block_sparse import size_pair
from attnspan.masks.columns import Columns, counted
from attnspan.masks.mask import Mask, MaskFunction, Space
from attnspan.masks.tile import Tile, band_of

SLAB = 1 << 20
"""How many blocks are put in order at a time: temporaries stay in the cache and do not grow with the mask."""


def block_mask(mask: Mask, space: Space, block_size: int | tuple[int, int]) -> BlockMask:
    """The BlockMask of all batch rows of a mask, equal to `create_block_mask` of its `mask_mod`."""
    q_len, kv_len = space.q_len, space.kv_len
    assert q_len is not None, "a block mask is made for known lengths"
    assert kv_len is not None, "a block mask is made for known lengths"
    size = size_pair("block_size", block_size)
    shape = mask.rows, ceil_div(q_len, size[0]), ceil_div(kv_len, size[1])
    lists = BlockLists.empty(shape, space.device)
    for row in range(mask.rows):
        pairs_IJ = _pairs(_strips(mask.bands(q_len, kv_len, row), size, space.device), shape[1:], size)
        lists.put(row, pairs_IJ == size[0] * size[1], pairs_IJ > 0)
    return lists.block_mask(mask.mask_mod(q_len, kv_len, device=space.device), (q_len, kv_len), size)


@functools.lru_cache(maxsize=256)
def lists_of_tiles(
    tiles: tuple[Tile, ...], lengths: tuple[int, int], size: tuple[int, int], device: torch.device
) -> BlockLists:
    """The blocks between two buffers: full where certain tiles fill them, partial where any tile touches them.

    A tile of every n-th row or column counts as touching all blocks between its first and last.
    """
    shape = 1, ceil_div(lengths[0], size[0]), ceil_div(lengths[1], size[1])
    with torch.inference_mode(False):  # made during evaluation, they may be saved for backward later
        full_IJ, some_IJ, doubtful_IJ = classified(tiles, (shape[1], shape[2]), size, device)
        lists = BlockLists.empty(shape, device)
        lists.put(0, full_IJ, some_IJ | doubtful_IJ)
    return lists


def classified(
    tiles: Sequence[Tile], shape: tuple[int, int], size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(I, J): blocks that certain tiles fill, those in which they hold anything, and those in which others may."""
    plain = [tile for tile in tiles if tile.rows.step == tile.cols.step == 1]
    certain = [band_of(tile) for tile in plain if not tile.needs_mask_mod]
    partial = [band_of(tile) for tile in plain if tile.needs_mask_mod]
    pairs_IJ = _pairs(_strips(certain, size, device), shape, size)
    doubtful_IJ = _pairs(_strips(partial, size, device), shape, size) > 0
    for tile in tiles:
        if tile.rows.step > 1 or tile.cols.step > 1:
            i, j = (
                slice(side[0] // of, side[-1] // of + 1) for side, of in zip((tile.rows, tile.cols), size, strict=True)
            )
            doubtful_IJ[i, j] = True
    full_IJ = pairs_IJ == size[0] * size[1]
    return full_IJ, pairs_IJ > 0, doubtful_IJ & ~full_IJ


class BlockLists(NamedTuple):
    """Partial and full blocks, by rows and by columns of blocks, as a BlockMask has them."""

    partial: _BlockListing
    full: _BlockListing

    @classmethod
    def empty(cls, shape: tuple[int, int, int], device: torch.device, heads: int = 1) -> BlockLists:
        """For so many batch rows, rows of blocks and columns of blocks."""
        return cls(_BlockListing(shape, heads, device), _BlockListing(shape, heads, device))

    def put(self, row: int, full_IJ: torch.Tensor, some_IJ: torch.Tensor, head: int = 0) -> None:
        """The blocks of a batch row and head: those that are full, and those that hold anything."""
        self.full.put(row, head, full_IJ)
        self.partial.put(row, head, some_IJ & ~full_IJ)

    def block_mask(self, mask_mod: MaskFunction, lengths: tuple[int, int], size: tuple[int, int]) -> BlockMask:
        partial, full = self
        return BlockMask(
            seq_lengths=lengths,
            kv_num_blocks=partial.kv_counts,
            kv_indices=partial.kv_indices,
            full_kv_num_blocks=full.kv_counts,
            full_kv_indices=full.kv_indices,
            q_num_blocks=partial.q_counts,
            q_indices=partial.q_indices,
            full_q_num_blocks=full.q_counts,
            full_q_indices=full.q_indices,
            BLOCK_SIZE=size,
            mask_mod=mask_mod,
        )


Strips = tuple[torch.Tensor, Columns]
"""Bands cut at every row of blocks: which row each strip is in, and its bounds."""


def _strips(bands: Sequence[Band], size: tuple[int, int], device: torch.device) -> Strips:
    q0, q1, k0, k1, lo, hi = (column.to(device) for column in Columns.of(bands))
    first = q0 // size[0]
    source, nth = counted((q1 - 1) // size[0] + 1 - first)
    i = first[source] + nth
    q0, q1 = torch.maximum(q0[source], i * size[0]), torch.minimum(q1[source], (i + 1) * size[0])
    lo, hi = lo[source], hi[source]
    k0, k1 = torch.maximum(k0[source], q0 + lo), torch.minimum(k1[source], q1 + hi)
    return i, Columns(q0, q1, k0, k1, lo, hi)


def _pairs(strips: Strips, shape: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """The number of allowed pairs in each block, (I, J)."""
    i, (q0, q1, k0, k1, lo, hi) = strips
    k_size = size[1]
    first, last = k0 // k_size, (k1 - 1) // k_size + 1  # the blocks it touches: all between, a band has no gaps
    # From the last row's left edge to the first row's right edge, every row of the strip covers every key.
    j0 = (torch.maximum(k0, q1 - 1 + lo) - 1) // k_size + 1
    j1 = torch.minimum(k1, q0 + hi + 1) // k_size
    bare = j1 <= j0
    j0, j1 = torch.where(bare, last, j0), torch.where(bare, last, j1)

    source, nth = counted(torch.cat([j0 - first, last - j1]))  # the left ends, then the right ends
    j = torch.cat([first, j1])[source] + nth
    source = source % len(i)
    ends = Columns(*(column[source] for column in strips[1]))
    left, right = torch.maximum(ends.k0, j * k_size), torch.minimum(ends.k1, (j + 1) * k_size)
    end_pairs = _at_most(ends.hi, ends, left, right) - _at_most(ends.lo - 1, ends, left, right)

    dtype = torch.int32 if size[0] * size[1] < 1 << 31 else torch.int64
    change = torch.zeros(shape[0] * (shape[1] + 1), dtype=dtype, device=i.device)
    for row, start, stop, pairs in ((i, j0, j1, (q1 - q0) * k_size), (i[source], j, j + 1, end_pairs)):
        for column, sign in ((start, 1), (stop, -1)):
            change.index_add_(0, row * (shape[1] + 1) + column, (sign * pairs).to(dtype))
    change = change.view(shape[0], shape[1] + 1)
    return torch.cumsum(change, 1, dtype=dtype, out=change)[:, :-1]


def _at_most(diagonal: torch.Tensor, strip: Columns, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The pairs of a strip's rows and the keys [left, right) with k - q <= diagonal.

    Row q holds q + diagonal + 1 - left of them, at least 0 and at most right - left: a ramp, which is the
    difference of two ramps without an upper end, each with a triangular sum.
    """
    above, below = strip.q0 + diagonal - left, strip.q1 + diagonal - left
    width = right - left
    return _triangle(below) - _triangle(below - width) - _triangle(above) + _triangle(above - width)


def _triangle(n: torch.Tensor) -> torch.Tensor:
    """1 + 2 + ... + n, and 0 for n < 0."""
    n = n.clamp(min=0)
    return n * (n + 1) // 2


class _BlockListing:
    """The chosen blocks of every row of blocks and of every column, as a BlockMask lists them.

    A row of indices is the chosen blocks in order and then the others in order; counts say where the chosen
    end.
    """

    def __init__(self, shape: tuple[int, int, int], heads: int, device: torch.device):
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        rows, i, j = shape
        self.kv_counts, self.kv_indices = empty(rows, heads, i), empty(rows, heads, i, j)
        self.q_counts, self.q_indices = empty(rows, heads, j), empty(rows, heads, j, i)

    def put(self, row: int, head: int, chosen_IJ: torch.Tensor) -> None:
        _order(chosen_IJ, self.kv_counts[row, head], self.kv_indices[row, head])
        _order(chosen_IJ.T, self.q_counts[row, head], self.q_indices[row, head])


def _order(chosen: torch.Tensor, counts: torch.Tensor, indices: torch.Tensor) -> None:
    """Write, for each row, the number of chosen columns, and the columns with the chosen first."""
    slab = max(1, SLAB // chosen.shape[1])
    for start in range(0, len(chosen), slab):
        some = slice(start, start + slab)
        picked = chosen[some].contiguous()
        torch.sum(picked, 1, dtype=torch.int32, out=counts[some])
        indices[some] = _chosen_first(picked, counts[some])


def _chosen_first(picked: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The columns of each row, those picked first, both in order.

    A row is a few runs of columns, picked or not, and a moved run is still a run: so the result rises by one
    from place to place, except for a jump where a run begins.

    >>> picked = torch.tensor([[False, True, True, False, True]])
    >>> _chosen_first(picked, picked.sum(1)).tolist()
    [[1, 2, 4, 0, 3]]
    """
    rows, columns = picked.shape
    begins = torch.ones_like(picked)
    begins[:, 1:] = picked[:, 1:] != picked[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    flat = row * columns + column
    length = torch.diff(flat, append=flat.new_tensor([rows * columns]))
    is_picked = picked[row, column]
    first = length * is_picked
    earlier = first.cumsum(0) - first - (counts.cumsum(0) - counts)[row]  # picked columns left of the run
    place = torch.where(is_picked, earlier, counts[row] + column - earlier)

    step = torch.ones(rows, columns + 1, dtype=torch.int32, device=picked.device)
    step[:, 0] = 0
    at = row * (columns + 1) + place
    step.view(-1).index_add_(0, at, column.to(torch.int32))  # a run begins with its column,
    step.view(-1).index_add_(0, at + length, -(column + length).to(torch.int32))  # and is not continued after it
    return torch.cumsum(step, 1, dtype=torch.int32, out=step)[:, :-1]
