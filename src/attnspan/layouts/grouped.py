"""Neighbouring ranks seen as one: what a group of ranks holds together."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan.errors import LayoutError, integer
from attnspan.layouts.layout import Layout, Shards
from attnspan.layouts.run import joined_runs


@dataclass(frozen=True, slots=True)
class Grouped(Layout):
    """Group g holds what ranks g * size ... g * size + size - 1 of another layout hold, by position.

    >>> from attnspan.layouts import HeadTail
    >>> Grouped(HeadTail(ranks=4), size=2).positions(8)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    layout: Layout
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("size", self.size, at_least=1, error=LayoutError))
        if self.layout.ranks % self.size:
            raise LayoutError(f"size must divide the layout's {self.layout.ranks} ranks, got {self.size}")

    @property
    def ranks(self) -> int:
        return self.layout.ranks // self.size

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def natural_len(self) -> int | None:
        return self.layout.natural_len

    @property
    def least_len(self) -> int:
        return self.layout.least_len

    def _shards(self, seq_len: int, row: int) -> Shards:
        shards = self.layout.shards(seq_len, row)
        groups = (shards[g * self.size : (g + 1) * self.size] for g in range(self.ranks))
        return tuple(joined_runs(tuple(sorted(run for runs in group for run in runs))) for group in groups)
