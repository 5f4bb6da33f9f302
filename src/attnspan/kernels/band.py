"""Our own kernel for CUDA, in Triton: every tile, exactly, and nothing rounded before it is merged.

Library kernels round a tile's out and gradients to half precision. Merged, such parts are off by about 1.2 times as
much as one attention over the whole sequence. This kernel returns float32, whatever its inputs: what is merged or
summed is rounded once, at the end, so that the error does not depend on the number of tiles or ranks.

A program takes a block of rows and goes over the blocks of keys that the band reaches. Those that lie inside it take no
mask; those that a diagonal or the end of the keys cuts do, and they are at most a few on either side::

    [ \\ # # # / . . . ]      rows of one block: # is computed as it is, \\ and / with a mask, . is never visited

Backward is two kernels: one by rows for dq, which also writes delta = sum(grad * out) for the other, and one by keys
for dk and dv, that goes over all query heads of its key head. Nothing is added by atomics, so the same inputs give the
same bits.

Products of half precision are summed in float32; probabilities and score gradients are rounded to the inputs' dtype to
be multiplied, as in every flash attention. float32 is multiplied as float32, not as TF32. Block sizes are fixed.
Knows nothing of other kernels. Shapes: kernel.py; any strides with the last dim dense.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.kernels.kernel import Spec, not_among
from attnspan.kernels.merge import has_triton
from attnspan.kernels.parts import last_dim_dense
from attnspan.masks.tile import Tile

name = "band"

MOST_DIM = 256


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Every tile, with head dims up to 256."""
    if q.device.type != "cuda":
        return f"band runs on cuda, got tensors on {q.device.type}"
    if not has_triton():
        return "band needs the package triton, which is not installed"
    if reason := not_among(q.dtype, (torch.float32, torch.float16, torch.bfloat16)):
        return f"band {reason}"
    if (most := max(q.shape[3], v.shape[3])) > MOST_DIM:
        return f"band needs head dims up to {MOST_DIM}, got {most}"
    if spec.scale == 0:  # the largest score is found before scaling: see `attend`
        return "band needs a scale other than 0"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse), both in float32."""
    q, k, v = last_dim_dense(q, k, v)
    shape = _Shape.of(q, k, v, tile)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    blocks = shape.blocks(_FORWARD, q)
    scale = abs(spec.scale) if shape.wide else abs(spec.scale) * math.log2(math.e)
    with torch.cuda.device(q.device):
        _kernels().forward[shape.grid(q, blocks.rows)](
            q, k, v, out, lse, *_strides(q, k, v, out), *shape.sizes, scale,
            flip=spec.scale < 0, late=shape.grows, **shape.constants, **blocks.constants,
        )  # fmt: skip
    return out, lse


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), all in float32."""
    grad, q, k, v, out = last_dim_dense(grad.to(q.dtype), q, k, v, out)
    shape = _Shape.of(q, k, v, tile)
    lse, delta = lse.contiguous(), lse.new_empty(lse.shape)
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    unit = 1.0 if shape.wide else math.log2(math.e)
    scales = (spec.scale, spec.scale * unit, unit)
    with torch.cuda.device(q.device):
        blocks = shape.blocks(_BY_ROWS, q)
        _kernels().by_rows[shape.grid(q, blocks.rows)](
            grad, q, k, v, out, lse, delta, dq, *_strides(grad, q, k, v, out, dq), *shape.sizes, *scales,
            late=shape.grows, **shape.constants, **blocks.constants,
        )  # fmt: skip
        blocks = shape.blocks(_BY_KEYS, q)
        _kernels().by_keys[shape.grid(k, blocks.cols)](
            grad, q, k, v, lse, delta, dk, dv, *_strides(grad, q, k, v, dk, dv), *shape.sizes, *scales,
            **shape.constants, **blocks.constants,
        )  # fmt: skip
    return dq, dk, dv


# ---- sizes ---------------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Rows and columns that a program multiplies at a time, its warps, and how many loads are on their way."""

    rows: int
    cols: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"block_n": self.rows, "block_m": self.cols, "num_warps": self.warps, "num_stages": self.stages}


