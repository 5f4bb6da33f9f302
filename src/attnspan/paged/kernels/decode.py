"""Attention that walks the block table itself: one Triton kernel that reads every key once, and one that joins splits.

Decoding is a matter of reading keys fast. A program takes one key head of one row and a part (a split) of its keys; the
query heads of that key head, and several queries if the row has them, are the rows of one small matrix, so each key
is read once for all of them::

    program (key head, split, row)      for pages of its part: scores, running maximum, weights, sum
    program (query, head)               joins the splits by lse, if there are several

Programs of neighbouring key heads run at the same time, and heads of one token lie side by side in a page: together
they read whole lines of memory. There are as many splits as keep the device busy, so one sequence of 128k keys is
read as fast as many short ones.

[Note: one block ahead] Which page a key is in must be known before the key can be loaded. The pages of the next block
are therefore loaded together with the keys of this one: otherwise Triton spends a stage of its pipeline on the table,
and no key is in flight while another is multiplied.

[Note: waves] Programs that fit on the device at once are a wave. A wave costs its start, and a last one that is not
full leaves the device idle: a row that is alone is split into as many parts as make one whole wave. Rows may differ in
length, and those of a captured step will, so where there are several, each is split into more and shorter parts, which
are whole waves still.

[Note: PDL] Programmatic dependent launch: `combine` is launched when the last programs of `attend_split` have begun,
and waits on the device until they have ended, so that its launch is hidden. It needs compute capability 9.0.

[Note: few variants] A kernel is compiled for each of its constants, which takes a second. So `attend_split`
announces a dependent launch whether or not there will be a `combine`, which costs nothing, and `combine` is there for
16 parts and for 64.

[Note: capture] Which keys a program reads is decided by numbers on the device. A captured graph therefore serves later
steps, of other lengths, with the splits it was captured with; they are chosen for the longest sequence that the
plan allows.

[Note: unowned slots] A key past a row's end is not loaded: its score is -inf and its value 0, whatever is in
its slot.

[Note: codes] Keys in 8 bits are multiplied as the codes they are, exact in every dtype of a query, and a score is
scaled afterwards. A value's scale goes into its weight, over the largest scale of the block, so that weights stay
between 0 and 1 and half precision has room for them.

Knows causal masks and windows; masks and score_mods are for other kernels. Half precision is summed in float32;
float32 is multiplied as it is, without the tensor cores' shorter form.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.kernels.merge import has_triton
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.quantised import Quantised
from attnspan.paged.scoring import Scoring

name = "decode"

DENSE = {2: 1 << 36, 4: 1 << 31}
"""By bytes of a number: queries x keys x heads x dim of a row from which it is faster to gather keys first, as measured
on an H200. In bf16 a row of 4096 new tokens takes as long either way (32 heads, dim 128), and 512 a quarter of the
time here: to gather is some 0.3 ms of launches for each row."""

FEW_TOKENS = 16
"""New tokens of a row up to which keys are read and hardly computed with, so that a copy of them never pays."""

MAX_ROWS = 64
"""Queries x heads of a group that one program holds at most."""

MIN_KEYS = 256
"""A split shorter than this costs more to start and to combine than it saves."""

MAX_SPLITS = 64
"""Parts that one row is joined from at most."""

COMBINED = 32
"""Numbers of a head that one program combines: more programs, each of which waits for less."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

VARYING = ["width", "tokens", "splits", "tiles", "window", "interleave", "rank"]
"""Numbers that differ from step to step: Triton would recompile for 1, for multiples of 16, and for the rest."""


class DecodeTuning(NamedTuple):
    """How a program goes about its part: keys in a block, blocks on their way, warps.

    And for [Note: waves]: programs that a multiprocessor holds, and waves where rows may differ. Measured on an H200,
    head dim 128, bf16 (benchmarks/log.md).
    """

    block: int = 64
    stages: int = 3
    warps: int = 4
    resident: int = 3
    waves: int = 8


