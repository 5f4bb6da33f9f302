"""All tiles between two buffers in one call of our Triton kernel: no merge, no sum of parts, no launch for each tile.

Packed documents make many small tiles. Computed one by one, each costs a launch, a merge of its result and an addition
of its gradients, and a GPU that is never full. Here one program meets all keys of its rows (agenda.py), so that out is
final when it is written, and goes straight to the caller's dtype where nothing else will be merged into it. Gradients
are written where they are summed, or added to what is there.

`Bands` is the kernel; `forward` and `backward` are its calls, for tiles of neighbouring rows and columns. Others go one
by one, as band.py computes them. Block sizes are fixed. On Hopper GPUs some programs are others (band_hopper.py).
Shapes: kernel.py; any strides with the last dim dense.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.kernels import band_hopper
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.agenda import Agenda, agenda
from attnspan.kernels.band_mods import NO_MODS, CapturedSums, ModsArgs, add_captured_gradients, refusal, wanted
from attnspan.kernels.band_programs import programs
from attnspan.kernels.dropout import Dropout
from attnspan.kernels.kernel import GradientBuffers, Gradients, MergedOutputs, Spec, StepTiles, Tiles
from attnspan.kernels.mods import as_slice
from attnspan.kernels.parts import last_dim_dense
from attnspan.kernels.per_tile import PerTile, placed, sliced
from attnspan.masks.tile import Tile


class Bands(PerTile):
    """`band` for all tiles of a step: in one call where neighbours in a tile are neighbours in its buffers."""

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
        """What `band` says of any tile, it says of all; programs are compiled, or the reason is told."""
        return self.kernel.supports(spec, q, k, v, tiles[0]) or refusal(spec, tiles)

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
        mods = ModsArgs.of(spec, step)
        if are_dense(step.tiles):
            dtype, spec = q.dtype if step.is_final else torch.float32, _placed(spec, step, q, k)
            total.add(range(q.shape[2]), *forward(spec, q, k, v, step.tiles, dtype, mods))
            return
        for tile in step.tiles:
            there = placed(spec, step, tile.rows, tile.cols)
            out, lse = forward(there, *sliced(q, k, v, tile), (alone(tile),), torch.float32, mods.at(tile))
            total.add(tile.rows, out, lse)

    def backward(
        self, spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
    ) -> None:
        mods = ModsArgs.of(spec, step, wanted(spec, step, grads))
        whole = range(q.shape[2]), range(k.shape[2])
        if are_dense(step.tiles):
            into, there = grads.open(), _placed(spec, step, q, k)
            sums = backward(there, merged, q, k, v, step.tiles, into, mods)
            grads.close(into)
            if sums is not None:
                add_captured_gradients(sums, spec, merged, step, grads, whole)
            return
        for tile in step.tiles:
            there, x = placed(spec, step, tile.rows, tile.cols), sliced(q, k, v, tile)
            dq, dk, dv = (torch.empty(each.shape, dtype=torch.float32, device=q.device) for each in x)
            sums = backward(
                there, merged.rows(as_slice(tile.rows)), *x, (alone(tile),), GradientBuffers(dq, dk, dv), mods.at(tile)
            )
            grads.add(tile.rows, tile.cols, dq, dk, dv)
            if sums is not None:
                add_captured_gradients(sums, spec, merged, step, grads, (tile.rows, tile.cols))


def _placed(spec: Spec, step: StepTiles, q: Tensor, k: Tensor) -> Spec:
    """Dropout at the place of all rows and columns."""
    return placed(spec, step, range(q.shape[2]), range(k.shape[2]))


def are_dense(tiles: Tiles) -> bool:
    """Whether neighbours in tiles are neighbours in their buffers."""
    return all(tile.rows.step == tile.cols.step == 1 for tile in tiles)


def alone(tile: Tile) -> Tile:
    """The tile as it lies in tensors that were sliced for it."""
    return tile._replace(rows=range(len(tile.rows)), cols=range(len(tile.cols)))


def forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, dtype: torch.dtype, mods: ModsArgs = NO_MODS
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all rows, out in `dtype`, lse in float32; 0 and -inf for rows in no tile."""
    q, k, v = last_dim_dense(q, k, v)
    shape = _CallShape.of(q, k, v)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    drawn, keep = _drawn(spec.dropout, q)
    scale, flip = abs(spec.scale) if shape.wide else abs(spec.scale) * math.log2(math.e), spec.scale < 0
    if mods.code.change is not None:
        scale, flip = spec.scale, False
    with torch.cuda.device(q.device):
        if mods is NO_MODS and spec.dropout is None and band_hopper.serves(q, k, v):
            work = agenda(tiles, "rows", q.shape[2], band_hopper.ROWS, q.device)
            band_hopper.forward((q, k, v), (out, lse), work, scale, flip=flip)
            return out, lse
        blocks = shape.blocks(_FORWARD, q, mods)
        work = agenda(tiles, "rows", q.shape[2], blocks.rows, q.device, mods.runs)
        programs(mods.code).forward[_grid(q, work)](
            q, k, v, out, lse, *work, *mods.arguments, *drawn, *_strides(q, k, v, out), *shape.sizes,
            len(work.blocks), scale, keep,
            drops=spec.dropout is not None, flip=flip, **shape.constants, **blocks.constants,
        )  # fmt: skip
    return out, lse


