"""What lies where: ranges and bands, found by an interval of positions.

A plan of a thousand ranks has thousands of runs and bands, and one rank asks only for those near its own. Both tables
are sorted once and bisected ever after. Knows nothing of ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from attnspan.masks.band import Band


class Ranges:
    """Disjoint ranges of positions: the plain ones are bisected, each with a step is tried.

    >>> Ranges([range(4, 8), range(0, 4), range(8, 16)]).meeting(2, 6)
    [1, 0]
    """

    __slots__ = ("_plain", "_starts", "_stops", "_striped", "ranges")

    def __init__(self, ranges: Sequence[range]):
        self.ranges = ranges
        plain = sorted([(r.start, r.stop, i) for i, r in enumerate(ranges) if r.step == 1])
        self._starts = [start for start, _, _ in plain]
        self._stops = [stop for _, stop, _ in plain]
        self._plain = [i for _, _, i in plain]
        self._striped = [i for i, r in enumerate(ranges) if r.step > 1]

    @property
    def are_striped(self) -> bool:
        """Whether any has a step."""
        return bool(self._striped)

    def meeting(self, start: int, stop: int) -> list[int]:
        """The numbers of the ranges that may hold a position of [start, stop)."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return self._plain[first:last] + self._striped


class Near:
    """Bands by the interval they cover on one side: `Near.rows(bands)` or `Near.cols(bands)`.

    >>> from attnspan.masks.band import tight
    >>> bands = [tight(0, 4, 0, 4), tight(4, 8, 0, 8), tight(8, 9, 8, 9)]
    >>> Near.rows(bands).meeting(2, 5), Near.cols(bands).meeting(6, 7)
    ([0, 1], [1])
    """

    __slots__ = ("_order", "_reach", "_starts", "_stops")

    def __init__(self, sides: list[tuple[int, int]]):
        self._order = sorted(range(len(sides)), key=sides.__getitem__)
        self._starts = [sides[i][0] for i in self._order]
        self._stops = [sides[i][1] for i in self._order]
        self._reach = list(accumulate(self._stops, max))  # of this band or any before

    @classmethod
    def rows(cls, bands: Sequence[Band]) -> Near:
        return cls([(band.q0, band.q1) for band in bands])

    @classmethod
    def cols(cls, bands: Sequence[Band]) -> Near:
        return cls([(band.k0, band.k1) for band in bands])

    def meeting(self, start: int, stop: int) -> list[int]:
        """The numbers of the bands with a position in [start, stop)."""
        first, last = bisect_right(self._reach, start), bisect_left(self._starts, stop)
        return [self._order[i] for i in range(first, last) if self._stops[i] > start]
