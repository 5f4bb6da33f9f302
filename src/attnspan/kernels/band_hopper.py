"""dk and dv of the kernels `band` and `bands` on Hopper GPUs: one warp loads, two groups of warps multiply.

What band_programs.py computes by keys, in the same order and from the same tables, but written for the chip. There, a
program that keeps the sums of 128 keys in registers has none left for the addresses of what it loads. Here a program is
cut in three: one warp asks the chip's copy engine for the next blocks of q and grad, which lands them in shared memory
and says so on a barrier; two groups of four warps keep the sums of 64 keys each, and say on another barrier when they
are done with a block::

    fetch      wait until a place is free, ask for a block of q, grad, walls and delta
    compute    wait until the block is there; scores, probabilities, slopes; dv and dk; the place is free

[Note: aligned rows] The copy engine reads walls and delta, one number for a row, only from addresses of 16 bytes. So
blocks of rows begin at multiples of four, before a span's first row if need be; such a block is masked, as the last one
of a span is, and what it holds of others is set to 0 before it is multiplied (0 times another row's NaN would be NaN).

Written in Gluon, the layer below Triton's language, which is not stable yet: it is used with the versions of Triton
that it was compiled with, and elsewhere band_programs.py computes the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnspan.kernels.agenda import Agenda

VERSIONS = ("3.6",)
"""Of Triton."""

ROWS, KEYS, STAGES = 64, 128, 3
"""Rows that are multiplied at a time, keys of a program, and how many blocks of rows are there or on their way."""

DIMS = (64, 128)
ALIGNED = 16
"""Bytes that addresses in memory are a multiple of."""

gl: Any = None  # Gluon and its parts: names are looked up among the globals of what is compiled, so they must be there
tma: Any = None
mbarrier: Any = None
warpgroup_mma: Any = None
warpgroup_mma_wait: Any = None
fence_async_shared: Any = None


def serves(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> bool:
    """Whether dk and dv of such tensors can be computed here."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] in DIMS
        and v.shape[3] in DIMS
        and q.numel() < 2**31
        and all(map(_aligned, (q, k, v, grad)))
        and _available(q.device)
    )


