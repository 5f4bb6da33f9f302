"""The Triton programs of the kernel `decode`: attention over the pages of a block table.

A program computes a row's result over some of its keys; where a row's keys are in several programs, a second launch
joins the parts. Two pairs of programs serve two sorts of steps, between which decode.py chooses::

    attend_shares, join_shares    short rows, whose queries fit into one program: decoding, with or without drafts.
                                  The keys of all rows are dealt to programs in equal shares.
    attend_split, join_splits     long rows: programs for tiles of a row's queries, each over one split of its keys

Both call `attend_blocks`, which is FlashAttention over blocks of keys, and `store`.

Names of strides: a tensor and a dim, such as k_p, k_s, k_h: k keys, v values, s scales, q queries; p page, s slot,
h head, t token.

[Note: shares] The blocks of all rows, one row after another, are one long list, cut into as many equal shares as
programs fit on the device at once. A program goes over its share, which may begin and end inside of a row::

    rows      aaaaaaaaaaa bbb cccccccccccccccccc dd      4 rows, 34 blocks
    shares    |aaaaaaa|aaaa bbb|ccccccc|ccccccc|cccc dd|

Lengths are read on the device, so that a captured graph deals later steps as evenly. A row that lies in one share is
written where it belongs; the parts of others are joined afterwards. Share s keeps its part of row r in place s + r:
from each part to the next one of these grows, so no two have the same place, and there are fewer than shares and rows
together.

[Note: one block ahead] Which page a key is in must be known before the key can be loaded. The pages of the next block
are therefore loaded together with the keys of this one: otherwise Triton spends a stage of its pipeline on the table,
and no key is in flight while another is multiplied.

[Note: PDL] Programmatic dependent launch: the programs that join are launched when the last ones that attend have
begun, and wait on the device until they have ended, so that their launch is hidden. It needs compute capability 9.0.

[Note: unowned slots] A key past a row's end is not loaded: its score is -inf and its value 0, whatever is in
its slot.

[Note: codes] Keys in 8 bits are multiplied as the codes they are, exact in every dtype of a query, and a score is
scaled afterwards. A value's scale goes into its weight, over the largest scale of the block, so that weights stay
between 0 and 1 and half precision has room for them. Where queries are in half precision, four codes are loaded as one
word and become float16, in half the instructions that bfloat16 takes. Each query is divided by a power of two first,
so that its largest number is between 1 and 2: in float16 the others are exact then, or off by at most 2^-25.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

VARYING = [
    "width",
    "rows_t",
    "tokens",
    "splits",
    "tiles",
    "shares",
    "row_count",
    "most",
    "window",
    "interleave",
    "rank",
]
"""Numbers that differ from step to step: Triton would recompile for 1, for multiples of 16, and for the rest."""

NO_POSITION = 1 << 30
"""A position after all others, where a row without queries begins. Its loop over keys never runs, but the comparison
that loads ahead still adds a few blocks to it, so that int32 must have room above it."""

INT8, FLOAT8 = (
    """
{
.reg .b32 shifted, two, middle;
mov.b32 middle, 0x64806480;
xor.b32 shifted, $4, 0x80808080;
prmt.b32 two, shifted, 0x64646464, 0x4140;
sub.rn.f16x2 two, two, middle;
mov.b32 {$0, $1}, two;
prmt.b32 two, shifted, 0x64646464, 0x4342;
sub.rn.f16x2 two, two, middle;
mov.b32 {$2, $3}, two;
}
""",
    """
{
.reg .b16 low, high;
.reg .b32 two;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 two, low;
mov.b32 {$0, $1}, two;
cvt.rn.f16x2.e4m3x2 two, high;
mov.b32 {$2, $3}, two;
}
""",
)
"""PTX that makes float16 of the four codes in a word. int8: code + 128, as the lower byte of a float16 between 1024 and
2048, is the number code + 1152, of which 1152 is subtracted."""

INTS, FLOATS = 1, 2
"""Values of `words`: what the codes in a word are. 0: codes are not loaded as words."""

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


class DecodePrograms(NamedTuple):
    attend_shares: Any
    join_shares: Any
    attend_split: Any
    join_splits: Any


@cache
def programs() -> DecodePrograms:
    """The Triton kernels. In them m is a row of queries and heads, d and dv a feature, r a row of the step."""
    global tl
    import triton
    import triton.language as tl

    unpack_int8, unpack_float8 = tl.constexpr(INT8), tl.constexpr(FLOAT8)

    no_position = tl.constexpr(NO_POSITION)

    # fmt: off
    @triton.jit
    def numbers(words, rows: tl.constexpr, cols: tl.constexpr, are_ints: tl.constexpr):
        """Codes, four in a word, (rows, cols / 4), as float16 (rows, cols). See [Note: codes]."""
        asm: tl.constexpr = unpack_int8 if are_ints else unpack_float8
        a, b, c, d = tl.inline_asm_elementwise(asm, "=h,=h,=h,=h,r", [words], is_pure=True, pack=1,
                                               dtype=(tl.float16, tl.float16, tl.float16, tl.float16))
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [rows, cols])

    @triton.jit
    def attend_blocks(
        rows, at, table, head, begin, end, low, high, keys, values, key_scales, value_scales, scale,
        k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, window, interleave, rank,
        size: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
        block_m: tl.constexpr, block_n: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr, ranks: tl.constexpr,
        stored: tl.constexpr, words: tl.constexpr,
    ):
        """Queries `rows` at positions `at` over the keys [low, high) of a row, of those that it owns: (sum of weighted
        values, largest score, sum of weights), scores in powers of two."""
        if words > 0:  # see [Note: codes]
            d4 = tl.arange(0, block_d // 4)
            dv4 = tl.arange(0, block_v // 4)
            largest = tl.max(tl.abs(rows.to(tl.float32)), 1)
            exponent = tl.floor(tl.log2(tl.maximum(largest, 1e-30)))
            rows = (rows.to(tl.float32) * tl.exp2(-exponent)[:, None]).to(tl.float16)
            row_scale = scale * tl.exp2(exponent)[:, None]
        else:
            row_scale = scale
        row_max = tl.full([block_m], float("-inf"), tl.float32)
        row_sum = tl.zeros([block_m], tl.float32)
        acc = tl.zeros([block_m, block_v], tl.float32)
        d = tl.arange(0, block_d)
        dv = tl.arange(0, block_v)
        step = tl.arange(0, block_n)
        lead = 0 if size % block_n == 0 else step  # one page for all of a block, or one for each key
        next_page = tl.load(table + (low + lead) // size, mask=low + lead < high, other=0)
        for start in range(low, high, block_n):
            key = start + step
            owned = (key >= begin) & (key < end)
            page = next_page.to(tl.int64)
            next_key = start + block_n + lead  # see [Note: one block ahead]
            next_page = tl.load(table + next_key // size, mask=next_key < high, other=0)
            slot = step % size if block_n % size == 0 else key % size  # a fifth of the instructions less
            if words > 0:
                codes = tl.load(keys + (page * k_p + slot * k_s)[:, None] + head * k_h + d4[None, :],
                                mask=owned[:, None] & (d4 < dim // 4)[None, :], other=0)
                k = numbers(codes, block_n, block_d, words == 1)
            else:
                k = tl.load(keys + (page * k_p + slot * k_s)[:, None] + head * k_h + d[None, :],
                            mask=owned[:, None] & (d < dim)[None, :], other=0.0).to(rows.dtype)
            scores = tl.dot(rows, tl.trans(k), input_precision="ieee") * row_scale
            if stored:
                scaled = page * s_p + slot * s_s + head * s_h
                scores = scores * tl.load(key_scales + scaled, mask=owned, other=0.0)[None, :]
            seen = owned[None, :]
            if causal or windowed:
                if ranks == 1:
                    position = key
                else:
                    run = key // interleave
                    position = (run * ranks + rank) * interleave + key - run * interleave
                if causal:
                    seen = seen & (position[None, :] <= at[:, None])
                if windowed:
                    seen = seen & (position[None, :] > at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - base[:, None])
            alpha = tl.exp2(row_max - base)
            if words > 0:
                codes = tl.load(values + (page * v_p + slot * v_s)[:, None] + head * v_h + dv4[None, :],
                                mask=owned[:, None] & (dv4 < value_dim // 4)[None, :], other=0)
                v = numbers(codes, block_n, block_v, words == 1)
            else:
                v = tl.load(values + (page * v_p + slot * v_s)[:, None] + head * v_h + dv[None, :],
                            mask=owned[:, None] & (dv < value_dim)[None, :], other=0.0)
                if stored:
                    v = v.to(rows.dtype)
            row_sum = row_sum * alpha + tl.sum(weights, 1)
            if stored:
                scales = tl.load(value_scales + scaled, mask=owned, other=0.0)
                most = tl.max(scales, 0)
                weights = weights * (scales / tl.where(most == 0.0, 1.0, most))[None, :]
                found = tl.dot(weights.to(v.dtype), v, input_precision="ieee") * most
            else:
                found = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            acc = acc * alpha[:, None] + found
            row_max = new_max
        return acc, row_max, row_sum

    @triton.jit
    def store(out, lse, place, real, acc, row_max, row_sum, value_dim: tl.constexpr, block_v: tl.constexpr):
        """A result of `attend_blocks`, normalised, and its lse in natural logarithms."""
        dv = tl.arange(0, block_v)
        whole = tl.where(row_sum == 0.0, 1.0, row_sum)
        tl.store(out + place[:, None] * value_dim + dv[None, :], (acc / whole[:, None]).to(out.dtype.element_ty),
                 mask=real[:, None] & (dv < value_dim)[None, :])
        row_lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(whole)) * 0.6931471805599453)
        tl.store(lse + place, row_lse, mask=real)

    @triton.jit(do_not_specialize=VARYING)
    def attend_shares(
        out, lse, part_out, part_lse, joined, q, keys, values, key_scales, value_scales, tables, begins, ends, offsets,
        positions, scale, width, q_t, q_h, k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, heads, row_count, most, shares,
        window, interleave, rank,
        size: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, block_d: tl.constexpr,
        block_v: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr,
        fewest: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr, ranks: tl.constexpr, stored: tl.constexpr,
        words: tl.constexpr, pdl: tl.constexpr,
    ):
        """A share of all rows' blocks, of one key head. `joined` (2, rows): the first and last share of each row."""
        if pdl:  # see [Note: PDL]
            tl.extra.cuda.gdc_launch_dependents()
        head = tl.program_id(0).to(tl.int64)
        share = tl.program_id(1)
        r = tl.arange(0, block_r)
        known = r < row_count
        offset = tl.load(offsets + r, mask=known, other=0)
        count = tl.load(offsets + r + 1, mask=known, other=0) - offset
        begin = tl.load(begins + r, mask=known, other=0)
        end = tl.load(ends + r, mask=known, other=0)
        if windowed and ranks == 1:
            least = tl.full([block_r], no_position, tl.int32)
            for i in range(most):
                least = tl.minimum(least, tl.load(positions + offset + i, mask=i < count, other=no_position))
            begin = tl.maximum(begin, least - window + 1)
        low = begin // block_n * block_n
        blocks = tl.where((count > 0) & (end > begin), tl.cdiv(end - low, block_n), 0)
        until = tl.cumsum(blocks, 0)
        total = tl.sum(blocks, 0)
        length = tl.maximum(tl.cdiv(total, shares), fewest)
        if (share == 0) & (head == 0):
            tl.store(joined + r, (until - blocks) // length, mask=known)
            tl.store(joined + row_count + r, tl.where(blocks > 0, (until - 1) // length, -1), mask=known)

        m = tl.arange(0, block_m)
        query = m // group
        qh = head * group + m % group
        d = tl.arange(0, block_d)
        block = share * length
        stop = tl.minimum(block + length, total)
        row = tl.sum((until <= block).to(tl.int32), 0)
        row_from = tl.sum(tl.where(r == row, until - blocks, 0), 0)
        while block < stop:
            first = tl.load(offsets + row)
            real = query < tl.load(offsets + row + 1) - first
            token = (first + query).to(tl.int64)
            at = tl.load(positions + token, mask=real, other=0)
            rows = tl.load(q + token[:, None] * q_t + qh[:, None] * q_h + d[None, :],
                           mask=real[:, None] & (d < dim)[None, :], other=0.0)
            row_begin = tl.load(begins + row)
            row_end = tl.load(ends + row)
            if windowed and ranks == 1:
                row_begin = tl.maximum(row_begin, tl.min(tl.where(real, at, no_position)) - window + 1)
            row_low = row_begin // block_n * block_n
            row_blocks = tl.where((row_end > row_begin) & (tl.load(offsets + row + 1) > first),
                                  tl.cdiv(row_end - row_low, block_n), 0)
            upto = tl.minimum(stop, row_from + row_blocks)
            row_low += (block - row_from) * block_n
            row_high = tl.minimum(row_end, row_low + (upto - block) * block_n)
            acc, row_max, row_sum = attend_blocks(
                rows, at, tables + row.to(tl.int64) * width, head, row_begin, row_end, row_low, row_high, keys, values,
                key_scales, value_scales, scale, k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, window, interleave, rank,
                size, dim, value_dim, block_d, block_v, block_m, block_n, causal, windowed, ranks, stored, words)
            if (block == row_from) & (upto == row_from + row_blocks):  # all of the row
                store(out, lse, token * heads + qh, real, acc, row_max, row_sum, value_dim, block_v)
            else:
                place = ((share + row).to(tl.int64) * most + query) * heads + qh  # see [Note: shares]
                store(part_out, part_lse, place, real, acc, row_max, row_sum, value_dim, block_v)
            block = upto
            row_from = upto
            row += 1

    @triton.jit(do_not_specialize=VARYING)
    def join_shares(
        out, lse, part_out, part_lse, joined, rows, rows_t, offsets, heads, row_count, most,
        value_dim: tl.constexpr, block_v: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
    ):
        """Some numbers of a query's head, of rows that lie in several shares; 0 and -inf of rows without keys."""
        token = tl.program_id(0)
        head = tl.program_id(1)
        row = tl.load(rows + token * rows_t)  # those of a shared beginning are one number
        query = token - tl.load(offsets + row)
        if pdl:
            tl.extra.cuda.gdc_wait()
        share = tl.load(joined + row)
        last = tl.load(joined + row_count + row)
        if share != last:
            dv = tl.program_id(2) * block_v + tl.arange(0, block_v)
            s = tl.arange(0, block_s)
            row_max = tl.full([], float("-inf"), tl.float32)
            row_sum = tl.full([], 0.0, tl.float32)
            acc = tl.zeros([block_v], tl.float32)
            while share <= last:
                place = ((share + s + row).to(tl.int64) * most + query) * heads + head
                some = share + s <= last
                parts = tl.load(part_lse + place, mask=some, other=float("-inf"))
                new_max = tl.maximum(row_max, tl.max(parts, 0))
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                weights = tl.exp(parts - base)
                each = tl.load(part_out + place[:, None] * value_dim + dv[None, :],
                               mask=some[:, None] & (dv < value_dim)[None, :], other=0.0)
                alpha = tl.exp(row_max - base)
                acc = acc * alpha + tl.sum(each * weights[:, None], 0)
                row_sum = row_sum * alpha + tl.sum(weights, 0)
                row_max = new_max
                share += block_s
            whole = tl.where(row_sum == 0.0, 1.0, row_sum)
            place = token.to(tl.int64) * heads + head
            tl.store(out + place * value_dim + dv, (acc / whole).to(out.dtype.element_ty), mask=dv < value_dim)
            tl.store(lse + place, tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(whole)))

    @triton.jit(do_not_specialize=VARYING)
    def attend_split(
        out, lse, q, keys, values, key_scales, value_scales, tables, begins, ends, offsets, positions, scale, width,
        q_t, q_h, k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, tokens, heads, tiles, splits, window, interleave, rank,
        size: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, block_d: tl.constexpr,
        block_v: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, per_tile: tl.constexpr,
        fewest: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr, ranks: tl.constexpr, stored: tl.constexpr,
        words: tl.constexpr, pdl: tl.constexpr,
    ):
        """Some queries of a row, of one key head, over a split of their keys."""
        if pdl:  # see [Note: PDL]
            tl.extra.cuda.gdc_launch_dependents()
        head = tl.program_id(0).to(tl.int64)
        split = tl.program_id(1)
        row = tl.program_id(2) // tiles
        tile = tl.program_id(2) % tiles
        first = tl.load(offsets + row)
        count = tl.load(offsets + row + 1) - first
        begin = tl.load(begins + row)
        end = tl.load(ends + row)
        if tile * per_tile >= count:
            return
        m = tl.arange(0, block_m)
        query = tile * per_tile + m // group
        real = (m < per_tile * group) & (query < count)
        token = (first + query).to(tl.int64)
        at = tl.load(positions + token, mask=real, other=0)
        qh = head * group + m % group
        d = tl.arange(0, block_d)
        rows = tl.load(q + token[:, None] * q_t + qh[:, None] * q_h + d[None, :],
                       mask=real[:, None] & (d < dim)[None, :], other=0.0)

        if ranks == 1:
            if causal:
                end = tl.minimum(end, tl.max(tl.where(real, at, -1)) + 1)
            if windowed:
                begin = tl.maximum(begin, tl.min(tl.where(real, at, no_position)) - window + 1)
        low = begin // block_n * block_n
        blocks = tl.cdiv(tl.maximum(end - low, 0), block_n)
        per_split = tl.maximum(tl.cdiv(blocks, splits), fewest)
        low += split * per_split * block_n
        high = tl.minimum(end, low + per_split * block_n)
        place = (split.to(tl.int64) * tokens + token) * heads + qh
        if (split > 0) & (low >= end):  # nothing is left for this part; `join_splits` passes over it
            tl.store(lse + place, tl.full([block_m], float("-inf"), tl.float32), mask=real)
            return

        acc, row_max, row_sum = attend_blocks(
            rows, at, tables + row.to(tl.int64) * width, head, begin, end, low, high, keys, values, key_scales,
            value_scales, scale, k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, window, interleave, rank,
            size, dim, value_dim, block_d, block_v, block_m, block_n, causal, windowed, ranks, stored, words)
        store(out, lse, place, real, acc, row_max, row_sum, value_dim, block_v)

    @triton.jit(do_not_specialize=VARYING)
    def join_splits(out, lse, part_out, part_lse, tokens, heads, splits,
                value_dim: tl.constexpr, block_v: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr):
        """Some numbers of a query's head, of all splits."""
        if pdl:
            tl.extra.cuda.gdc_wait()
        place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
        many = tl.full([], 1, tl.int64) * tokens * heads  # in 64 bits
        s = tl.arange(0, block_s)
        dv = tl.program_id(2) * block_v + tl.arange(0, block_v)
        parts = tl.load(part_lse + s * many + place, mask=s < splits, other=float("-inf"))
        row_max = tl.max(parts, 0)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp(parts - base)
        row_sum = tl.sum(weights, 0)
        whole = tl.where(row_sum == 0.0, 1.0, row_sum)
        each = tl.load(part_out + (s * many + place)[:, None] * value_dim + dv[None, :],
                       mask=(s < splits)[:, None] & (dv < value_dim)[None, :], other=0.0)
        joined = tl.sum(tl.where((weights > 0.0)[:, None], each * (weights / whole)[:, None], 0.0), 0)
        tl.store(out + place * value_dim + dv, joined.to(out.dtype.element_ty), mask=dv < value_dim)
        tl.store(lse + place, tl.where(row_sum == 0.0, float("-inf"), base + tl.log(whole)))
    # fmt: on

    return DecodePrograms(attend_shares, join_shares, attend_split, join_splits)
