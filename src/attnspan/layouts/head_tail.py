"""Each rank owns one chunk from the front and its mirror from the back."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan.layouts.layout import Layout, Shards, check_ranks, spans


@dataclass(frozen=True, slots=True)
class HeadTail(Layout):
    """Rank r owns chunk r and chunk 2*ranks-1-r, so that causal work is equal on every rank.

    >>> HeadTail(ranks=2).positions(8)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> HeadTail(ranks=2).positions(7)  # no length is refused
    [[0, 5, 6], [1, 2, 3, 4]]
    """

    ranks: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))

    def _shards(self, seq_len: int, row: int) -> Shards:
        chunks = spans(seq_len, 2 * self.ranks)
        pairs = ((chunks[r], chunks[-1 - r]) for r in range(self.ranks))
        return tuple(tuple(chunk for chunk in pair if chunk) for pair in pairs)
