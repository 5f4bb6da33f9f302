"""The Gluon programs of band_hopper.py: forward, and dk and dv by keys, for Hopper GPUs.

A program is cut in three: one warp asks the chip's copy engine for the next blocks, which lands them in shared memory
and says so on a barrier; two groups of four warps multiply, each for its half of the program's rows (or keys), and say
on another barrier when they are done with a block::

    fetch      wait until a place is free, ask for a block
    compute    wait until the block is there; scores, probabilities, products; the place is free

[Note: aligned rows] The copy engine reads walls and delta, one number for a row, only from addresses of 16 bytes. So
by keys, blocks of rows begin at multiples of four, before a span's first row if need be.

[Note: other rows] A block that reaches out of its span is masked, and what it holds of others is set to 0 before it is
multiplied: 0 times another row's NaN would be NaN.

[Note: in flight] Nothing may be multiplied while registers that are multiplied next are written, or the compiler has
products done one by one. So a group waits for its own products, and the other group's fill the time.

Rows n, columns m, agendas and bands as in band_programs.py; x_s is x in shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

gl: Any = None  # Gluon and its parts: names are looked up among the globals of what is compiled, so they must be there
tma: Any = None
mbarrier: Any = None
warpgroup_mma: Any = None
warpgroup_mma_wait: Any = None
fence_async_shared: Any = None


class HopperPrograms(NamedTuple):
    forward: Any
    by_keys: Any


@cache
def programs() -> HopperPrograms:
    """The Gluon kernels."""
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
    def reach(first, last, begin, end, lo, hi, block: gl.constexpr, multiple: gl.constexpr):
        """Where blocks are counted from, a multiple of `multiple`, and those that [first, last] sees of [begin, end):
        from `start` to `stop`, and without a mask from `inner` to `outer`."""
        at = begin // multiple * multiple
        lo, hi, ahead, count = lo - at, hi - at, begin - at, end - at
        start = gl.maximum(first + lo, ahead) // block
        stop = gl.maximum((gl.minimum(last + hi + 1, count) + block - 1) // block, start)
        inner = gl.minimum(gl.maximum((gl.maximum(last + lo, ahead) + block - 1) // block, start), stop)
        outer = gl.minimum(gl.maximum(gl.maximum(gl.minimum(first + hi + 1, count), 0) // block, inner), stop)
        return at, start, inner, outer, stop

    @gluon.jit
    def barriers(stages: gl.constexpr):
        """What says that the kept blocks are there, that each passing one is, and that both groups are done with it."""
        kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        mbarrier.init(kept, count=1)
        for i in gl.static_range(stages):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        return kept, full, empty

    @gluon.jit
    def turn(e, start, inner, outer):
        """The e-th block of a span: those without a mask come first."""
        late = start + e - (outer - inner)
        return gl.where(e < outer - inner, inner + e, gl.where(late < inner, late, start + e))

    @gluon.jit
    def fetch_rows(sources, heads_of, keys_s, rows_s, task):
        """Ask for keys and values once, then for one block of rows after another."""
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
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_row, lo, hi, block_n, 4)
            for each in range(group):
                own = h * group + each
                base = (b * heads + own) * n
                for e in range(stop - start):
                    row = at + block_n * turn(e, start, inner, outer)
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
        """Of a block that begins at `row`, rows outside of [begin, end) become 0. See [Note: other rows]."""
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
    def store(x, row_stride, at, end, value):
        """Write rows [at, end) of x."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        count: gl.constexpr = value.shape[0]
        dim: gl.constexpr = value.shape[1]
        n = at + gl.arange(0, count, gl.SliceLayout(1, layout))
        d = gl.arange(0, dim, gl.SliceLayout(0, layout))
        rows = x + (n.to(gl.int64) * row_stride)[:, None] + d[None, :]
        cell = (n < end)[:, None] & (d < dim)[None, :]
        value = gl.convert_layout(value, layout)
        gl.store(rows, value.to(x.dtype.element_ty), mask=cell)

    @gluon.jit
    def compute_keys(half: gl.constexpr, into, keys_s, rows_s, task, group, scale, scale_unit):
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
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_row, lo, hi, block_n, 4)
            band = (begin, stop_row, lo, hi)
            for _ in range(group):
                for i in range(inner, outer):
                    dk_sum, dv_sum, count = gather(dk_sum, dv_sum, count, k_block, v_block, rows_s, at + i * block_n,
                                                   band, cols, scale_unit, False)
                for e in range(inner - start + stop - outer):
                    i = gl.where(start + e < inner, start + e, start + e - inner + outer)
                    dk_sum, dv_sum, count = gather(dk_sum, dv_sum, count, k_block, v_block, rows_s, at + i * block_n,
                                                   band, cols, scale_unit, True)
        store(dk, dk_n, own, end, dk_sum * scale)
        store(dv, dv_n, own, end, dv_sum)

    @gluon.jit(do_not_specialize=["n", "count", "heads", "group"])
    def by_keys(
        grad, q, k, v, delta, walls, dk, dv, blocks, spans, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
        heads, group, n, count, scale, scale_unit, stages: gl.constexpr,
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
        kept, full, empty = barriers(stages)
        dk += b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h
        dv += b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h
        sources, heads_of = (grad, q, k, v, delta, walls), (b, h, heads, group, n)
        keys_s, rows_s = (k_s, v_s, kept), (grad_s, q_s, delta_s, walls_s, full, empty)
        into, task = (dk, dk_n, dv, dv_n), (spans, first, end, span, last_span)
        gl.warp_specialize([
            (compute_keys, (0, into, keys_s, rows_s, task, group, scale, scale_unit)),
            (compute_keys, (1, into, keys_s, rows_s, task, group, scale, scale_unit)),
            (fetch_rows, (sources, heads_of, keys_s, rows_s, task)),
        ], [4, 1], [240, 24])

    @gluon.jit
    def fetch_keys(sources, heads_of, rows_s, keys_s, task):
        """Ask for queries once, then for one block of keys and values after another."""
        q, k, v = sources
        b, h, group = heads_of
        q_s, kept = rows_s
        k_s, v_s, full, empty = keys_s
        spans, first, end, span, last_span = task
        stages: gl.constexpr = k_s.shape[0]
        block_m: gl.constexpr = k.block_type.shape[2]
        half: gl.constexpr = q.block_type.shape[2]
        mbarrier.expect(kept, 2 * q.block_type.nbytes)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(q, [b, h, first + i * half, 0], kept, q_s.index(i))
        count = 0
        for s in range(span, last_span):
            begin, stop_col, lo, hi = four(spans, s)
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_col, lo, hi, block_m, 1)
            for e in range(stop - start):
                col = at + block_m * turn(e, start, inner, outer)
                place = count % stages
                mbarrier.wait(empty.index(place), (count // stages) & 1 ^ 1)
                ready = full.index(place)
                mbarrier.expect(ready, k.block_type.nbytes + v.block_type.nbytes)
                tma.async_copy_global_to_shared(k, [b, h // group, col, 0], ready, k_s.index(place))
                tma.async_copy_global_to_shared(v, [b, h // group, col, 0], ready, v_s.index(place))
                count += 1

    @gluon.jit
    def attend(acc, total, most, count, q_block, keys_s, col, band, rows, scale, flip: gl.constexpr, cut: gl.constexpr):
        """One block of keys more in the sums of 2^(score - most), with values and alone."""
        k_s, v_s, full, empty = keys_s
        begin, stop_col, lo, hi = band
        stages: gl.constexpr = k_s.shape[0]
        block_n: gl.constexpr = q_block.shape[0]
        block_m: gl.constexpr = k_s.shape[3]
        dim: gl.constexpr = k_s.shape[4]
        dim_v: gl.constexpr = v_s.shape[4]
        scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 16])
        place = count % stages
        mbarrier.wait(full.index(place), (count // stages) & 1)
        k_block = k_s.index(place).reshape([block_m, dim])
        v_block = v_s.index(place).reshape([block_m, dim_v])
        if cut:
            confine(v_block, col, begin, stop_col)
        nothing = gl.zeros([block_n, block_m], gl.float32, scores)
        score = warpgroup_mma(q_block, k_block.permute([1, 0]), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        if flip:
            score = 0.0 - score
        if cut:
            cols = col + gl.arange(0, block_m, gl.SliceLayout(0, scores))
            distance = cols[None, :] - rows[:, None]
            seen = (lo <= distance) & (distance <= hi) & (cols < stop_col)[None, :]
            score = gl.where(seen, score, float("-inf"))
        top = gl.maximum(most, gl.max(score, 1) * scale)
        base = gl.where(top == float("-inf"), 0.0, top)  # of a row that saw nothing yet; -inf - -inf would be NaN
        p = gl.exp2(score * scale - base[:, None])
        fade = gl.exp2(most - base)
        total = total * fade + gl.sum(p, 1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        share = gl.convert_layout(p.to(k_s.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = warpgroup_mma(share, v_block, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(place), count=1)
        return acc, total, top, count + 1

    @gluon.jit
    def compute_rows(half: gl.constexpr, into, rows_s, keys_s, task, scale, flip: gl.constexpr):
        """Out and lse of one half of the rows."""
        out, out_n, lse = into
        q_s, kept = rows_s
        spans, first, end, span, last_span = task
        block_n: gl.constexpr = q_s.shape[3]
        dim: gl.constexpr = q_s.shape[4]
        block_m: gl.constexpr = keys_s[0].shape[3]
        dim_v: gl.constexpr = keys_s[1].shape[4]
        scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 16])
        sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim_v, 16])
        by_row: gl.constexpr = gl.SliceLayout(1, scores)
        acc = gl.zeros([block_n, dim_v], gl.float32, sums)
        total = gl.zeros([block_n], gl.float32, by_row)
        most = gl.full([block_n], float("-inf"), gl.float32, by_row)
        own = first + half * block_n
        rows = own + gl.arange(0, block_n, by_row)
        q_block = q_s.index(half).reshape([block_n, dim])
        mbarrier.wait(kept, 0)
        count = 0
        for s in range(span, last_span):
            begin, stop_col, lo, hi = four(spans, s)
            at, start, inner, outer, stop = reach(first, end - 1, begin, stop_col, lo, hi, block_m, 1)
            band = (begin, stop_col, lo, hi)
            for j in range(inner, outer):
                acc, total, most, count = attend(acc, total, most, count, q_block, keys_s, at + j * block_m, band,
                                                 rows, scale, flip, False)
            for e in range(inner - start + stop - outer):
                j = gl.where(start + e < inner, start + e, start + e - inner + outer)
                acc, total, most, count = attend(acc, total, most, count, q_block, keys_s, at + j * block_m, band,
                                                 rows, scale, flip, True)
        empty = total == 0.0
        weight = gl.convert_layout(1.0 / gl.where(empty, 1.0, total), gl.SliceLayout(1, sums))
        store(out, out_n, own, end, acc * weight[:, None], False)
        # An infinite score makes its row NaN, but the sum of exponentials is infinite all the same.
        level = gl.where(most == float("inf"), most, most * 0.6931471805599453 + gl.log(total))
        gl.store(lse + rows, gl.where(empty, float("-inf"), level), mask=rows < end)

    @gluon.jit(do_not_specialize=["n", "count", "heads", "group"])
    def forward(
        q, k, v, out, lse, blocks, spans, out_b, out_h, out_n,
        heads, group, n, count, scale, flip: gl.constexpr, stages: gl.constexpr,
    ):
        all_heads = gl.num_programs(0) // count
        first, end, span, last_span = four(blocks, gl.program_id(0) // all_heads)
        head = gl.program_id(0) % all_heads
        b, h = head // heads, head % heads
        q_s = gl.allocate_shared_memory(q.dtype, [2] + q.block_type.shape, q.layout)  # noqa: RUF005
        k_s = gl.allocate_shared_memory(k.dtype, [stages] + k.block_type.shape, k.layout)  # noqa: RUF005
        v_s = gl.allocate_shared_memory(v.dtype, [stages] + v.block_type.shape, v.layout)  # noqa: RUF005
        kept, full, empty = barriers(stages)
        out += b.to(gl.int64) * out_b + h.to(gl.int64) * out_h
        lse += head.to(gl.int64) * n
        rows_s, keys_s = (q_s, kept), (k_s, v_s, full, empty)
        into, task = (out, out_n, lse), (spans, first, end, span, last_span)
        gl.warp_specialize([
            (compute_rows, (0, into, rows_s, keys_s, task, scale, flip)),
            (compute_rows, (1, into, rows_s, keys_s, task, scale, flip)),
            (fetch_keys, ((q, k, v), (b, h, group), rows_s, keys_s, task)),
        ], [4, 1], [240, 24])
    # fmt: on

    return HopperPrograms(forward, by_keys)
