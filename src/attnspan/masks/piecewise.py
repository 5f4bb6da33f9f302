"""A number for every row, linear between a few of them, and its running sum; asked for many rows at once.

What `profile.py` answers exactly and one row at a time is here a handful of tensors, for layouts, which ask thousands
of times. Numbers are float64: whole and exact up to 2^53, beyond that as good as layouts need. Knows nothing of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from attnspan.masks.columns import Columns

Pieces = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""(start, stop, constant, slope), a tensor each: constant + slope * q for the rows start <= q < stop."""


class Piecewise:
    """A sum of linear pieces.

    >>> some = Piecewise(pieces_of([(0, 4, 1, 1), (2, 6, 10, 0)]))
    >>> some.at(torch.arange(7)).tolist()
    [1.0, 2.0, 13.0, 14.0, 10.0, 10.0, 0.0]
    >>> some.before(torch.tensor([0, 3, 9])).tolist(), some.between(1, 3)
    ([0.0, 16.0, 50.0], 15.0)
    """

    def __init__(self, pieces: Pieces):
        start, stop, constant, slope = (torch.cat(columns) for columns in zip(*pieces, strict=True))
        filled = (start < stop).nonzero().squeeze(1)
        start, stop = start.index_select(0, filled), stop.index_select(0, filled)
        lines = torch.stack([constant, slope]).index_select(1, filled)
        ends = torch.cat([start.new_zeros(1), start, stop])  # row 0 is an edge, so that none lies before the first
        ends, order = ends.sort()
        lines = torch.cat([lines.new_zeros(2, 1), lines, -lines], 1).index_select(1, order).cumsum(1)
        last = torch.cat([ends[1:] != ends[:-1], ends.new_ones(1, dtype=torch.bool)]).nonzero().squeeze(1)
        self.edges: Tensor = ends.index_select(0, last)
        self._lines: Tensor = lines.index_select(1, last)

    @cached_property
    def _squares(self) -> Tensor:
        """The running sum as a + b q + c q^2 between two edges; it has no jumps."""
        constant, slope = self._lines
        b, c = constant - slope / 2, slope / 2
        edges = self.edges.double()
        sums = edges[1:] * (b[:-1] + c[:-1] * edges[1:]) - edges[:-1] * (b[:-1] + c[:-1] * edges[:-1])
        base = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
        return torch.stack([base - edges * (b + c * edges), b, c])

    @cached_property
    def total(self) -> float:
        """The sum of all rows."""
        edges, a, b, c = self.lists
        return a[-1] + edges[-1] * (b[-1] + c[-1] * edges[-1])

    def at(self, rows: Tensor) -> Tensor:
        """The number of each row."""
        constant, slope = self._lines[:, self._index(rows)]
        return torch.addcmul(constant, slope, rows)

    def before(self, rows: Tensor) -> Tensor:
        """The sum of all rows before each."""
        a, b, c = self._squares[:, self._index(rows)]
        return torch.addcmul(a, rows, torch.addcmul(b, c, rows))

    def between(self, start: int, stop: int) -> float:
        """The sum of the rows [start, stop)."""
        return self.sum_before(stop) - self.sum_before(start)

    def sum_before(self, row: int) -> float:
        """The sum of all rows before one."""
        edges, a, b, c = self.lists
        index = bisect_right(edges, row) - 1
        return a[index] + row * (b[index] + c[index] * row)

    def number_at(self, row: int) -> float:
        """The number of one row."""
        edges, constant, slope = self._line_lists
        index = bisect_right(edges, row) - 1
        return constant[index] + slope[index] * row

    def bends(self, most: int) -> list[int]:
        """The first edges where the sum changes its line; at the others, what ends and what begins cancel out.

        >>> Piecewise(pieces_of([(0, 4, 1, 0), (4, 8, 1, 0)])).bends(3)
        [0, 8]
        """
        changed = (torch.diff(self._lines, prepend=self._lines.new_zeros(2, 1)) != 0).any(0)
        found: list[int] = self.edges[changed][:most].tolist()
        return found

    def _index(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self.edges, rows, right=True) - 1

    @cached_property
    def lists(self) -> tuple[list[int], list[float], list[float], list[float]]:
        """(edges, a, b, c): the sum of the rows before q is a + b q + c q^2 from each edge on."""
        a, b, c = self._squares.tolist()
        return self.edges.tolist(), a, b, c

    @cached_property
    def _line_lists(self) -> tuple[list[int], list[float], list[float]]:
        constant, slope = self._lines.tolist()
        return self.edges.tolist(), constant, slope


def pieces_of(pieces: Iterable[tuple[int, int, float, float]]) -> Pieces:
    """Pieces one by one as columns."""
    table = torch.tensor(list(pieces), dtype=torch.float64, device="cpu").view(-1, 4)
    start, stop = table[:, :2].long().unbind(1)
    return [(start, stop, table[:, 2], table[:, 3])]


def weighted(pieces: Callable[[Columns], Pieces], sets: Iterable[tuple[int, Columns]]) -> Piecewise:
    """The sum over sets of bands, each times its weight, of what `pieces` counts in bands.

    >>> from attnspan.masks.band import tight
    >>> causal = Columns.of([tight(0, 4, 0, 4, hi=0)])
    >>> weighted(row_work, [(1, causal), (10, causal)]).at(torch.arange(5)).tolist()
    [11.0, 22.0, 33.0, 44.0, 0.0]
    """
    found = pieces_of([])
    for weight, bands in sets:
        for start, stop, constant, slope in pieces(bands):
            found.append(
                (start, stop, constant, slope) if weight == 1 else (start, stop, weight * constant, weight * slope)
            )
    return Piecewise(found)


def row_work(bands: Columns) -> Pieces:
    """The number of keys that a row of each band sees, which is right edge - left edge."""
    q0, q1, k0, k1, lo, hi = bands
    zero, one = torch.zeros_like(q0).double(), torch.ones_like(q0).double()
    full_right = torch.minimum(torch.maximum(k1 - hi, q0), q1)
    leave_left = torch.minimum(torch.maximum(k0 - lo + 1, q0), q1)
    return [
        (q0, full_right, (hi + 1).double(), one),
        (full_right, q1, k1.double(), zero),
        (q0, leave_left, -k0.double(), zero),
        (leave_left, q1, -lo.double(), -one),
    ]