class _Loop(NamedTuple):
    """Blocks by head dim (the larger one, up to), and what a program keeps of q, k, v and grad as the rest passes."""

    blocks: dict[int, _Blocks]
    keeps: Literal["q", "rows", "cols"]

    def fitted(self, dims: tuple[int, int], size: int, memory: int) -> _Blocks:
        """The blocks for such head dims of `size` bytes, made smaller until they fit in a GPU's shared memory.

        >>> loop = _Loop({128: _Blocks(128, 128, 8, 3)}, keeps="q")
        >>> loop.fitted((128, 128), size=2, memory=227 << 10)
        _Blocks(rows=128, cols=128, warps=8, stages=3)
        >>> loop.fitted((128, 128), size=2, memory=99 << 10)
        _Blocks(rows=128, cols=128, warps=8, stages=1)
        """
        blocks = _WIDE if size == 4 else next(b for dim, b in self.blocks.items() if max(dims) <= dim)
        while self._bytes(blocks, dims, size) > memory and max(blocks.rows, blocks.cols) > 16:
            rows, cols, warps, stages = blocks
            if stages > 1:
                blocks = _Blocks(rows, cols, warps, stages - 1)
            else:
                blocks = _Blocks(rows // 2, cols, warps, 1) if rows >= cols else _Blocks(rows, cols // 2, warps, 1)
        return blocks

    def _bytes(self, blocks: _Blocks, dims: tuple[int, int], size: int) -> int:
        rows, cols, _, stages = blocks
        if self.keeps == "q":
            return (rows * dims[0] + stages * cols * sum(dims)) * size
        kept, passing = (rows, cols) if self.keeps == "rows" else (cols, rows)
        return (kept + stages * passing) * sum(dims) * size


# Measured on an H200. float32 goes through no tensor cores, and has small blocks that fit in registers.
_FORWARD = _Loop({64: _Blocks(64, 64, 4, 3), 128: _Blocks(128, 128, 8, 3), 256: _Blocks(128, 64, 8, 2)}, "q")
_BY_ROWS = _Loop({64: _Blocks(128, 64, 4, 3), 128: _Blocks(128, 64, 8, 3), 256: _Blocks(128, 32, 8, 1)}, "rows")
_BY_KEYS = _Loop({64: _Blocks(32, 128, 4, 3), 128: _Blocks(64, 128, 8, 1), 256: _Blocks(64, 64, 8, 2)}, "cols")
_WIDE = _Blocks(32, 32, 4, 1)


class _Shape(NamedTuple):
    """What all programs of a tile are told."""

    heads: int
    group: int
    n: int
    m: int
    dims: tuple[int, int]
    lo: int
    hi: int
    wide: bool

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> _Shape:
        n, m = q.shape[2], k.shape[2]
        lo, hi = max(tile.lo, 1 - n), min(tile.hi, m - 1)  # beyond, a diagonal does not bite
        group, wide = q.shape[1] // k.shape[1], q.dtype == torch.float32
        return _Shape(q.shape[1], group, n, m, (q.shape[3], v.shape[3]), lo, hi, wide)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.group, self.n, self.m, self.lo, self.hi

    @property
    def constants(self) -> dict[str, int | bool]:
        dim, dim_v = self.dims
        return {"dim": dim, "dim_v": dim_v, "block_d": _padded(dim), "block_v": _padded(dim_v), "wide": self.wide}

    @property
    def grows(self) -> bool:
        """Whether the last rows see more keys than the first: they are then begun with, to end together."""
        first, last = (min(row + self.hi, self.m - 1) - max(row + self.lo, 0) for row in (0, self.n - 1))
        return last > first

    def blocks(self, loop: _Loop, q: Tensor) -> _Blocks:
        padded = _padded(self.dims[0]), _padded(self.dims[1])
        return loop.fitted(padded, q.element_size(), _shared_memory(q.device))

    def grid(self, x: Tensor, block: int) -> tuple[int]:
        """One program for each block of x's rows, of each head."""
        return (x.shape[0] * x.shape[1] * -(-x.shape[2] // block),)


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


# ---- programs ------------------------------------------------------------------------------------------------------

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


class _Kernels(NamedTuple):
    forward: Any
    by_rows: Any
    by_keys: Any


@cache
def _kernels() -> _Kernels:
    """The Triton kernels. In them n is a row, m a column, d a feature; `first` and `last` those of a block."""
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def load(x, row_stride, at, count, dim: tl.constexpr,
             block: tl.constexpr, block_d: tl.constexpr, cut: tl.constexpr):
        """Rows [at, at + block) of x; what lies beyond `count` rows, if `cut`, or beyond `dim` is 0."""
        n, d = tl.arange(0, block), tl.arange(0, block_d)
        rows = x + tl.cast(at, tl.int64) * row_stride + (n.to(tl.int64) * row_stride)[:, None] + d[None, :]
        if cut:
            return tl.load(rows, mask=(at + n < count)[:, None] & (d < dim)[None, :], other=0.0)
        elif dim < block_d:
            return tl.load(rows, mask=(d < dim)[None, :], other=0.0)
        else:
            return tl.load(rows)

    @triton.jit
    def store(x, row_stride, at, count, dim: tl.constexpr, block: tl.constexpr, block_d: tl.constexpr, value):
        n, d = at + tl.arange(0, block), tl.arange(0, block_d)
        rows = x + (n.to(tl.int64) * row_stride)[:, None] + d[None, :]
        tl.store(rows, value, mask=(n < count)[:, None] & (d < dim)[None, :])

    @triton.jit
    def reach(first, last, lo, hi, count, block: tl.constexpr):
        """The blocks that [first, last] sees: from `start` to `stop`, and without a mask from `inner` to `outer`."""
        start = tl.maximum(first + lo, 0) // block
        stop = tl.maximum(tl.cdiv(tl.minimum(last + hi + 1, count), block), start)
        inner = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last + lo, 0), block), start), stop)
        outer = tl.minimum(tl.maximum(tl.maximum(tl.minimum(first + hi + 1, count), 0) // block, inner), stop)
        return start, inner, outer, stop

    @triton.jit
    def inside(n, m, lo, hi, count):
        """Which pairs of rows and columns the band holds, (n, m)."""
        distance = m[None, :] - n[:, None]
        return (lo <= distance) & (distance <= hi) & (m < count)[None, :]

    @triton.jit
    def attend(acc, total, most, q, k, v, n, j, k_n, v_n, m, lo, hi, scale, flip: tl.constexpr,
               dim: tl.constexpr, dim_v: tl.constexpr, block_m: tl.constexpr,
               block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """One block of keys more in the sums of e^(score - most), with values and alone; powers of 2 if not wide."""
        k_block = load(k, k_n, j * block_m, m, dim, block_m, block_d, cut)
        v_block = load(v, v_n, j * block_m, m, dim_v, block_m, block_v, cut)
        score = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        if flip:
            score = -score
        if cut:
            score = tl.where(inside(n, j * block_m + tl.arange(0, block_m), lo, hi, m), score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1) * scale)
        base = tl.where(top == float("-inf"), 0.0, top)  # of a row that saw nothing yet; -inf - -inf would be NaN
        if wide:
            p = tl.exp2((score * scale - base[:, None]) * 1.4426950408889634)
            fade = tl.exp2((most - base) * 1.4426950408889634)
        else:
            p = tl.exp2(score * scale - base[:, None])
            fade = tl.exp2(most - base)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * fade[:, None], input_precision="ieee")
        return acc, total, top

    @triton.jit(do_not_specialize=["n", "m", "lo", "hi", "heads", "group"])
    def forward(
        q, k, v, out, lse,
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n,
        heads, group, n, m, lo, hi, scale,
        flip: tl.constexpr, late: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr,
        block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        blocks = tl.cdiv(n, block_n)
        at, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
        if late:
            at = blocks - 1 - at
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        q += b * q_b + h * q_h
        k += b * k_b + h // group * k_h
        v += b * v_b + h // group * v_h
        first = at * block_n
        rows = first + tl.arange(0, block_n)
        start, inner, outer, stop = reach(first, tl.minimum(first + block_n, n) - 1, lo, hi, m, block_m)

        acc = tl.zeros([block_n, block_v], tl.float32)
        total = tl.zeros([block_n], tl.float32)
        most = tl.full([block_n], float("-inf"), tl.float32)
        q_block = load(q, q_n, first, n, dim, block_n, block_d, True)
        for j in range(inner, outer):
            acc, total, most = attend(acc, total, most, q_block, k, v, rows, j, k_n, v_n, m, lo, hi, scale, flip,
                                      dim, dim_v, block_m, block_d, block_v, wide, False)
        for i in range(inner - start + stop - outer):
            j = tl.where(start + i < inner, start + i, start + i - inner + outer)
            acc, total, most = attend(acc, total, most, q_block, k, v, rows, j, k_n, v_n, m, lo, hi, scale, flip,
                                      dim, dim_v, block_m, block_d, block_v, wide, True)

        empty = total == 0.0
        result = acc / tl.where(empty, 1.0, total)[:, None]
        store(out + b * out_b + h * out_h, out_n, first, n, dim_v, block_n, block_v, result)
        natural = most if wide else most * 0.6931471805599453
        # An infinite score makes its row NaN, but the sum of exponentials is infinite all the same.
        level = tl.where(most == float("inf"), most, natural + tl.log(total))
        level = tl.where(empty, float("-inf"), level)
        tl.store(lse + head.to(tl.int64) * n + rows, level, mask=rows < n)

    @triton.jit
    def share(score, wall, scale, wide: tl.constexpr):
        """e^(score * scale - wall), given in powers of 2 if not wide; a wall of +inf lets nothing through."""
        if wide:
            return tl.exp2((score * scale - wall) * 1.4426950408889634)
        else:
            return tl.exp2(score * scale - wall)

    @triton.jit
    def walls(lse, rows, n, unit):
        """lse, and +inf where a row saw no key or there is no row: e^(score + inf) would be no number."""
        level = tl.load(lse + rows, mask=rows < n, other=float("-inf"))
        return tl.where(level == float("-inf"), float("inf"), level * unit)

    @triton.jit
    def gather_rows(acc, q, grad, wall, delta, k, v, n, j, k_n, v_n, m, lo, hi, scale,
                    dim: tl.constexpr, dim_v: tl.constexpr, block_m: tl.constexpr,
                    block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """dq of one block of keys more."""
        k_block = load(k, k_n, j * block_m, m, dim, block_m, block_d, cut)
        v_block = load(v, v_n, j * block_m, m, dim_v, block_m, block_v, cut)
        p = share(tl.dot(q, tl.trans(k_block), input_precision="ieee"), wall[:, None], scale, wide)
        slope = p * (tl.dot(grad, tl.trans(v_block), input_precision="ieee") - delta[:, None])
        if cut:
            slope = tl.where(inside(n, j * block_m + tl.arange(0, block_m), lo, hi, m), slope, 0.0)
        return tl.dot(slope.to(k_block.dtype), k_block, acc, input_precision="ieee")

    @triton.jit(do_not_specialize=["n", "m", "lo", "hi", "heads", "group"])
    def by_rows(
        grad, q, k, v, out, lse, delta, dq,
        grad_b, grad_h, grad_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, dq_b, dq_h, dq_n,
        heads, group, n, m, lo, hi, scale, scale_unit, unit,
        late: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr,
        block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        blocks = tl.cdiv(n, block_n)
        at, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
        if late:
            at = blocks - 1 - at
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        k += b * k_b + h // group * k_h
        v += b * v_b + h // group * v_h
        first = at * block_n
        rows = first + tl.arange(0, block_n)
        start, inner, outer, stop = reach(first, tl.minimum(first + block_n, n) - 1, lo, hi, m, block_m)

        out_block = load(out + b * out_b + h * out_h, out_n, first, n, dim_v, block_n, block_v, True)
        grad_block = load(grad + b * grad_b + h * grad_h, grad_n, first, n, dim_v, block_n, block_v, True)
        correction = tl.sum(grad_block.to(tl.float32) * out_block.to(tl.float32), 1)
        tl.store(delta + head.to(tl.int64) * n + rows, correction, mask=rows < n)
        wall = walls(lse + head.to(tl.int64) * n, rows, n, unit)
        q_block = load(q + b * q_b + h * q_h, q_n, first, n, dim, block_n, block_d, True)
        acc = tl.zeros([block_n, block_d], tl.float32)
        for j in range(inner, outer):
            acc = gather_rows(acc, q_block, grad_block, wall, correction, k, v, rows, j, k_n, v_n, m, lo, hi,
                              scale_unit, dim, dim_v, block_m, block_d, block_v, wide, False)
        for i in range(inner - start + stop - outer):
            j = tl.where(start + i < inner, start + i, start + i - inner + outer)
            acc = gather_rows(acc, q_block, grad_block, wall, correction, k, v, rows, j, k_n, v_n, m, lo, hi,
                              scale_unit, dim, dim_v, block_m, block_d, block_v, wide, True)
        store(dq + b * dq_b + h * dq_h, dq_n, first, n, dim, block_n, block_d, acc * scale)

    @triton.jit
    def gather_keys(dk, dv, k, v, q, grad, lse, delta, i, cols, q_n, grad_n, n, lo, hi, scale, unit,
                    dim: tl.constexpr, dim_v: tl.constexpr, block_n: tl.constexpr,
                    block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """dk and dv of one block of rows more; scores are (m, n) here."""
        rows = i * block_n + tl.arange(0, block_n)
        q_block = load(q, q_n, i * block_n, n, dim, block_n, block_d, cut)
        grad_block = load(grad, grad_n, i * block_n, n, dim_v, block_n, block_v, cut)
        wall = walls(lse, rows, n, unit)
        correction = tl.load(delta + rows, mask=rows < n, other=0.0)
        p = share(tl.dot(k, tl.trans(q_block), input_precision="ieee"), wall[None, :], scale, wide)
        if cut:
            seen = inside(cols, rows, -hi, -lo, n)
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(grad_block.dtype), grad_block, dv, input_precision="ieee")
        slope = p * (tl.dot(v, tl.trans(grad_block), input_precision="ieee") - correction[None, :])
        if cut:
            slope = tl.where(seen, slope, 0.0)
        return tl.dot(slope.to(q_block.dtype), q_block, dk, input_precision="ieee"), dv

    @triton.jit(do_not_specialize=["n", "m", "lo", "hi", "heads", "group"])
    def by_keys(
        grad, q, k, v, lse, delta, dk, dv,
        grad_b, grad_h, grad_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
        heads, group, n, m, lo, hi, scale, scale_unit, unit,
        dim: tl.constexpr, dim_v: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        blocks = tl.cdiv(m, block_m)
        at, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
        b, h = (head // (heads // group)).to(tl.int64), (head % (heads // group)).to(tl.int64)
        first = at * block_m
        cols = first + tl.arange(0, block_m)
        start, inner, outer, stop = reach(first, tl.minimum(first + block_m, m) - 1, -hi, -lo, n, block_n)

        k_block = load(k + b * k_b + h * k_h, k_n, first, m, dim, block_m, block_d, True)
        v_block = load(v + b * v_b + h * v_h, v_n, first, m, dim_v, block_m, block_v, True)
        dk_sum = tl.zeros([block_m, block_d], tl.float32)
        dv_sum = tl.zeros([block_m, block_v], tl.float32)
        for each in range(group):
            own = h * group + each
            q_own, grad_own = q + b * q_b + own * q_h, grad + b * grad_b + own * grad_h
            lse_own, delta_own = lse + (b * heads + own) * n, delta + (b * heads + own) * n
            for i in range(inner, outer):
                dk_sum, dv_sum = gather_keys(dk_sum, dv_sum, k_block, v_block, q_own, grad_own, lse_own, delta_own, i,
                                             cols, q_n, grad_n, n, lo, hi, scale_unit, unit,
                                             dim, dim_v, block_n, block_d, block_v, wide, False)
            for e in range(inner - start + stop - outer):
                i = tl.where(start + e < inner, start + e, start + e - inner + outer)
                dk_sum, dv_sum = gather_keys(dk_sum, dv_sum, k_block, v_block, q_own, grad_own, lse_own, delta_own, i,
                                             cols, q_n, grad_n, n, lo, hi, scale_unit, unit,
                                             dim, dim_v, block_n, block_d, block_v, wide, True)
        store(dk + b * dk_b + h * dk_h, dk_n, first, m, dim, block_m, block_d, dk_sum * scale)
        store(dv + b * dv_b + h * dv_h, dv_n, first, m, dim_v, block_m, block_v, dv_sum)
    # fmt: on

    return _Kernels(forward, by_rows, by_keys)
