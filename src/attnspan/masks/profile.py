"""How much work lies in the rows before a position, for any set of bands, in O(log bands) per question.

The number of keys a row sees is a piecewise linear function of the row: a band's row count climbs, rests and
falls at four rows that can be read off its bounds. Adding those pieces up once gives the whole mask's row
counts, and their running sum is a piecewise quadratic that answers "how much work is in rows [a, b)" for any
cut. Knows nothing of ranks or layouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from attnspan.masks.band import Band


class RowWork:
    """The work of rows, summed: `before(q)` counts the pairs in rows [0, q).

    >>> from attnspan.masks.band import tight
    >>> work = RowWork([tight(0, 4, 0, 4, hi=0)])
    >>> [work.before(q) for q in range(6)]
    [0, 1, 3, 6, 10, 10]
    >>> work.between(2, 4), work.at(3)
    (7, 4)
    """

    __slots__ = ("_base", "_constant", "_slope", "edges")

    def __init__(self, bands: Iterable[Band]):
        # On a segment the number is constant + slope * q; each piece changes both at its ends.
        changes: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for start, stop, constant, slope in (piece for band in bands for piece in row_pieces(band)):
            if start < stop:
                opened, closed = changes[start], changes[stop]
                opened[0] += constant
                opened[1] += slope
                closed[0] -= constant
                closed[1] -= slope
        self.edges = sorted(changes)
        """The rows where a piece begins or ends: band borders, the natural places to cut."""
        self._constant: list[int] = []
        self._slope: list[int] = []
        self._base: list[int] = []
        constant = slope = base = 0
        for index, edge in enumerate(self.edges):
            if index:
                base += _segment(constant, slope, self.edges[index - 1], edge)
            constant += changes[edge][0]
            slope += changes[edge][1]
            self._constant.append(constant)
            self._slope.append(slope)
            self._base.append(base)

    def before(self, q: int) -> int:
        """The number of pairs in rows below q."""
        index = bisect_right(self.edges, q) - 1
        if index < 0:
            return 0
        return self._base[index] + _segment(self._constant[index], self._slope[index], self.edges[index], q)

    def between(self, q0: int, q1: int) -> int:
        """The number of pairs in rows [q0, q1)."""
        return self.before(q1) - self.before(q0)

    def over(self, rows: range) -> int:
        """The number of pairs in the rows of an ascending range.

        >>> from attnspan.masks.band import tight
        >>> RowWork([tight(0, 8, 0, 8, hi=0)]).over(range(1, 8, 2))  # rows 1 3 5 7 see 2 + 4 + 6 + 8 keys
        20
        """
        if not rows:
            return 0
        if rows.step == 1:
            return self.between(rows.start, rows.stop)
        total = 0
        for index in range(max(bisect_right(self.edges, rows.start) - 1, 0), len(self.edges) - 1):
            start, stop = self.edges[index], self.edges[index + 1]
            if start >= rows.stop:
                break
            first = len(range(rows.start, start, rows.step))
            inside = rows[first : len(range(rows.start, min(stop, rows.stop), rows.step))]
            if inside:
                total += len(inside) * self._constant[index]
                total += self._slope[index] * (len(inside) * (inside[0] + inside[-1]) // 2)
        return total

    def at(self, q: int) -> int:
        """The number of keys that row q sees."""
        index = bisect_right(self.edges, q) - 1
        return self._constant[index] + self._slope[index] * q if index >= 0 else 0


def _segment(constant: int, slope: int, start: int, stop: int) -> int:
    """The sum of constant + slope * q over rows [start, stop)."""
    rows = stop - start
    return rows * constant + slope * (rows * (start + stop - 1) // 2)


def row_pieces(band: Band) -> Iterable[tuple[int, int, int, int]]:
    """The number of keys a row of the band sees, right edge - left edge, as pieces (start, stop, constant, slope).

    A piece is constant + slope * q for the rows start <= q < stop.
    """
    full_right = min(max(band.k1 - band.hi, band.q0), band.q1)
    yield band.q0, full_right, band.hi + 1, 1
    yield full_right, band.q1, band.k1, 0
    leave_left = min(max(band.k0 - band.lo + 1, band.q0), band.q1)
    yield band.q0, leave_left, -band.k0, 0
    yield leave_left, band.q1, -band.lo, -1
