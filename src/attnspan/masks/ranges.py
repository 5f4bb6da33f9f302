"""Ranges found by an interval of positions.

A plan of a thousand ranks has thousands of runs, and one rank asks only for those near its own. They are sorted once
and bisected ever after.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


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
