"""Positions dealt like cards: one at a time, or a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnspan.errors import LayoutError, integer
from attnspan.layouts.layout import Layout, Shards, check_ranks
from attnspan.layouts.run import Run


@dataclass(frozen=True, slots=True)
class Striped(Layout):
    """Rank r owns every ranks-th chunk, starting with chunk r.

    With chunk=1 a rank's share is a single run with a step, however long the sequence.

    >>> Striped(ranks=2).positions(7)
    [[0, 2, 4, 6], [1, 3, 5]]
    >>> Striped(ranks=2).runs(7, rank=1)
    (Run(start=1, stop=6, step=2),)
    >>> Striped(ranks=2, chunk=2).positions(7)
    [[0, 1, 4, 5], [2, 3, 6]]
    """

    ranks: int
    chunk: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        object.__setattr__(self, "chunk", integer("chunk", self.chunk, at_least=1, error=LayoutError))

    def _shards(self, seq_len: int, row: int) -> Shards:
        if self.chunk == 1:
            stripes = (range(rank, seq_len, self.ranks) for rank in range(self.ranks))
            return tuple((Run.of(stripe),) if stripe else () for stripe in stripes)
        turn = self.ranks * self.chunk
        return tuple(
            tuple(Run(start, min(start + self.chunk, seq_len)) for start in range(first, seq_len, turn))
            for first in range(0, turn, self.chunk)
        )
