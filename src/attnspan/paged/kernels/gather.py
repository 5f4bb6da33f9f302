"""Attention over gathered pages: each row's keys are copied side by side, and a dense kernel does the rest.

The copy costs as much as reading the keys twice more; prompts and chunks do not feel it, and on a CPU, where the
dense kernels are far better than anything that walks pages, neither does decoding. Causal and windowed rows are one
tile each for the kernels of `attnspan.kernels`. Masks and score_mods are evaluated pair by pair, in float32 and
blocks of queries, with scores in memory.

Rows of one query are done many at a time (gather_decode.py).

Knows where a row's keys end, so that what lies behind them is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels import Spec, kernel_for_tile
from attnspan.masks.tile import Tile
from attnspan.paged.kernels import gather_decode
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.scoring import Scoring, VisibleKeys

name = "gather"

MAX_SCORES = 1 << 22
"""The most scores of one row that are in memory at once, where pairs are evaluated."""


def supports(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Everything but the capture of a graph, in which a copy keeps the size that it had."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "gather copies as many pages as there are now, which a CUDA graph would repeat for ever"
    return None


def forward(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv), in q's dtype or a wider one, and lse (T, H)."""
    wide = lse_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:2], values.shape[3], dtype=wide if metadata.merged else q.dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    done = set[int]()
    for group in gather_decode.groups(scoring, metadata, q, keys, values):
        done.update(group.rows)
        parts = gather_decode.attend(scoring, group, metadata, q, keys, values)  # type: ignore[arg-type]  # no codes
        for whole, part in zip((out, lse), parts, strict=True):
            whole.index_copy_(0, group.queries, part.to(whole.dtype))
    for seen in scoring.rows(metadata, done) if len(done) < len(metadata.query_lens) else ():
        k, v = (metadata.keys_of(pages, seen.row, seen.begin, seen.end) for pages in (keys, values))
        some, mine = seen.queries, q[seen.queries].to(k.dtype)  # what was stored in 8 bits comes in float32
        tile = _tile(scoring, metadata, seen)
        if tile is not None:
            out[some], lse[some] = _by_tile(scoring, mine, k, v, tile)
        else:
            _by_pairs(scoring, metadata, seen, mine, k, v, out[some], lse[some])
    return out, lse


def _tile(scoring: Scoring, metadata: PagedMetadata, seen: VisibleKeys) -> Tile | None:
    """The pairs of a row as a band between diagonals, or None if they are none."""
    row, _, begin, end = seen
    if scoring.program:
        return None
    n, start, last = metadata.query_lens[row], metadata.query_starts[row], metadata.last(row)
    # Where every key lies before every query, and within its window, no diagonal bites, wherever the keys are.
    before = not scoring.causal or metadata.spread.position(end - 1) <= start
    within = scoring.window is None or last - metadata.spread.position(begin) < scoring.window
    if not (before and within) and (metadata.spread.ranks > 1 or not metadata.in_order):
        return None
    hi = end - begin - 1 if before else start - begin
    lo = 1 - n if within or scoring.window is None else start - begin - scoring.window + 1
    return Tile(range(n), range(end - begin), lo, min(hi, end - begin - 1))


def _by_tile(scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if len(tile.rows) == 1 and tile.kind == "full":
        # One query: the heads of a group are its rows, so that every key is read once.
        heads, grouped = q.shape[1], q.view(1, k.shape[1], -1, q.shape[3])
        stacked = Tile(range(grouped.shape[2]), tile.cols, 1 - grouped.shape[2], len(tile.cols) - 1)
        out, lse = _dense(scoring, grouped, k, v, stacked)
        return out.reshape(1, heads, -1), lse.reshape(1, heads)
    out, lse = _dense(scoring, q, k, v, tile)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _dense(scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """One tile by the first kernel that knows no pages."""
    plain = Spec(scale=scoring.scale)
    return kernel_for_tile(plain, q, k, v, tile).forward(plain, q, k, v, tile)


def _by_pairs(
    scoring: Scoring,
    metadata: PagedMetadata,
    seen: VisibleKeys,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The formulas in blocks of queries; out and lse are written in place."""
    heads, (n, m) = q.shape[1], (q.shape[0], k.shape[0])
    at, key_at = metadata.positions[seen.queries], metadata.key_positions(seen.begin, seen.end)
    q, k, v = (x.to(lse.dtype).transpose(0, 1) for x in (q, k, v))
    block = max(1, MAX_SCORES // (heads * m))
    for low in range(0, n, block):
        some = slice(low, low + block)
        grouped = q[:, some].unflatten(0, (k.shape[0], -1)).flatten(1, 2)  # (Hk, G n, D)
        scores = (grouped @ k.mT * scoring.scale).view(heads, -1, m)
        scores = scoring.applied(scores, seen.row, at[some], key_at)
        part = scores.logsumexp(-1)
        weights = (scores - part.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0.0)
        found = (weights.view(k.shape[0], -1, m) @ v).view(heads, -1, v.shape[2])
        out[some], lse[some] = found.transpose(0, 1).to(out.dtype), part.transpose(0, 1)
