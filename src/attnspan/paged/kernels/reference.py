"""The reference: the formulas as they stand, in float64, row by row, with every score in memory.

For tests, and for whatever the others cannot do. Imports no other kernel, and none imports it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.scoring import Scoring

name = "reference"


def supports(spec: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Everything."""
    return None


def forward(spec: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), both in float64."""
    out = q.new_zeros(*q.shape[:2], values.shape[3], dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    first = 0
    for row, count in enumerate(metadata.queries):
        begin, end = spec.visible(metadata, row)
        if count and end > begin:
            some = slice(first, first + count)
            k, v = (metadata.keys_of(pages, row, begin, end).double() for pages in (keys, values))
            at, key_at = metadata.positions[some], metadata.key_positions(row, begin, end)
            out[some], lse[some] = _row(spec, metadata, row, q[some].double(), k, v, at, key_at)
        first += count
    return out, lse


def _row(
    spec: Scoring, metadata: PagedMetadata, row: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor, key_at: Tensor
) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    scores = spec.scored(q.transpose(0, 1) @ k.mT * spec.scale, row, at, key_at)
    allowed = spec.allowed(metadata, row, heads, at, key_at)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0.0)
    return (weights @ v).transpose(0, 1), lse.transpose(0, 1)
