"""Attention that walks the block table itself: Triton programs that read every key once, and others that join parts.

Decoding is a matter of reading keys fast. A program takes one key head and some keys of a row; the query heads of that
key head, and several queries if the row has them, are the rows of one small matrix, so each key is read once for all of
them. Programs of neighbouring key heads run at the same time, and heads of one token lie side by side in a page:
together they read whole lines of memory. decode_programs.py has the programs, and how keys are dealt to them in steps
that decode ([Note: shares]) and in those with longer rows::

    program (key head, share)           all rows of a step, cut into equal shares: as many as fit on the device
    program (key head, split, tile)     some queries of a row, and a part of its keys

[Note: waves] Programs that fit on the device at once are a wave. A wave costs its start, and a last one that is not
full leaves the device idle. Shares are one wave. Splits of a row that is alone are one wave too; where there are
several, which differ in length, each is split into more and shorter parts, which are whole waves still.

[Note: few variants] A kernel is compiled for each of its constants, which takes a second. So programs announce a
dependent launch whether or not there will be one, which costs nothing; those that join splits are there for 16 parts
and for 64; and those that deal shares, for steps of up to 32, 256 and 1024 rows.

[Note: capture] Which keys a program reads is decided by numbers on the device. A captured graph therefore serves later
steps, of other lengths. Splits are those that it was captured with, chosen for the longest sequence that the plan
allows.

Knows causal masks and windows; masks and score_mods are for other kernels. Half precision is summed in float32;
float32 is multiplied as it is, without the tensor cores' shorter form.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.packages import has_triton
from attnspan.paged.kernels.decode_programs import FLOATS, INTS, programs
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.quantised import Quantised
from attnspan.paged.scoring import Scoring
from attnspan.paged.slot_writes import next_power_of_2

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

MANY = 2048
"""Heads of all queries from which a program joins whole ones: there are enough programs then."""

REGISTERS = 504
"""Of a thread, divided among the programs that a multiprocessor holds: 65,536 for programs of 128 threads."""

SHARED_ROWS = (32, 256, 1024)
"""Rows of a step whose keys are dealt in shares, at most: see [Note: few variants]."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def supports(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Causal and windowed attention in float32 or half precision, on CUDA."""
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"decode runs on cuda, got tensors on {q.device.type}"
    if not has_triton():
        return "decode needs triton, which is not installed"
    if scoring.program:
        return f"decode knows causal masks and windows, and runs no {scoring.program}"
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
    rows = len(metadata.query_lens)
    if q.shape[0] <= FEW_TOKENS * rows:
        return False
    keys = [end - begin for begin, end in metadata.spans]
    pairs = sum(n * seen for n, seen in zip(metadata.query_lens, keys, strict=True))
    return pairs * q.shape[1] * q.shape[2] > rows * DENSE[q.element_size()]


def forward(
    scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages, tuning: DecodeTuning | None = None
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) in q's dtype, or float32 where it is merged, and lse (T, H) in float32."""
    tokens, heads, _ = q.shape
    dtype = torch.float32 if metadata.merged else q.dtype
    out, lse = q.new_empty(tokens, heads, values.shape[3], dtype=dtype), q.new_empty(tokens, heads, dtype=torch.float32)
    if tokens:
        call = _call_of(scoring, metadata, q, keys, values, tuning)
        with _device_guard(q.device):
            if call.per_tile >= call.most and len(metadata.query_lens) <= SHARED_ROWS[-1]:
                _attend_shares(call, out, lse)
            else:
                _attend_splits(call, out, lse)
    return out, lse


class DecodeCall(NamedTuple):
    """What both ways to attend are told: tensors, then numbers, then constants that programs are compiled for."""

    metadata: PagedMetadata
    tensors: tuple[Any, ...]
    strides: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    tuning: DecodeTuning
    key_heads: int
    most: int  # queries of a row
    per_tile: int  # queries that a program holds

    @property
    def pdl(self) -> dict[str, bool]:
        """For programs that join: launched while those that attend run."""
        return {"pdl": True, "launch_pdl": True} if self.constants["pdl"] else {"pdl": False}  # no word of interpreters