def backward(
    spec: Spec,
    merged: MergedOutputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    into: GradientBuffers,
    mods: ModsArgs = NO_MODS,
) -> CapturedSums | None:
    """Write the gradients of all rows and columns; those in no tile are 0. Returns the sums of what is learned."""
    grad, q, k, v, out = last_dim_dense(merged.grad.to(q.dtype), q, k, v, merged.out)
    shape = _CallShape.of(q, k, v)
    lse = merged.lse.contiguous()
    held = band_hopper.padded(shape.rows)
    delta, walls = (lse.new_empty(*lse.shape[:2], held) for _ in range(2))
    through_lse = merged.grad_lse is not None
    grad_lse = merged.grad_lse.to(lse.dtype).contiguous() if merged.grad_lse is not None else lse
    unit = 1.0 if shape.wide else math.log2(math.e)
    scales = (spec.scale, spec.scale * unit, unit)
    dq, dk, dv, add_rows = into
    (drawn, keep), drops = _drawn(spec.dropout, q), spec.dropout is not None
    sums = CapturedSums(mods, (*q.shape[:3], k.shape[2]), q.device)
    with torch.cuda.device(q.device):
        blocks = shape.blocks(_BY_ROWS, q, mods)
        whole = agenda(tiles, "rows", q.shape[2], blocks.rows, q.device, mods.runs)
        for some in sums.launches(len(whole.blocks)):
            work = whole.some(some)
            programs(mods.code).by_rows[_grid(q, work)](
                grad, q, k, v, out, lse, grad_lse, delta, walls, dq, *work, *mods.arguments,
                sums.row_sums, *sums.by_distance, sums.pairs, k.shape[2], *drawn,
                *_strides(grad, q, k, v, out, dq), *shape.sizes, held, len(work.blocks), *scales, keep,
                drops=drops, through_lse=through_lse, add=add_rows, **shape.constants, **blocks.constants,
            )  # fmt: skip
        if mods is NO_MODS and not drops and band_hopper.serves(q, k, v, grad):
            work = agenda(tiles, "cols", k.shape[2], band_hopper.KEYS, q.device)
            band_hopper.by_keys((grad, q, k, v), (delta, walls), (dk, dv), work, scales[:2])
            return None
        blocks = shape.blocks(_BY_KEYS, q, mods)
        work = agenda(tiles, "cols", k.shape[2], blocks.cols, q.device, mods.runs)
        programs(mods.code).by_keys[_grid(k, work)](
            grad, q, k, v, delta, walls, dk, dv, *work, *mods.arguments, sums.col_sums, k.shape[2], *drawn,
            *_strides(grad, q, k, v, dk, dv),
            shape.heads, shape.group, held, len(work.blocks), *scales[:2], keep,
            drops=drops, **shape.constants, **blocks.constants,
        )  # fmt: skip
    return sums if mods.code.learned else None


def _drawn(dropout: Dropout | None, q: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """What programs draw dropout from, see [Note: dropout] in band_programs.py, and the weight of what is kept."""
    if dropout is None:
        return (q, q, q), 1.0
    b, h, q_idx, kv_idx = dropout.place
    dice = torch.cat([torch.tensor([dropout.seed, dropout.least], device=q.device), b[:1], h[:1]])
    return (dice, q_idx.contiguous(), kv_idx.contiguous()), dropout.scale


# ---- sizes ---------------------------------------------------------------------------------------------------------


class _BlockSizes(NamedTuple):
    """Rows and columns that a program multiplies at a time, its warps, and how many loads are on their way."""

    rows: int
    cols: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"block_n": self.rows, "block_m": self.cols, "num_warps": self.warps, "num_stages": self.stages}


