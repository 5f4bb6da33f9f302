"""Spans of keys, row by row, as tensors: the way from pairs that were asked to bands.

A span is the keys [start, stop) of one row. A band is a chain of spans in successive rows, whose starts rest and then
climb by one key a row, and whose stops climb and then rest::

    [ # # . . ]    start 0, stop 2
    [ # # # . ]          0       3
    [ . # # # ]          1       4

A row may stand for several queries: `repeated` writes them out. Everything is done to all spans at once, so that a
hundred thousand rows take milliseconds. Knows nothing of masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The keys [start, stop) of rows, a span each, those of a row disjoint.

    >>> RowSpans.of([[0, 0, 1], [1, 0, 3], [0, 1, 2]]).merged().bands().tolist()  # row 0: keys 0 and 1; row 1: 0 to 2
    [[0, 2, 0, 3, -1, 1]]
    """

    row: Tensor
    start: Tensor
    stop: Tensor

    @classmethod
    def of(cls, spans: Sequence[Sequence[int]]) -> RowSpans:
        """From triples."""
        return cls(*torch.tensor(spans, dtype=torch.int64, device="cpu").reshape(-1, 3).unbind(1))

    @classmethod
    def together(cls, parts: Sequence[RowSpans]) -> RowSpans:
        """All spans of several."""
        nothing = cls.of([])
        columns = zip(*((each.row, each.start, each.stop) for each in (nothing, *parts)), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    @classmethod
    def of_pairs(cls, allowed: Tensor, row: Tensor, start: Tensor) -> RowSpans:
        """Those of the pairs of boxes that are allowed, (N, n, m); boxes begin at a row and a key.

        >>> RowSpans.of_pairs(torch.tensor([[[1, 1, 0, 1]]]).bool(), torch.tensor([7]), torch.tensor([4]))
        RowSpans(row=tensor([7, 7]), start=tensor([4, 7]), stop=tensor([6, 8]))
        """
        begins, ends = allowed.clone(), allowed.clone()
        begins[..., 1:] &= ~allowed[..., :-1]
        ends[..., :-1] &= ~allowed[..., 1:]
        (box, nth, first), (*_, last) = begins.nonzero(as_tuple=True), ends.nonzero(as_tuple=True)
        return cls(row[box] + nth, start[box] + first, start[box] + last + 1).cpu()

    def cpu(self) -> RowSpans:
        """On the host."""
        return RowSpans(self.row.cpu(), self.start.cpu(), self.stop.cpu())

    def __len__(self) -> int:
        return len(self.row)

    def chosen(self, which: Tensor) -> RowSpans:
        """Some of them."""
        return RowSpans(self.row[which], self.start[which], self.stop[which])

    def merged(self) -> RowSpans:
        """The same keys in order, neighbours as one span."""
        at = self._places(self.row, self.start).argsort()
        row, start, stop = self.row[at], self.start[at], self.stop[at]
        begins, ends = torch.ones(2, len(at), dtype=torch.bool, device=at.device)
        begins[1:] = (row[1:] != row[:-1]) | (start[1:] != stop[:-1])
        ends[:-1] = begins[1:]
        return RowSpans(row[begins], start[begins], stop[ends])

    def repeated(self, times: int, rows: int) -> RowSpans:
        """Each row as so many rows, of which there are `rows` in all.

        >>> RowSpans.of([[0, 4, 8], [1, 6, 8]]).repeated(2, rows=3)
        RowSpans(row=tensor([0, 1, 2]), start=tensor([4, 4, 6]), stop=tensor([8, 8, 8]))
        """
        row = (self.row[:, None] * times + torch.arange(times, device=self.row.device)).flatten()
        every = RowSpans(row, self.start.repeat_interleave(times), self.stop.repeat_interleave(times))
        return every.chosen(row < rows)

    def bands(self) -> Tensor:
        """Bands of merged spans, (n, 6), each tight; some might still be joined.

        A chain ends where a start falls behind or a stop moves on again: two bands may meet there.
        """
        after, starts, stops = self._next()
        last = torch.arange(len(self), device=after.device)
        linked = after < len(self)
        following = after.clamp(max=max(len(self) - 1, 0))
        breaks = linked & linked[following] & ((starts > starts[following]) | (stops < stops[following]))
        linked[following[breaks]] = False
        last = torch.where(linked, following, last)
        begins = torch.ones_like(linked)
        begins[following[linked]] = False
        while not torch.equal(further := last[last], last):
            last = further
        first, last = begins.nonzero().flatten(), last[begins]
        q0, q1 = self.row[first], self.row[last] + 1
        k0, k1 = self.start[first], self.stop[last]
        return torch.stack([q0, q1, k0, k1, self.start[last] - q1 + 1, self.stop[first] - 1 - q0], 1)

    def _next(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each span the one that continues it in the next row, if any, and by how much start and stop move on.

        In a row, no two spans start within two keys of each other, so there is at most one.
        """
        places = self._places(self.row, self.start)
        after = torch.searchsorted(places, self._places(self.row + 1, self.start))
        there = after.clamp(max=max(len(self) - 1, 0))
        starts, stops = self.start[there] - self.start, self.stop[there] - self.stop
        follows = (after < len(self)) & (self.row[there] == self.row + 1)
        follows &= (starts >= 0) & (starts <= 1) & (stops >= 0) & (stops <= 1)
        return torch.where(follows, after, len(self)), starts, stops

    def _places(self, row: Tensor, start: Tensor) -> Tensor:
        """One number for a row and a key, in the order of both."""
        return row * (int(self.stop.max()) + 1 if len(self) else 1) + start