def _call_of(
    scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages, tuning: DecodeTuning | None
) -> DecodeCall:
    group, dim, value_dim = q.shape[1] // keys.shape[2], q.shape[2], values.shape[3]
    most = metadata.once("most", lambda: max(metadata.query_lens))
    rows = min(MAX_ROWS, max(16, next_power_of_2(group * most)))
    stored, words = isinstance(keys, Quantised), _words(q, keys, values)
    tuning = tuning or _tuning(q, value_dim, rows if words else 0)
    keys, key_scales = _codes_and_scales(keys, words)
    values, value_scales = _codes_and_scales(values, words)
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    spread = metadata.spread
    constants = {
        "size": metadata.page_size, "group": group, "dim": dim, "value_dim": value_dim,
        "block_d": max(16, next_power_of_2(dim)), "block_v": max(16, next_power_of_2(value_dim)), "block_m": rows,
        "block_n": tuning.block, "fewest": MIN_KEYS // tuning.block,
        "causal": scoring.causal, "windowed": scoring.window is not None, "ranks": spread.ranks,
        "stored": stored, "words": words,
        "pdl": q.is_cuda and torch.version.cuda is not None and _capability(q.device) >= (9, 0),
        "num_warps": tuning.warps, "num_stages": tuning.stages,
    }  # fmt: skip
    return DecodeCall(
        metadata,
        (q, keys, values, key_scales, value_scales, metadata.tables, metadata.key_begins, metadata.key_ends,
         metadata.offsets, metadata.positions, scoring.scale * 1.4426950408889634, metadata.tables.stride(0)),
        (q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], *key_scales.stride()[:3]),
        (scoring.window or 0, spread.interleave, spread.rank),
        constants, tuning, keys.shape[2], most, rows // group,
    )  # fmt: skip


