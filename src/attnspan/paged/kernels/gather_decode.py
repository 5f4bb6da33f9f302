"""Decoding on a CPU: rows of one query are gathered and attended to in batches, by a handful of calls for all rows.

Rows of about the same length are copied side by side, padded to the longest of them, and attended to by one call; what
is not a row's own is cleared in the copy, since it may be NaN, and masked. A query that is alone in its row sees all of
the keys between two bounds (scoring.py), so that the mask is the padding and nothing else.

[Note: alike in length] Rows are taken longest first, and share a call as long as padding stays below a quarter of what
is copied, or below what a call costs anyway.

A part of `gather`, which does what is left over.   Shapes: n rows of a group, L keys, Hk key heads, G queries for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels.aten import CPU_FLASH
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.scoring import Scoring, mapped

CHEAP = 1 << 19
"""Bytes of padding that are cheaper than one more call."""


class DecodeGroup(NamedTuple):
    """Rows that share a call: their queries, their pages, and which of the n x L copied keys are not theirs."""

    rows: tuple[int, ...]
    queries: Tensor  # (n,) int64
    pages: Tensor  # (n * W,) int64
    hidden: Tensor  # (n, L) bool
    cleared: Tensor  # (hidden,) int64: the same, as places in n x L
    mask: Tensor  # (n, L) float32 or wider: what to add to scores
    first: Tensor  # (n, 1): the first copied key of each row, by its place in the row


def groups(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> list[DecodeGroup]:
    """The rows that share calls; none where that does not pay, or the kernel does not know how."""
    if not isinstance(keys, Tensor) or scoring.mask_mod is not None or not metadata.in_order:
        return []
    if q.device.type != "cpu" or q.shape[2] != values.shape[3]:
        return []
    page_bytes = 2 * keys[0].numel() * keys.element_size()
    wide = lse_dtype(q.dtype)
    what = ("decode groups", scoring.causal, scoring.window, page_bytes, wide)
    return metadata.once(what, lambda: _grouped(scoring, metadata, page_bytes, wide))


def _grouped(scoring: Scoring, metadata: PagedMetadata, page_bytes: int, wide: torch.dtype) -> list[DecodeGroup]:
    """See [Note: alike in length]."""
    size, spread, bounds = metadata.page_size, metadata.spread, dict[int, tuple[int, int]]()
    for row, count in enumerate(metadata.query_lens):
        if count == 1:
            begin, end, at = metadata.host_key_begins[row], metadata.host_key_ends[row], metadata.query_starts[row]
            if scoring.causal and spread.ranks == 1:  # what `visible` says, for nearly every row there is
                end = min(end, at + 1)
                begin = begin if scoring.window is None else max(begin, at - scoring.window + 1)
            else:
                begin, end = scoring.visible(metadata, row)
            if end > begin:
                bounds[row] = (begin, end)
    pages = {row: -(-end // size) - begin // size for row, (begin, end) in bounds.items()}
    found: list[list[int]] = []
    longest = padding = held = 0
    for row in sorted(pages, key=lambda row: -pages[row]):
        more = longest - pages[row]
        if found and (padding + more <= held // 4 or (padding + more) * page_bytes <= CHEAP):
            found[-1].append(row)
            padding, held = padding + more, held + pages[row]
        else:
            found.append([row])
            longest, padding, held = pages[row], 0, pages[row]
    return [_group(metadata, rows, bounds, wide) for rows in found if len(rows) > 1]


def _group(
    metadata: PagedMetadata, rows: list[int], bounds: dict[int, tuple[int, int]], wide: torch.dtype
) -> DecodeGroup:
    size, chosen = metadata.page_size, torch.tensor(rows, device="cpu")
    begin, end = torch.tensor([bounds[row] for row in rows], device="cpu").unsqueeze(2).unbind(1)  # (n, 1) each
    low = begin // size
    width = int(((end + size - 1) // size - low).max())
    columns = (low + torch.arange(width, device="cpu")).clamp_(max=metadata.tables.shape[1] - 1)
    pages = metadata.tables.index_select(0, chosen).long().gather(1, columns)
    places = low * size + torch.arange(width * size, device="cpu")
    hidden = (places < begin) | (places >= end)
    mask = torch.zeros(hidden.shape, dtype=wide, device="cpu").masked_fill_(hidden, -torch.inf)
    cleared = hidden.flatten().nonzero().flatten()
    queries = metadata.offsets.index_select(0, chosen).long()
    return DecodeGroup(tuple(rows), queries, pages.flatten(), hidden, cleared, mask, low * size)


def attend(
    scoring: Scoring, group: DecodeGroup, metadata: PagedMetadata, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """out (n, H, D) and lse (n, H) of a group's rows, in float32 or wider."""
    wide = lse_dtype(q.dtype)
    n, kv_heads = len(group.rows), keys.shape[2]
    k, v = (_copied(pages, group, n).to(wide).transpose(1, 2) for pages in (keys, values))  # (n, Hk, L, D)
    mine = q.index_select(0, group.queries).to(wide).view(n, kv_heads, -1, q.shape[2])  # (n, Hk, G, D)
    if scoring.score_mod is not None:
        out, lse = _by_pairs(scoring, group, metadata, mine, k, v)
    else:
        out, lse = CPU_FLASH(mine, k, v, 0.0, False, attn_mask=group.mask[:, None, None], scale=scoring.scale)
    return out.reshape(n, -1, out.shape[3]), lse.reshape(n, -1)


def _copied(pages: Tensor, group: DecodeGroup, n: int) -> Tensor:
    """(n, L, Hk, D), cleared where there is nothing of the row."""
    whole = pages.flatten(1) if pages.is_contiguous() else pages  # not where values are a part of keys
    found = whole.index_select(0, group.pages)
    found.view(-1, pages[0, 0].numel()).index_fill_(0, group.cleared, 0.0)  # few: a mask would look at all of them
    return found.view(n, -1, *pages.shape[2:])


def _by_pairs(
    scoring: Scoring, group: DecodeGroup, metadata: PagedMetadata, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The formulas, with scores as the score_mod changes them."""
    scores = (q @ k.mT * scoring.scale).flatten(1, 2)  # (n, H, L)
    at = metadata.positions.index_select(0, group.queries)
    key_at = metadata.spread.position(group.first + torch.arange(k.shape[2], device="cpu"))
    assert scoring.score_mod is not None, "asked for one"
    levels = ((0, None, None, None, 0), (0, None, 0, None, None), (0, 0, None, 0, 0))
    heads = torch.arange(scores.shape[1], device="cpu")
    scores = mapped(scoring.score_mod, levels, scores, torch.tensor(group.rows, device="cpu"), heads, at, key_at)
    scores = scores.masked_fill(group.hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)  # a row whose scores are all -inf saw nothing
    return weights.view(*q.shape[:3], -1) @ v, lse.view(q.shape[:3])
