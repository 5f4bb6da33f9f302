"""Each rank owns one span of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan.layouts.layout import Layout, Shards, check_ranks, spans


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank r owns the r-th of `ranks` spans, whose lengths differ by at most one.

    >>> Contiguous(ranks=3).positions(8)
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """

    ranks: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))

    def _shards(self, seq_len: int, row: int) -> Shards:
        return tuple((span,) if span else () for span in spans(seq_len, self.ranks))