def supports(spec: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Causal and windowed attention in float32 or half precision, on CUDA."""
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"decode runs on cuda, got tensors on {q.device.type}"
    if not has_triton():
        return "decode needs triton, which is not installed"
    if spec.program:
        return f"decode knows causal masks and windows, and runs no {spec.program}"
    if q.dtype not in DTYPES:
        return f"decode needs bfloat16, float16 or float32, got {q.dtype}"
    if isinstance(keys, Quantised) and keys.dtype == torch.float8_e4m3fn and _capability(q.device) < (8, 9):
        return f"decode needs a device of compute capability 8.9 for {keys.dtype}, got {_capability(q.device)}"
    if max(keys.shape[3], values.shape[3]) > 256:
        return f"decode needs head dims up to 256, got {keys.shape[3]} and {values.shape[3]}"
    if q.shape[1] // keys.shape[2] > MAX_ROWS:
        return f"decode needs at most {MAX_ROWS} query heads for a key head, got {q.shape[1] // keys.shape[2]}"
    return None


def dense_is_faster(metadata: PagedMetadata, q: Tensor) -> bool:
    """Whether `auto` leaves this step to kernels that want keys side by side: on average, rows are long prompts."""
    rows = len(metadata.queries)
    if q.shape[0] <= FEW_TOKENS * rows:
        return False
    keys = [end - begin for begin, end in metadata.spans]
    pairs = sum(n * seen for n, seen in zip(metadata.queries, keys, strict=True))
    return pairs * q.shape[1] * q.shape[2] > rows * DENSE[q.element_size()]


def forward(
    spec: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages, tuning: DecodeTuning | None = None
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) in q's dtype, or float32 where it is merged, and lse (T, H) in float32."""
    stored = isinstance(keys, Quantised)
    keys, key_scales = _codes_and_scales(keys)
    values, value_scales = _codes_and_scales(values)
    tokens, heads, dim = q.shape
    dtype = torch.float32 if metadata.merged else q.dtype
    out, lse = q.new_empty(tokens, heads, values.shape[3], dtype=dtype), q.new_empty(tokens, heads, dtype=torch.float32)
    if not tokens:
        return out, lse
    tuning = tuning or _tuning(q, values.shape[3])
    group = heads // keys.shape[2]
    most = metadata.once("most", lambda: max(metadata.queries))
    rows = min(MAX_ROWS, max(16, _next_power_of_2(group * most)))
    per_tile = rows // group
    tiles = -(-most // per_tile)
    splits = _splits(metadata, keys.shape[2] * len(metadata.queries) * tiles, q.device, tuning)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = q.new_empty(splits, *out.shape, dtype=torch.float32)
        part_lse = q.new_empty(splits, *lse.shape, dtype=torch.float32)
    spread = metadata.spread
    pdl = q.is_cuda and torch.version.cuda is not None and _capability(q.device) >= (9, 0)
    grid = (keys.shape[2], splits, len(metadata.queries) * tiles)
    attend_split, combine = _compiled()
    last_dense = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values)]
    q, keys, values = last_dense
    with _device_guard(q.device):
        attend_split[grid](
            part_out, part_lse, q, keys, values, key_scales, value_scales, metadata.tables, metadata.begins,
            metadata.ends, metadata.offsets, metadata.positions, spec.scale * 1.4426950408889634,
            metadata.tables.stride(0),
            q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], *key_scales.stride()[:3],
            tokens, heads, tiles, splits, spec.window or 0, spread.interleave, spread.rank,
            size=metadata.page_size, group=group, dim=dim, value_dim=values.shape[3],
            block_d=max(16, _next_power_of_2(dim)), block_v=max(16, _next_power_of_2(values.shape[3])),
            block_m=rows, block_n=tuning.block, per_tile=per_tile, fewest=MIN_KEYS // tuning.block,
            causal=spec.causal, windowed=spec.window is not None, ranks=spread.ranks, stored=stored, pdl=pdl,
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        if splits > 1:
            combine[tokens, heads, -(-values.shape[3] // COMBINED)](
                out, lse, part_out, part_lse, tokens, heads, splits, value_dim=values.shape[3],
                block_v=COMBINED, block_s=16 if splits <= 16 else MAX_SPLITS, pdl=pdl, num_warps=4,
                **({"launch_pdl": True} if pdl else {}),  # the interpreter does not know the word
            )  # fmt: skip
    return out, lse


def _codes_and_scales(pages: Pages) -> tuple[Tensor, Tensor]:
    """Codes and scales; of pages that have none, themselves twice."""
    return (pages.codes.view(pages.dtype), pages.scales) if isinstance(pages, Quantised) else (pages, pages)


def _tuning(q: Tensor, value_dim: int) -> DecodeTuning:
    row = (q.shape[2] + value_dim) * q.element_size()  # codes too are multiplied as numbers of the query's dtype
    if row > 512:  # keys and values in flight must fit beside the queries
        return DecodeTuning(block=32, stages=3 if row <= 1024 else 2, resident=2)
    return DecodeTuning()


def _splits(metadata: PagedMetadata, programs: int, device: torch.device, tuning: DecodeTuning) -> int:
    """The most whole waves whose parts are long enough. See [Note: waves] and [Note: capture]."""
    if device.type != "cuda":
        return min(3, max(1, max(metadata.host_ends) // 8))  # the interpreter: enough to have some
    longest = metadata.once("longest", lambda: max(end - begin for begin, end in metadata.spans))
    if metadata.for_graphs or torch.cuda.is_current_stream_capturing():
        longest = metadata.tables.shape[1] * metadata.page_size
    most = min(-(-longest // MIN_KEYS), MAX_SPLITS)
    wave = _multiprocessors(device) * tuning.resident
    whole = [wave * waves // programs for waves in range(1, 1 + (tuning.waves if len(metadata.queries) > 1 else 1))]
    return max(1, max((splits for splits in whole if splits <= most), default=most))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)  # the interpreter knows all


def _device_guard(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


def _next_power_of_2(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _compiled() -> tuple[Any, Any]:
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit(do_not_specialize=VARYING)
    def attend_split(
        out, lse, q, keys, values, key_scales, value_scales, tables, begins, ends, offsets, positions, scale, width,
        q_t, q_h, k_p, k_s, k_h, v_p, v_s, v_h, s_p, s_s, s_h, tokens, heads, tiles, splits, window, interleave, rank,
        size: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, block_d: tl.constexpr,
        block_v: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, per_tile: tl.constexpr,
        fewest: tl.constexpr, causal: tl.constexpr, windowed: tl.constexpr, ranks: tl.constexpr, stored: tl.constexpr,
        pdl: tl.constexpr,
    ):
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
        dv = tl.arange(0, block_v)
        rows = tl.load(q + token[:, None] * q_t + qh[:, None] * q_h + d[None, :],
                       mask=real[:, None] & (d < dim)[None, :], other=0.0)

        if ranks == 1:
            if causal:
                end = tl.minimum(end, tl.max(tl.where(real, at, -1)) + 1)
            if windowed:
                begin = tl.maximum(begin, tl.min(tl.where(real, at, 2147483647)) - window + 1)
        low = begin // block_n * block_n
        blocks = tl.cdiv(tl.maximum(end - low, 0), block_n)
        per_split = tl.maximum(tl.cdiv(blocks, splits), fewest)
        low += split * per_split * block_n
        high = tl.minimum(end, low + per_split * block_n)
        place = (split.to(tl.int64) * tokens + token) * heads + qh
        if (split > 0) & (low >= end):  # nothing is left for this part; `combine` passes over it
            tl.store(lse + place, tl.full([block_m], float("-inf"), tl.float32), mask=real)
            return

        row_max = tl.full([block_m], float("-inf"), tl.float32)
        row_sum = tl.zeros([block_m], tl.float32)
        acc = tl.zeros([block_m, block_v], tl.float32)
        table = tables + row.to(tl.int64) * width
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
            k = tl.load(keys + (page * k_p + slot * k_s)[:, None] + head * k_h + d[None, :],
                        mask=owned[:, None] & (d < dim)[None, :], other=0.0)
            scores = tl.dot(rows, tl.trans(k.to(rows.dtype)), input_precision="ieee") * scale
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
            v = tl.load(values + (page * v_p + slot * v_s)[:, None] + head * v_h + dv[None, :],
                        mask=owned[:, None] & (dv < value_dim)[None, :], other=0.0)
            row_sum = row_sum * alpha + tl.sum(weights, 1)
            if stored:
                scales = tl.load(value_scales + scaled, mask=owned, other=0.0)
                most = tl.max(scales, 0)
                weights = weights * (scales / tl.where(most == 0.0, 1.0, most))[None, :]
                found = tl.dot(weights.to(rows.dtype), v.to(rows.dtype), input_precision="ieee") * most
            else:
                found = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            acc = acc * alpha[:, None] + found
            row_max = new_max

        whole = tl.where(row_sum == 0.0, 1.0, row_sum)
        tl.store(out + place[:, None] * value_dim + dv[None, :], (acc / whole[:, None]).to(out.dtype.element_ty),
                 mask=real[:, None] & (dv < value_dim)[None, :])
        row_lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(whole)) * 0.6931471805599453)
        tl.store(lse + place, row_lse, mask=real)

    @triton.jit(do_not_specialize=["tokens", "splits"])
    def combine(out, lse, part_out, part_lse, tokens, heads, splits,
                value_dim: tl.constexpr, block_v: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr):
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

    return attend_split, combine