class _LoopBlocks(NamedTuple):
    """Blocks by head dim (the larger one, up to), and what a program keeps of q, k, v and grad as the rest passes."""

    blocks: dict[int, _BlockSizes]
    keeps: Literal["q", "rows", "cols"]

    def fitted(self, dims: tuple[int, int], size: int, memory: int, lookups: int = 0) -> _BlockSizes:
        """The blocks for such head dims of `size` bytes, made smaller until they fit in a GPU's shared memory, with
        what is looked up pair by pair ahead of time.

        >>> loop = _LoopBlocks({128: _BlockSizes(128, 128, 8, 3)}, keeps="q")
        >>> loop.fitted((128, 128), size=2, memory=227 << 10)
        _BlockSizes(rows=128, cols=128, warps=8, stages=3)
        >>> loop.fitted((128, 128), size=2, memory=99 << 10)
        _BlockSizes(rows=128, cols=128, warps=8, stages=1)
        """
        blocks = _WIDE if size == 4 else next(b for dim, b in self.blocks.items() if max(dims) <= dim)
        while self._bytes(blocks, dims, size, lookups) > memory and max(blocks.rows, blocks.cols) > 16:
            rows, cols, warps, stages = blocks
            if stages > 1:
                blocks = _BlockSizes(rows, cols, warps, stages - 1)
            else:
                blocks = (
                    _BlockSizes(rows // 2, cols, warps, 1) if rows >= cols else _BlockSizes(rows, cols // 2, warps, 1)
                )
        return blocks

    def _bytes(self, blocks: _BlockSizes, dims: tuple[int, int], size: int, lookups: int) -> int:
        rows, cols, _, stages = blocks
        looked_up = lookups * stages * rows * cols * 4
        if self.keeps == "q":
            return (rows * dims[0] + stages * cols * sum(dims)) * size + looked_up
        kept, passing = (rows, cols) if self.keeps == "rows" else (cols, rows)
        return (kept + stages * passing) * sum(dims) * size + looked_up


# Measured on an H200. float32 goes through no tensor cores, and has small blocks that fit in registers.
_FORWARD = _LoopBlocks(
    {64: _BlockSizes(64, 64, 4, 3), 128: _BlockSizes(128, 64, 8, 3), 256: _BlockSizes(128, 64, 8, 2)}, "q"
)
_BY_ROWS = _LoopBlocks(
    {64: _BlockSizes(128, 64, 4, 3), 128: _BlockSizes(128, 64, 8, 3), 256: _BlockSizes(128, 32, 8, 1)}, "rows"
)
_BY_KEYS = _LoopBlocks(
    {64: _BlockSizes(32, 128, 4, 3), 128: _BlockSizes(32, 64, 4, 3), 256: _BlockSizes(64, 64, 8, 2)}, "cols"
)
_WIDE = _BlockSizes(32, 32, 4, 1)


class _CallShape(NamedTuple):
    """What all programs of a call are told."""

    heads: int
    group: int
    rows: int
    dims: tuple[int, int]
    wide: bool

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> _CallShape:
        group, wide = q.shape[1] // k.shape[1], q.dtype == torch.float32
        return _CallShape(q.shape[1], group, q.shape[2], (q.shape[3], v.shape[3]), wide)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.group, self.rows

    @property
    def constants(self) -> dict[str, int | bool]:
        dim, dim_v = self.dims
        return {"dim": dim, "dim_v": dim_v, "block_d": _padded(dim), "block_v": _padded(dim_v), "wide": self.wide}

    def blocks(self, loop: _LoopBlocks, q: Tensor, mods: ModsArgs) -> _BlockSizes:
        padded = _padded(self.dims[0]), _padded(self.dims[1])
        return loop.fitted(padded, q.element_size(), _shared_memory(q.device), mods.code.lookups)


def _grid(x: Tensor, work: Agenda) -> tuple[int]:
    """One program for each block of the agenda, of each head of x."""
    return (x.shape[0] * x.shape[1] * len(work.blocks),)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program can have."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def _padded(dim: int) -> int:
    """The power of two that a head dim is computed in; tensor cores want 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]
