"""The Triton programs of the kernels `band` and `bands`: forward, dq by rows, dk and dv by keys.

A program takes one block of an agenda (agenda.py): rows, and the spans of columns that they see. Of each span it goes
over the blocks of columns that the band reaches. Those that lie inside it take no mask; those that a diagonal or the
span's end cuts do, and they are at most a few on either side::

    [ \\ # # # / . . . ]      rows of one block: # is computed as it is, \\ and / with a mask, . is never visited

The program by rows also writes delta = sum(grad * out), and lse as it is subtracted, for the one by keys, which goes
over all query heads of its key head; of these two numbers a head may hold more rows than it has (`held`). Nothing is
added by atomics, so the same inputs give the same bits.

Products of half precision are summed in float32; probabilities and score gradients are rounded to the inputs' dtype to
be multiplied, as in every flash attention. float32 is multiplied as float32, not as TF32.

[Note: dropout] Where `drops`, a program looks up the positions of its rows and columns and draws the weights of a
block's pairs (dropout.py): a probability is weighted before it meets its value, and so is its gradient. `dice` holds
the seed, the least word that is kept, and the first batch row and head. Without `drops` nothing of this is compiled.

[Note: programs] With a score_mod or a mask_mod, programs are compiled with their functions (triton_mods.py) for each
pair of graphs. Positions are affine in rows and columns: those of a block's rows, and of a span's columns, are
``first + step * index``, and no tensor of positions is read. `mods` is (batch row, head, tables, their sizes). Scores
are natural logarithms where they are changed: `scale` is the plain one then. A mask_mod is evaluated in blocks that
take a mask anyway, and in all blocks of spans that need it.

[Note: what is learned] What the score_mod looked up by row, head or not at all is summed row by row, in registers
(`carry`), with the sum of p * d_share: host code corrects with it, see bands.py. What it looked up by column is summed
where dk is. By distance, diagonals of a block are summed and added to sums that belong to one program. The rest is
written pair by pair. Each sum has one writer, so the same inputs give the same bits here too.

Measured on an H200: by rows, all heads of a block come before the next block; by keys, all blocks of a head come first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attnspan.kernels.triton_mods import NO_CODE, ModsCode

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


class BandPrograms(NamedTuple):
    forward: Any
    by_rows: Any
    by_keys: Any


@lru_cache(maxsize=256)
def programs(code: ModsCode = NO_CODE) -> BandPrograms:
    """The Triton kernels. In them n is a row, m a column, d a feature; a block is rows [first, end)."""
    global tl
    import triton
    import triton.language as tl

    change, pull, allow, row_start, row_more, row_keep, col_start, col_more, col_keep, spread, learned, _ = code
    changes, asks, learns = (tl.constexpr(bool(each)) for each in (change, allow, learned))
    placed = tl.constexpr(bool(change or allow))
    spreads = tl.constexpr(bool(code.along("distances") or code.along("pairs")))
    in_cols = tl.constexpr(bool(code.along("cols")))

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
    def store(x, row_stride, at, count, dim: tl.constexpr, block: tl.constexpr, block_d: tl.constexpr, value,
              add: tl.constexpr):
        """Write rows [at, count) of x, or add to what is there."""
        n, d = at + tl.arange(0, block), tl.arange(0, block_d)
        rows = x + (n.to(tl.int64) * row_stride)[:, None] + d[None, :]
        cell = (n < count)[:, None] & (d < dim)[None, :]
        if add:
            value += tl.load(rows, mask=cell, other=0.0)
        tl.store(rows, value.to(x.dtype.element_ty), mask=cell)

    @triton.jit
    def four(table, at):
        """A row of an agenda."""
        x = table + at * 4
        return tl.load(x), tl.load(x + 1), tl.load(x + 2), tl.load(x + 3)

    @triton.jit
    def three(table, at):
        """Where a block or span lies: the position of index 0, the step, whether its pairs need the mask_mod."""
        x = table + at * 3
        return tl.load(x), tl.load(x + 1), tl.load(x + 2)

    @triton.jit
    def reach(first, last, at, end, lo, hi, block: tl.constexpr):
        """The blocks of [at, end) that [first, last] sees, counted from `at`: from `start` to `stop`, and without a
        mask from `inner` to `outer`."""
        lo, hi, count = lo - at, hi - at, end - at
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
    def places(where, at, count):
        """The positions of rows or columns, those beyond `count` left at 0."""
        return tl.load(where + at, mask=at < count, other=0).to(tl.uint32)

    @triton.jit
    def weight(dice, keep, b, h, q_at, k_at):
        """What dropout multiplies probabilities by; positions are broadcast. See [Note: dropout]."""
        none = ((q_at ^ k_at) & 0).to(tl.uint32)
        row = (tl.load(dice + 2) + b).to(tl.uint32)
        head = (tl.load(dice + 3) + h).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(tl.load(dice), (k_at >> 2) + none, q_at + none, head + none, row + none)
        place = (k_at & 3) + none
        word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
        return tl.where(word.to(tl.int64) >= tl.load(dice + 1), keep, 0.0)

    @triton.jit
    def attend(acc, total, most, q, k, v, n, first, k_n, v_n, m, lo, hi, scale, mods, q_pos, k_first, k_step,
               dice, keep, b, h, q_at, cols_at, drops: tl.constexpr, flip: tl.constexpr,
               dim: tl.constexpr, dim_v: tl.constexpr, block_m: tl.constexpr,
               block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """One block of keys more in the sums of e^(score - most), with values and alone; powers of 2 if not wide."""
        k_block = load(k, k_n, first, m, dim, block_m, block_d, cut)
        v_block = load(v, v_n, first, m, dim_v, block_m, block_v, cut)
        score = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        if flip:
            score = -score
        cols = first + tl.arange(0, block_m)
        k_pos = k_first + k_step * cols
        if changes:
            score = change(score * scale, mods[0], mods[1], q_pos[:, None], k_pos[None, :], mods[2], mods[3])
            scale = 1.0 if wide else 1.4426950408889634
        if cut:
            seen = inside(n, cols, lo, hi, m)
            if asks:
                seen &= allow(mods[0], mods[1], q_pos[:, None], k_pos[None, :], mods[2], mods[3])
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1) * scale)
        base = tl.where(top == float("-inf"), 0.0, top)  # of a row that saw nothing yet; -inf - -inf would be NaN
        if wide:
            p = tl.exp2((score * scale - base[:, None]) * 1.4426950408889634)
            fade = tl.exp2((most - base) * 1.4426950408889634)
        else:
            p = tl.exp2(score * scale - base[:, None])
            fade = tl.exp2(most - base)
        total = total * fade + tl.sum(p, 1)
        if drops:
            k_at = places(cols_at, first + tl.arange(0, block_m), m)
            p *= weight(dice, keep, b, h, q_at[:, None], k_at[None, :])
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * fade[:, None], input_precision="ieee")
        return acc, total, top

    @triton.jit(do_not_specialize=["n", "count", "heads", "group"])
    def forward(
        q, k, v, out, lse, blocks, spans, blocks_at, spans_at, first_b, first_h, tables, dims, dice, rows_at, cols_at,
        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n,
        heads, group, n, count, scale, keep,
        drops: tl.constexpr, flip: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr,
        block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        all_heads = tl.num_programs(0) // count
        first, end, span, last_span = four(blocks, tl.program_id(0) // all_heads)
        head = tl.program_id(0) % all_heads
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        q += b * q_b + h * q_h
        k += b * k_b + h // group * k_h
        v += b * v_b + h // group * v_h
        rows = first + tl.arange(0, block_n)
        q_at = places(rows_at, rows, end) if drops else rows
        mods = (first_b + b, first_h + h, tables, dims)
        q_first, q_step, _ = three(blocks_at, tl.program_id(0) // all_heads) if placed else (0, 0, 0)
        q_pos = q_first + q_step * rows

        acc = tl.zeros([block_n, block_v], tl.float32)
        total = tl.zeros([block_n], tl.float32)
        most = tl.full([block_n], float("-inf"), tl.float32)
        q_block = load(q, q_n, first, end, dim, block_n, block_d, True)
        for s in range(span, last_span):
            at, m, lo, hi = four(spans, s)
            start, inner, outer, stop = reach(first, end - 1, at, m, lo, hi, block_m)
            k_first, k_step, needs_mod = three(spans_at, s) if placed else (0, 0, 0)
            if asks:
                inner, outer = tl.where(needs_mod != 0, stop, inner), tl.where(needs_mod != 0, stop, outer)
            for j in range(inner, outer):
                acc, total, most = attend(acc, total, most, q_block, k, v, rows, at + j * block_m, k_n, v_n, m, lo, hi,
                                          scale, mods, q_pos, k_first, k_step,
                                          dice, keep, b, h, q_at, cols_at, drops, flip,
                                          dim, dim_v, block_m, block_d, block_v, wide, False)
            for i in tl.range(inner - start + stop - outer, num_stages=1):
                j = tl.where(start + i < inner, start + i, start + i - inner + outer)
                acc, total, most = attend(acc, total, most, q_block, k, v, rows, at + j * block_m, k_n, v_n, m, lo, hi,
                                          scale, mods, q_pos, k_first, k_step,
                                          dice, keep, b, h, q_at, cols_at, drops, flip,
                                          dim, dim_v, block_m, block_d, block_v, wide, True)

        empty = total == 0.0
        result = acc / tl.where(empty, 1.0, total)[:, None]
        store(out + b * out_b + h * out_h, out_n, first, end, dim_v, block_n, block_v, result, False)
        natural = most if wide else most * 0.6931471805599453
        # An infinite score makes its row NaN, but the sum of exponentials is infinite all the same.
        level = tl.where(most == float("inf"), most, natural + tl.log(total))
        level = tl.where(empty, float("-inf"), level)
        tl.store(lse + head.to(tl.int64) * n + rows, level, mask=rows < end)

    @triton.jit
    def share(score, wall, scale, wide: tl.constexpr):
        """e^(score * scale - wall), given in powers of 2 if not wide; a wall of +inf lets nothing through."""
        if wide:
            return tl.exp2((score * scale - wall) * 1.4426950408889634)
        else:
            return tl.exp2(score * scale - wall)

    @triton.jit
    def gather_rows(acc, carry, q, grad, wall, delta, k, v, n, first, k_n, v_n, m, lo, hi, scale,
                    mods, q_pos, k_first, k_step, spots, dice, keep, b, h, q_at, cols_at, drops: tl.constexpr,
                    dim: tl.constexpr, dim_v: tl.constexpr, block_m: tl.constexpr,
                    block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """dq of one block of keys more, and what is learned."""
        k_block = load(k, k_n, first, m, dim, block_m, block_d, cut)
        v_block = load(v, v_n, first, m, dim_v, block_m, block_v, cut)
        score = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        cols = first + tl.arange(0, block_m)
        k_pos = k_first + k_step * cols
        if changes:
            found = pull(score * scale, mods[0], mods[1], q_pos[:, None], k_pos[None, :], mods[2], mods[3])
            p = share(found[0], wall[:, None], 1.0 if wide else 1.4426950408889634, wide)
            p = tl.where((wall == float("inf"))[:, None], 0.0, p)  # positions of rows that are not there have no score
        else:
            p = share(score, wall[:, None], scale, wide)
        d_share = tl.dot(grad, tl.trans(v_block), input_precision="ieee")
        if drops:
            k_at = places(cols_at, cols, m)
            d_share *= weight(dice, keep, b, h, q_at[:, None], k_at[None, :])
        if cut:
            seen = inside(n, cols, lo, hi, m)
            if asks:
                seen &= allow(mods[0], mods[1], q_pos[:, None], k_pos[None, :], mods[2], mods[3])
            p = tl.where(seen, p, 0.0)
        slope = p * (d_share - delta[:, None])
        if cut:
            slope = tl.where(seen, slope, 0.0)
        if learns:
            carry = row_more(carry, p, d_share, slope, found)
        if spreads:
            distances, stride, count, lowest, pairs, pair_stride, width = spots
            q_0, k_0 = tl.min(q_pos), tl.min(k_pos)
            at = n.to(tl.int64)[:, None] * width + cols[None, :]
            spread(slope, found, distances, stride, q_0 - k_0 - k_step * (block_m - 1) - lowest, k_step, count,
                   pairs, pair_stride, at, (wall < float("inf"))[:, None] & (cols < m)[None, :])
        if changes:
            slope = tl.where(slope == 0.0, 0.0, slope * found[1])
        return tl.dot(slope.to(k_block.dtype), k_block, acc, input_precision="ieee"), carry

    @triton.jit(do_not_specialize=["n", "held", "count", "heads", "group"])
    def by_rows(
        grad, q, k, v, out, lse, grad_lse, delta, walls, dq,
        blocks, spans, blocks_at, spans_at, first_b, first_h, tables, dims,
        row_sums, distances, distance_stride, distance_count, lowest, pairs, width, dice, rows_at, cols_at,
        grad_b, grad_h, grad_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, dq_b, dq_h, dq_n,
        heads, group, n, held, count, scale, scale_unit, unit, keep, drops: tl.constexpr,
        through_lse: tl.constexpr, add: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr,
        block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        all_heads = tl.num_programs(0) // count
        first, end, span, last_span = four(blocks, tl.program_id(0) // all_heads)
        head = tl.program_id(0) % all_heads
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        k += b * k_b + h // group * k_h
        v += b * v_b + h // group * v_h
        rows = first + tl.arange(0, block_n)
        q_at = places(rows_at, rows, end) if drops else rows
        mods = (first_b + b, first_h + h, tables, dims)
        q_first, q_step, _ = three(blocks_at, tl.program_id(0) // all_heads) if placed else (0, 0, 0)
        q_pos = q_first + q_step * rows
        of_head = head.to(tl.int64) * n

        out_block = load(out + b * out_b + h * out_h, out_n, first, end, dim_v, block_n, block_v, True)
        grad_block = load(grad + b * grad_b + h * grad_h, grad_n, first, end, dim_v, block_n, block_v, True)
        correction = tl.sum(grad_block.to(tl.float32) * out_block.to(tl.float32), 1)
        if through_lse:
            correction -= tl.load(grad_lse + of_head + rows, mask=rows < end, other=0.0)
        level = tl.load(lse + of_head + rows, mask=rows < end, other=float("-inf"))
        # A row that saw no key lets nothing through: e^(score + inf) would be no number.
        wall = tl.where(level == float("-inf"), float("inf"), level * unit)
        tl.store(delta + head.to(tl.int64) * held + rows, correction, mask=rows < end)
        tl.store(walls + head.to(tl.int64) * held + rows, wall, mask=rows < end)
        q_block = load(q + b * q_b + h * q_h, q_n, first, end, dim, block_n, block_d, True)
        acc = tl.zeros([block_n, block_d], tl.float32)
        carry = row_start(block_n) if learns else ()
        all_rows = all_heads.to(tl.int64) * n
        spots = (distances + tl.program_id(0).to(tl.int64) * distance_count, distance_stride, distance_count, lowest,
                 pairs + of_head * width, all_rows * width, width)
        factor = scale if changes else scale_unit
        for s in range(span, last_span):
            at, m, lo, hi = four(spans, s)
            start, inner, outer, stop = reach(first, end - 1, at, m, lo, hi, block_m)
            k_first, k_step, needs_mod = three(spans_at, s) if placed else (0, 0, 0)
            if asks:
                inner, outer = tl.where(needs_mod != 0, stop, inner), tl.where(needs_mod != 0, stop, outer)
            for j in range(inner, outer):
                acc, carry = gather_rows(acc, carry, q_block, grad_block, wall, correction,
                                  k, v, rows, at + j * block_m, k_n, v_n, m, lo, hi, factor,
                                  mods, q_pos, k_first, k_step, spots,
                                  dice, keep, b, h, q_at, cols_at, drops,
                                  dim, dim_v, block_m, block_d, block_v, wide, False)
            for i in tl.range(inner - start + stop - outer, num_stages=1):
                j = tl.where(start + i < inner, start + i, start + i - inner + outer)
                acc, carry = gather_rows(acc, carry, q_block, grad_block, wall, correction,
                                  k, v, rows, at + j * block_m, k_n, v_n, m, lo, hi, factor,
                                  mods, q_pos, k_first, k_step, spots,
                                  dice, keep, b, h, q_at, cols_at, drops,
                                  dim, dim_v, block_m, block_d, block_v, wide, True)
        store(dq + b * dq_b + h * dq_h, dq_n, first, end, dim, block_n, block_d, acc * scale, add)
        if learns:
            row_keep(carry, row_sums, all_rows, of_head + rows, rows < end)

    @triton.jit
    def gather_keys(dk, dv, carry, k, v, q, grad, walls, delta, first, cols, q_n, grad_n, n, lo, hi, scale,
                    mods, k_pos, q_first, q_step, dice, keep, b, h, rows_at, k_at, drops: tl.constexpr,
                    dim: tl.constexpr, dim_v: tl.constexpr, block_n: tl.constexpr,
                    block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr, cut: tl.constexpr):
        """dk and dv of one block of rows more; scores are (m, n) here."""
        rows = first + tl.arange(0, block_n)
        q_block = load(q, q_n, first, n, dim, block_n, block_d, cut)
        grad_block = load(grad, grad_n, first, n, dim_v, block_n, block_v, cut)
        if cut:
            wall = tl.load(walls + rows, mask=rows < n, other=float("inf"))
            correction = tl.load(delta + rows, mask=rows < n, other=0.0)
        else:
            wall = tl.load(walls + rows)
            correction = tl.load(delta + rows)
        score = tl.dot(k, tl.trans(q_block), input_precision="ieee")
        q_pos = q_first + q_step * rows
        if changes:
            found = pull(score * scale, mods[0], mods[1], q_pos[None, :], k_pos[:, None], mods[2], mods[3])
            p = share(found[0], wall[None, :], 1.0 if wide else 1.4426950408889634, wide)
            p = tl.where((wall == float("inf"))[None, :], 0.0, p)
        else:
            p = share(score, wall[None, :], scale, wide)
        if cut:
            seen = inside(cols, rows, lo, hi, n)
            if asks:
                seen &= allow(mods[0], mods[1], q_pos[None, :], k_pos[:, None], mods[2], mods[3])
            p = tl.where(seen, p, 0.0)
        if drops:
            weights = weight(dice, keep, b, h, places(rows_at, rows, n)[None, :], k_at[:, None])
            dv = tl.dot((p * weights).to(grad_block.dtype), grad_block, dv, input_precision="ieee")
            d_share = tl.dot(v, tl.trans(grad_block), input_precision="ieee") * weights
        else:
            dv = tl.dot(p.to(grad_block.dtype), grad_block, dv, input_precision="ieee")
            d_share = tl.dot(v, tl.trans(grad_block), input_precision="ieee")
        slope = p * (d_share - correction[None, :])
        if cut:
            slope = tl.where(seen, slope, 0.0)
        if in_cols:
            carry = col_more(carry, slope, found)
        if changes:
            slope = tl.where(slope == 0.0, 0.0, slope * found[1])
        return tl.dot(slope.to(q_block.dtype), q_block, dk, input_precision="ieee"), dv, carry

    @triton.jit(do_not_specialize=["n", "count", "heads", "group"])
    def by_keys(
        grad, q, k, v, delta, walls, dk, dv,
        blocks, spans, blocks_at, spans_at, first_b, first_h, tables, dims, col_sums, width, dice, rows_at, cols_at,
        grad_b, grad_h, grad_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
        heads, group, n, count, scale, scale_unit, keep, drops: tl.constexpr,
        dim: tl.constexpr, dim_v: tl.constexpr,
        block_d: tl.constexpr, block_v: tl.constexpr, wide: tl.constexpr,
        block_n: tl.constexpr, block_m: tl.constexpr,
    ):
        first, end, span, last_span = four(blocks, tl.program_id(0) % count)
        head = tl.program_id(0) // count
        b, h = (head // (heads // group)).to(tl.int64), (head % (heads // group)).to(tl.int64)
        cols = first + tl.arange(0, block_m)
        k_at = places(cols_at, cols, end) if drops else cols
        k_first, k_step, _ = three(blocks_at, tl.program_id(0) % count) if placed else (0, 0, 0)
        k_pos = k_first + k_step * cols
        factor = scale if changes else scale_unit
        all_cols = (tl.num_programs(0) // count).to(tl.int64) * group * width

        k_block = load(k + b * k_b + h * k_h, k_n, first, end, dim, block_m, block_d, True)
        v_block = load(v + b * v_b + h * v_h, v_n, first, end, dim_v, block_m, block_v, True)
        dk_sum = tl.zeros([block_m, block_d], tl.float32)
        dv_sum = tl.zeros([block_m, block_v], tl.float32)
        for s in range(span, last_span):
            at, stop_row, lo, hi = four(spans, s)
            start, inner, outer, stop = reach(first, end - 1, at, stop_row, lo, hi, block_n)
            q_first, q_step, needs_mod = three(spans_at, s) if placed else (0, 0, 0)
            if asks:
                inner, outer = tl.where(needs_mod != 0, stop, inner), tl.where(needs_mod != 0, stop, outer)
            for each in range(group):
                own = h * group + each
                q_own, grad_own = q + b * q_b + own * q_h, grad + b * grad_b + own * grad_h
                mods = (first_b + b, first_h + own, tables, dims)
                carry = col_start(block_m) if in_cols else ()
                walls_own, delta_own = walls + (b * heads + own) * n, delta + (b * heads + own) * n
                for i in range(inner, outer):
                    dk_sum, dv_sum, carry = gather_keys(
                        dk_sum, dv_sum, carry, k_block, v_block, q_own, grad_own, walls_own, delta_own,
                        at + i * block_n, cols, q_n, grad_n, stop_row, lo, hi, factor, mods, k_pos, q_first, q_step,
                        dice, keep, b, own, rows_at, k_at, drops,
                        dim, dim_v, block_n, block_d, block_v, wide, False)
                for e in tl.range(inner - start + stop - outer, num_stages=1):
                    i = tl.where(start + e < inner, start + e, start + e - inner + outer)
                    dk_sum, dv_sum, carry = gather_keys(
                        dk_sum, dv_sum, carry, k_block, v_block, q_own, grad_own, walls_own, delta_own,
                        at + i * block_n, cols, q_n, grad_n, stop_row, lo, hi, factor, mods, k_pos, q_first, q_step,
                        dice, keep, b, own, rows_at, k_at, drops,
                        dim, dim_v, block_n, block_d, block_v, wide, True)
                if in_cols:
                    col_keep(carry, col_sums, all_cols, (b * heads + own) * width + cols, cols < end)
        store(dk + b * dk_b + h * dk_h, dk_n, first, end, dim, block_m, block_d, dk_sum * scale, False)
        store(dv + b * dv_b + h * dv_h, dv_n, first, end, dim_v, block_m, block_v, dv_sum, False)
    # fmt: on

    return BandPrograms(forward, by_rows, by_keys)