def _attend_shares(call: DecodeCall, out: Tensor, lse: Tensor) -> None:
    """All rows' keys, dealt in equal shares. See [Note: shares] in decode_programs.py."""
    kernels, metadata = programs(), call.metadata
    (tokens, heads, value_dim), rows = out.shape, len(metadata.query_lens)
    shares = _shares(call.key_heads, out.device, call.tuning)
    places = (shares + rows) * call.most
    part_out, part_lse = (lse.new_empty(places, heads, *dims) for dims in ((value_dim,), ()))
    joined = metadata.tables.new_empty(2, rows)
    block_r = next(size for size in SHARED_ROWS if rows <= size)
    registers = {"maxnreg": REGISTERS // call.tuning.resident} if out.is_cuda and torch.version.cuda else {}
    kernels.attend_shares[call.key_heads, shares](
        out, lse, part_out, part_lse, joined, *call.tensors, *call.strides, heads, rows, call.most, shares,
        *call.numbers, block_r=block_r, **call.constants, **registers,
    )  # fmt: skip
    # Few programs join parts of many shares each, many join few.
    block_v, block_s = (COMBINED, 64) if tokens * heads < MANY else (next_power_of_2(value_dim), 16)
    kernels.join_shares[tokens, heads, -(-value_dim // block_v)](
        out, lse, part_out, part_lse, joined, metadata.rows, metadata.rows.stride(0), metadata.offsets, heads, rows,
        call.most, value_dim=value_dim, block_v=block_v, block_s=block_s, num_warps=4, **call.pdl,
    )  # fmt: skip


def _attend_splits(call: DecodeCall, out: Tensor, lse: Tensor) -> None:
    """Rows tile by tile, their keys in splits."""
    kernels, metadata = programs(), call.metadata
    tokens, heads, value_dim = out.shape
    tiles = -(-call.most // call.per_tile)
    splits = _splits(metadata, call.key_heads * len(metadata.query_lens) * tiles, out.device, call.tuning)
    part_out, part_lse = out, lse
    if splits > 1:
        part_out, part_lse = (lse.new_empty(splits, *x.shape) for x in (out, lse))
    kernels.attend_split[call.key_heads, splits, len(metadata.query_lens) * tiles](
        part_out, part_lse, *call.tensors, *call.strides, tokens, heads, tiles, splits, *call.numbers,
        per_tile=call.per_tile, **call.constants,
    )  # fmt: skip
    if splits > 1:
        kernels.join_splits[tokens, heads, -(-value_dim // COMBINED)](
            out, lse, part_out, part_lse, tokens, heads, splits, value_dim=value_dim, block_v=COMBINED,
            block_s=16 if splits <= 16 else MAX_SPLITS, num_warps=4, **call.pdl,
        )  # fmt: skip


def _words(q: Tensor, keys: Pages, values: Pages) -> int:
    """Whether codes are loaded four at once, and what they are. See [Note: codes] in decode_programs.py."""
    if not (isinstance(keys, Quantised) and isinstance(values, Quantised)) or q.dtype == torch.float32:
        return 0
    # NVIDIA's assembler makes numbers of them; the interpreter has none.
    if q.device.type != "cuda" or torch.version.cuda is None or _capability(q.device) < (9, 0):
        return 0
    codes = (keys.codes, values.codes)
    whole = all(
        x.stride(3) == 1 and not any(n % 4 for n in (x.shape[3], x.storage_offset(), *x.stride()[:3])) for x in codes
    )
    return (INTS if keys.dtype == torch.int8 else FLOATS) if whole else 0


def _codes_and_scales(pages: Pages, words: int) -> tuple[Tensor, Tensor]:
    """Codes, or words of four, and scales; of pages that have none, themselves twice."""
    if not isinstance(pages, Quantised):
        return pages, pages
    return pages.codes.view(torch.int32 if words else pages.dtype), pages.scales


def _tuning(q: Tensor, value_dim: int, code_rows: int = 0) -> DecodeTuning:
    """`code_rows`: rows that a program holds, where codes are loaded as words."""
    dims = q.shape[2] + value_dim
    if code_rows:
        return DecodeTuning(
            block=128 if code_rows == 16 and dims <= 256 else 64, stages=2, resident=3 if dims <= 256 else 2
        )
    row = dims * q.element_size()  # codes too are multiplied as numbers of the query's dtype
    if row > 512:  # keys and values in flight must fit beside the queries
        return DecodeTuning(block=32, stages=3 if row <= 1024 else 2, resident=2)
    return DecodeTuning()


def _shares(key_heads: int, device: torch.device, tuning: DecodeTuning) -> int:
    """As many as fit on the device at once, with all key heads."""
    if device.type != "cuda":
        return 3  # the interpreter
    return max(1, _multiprocessors(device) * tuning.resident // key_heads)


def _splits(metadata: PagedMetadata, programs: int, device: torch.device, tuning: DecodeTuning) -> int:
    """The most whole waves whose parts are long enough. See [Note: waves] and [Note: capture]."""
    if device.type != "cuda":
        return min(3, max(1, max(metadata.host_key_ends) // 8))  # the interpreter: enough to have some
    longest = metadata.once("longest", lambda: max(end - begin for begin, end in metadata.spans))
    if metadata.for_graphs or torch.cuda.is_current_stream_capturing():
        longest = metadata.tables.shape[1] * metadata.page_size
    most = min(-(-longest // MIN_KEYS), MAX_SPLITS)
    wave = _multiprocessors(device) * tuning.resident
    whole = [wave * waves // programs for waves in range(1, 1 + (tuning.waves if len(metadata.query_lens) > 1 else 1))]
    return max(1, max((splits for splits in whole if splits <= most), default=most))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)  # the interpreter knows all


def _device_guard(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
