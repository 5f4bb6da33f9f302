"""FlexAttention over pages: any mask and score_mod, compiled, straight from the block table.

All pages of all sequences are one long key axis, and a page is a block of it. A BlockMask then is hardly more than the
block table: for each row the numbers of its pages, those that every query sees whole as full blocks, the others (the
last one, and where a window or a mask bites) as blocks in which every pair is evaluated::

    row 0, 40 keys in pages of 16:     full  [7, 3]      partial  [9]     where position < 40

Inside, a key's place on the long axis is turned into its position by one table of ints, page -> index in its sequence.
One table is enough: sequences that share a page share all before it, so a page has the same index in all of them.
Nothing backward is built, and nothing as long as the pool.

[Note: clean tails] FlexAttention multiplies every value of a block with a weight, and a weight of 0 does not undo a
NaN. The slots behind a row's last key belong to no sequence (a row that has new tokens shares its last page with no
other), so they are set to 0 before.

[Note: rows of one size] Rows with the same number of new tokens are one call. Shapes are those of the plan, not of the
sequences, so that growing does not recompile.

[Note: what is compiled for pages] torch gives up on code that it compiled too often, so every mask and score_mod has a
code object of its own, told apart by its own code: functions that differ only in the tensors they capture share it.

For CUDA: torch's lowering for CPUs wants lists as wide as the pool and gives no lse, and there `gather` is faster.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan.attention.score import ScoreFunction
from attnspan.dtypes import lse_dtype
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.quantised import Quantised
from attnspan.paged.scoring import Scoring

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

name = "flex"

QUERY_BLOCK = 128

MAX_NUMBERS = 1 << 31
"""torch 2.11 cannot compile its own kernels for longer tensors."""

_NUMBERS = itertools.count()
_ONE_AT_A_TIME = RLock()  # compiling is not for two threads at once, and virtual ranks are threads


def supports(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Everything on one rank, for pages that can be blocks."""
    if q.device.type != "cuda":
        return f"flex runs on cuda, got tensors on {q.device.type}"
    if isinstance(keys, Quantised):
        return f"flex reads keys as they were written, got {keys.dtype} codes"
    size = metadata.page_size
    if size % 128:
        return f"flex needs pages of 128 slots or a multiple, which its kernels read at once, got page_size {size}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"flex needs float32, bfloat16 or float16, got {q.dtype}"
    if min(q.shape[2], values.shape[3]) < 16:
        return f"flex needs head dims of at least 16, got {q.shape[2]} and {values.shape[3]}"
    if max(keys.shape.numel(), values.shape.numel()) > MAX_NUMBERS:
        return f"flex needs layers of at most 2^31 numbers, as its kernels count in 32 bits, got {keys.shape.numel()}"
    if metadata.spread.ranks > 1:
        return f"flex reads pages of one rank, got {metadata.spread.ranks} ranks"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "flex makes its lists once a step, which a CUDA graph would repeat for ever"
    return None


def forward(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) in q's dtype and lse (T, H) in float32."""
    assert isinstance(keys, Tensor), "others are refused"
    assert isinstance(values, Tensor), "others are refused"
    out = q.new_zeros(*q.shape[:2], values.shape[3])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
    _clean_tails(metadata, keys, values)
    for count in sorted(set(metadata.query_lens) - {0}):
        rows = metadata.once(("rows", count), functools.partial(_rows, metadata, count))
        alike = (
            "lists",
            count,
            scoring.causal,
            scoring.window,
            scoring.mask_mod is None,
        )  # the same for every such layer
        lists = metadata.once(alike, functools.partial(_lists, scoring, metadata, rows))
        found, found_lse = _call(scoring, metadata, rows, lists, q[rows.tokens], keys, values)
        out[rows.tokens], lse[rows.tokens] = found.transpose(1, 2), found_lse.transpose(1, 2)
    return out, lse


class Rows(NamedTuple):
    """Rows with the same number n of new tokens: their numbers (g,), and their tokens (g, n)."""

    numbers: Tensor
    tokens: Tensor


class PageLists(NamedTuple):
    """Numbers and pages of partial and of full blocks, (g,) and (g, W)."""

    partial: Tensor
    partial_pages: Tensor
    full: Tensor
    full_pages: Tensor


def _rows(metadata: PagedMetadata, count: int) -> Rows:
    numbers = [row for row, queries in enumerate(metadata.query_lens) if queries == count]
    chosen = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(metadata.tables.device, non_blocking=True)
    first = metadata.offsets.index_select(0, chosen).long()
    return Rows(chosen, first.unsqueeze(1) + torch.arange(count, device=first.device))