def padded(rows: int) -> int:
    """Rows of delta and walls: see [Note: aligned rows]."""
    return -(-rows // 4) * 4


def by_keys(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor],
    work: Agenda,
    scales: tuple[float, float],
    *,
    add: bool,
) -> None:
    """dk and dv from (grad, q, k, v), (delta, walls), whose rows are padded, and an agenda by columns of `KEYS`."""
    grad, q, k, v = tensors
    described = (_described(grad, ROWS), _described(q, ROWS), _described(k, KEYS // 2), _described(v, KEYS // 2))
    grid = (k.shape[0] * k.shape[1] * len(work.blocks),)
    strides = [stride for x in into for stride in x.stride()[:3]]
    program()[grid](
        *described, *map(_flat, rows), *into, *work, *strides, q.shape[1], q.shape[1] // k.shape[1], rows[0].shape[2],
        len(work.blocks), *scales, add=add, stages=STAGES, num_warps=4,
    )  # fmt: skip


@cache
def _available(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return triton.__version__.startswith(VERSIONS)


def _aligned(x: Tensor) -> bool:
    size = x.element_size()
    return x.data_ptr() % ALIGNED == 0 and all(stride * size % ALIGNED == 0 for stride in x.stride()[:3])


def _described(x: Tensor, rows: int) -> Any:
    """How the copy engine takes `rows` rows of one head at a time out of a tensor."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]], layout)


def _flat(x: Tensor) -> Any:
    """The same for one number for each row."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [ROWS], layout)


@cache
def program() -> Any:
    """The Gluon kernel. Rows n, columns m and so on as in band_programs.py; x_s is x in shared memory."""
    global gl, tma, mbarrier, warpgroup_mma, warpgroup_mma_wait, fence_async_shared
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    # fmt: off
    @gluon.jit
    def four(table, at):
        """A row of an agenda."""
        x = table + at * 4
        return gl.load(x), gl.load(x + 1), gl.load(x + 2), gl.load(x + 3)

    @gluon.jit
    def reach(first, last, begin, end, lo, hi, block: gl.constexpr):
        """Where blocks of rows are counted from, and those that columns [first, last] see of [begin, end): from `start`
        to `stop`, and without a mask from `inner` to `outer`. See [Note: aligned rows]."""
        at = begin // 4 * 4
        lo, hi, ahead, count = lo - at, hi - at, begin - at, end - at
        start = gl.maximum(first + lo, ahead) // block
        stop = gl.maximum((gl.minimum(last + hi + 1, count) + block - 1) // block, start)
        inner = gl.minimum(gl.maximum((gl.maximum(last + lo, ahead) + block - 1) // block, start), stop)
        outer = gl.minimum(gl.maximum(gl.maximum(gl.minimum(first + hi + 1, count), 0) // block, inner), stop)
        return at, start, inner, outer, stop

    @gluon.jit
    def fetch(sources, heads_of, keys_s, rows_s, task):
        """Ask for keys and values once, then for one block of rows after another: those without a mask come first."""
        grad, q, k, v, delta, walls = sources
        b, h, heads, group, n = heads_of
        k_s, v_s, kept = keys_s
        grad_s, q_s, delta_s, walls_s, full, empty = rows_s
        spans, first, end, span, last_span = task
        stages: gl.constexpr = q_s.shape[0]
        block_n: gl.constexpr = q.block_type.shape[2]
        half: gl.constexpr = k.block_type.shape[2]
        mbarrier.expect(kept, 2 * (k.block_type.nbytes + v.block_type.nbytes))
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(k, [b, h, first + i * half, 0], kept, k_s.index(i))
            tma.async_copy_global_to_shared(v, [b, h, first + i * half, 0], kept, v_s.index(i))
        count = 0
        for s in range(span, last_span):
            begin, stop_row, lo, hi = four(spans, s)
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_row, lo, hi, block_n)
            whole = outer - inner
            for each in range(group):
                own = h * group + each
                base = (b * heads + own) * n
                for e in range(stop - start):
                    left = start + e - whole
                    row = at + block_n * gl.where(e < whole, inner + e, gl.where(left < inner, left, start + e))
                    place = count % stages
                    mbarrier.wait(empty.index(place), (count // stages) & 1 ^ 1)
                    ready = full.index(place)
                    mbarrier.expect(ready, grad.block_type.nbytes + q.block_type.nbytes + 8 * block_n)
                    tma.async_copy_global_to_shared(q, [b, own, row, 0], ready, q_s.index(place))
                    tma.async_copy_global_to_shared(grad, [b, own, row, 0], ready, grad_s.index(place))
                    tma.async_copy_global_to_shared(walls, [base + row], ready, walls_s.index(place))
                    tma.async_copy_global_to_shared(delta, [base + row], ready, delta_s.index(place))
                    count += 1

    @gluon.jit
    def confine(block, row, begin, end):
        """Of a block that begins at `row`, rows outside of [begin, end) become 0."""
        count: gl.constexpr = block.shape[0]
        if (row < begin) | (row + count > end):
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            rows = row + gl.arange(0, count, gl.SliceLayout(1, layout))
            x = block.load(layout)
            block.store(gl.where(((begin <= rows) & (rows < end))[:, None], x, gl.zeros_like(x)))
            fence_async_shared()

    @gluon.jit
    def gather(dk, dv, count, k_block, v_block, rows_s, row, band, cols, scale, cut: gl.constexpr):
        """dk and dv of one block of rows more; scores are (m, n)."""
        grad_s, q_s, delta_s, walls_s, full, empty = rows_s
        begin, stop_row, lo, hi = band
        stages: gl.constexpr = q_s.shape[0]
        block_n: gl.constexpr = q_s.shape[3]
        block_m: gl.constexpr = k_block.shape[0]
        dim: gl.constexpr = q_s.shape[4]
        dim_v: gl.constexpr = grad_s.shape[4]
        scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
        by_row: gl.constexpr = gl.SliceLayout(0, scores)
        place = count % stages
        mbarrier.wait(full.index(place), (count // stages) & 1)
        q_block = q_s.index(place).reshape([block_n, dim])
        grad_block = grad_s.index(place).reshape([block_n, dim_v])
        if cut:
            confine(q_block, row, begin, stop_row)
            confine(grad_block, row, begin, stop_row)
        nothing = gl.zeros([block_m, block_n], gl.float32, scores)
        score = warpgroup_mma(k_block, q_block.permute([1, 0]), nothing, use_acc=False, is_async=True)
        slope = warpgroup_mma(v_block, grad_block.permute([1, 0]), nothing, use_acc=False, is_async=True)
        wall = walls_s.index(place).load(by_row)
        score = warpgroup_mma_wait(1, deps=[score])
        p = gl.exp2(score * scale - wall[None, :])
        if cut:
            rows = row + gl.arange(0, block_n, by_row)
            distance = rows[None, :] - cols[:, None]
            seen = (lo <= distance) & (distance <= hi) & ((begin <= rows) & (rows < stop_row))[None, :]
            p = gl.where(seen, p, 0.0)
        correction = delta_s.index(place).load(by_row)
        # Nothing may be multiplied while registers that are multiplied next are written, or it is done one by one.
        slope = warpgroup_mma_wait(0, deps=[slope])
        slope = p * (slope - correction[None, :])
        if cut:
            slope = gl.where(seen, slope, 0.0)
        share = gl.convert_layout(p.to(q_s.dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
        slope = gl.convert_layout(slope.to(q_s.dtype), gl.DotOperandLayout(0, dk.type.layout, 2))
        dv = warpgroup_mma(share, grad_block, dv, is_async=True)
        dk = warpgroup_mma(slope, q_block, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(empty.index(place), count=1)
        return dk, dv, count + 1

    @gluon.jit
    def store(x, row_stride, at, end, value, add: gl.constexpr):
        """Write rows [at, end) of x, or add to what is there."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        count: gl.constexpr = value.shape[0]
        dim: gl.constexpr = value.shape[1]
        n = at + gl.arange(0, count, gl.SliceLayout(1, layout))
        d = gl.arange(0, dim, gl.SliceLayout(0, layout))
        rows = x + (n.to(gl.int64) * row_stride)[:, None] + d[None, :]
        cell = (n < end)[:, None] & (d < dim)[None, :]
        value = gl.convert_layout(value, layout)
        if add:
            value += gl.load(rows, mask=cell, other=0.0)
        gl.store(rows, value.to(x.dtype.element_ty), mask=cell)

    @gluon.jit
    def compute(half: gl.constexpr, into, keys_s, rows_s, task, group, scale, scale_unit, add: gl.constexpr):
        """dk and dv of one half of the keys."""
        dk, dk_n, dv, dv_n = into
        k_s, v_s, kept = keys_s
        spans, first, end, span, last_span = task
        block_n: gl.constexpr = rows_s[1].shape[3]
        block_m: gl.constexpr = k_s.shape[3]
        dim: gl.constexpr = k_s.shape[4]
        dim_v: gl.constexpr = v_s.shape[4]
        scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
        dk_sum = gl.zeros([block_m, dim], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16]))
        dv_sum = gl.zeros([block_m, dim_v], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim_v, 16]))
        own = first + half * block_m
        cols = own + gl.arange(0, block_m, gl.SliceLayout(1, scores))
        k_block = k_s.index(half).reshape([block_m, dim])
        v_block = v_s.index(half).reshape([block_m, dim_v])
        mbarrier.wait(kept, 0)
        count = 0
        for s in range(span, last_span):
            begin, stop_row, lo, hi = four(spans, s)
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_row, lo, hi, block_n)
            band = (begin, stop_row, lo, hi)
            for _ in range(group):
                for i in range(inner, outer):
                    dk_sum, dv_sum, count = gather(dk_sum, dv_sum, count, k_block, v_block, rows_s, at + i * block_n,
                                                   band, cols, scale_unit, False)
                for e in range(inner - start + stop - outer):
                    i = gl.where(start + e < inner, start + e, start + e - inner + outer)
                    dk_sum, dv_sum, count = gather(dk_sum, dv_sum, count, k_block, v_block, rows_s, at + i * block_n,
                                                   band, cols, scale_unit, True)
        store(dk, dk_n, own, end, dk_sum * scale, add)
        store(dv, dv_n, own, end, dv_sum, add)

    @gluon.jit(do_not_specialize=["n", "count", "heads", "group"])
    def by_keys(
        grad, q, k, v, delta, walls, dk, dv, blocks, spans, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
        heads, group, n, count, scale, scale_unit, add: gl.constexpr, stages: gl.constexpr,
    ):
        first, end, span, last_span = four(blocks, gl.program_id(0) % count)
        head = gl.program_id(0) // count
        b, h = head // (heads // group), head % (heads // group)
        block_n: gl.constexpr = q.block_type.shape[2]
        k_s = gl.allocate_shared_memory(k.dtype, [2] + k.block_type.shape, k.layout)  # noqa: RUF005
        v_s = gl.allocate_shared_memory(v.dtype, [2] + v.block_type.shape, v.layout)  # noqa: RUF005
        grad_s = gl.allocate_shared_memory(grad.dtype, [stages] + grad.block_type.shape, grad.layout)  # noqa: RUF005
        q_s = gl.allocate_shared_memory(q.dtype, [stages] + q.block_type.shape, q.layout)  # noqa: RUF005
        delta_s = gl.allocate_shared_memory(gl.float32, [stages, block_n], delta.layout)
        walls_s = gl.allocate_shared_memory(gl.float32, [stages, block_n], walls.layout)
        kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        mbarrier.init(kept, count=1)
        for i in gl.static_range(stages):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        dk += b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h
        dv += b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h
        sources, heads_of = (grad, q, k, v, delta, walls), (b, h, heads, group, n)
        keys_s, rows_s = (k_s, v_s, kept), (grad_s, q_s, delta_s, walls_s, full, empty)
        into, task = (dk, dk_n, dv, dv_n), (spans, first, end, span, last_span)
        gl.warp_specialize([
            (compute, (0, into, keys_s, rows_s, task, group, scale, scale_unit, add)),
            (compute, (1, into, keys_s, rows_s, task, group, scale, scale_unit, add)),
            (fetch, (sources, heads_of, keys_s, rows_s, task)),
        ], [4, 1], [240, 24])
    # fmt: on

    return by_keys
