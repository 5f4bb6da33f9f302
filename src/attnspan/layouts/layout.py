"""Who owns which positions: the base of every layout.

A layout deals the positions 0 .. seq_len - 1 of a sequence to `ranks` ranks, for any length and any number of
ranks; a rank may get nothing. Each rank's share is an ordered list of runs; that order is the order of its
shard in memory. A new layout defines `_shards`; everything else is derived from it.

>>> from attnspan.layouts import HeadTail
>>> print(HeadTail(ranks=2))
HeadTail(ranks=2) on 8 tokens
0 0 1 1 1 1 0 0
rank 0: [0, 2) [6, 8)
rank 1: [2, 6)

Knows masks only to measure how their work falls on the ranks; knows nothing of process groups or tensors of
data.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from attnspan.errors import LayoutError, integer
from attnspan.layouts.run import Run, Runs, joined_runs, positions_of, tokens_in
from attnspan.masks import Mask
from attnspan.masks.algebra import Bands
from attnspan.masks.profile import RowWork
from attnspan.masks.real_tensors import with_real_tensors

Shards = tuple[Runs, ...]
"""The runs of every rank, by rank."""


class Layout(ABC):
    """A partition of a sequence's positions over ranks."""

    __slots__ = ()

    if TYPE_CHECKING:  # most have it as a field, some derive it

        @property
        def ranks(self) -> int:
            """How many ranks it deals to."""

    # ---- what a new layout defines -------------------------------------------------------------------------

    @abstractmethod
    def _shards(self, seq_len: int, row: int) -> Shards:
        """The runs of every rank for one batch row; together they hold each position once."""

    @property
    def rows(self) -> int:
        """How many batch rows the layout tells apart; 1 means that all rows are dealt alike."""
        return 1

    @property
    def natural_len(self) -> int | None:
        """The sequence length the layout was written for, if it fixes one."""
        return None

    @property
    def least_len(self) -> int:
        """The shortest sequence that its masks can be laid over, where it fixes none."""
        return 1

    # ---- what everyone asks --------------------------------------------------------------------------------

    def shards(self, seq_len: int, row: int = 0) -> Shards:
        """The runs of every rank, adjacent ones joined."""
        seq_len = integer("seq_len", seq_len, at_least=1, error=LayoutError)
        row = integer("row", row, error=LayoutError)
        if self.rows > 1 and row >= self.rows:
            raise LayoutError(f"row must be below the layout's {self.rows} batch rows, got {row}")
        return _cached_shards(self, seq_len, row if self.rows > 1 else 0)

    def runs(self, seq_len: int, rank: int, row: int = 0) -> Runs:
        """The runs of one rank.

        >>> from attnspan.layouts import Contiguous
        >>> Contiguous(ranks=3).runs(8, rank=1)
        (Run(start=2, stop=5, step=1),)
        """
        rank = integer("rank", rank, error=LayoutError)
        if rank >= self.ranks:
            raise LayoutError(f"rank must be below the layout's {self.ranks} ranks, got {rank}")
        return self.shards(seq_len, row)[rank]

    def positions(self, seq_len: int, row: int = 0) -> list[list[int]]:
        """Every rank's positions, in shard order."""
        return [[p for run in runs for p in run.positions] for runs in self.shards(seq_len, row)]

    def tokens(self, seq_len: int, row: int = 0) -> list[int]:
        """The number of positions on each rank."""
        return list(map(tokens_in, self.shards(seq_len, row)))

    def owner(self, seq_len: int, position: int, row: int = 0) -> int:
        """The rank that holds a position."""
        shards = self.shards(seq_len, row)
        position = integer("position", position, error=LayoutError)
        if position >= seq_len:
            raise LayoutError(f"position must be below seq_len ({seq_len}), got {position}")
        return next(rank for rank, runs in enumerate(shards) for run in runs if position in run.positions)

    def permutation(self, seq_len: int, row: int = 0) -> torch.Tensor:
        """The positions in the order of the shards, rank after rank: `x[permutation]` lays a sequence out.

        >>> from attnspan.layouts import HeadTail
        >>> HeadTail(ranks=2).permutation(8).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        """
        shards = self.shards(seq_len, row)
        return positions_of(run for runs in shards for run in runs)

    def inverse(self, seq_len: int, row: int = 0) -> torch.Tensor:
        """Where each position went: `y[inverse]` puts a laid-out sequence back in order."""
        order = self.permutation(seq_len, row)
        back = torch.empty_like(order)
        back[order] = torch.arange(seq_len, device="cpu")
        return back

    def works(self, bands: Bands, seq_len: int, row: int = 0) -> list[int]:
        """The number of pairs of some bands whose query each rank holds in one batch row."""
        profile = RowWork(bands)
        return [sum(profile.over(run.positions) for run in runs) for runs in self.shards(seq_len, row)]

    def work_per_rank(self, mask: Mask, seq_len: int) -> list[int]:
        """The number of allowed pairs whose query each rank holds, over all batch rows the mask tells apart.

        >>> from attnspan.layouts import Contiguous
        >>> from attnspan.masks import Causal
        >>> Contiguous(ranks=2).work_per_rank(Causal(), 8)
        [10, 26]
        """
        self.check_rows(mask.rows)
        rows = range(max(mask.rows, self.rows))
        works = [self.works(mask.cover(seq_len, row=row).bands, seq_len, row) for row in rows]
        return [sum(each) for each in zip(*works, strict=True)]

    def imbalance(self, mask: Mask, seq_len: int) -> float:
        """The largest rank's work over the mean: 1.0 is perfect, `ranks` is one rank doing everything.

        >>> from attnspan.layouts import HeadTail
        >>> from attnspan.masks import Causal
        >>> HeadTail(ranks=2).imbalance(Causal(), 8)
        1.0
        """
        return imbalance(self.work_per_rank(mask, seq_len))

    def check_rows(self, rows: int) -> None:
        """Refuse a batch (or a mask) whose number of rows is not the layout's."""
        if self.rows != 1 and rows not in (1, self.rows):
            raise LayoutError(f"the layout deals {self.rows} batch rows, each its own way, got {rows}")

    def __str__(self) -> str:
        from attnspan.layouts.drawing import draw

        return draw(self)


@functools.lru_cache(maxsize=256)
@with_real_tensors
def _cached_shards(layout: Layout, seq_len: int, row: int) -> Shards:
    # A memo of a pure function: layouts are frozen and compare by value.
    return tuple(joined_runs(runs) for runs in layout._shards(seq_len, row))


def imbalance(works: Sequence[float]) -> float:
    """The largest of some works over their mean; 1.0 where there is no work at all."""
    return max(works) * len(works) / sum(works) if any(works) else 1.0


def check_ranks(ranks: object) -> int:
    """A number of ranks, at least 1."""
    return integer("ranks", ranks, at_least=1, hint="one process is ranks=1", error=LayoutError)


def spans(seq_len: int, parts: int) -> list[Run | None]:
    """`parts` consecutive spans whose lengths differ by at most one; None for an empty one.

    >>> spans(7, 3)
    [Run(start=0, stop=2, step=1), Run(start=2, stop=4, step=1), Run(start=4, stop=7, step=1)]
    """
    edges = [i * seq_len // parts for i in range(parts + 1)]
    return [Run(a, b) if a < b else None for a, b in pairwise(edges)]