def _lists(scoring: Scoring, metadata: PagedMetadata, rows: Rows) -> PageLists:
    """The block lists of some rows."""
    size = metadata.page_size
    tables, begin, end = (
        x.index_select(0, rows.numbers) for x in (metadata.tables, metadata.key_begins, metadata.key_ends)
    )
    at = metadata.positions[rows.tokens]
    first, last = at.amin(1), at.amax(1)  # rows of several sequences have them in any order
    low, high = begin // size, (end + size - 1) // size
    whole = end // size  # pages up to here hold nothing but keys of the row
    if scoring.causal:
        high, whole = torch.minimum(high, last // size + 1), torch.minimum(whole, (first + 1) // size)
    if scoring.window is not None:
        low = torch.maximum(low, (first - scoring.window + 1).clamp(min=0) // size)
    if scoring.window is not None or scoring.mask_mod is not None:
        whole = low
    whole = torch.maximum(whole, low)
    column = torch.arange(tables.shape[1], device=tables.device)

    def pages_from(start: Tensor) -> Tensor:
        return tables.gather(1, (start.unsqueeze(1) + column).clamp(max=tables.shape[1] - 1))

    return PageLists((high - whole).clamp(min=0).int(), pages_from(whole), (whole - low).int(), pages_from(low))


def _index_of_pages(metadata: PagedMetadata, pages: int) -> Tensor:
    """page -> its index in the sequences that have it, (pages,) int32. What is beyond a row's pages goes to page 0."""
    tables = metadata.tables
    column = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device).expand_as(tables)
    has = column * metadata.page_size < metadata.key_ends.unsqueeze(1)
    index = torch.empty(pages, dtype=torch.int32, device=tables.device)
    index.index_put_((torch.where(has, tables, 0).long(),), column)
    return index


def _clean_tails(metadata: PagedMetadata, keys: Tensor, values: Tensor) -> None:
    """See [Note: clean tails]. Rows without new tokens are left alone: their last page may be another's too."""
    size = metadata.page_size

    def tails() -> Tensor:
        ends = metadata.key_ends
        page = metadata.tables.gather(1, ((ends - 1).clamp(min=0) // size).long().unsqueeze(1))
        slot = torch.arange(size, device=ends.device)
        new = metadata.offsets[1:] > metadata.offsets[:-1]
        behind = (slot >= ((ends - 1) % size + 1).unsqueeze(1)) & (new & (ends > 0)).unsqueeze(1)
        return torch.where(behind, page.long() * size + slot, 0).flatten()  # the null page takes the rest

    slots = metadata.once("tails", tails)
    for pages in (keys, values):
        pages.flatten(0, 1).index_fill_(0, slots, 0.0)


def _call(
    scoring: Scoring, metadata: PagedMetadata, rows: Rows, lists: PageLists, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import BlockMask

    g, n = rows.tokens.shape
    blocks = -(-n // QUERY_BLOCK)
    index = metadata.once("index", lambda: _index_of_pages(metadata, keys.shape[0]))
    at, ends = metadata.positions[rows.tokens], metadata.key_ends.index_select(0, rows.numbers)
    block_mask = BlockMask.from_kv_blocks(
        lists.partial.view(g, 1, 1).expand(g, 1, blocks).contiguous(),
        lists.partial_pages.view(g, 1, 1, -1).expand(g, 1, blocks, -1).contiguous(),
        lists.full.view(g, 1, 1).expand(g, 1, blocks).contiguous(),
        lists.full_pages.view(g, 1, 1, -1).expand(g, 1, blocks, -1).contiguous(),
        (QUERY_BLOCK, metadata.page_size),
        _mask_mod(scoring, index, at, ends, rows.numbers, metadata.page_size),
        seq_lengths=(n, keys.shape[0] * metadata.page_size),
        compute_q_blocks=False,
    )
    score_mod = (
        _score_mod(scoring, index, at, rows.numbers, metadata.page_size) if scoring.score_mod is not None else None
    )
    key_axis, value_axis = (pages.flatten(0, 1).transpose(0, 1).unsqueeze(0) for pages in (keys, values))
    programs = (_code(scoring.mask_mod), _code(scoring.score_mod), scoring.causal, scoring.window)
    with _ONE_AT_A_TIME, torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        return _compiled(programs)(q.transpose(1, 2), key_axis, value_axis, score_mod, block_mask, scoring.scale)


def _mask_mod(
    scoring: Scoring, index: Tensor, at: Tensor, ends: Tensor, numbers: Tensor, size: int
) -> Callable[..., Tensor]:
    """The mask, as a function of places on the long axis."""
    causal, window, ask = scoring.causal, scoring.window, scoring.mask_mod

    def over_pages(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position, query = index[kv_idx // size] * size + kv_idx % size, at[b, q_idx]
        allowed = position < ends[b]
        if causal:
            allowed = allowed & (position <= query)
        if window is not None:
            allowed = allowed & (query - position < window)
        if ask is not None:
            allowed = allowed & ask(numbers[b], h, query, position)
        return allowed

    return over_pages


def _score_mod(scoring: Scoring, index: Tensor, at: Tensor, numbers: Tensor, size: int) -> Callable[..., Tensor]:
    ask = scoring.score_mod
    assert ask is not None, "asked for"

    def over_pages(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ask(score, numbers[b], h, at[b, q_idx], index[kv_idx // size] * size + kv_idx % size)

    return over_pages


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreFunction | None, block_mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(  # type: ignore[call-overload]  # FLOAT32_PRECISION is none of its named options
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"FLOAT32_PRECISION": "'ieee'"}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


@functools.lru_cache(maxsize=256)
def _compiled(programs: tuple[object, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention for one mask and score_mod. See [Note: what is compiled for pages]."""
    code = _attend.__code__.replace(co_name=f"over_pages_{next(_NUMBERS)}")
    return torch.compile(FunctionType(code, _attend.__globals__), fullgraph=True)


def _code(fn: object) -> object:
    """What two functions share if they compute the same from what they capture."""
    return getattr(fn, "__code__", type(fn))
