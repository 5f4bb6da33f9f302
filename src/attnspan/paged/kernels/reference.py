"""The reference: the formulas as they stand, in float64, row by row, with every score in memory.

For tests, and for whatever the others cannot do. Imports no other kernel, and none imports it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.scoring import Scoring

name = "reference"


def supports(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
    """Everything."""
    return None


def forward(scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), both in float64."""
    out = q.new_zeros(*q.shape[:2], values.shape[3], dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row, some, begin, end in scoring.rows(metadata):
        k, v = (_expanded(metadata.keys_of(pages, row, begin, end).double(), q.shape[1]) for pages in (keys, values))
        scores = q[some].double().transpose(0, 1) @ k.mT * scoring.scale
        scores = scoring.applied(scores, row, metadata.positions[some], metadata.key_positions(begin, end))
        sums = scores.logsumexp(-1)
        weights = (scores - sums.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0.0)
        out[some], lse[some] = (weights @ v).transpose(0, 1), sums.transpose(0, 1)
    return out, lse


def _expanded(x: Tensor, heads: int) -> Tensor:
    """(m, Hk, D) as (heads, m, D)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)
