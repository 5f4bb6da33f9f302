"""A band: the one shape that every mask here is made of.

A band is the set of (query, key) pairs with::

    q0 <= q < q1, k0 <= k < k1, lo <= k - q <= hi

that is, a rectangle cut by two diagonals::

        k0      k1
     q0 [ # # . . ]       rectangle, triangle, trapezoid and
        [ # # # . ]       diagonal stripe are all bands
     q1 [ . # # # ]

Bands are closed under intersection, keep their kind when rows and columns are shifted, have a closed-form
area, and stay bands when both sides are thinned by the same step. So masks can be measured, cut, sent and
drawn as data.

[Note: tight bands] Six numbers can describe the same set in many ways: a diagonal that never bites, a row
with no key. `tight` makes each bound as strong as the others imply. The result is unique for a set, every row
and column of it holds at least one pair, and therefore equality, hull and area need no special cases. Every
band made by this package is tight; build them with `tight`, not with `Band(...)`.
"""

from __future__ import annotations

from typing import NamedTuple

UNBOUNDED = 1 << 62
"""A diagonal bound that never bites; `tight` replaces it by the real one."""


class Band(NamedTuple):
    """Pairs with q0 <= q < q1, k0 <= k < k1 and lo <= k - q <= hi.

    >>> causal = tight(0, 4, 0, 4, hi=0)
    >>> causal
    Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0)
    >>> causal.area
    10
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int

    @property
    def area(self) -> int:
        """The number of pairs, in closed form.

        >>> tight(0, 6, 0, 6, lo=-2, hi=0).area  # rows hold 1, 2, 3, 3, 3, 3 keys
        15
        """
        rows = self.q1 - self.q0
        # The right edge climbs with q until it meets k1; the left edge rests on k0 until it is lifted.
        climbing = min(max(self.k1 - self.hi - self.q0, 0), rows)
        right = climbing * (self.q0 + self.hi) + climbing * (climbing - 1) // 2 + (rows - climbing) * (self.k1 - 1)
        resting = min(max(self.k0 - self.lo - self.q0 + 1, 0), rows)
        lifted = rows - resting
        left = resting * self.k0 + lifted * (self.q0 + resting + self.lo) + lifted * (lifted - 1) // 2
        return right - left + rows

    @property
    def is_rectangle(self) -> bool:
        """Whether no diagonal cuts the rectangle.

        >>> tight(0, 2, 4, 8).is_rectangle, tight(0, 2, 0, 2, hi=0).is_rectangle
        (True, False)
        """
        return self.lo == self.k0 - self.q1 + 1 and self.hi == self.k1 - 1 - self.q0

    def shift(self, q: int, k: int) -> Band:
        """The same shape, moved down by q rows and right by k columns.

        >>> tight(0, 2, 0, 2, hi=0).shift(3, 5)
        Band(q0=3, q1=5, k0=5, k1=7, lo=1, hi=2)
        """
        return Band(self.q0 + q, self.q1 + q, self.k0 + k, self.k1 + k, self.lo + k - q, self.hi + k - q)

    def cut(self, q0: int, q1: int, k0: int, k1: int) -> Band | None:
        """The part inside the rectangle [q0, q1) x [k0, k1), or None.

        >>> tight(0, 4, 0, 4, hi=0).cut(2, 4, 0, 2)
        Band(q0=2, q1=4, k0=0, k1=2, lo=-3, hi=-1)
        """
        return tight(max(self.q0, q0), min(self.q1, q1), max(self.k0, k0), min(self.k1, k1), lo=self.lo, hi=self.hi)

    def __and__(self, other: Band) -> Band | None:
        """The pairs in both, or None.

        >>> tight(0, 8, 0, 8, hi=0) & tight(4, 8, 4, 8)
        Band(q0=4, q1=8, k0=4, k1=8, lo=-3, hi=0)
        """
        return tight(
            max(self.q0, other.q0),
            min(self.q1, other.q1),
            max(self.k0, other.k0),
            min(self.k1, other.k1),
            lo=max(self.lo, other.lo),
            hi=min(self.hi, other.hi),
        )

    def hull(self, other: Band) -> Band:
        """The smallest band that holds both.

        >>> tight(0, 2, 0, 2).hull(tight(0, 2, 2, 4))
        Band(q0=0, q1=2, k0=0, k1=4, lo=-1, hi=3)
        """
        return Band(
            min(self.q0, other.q0),
            max(self.q1, other.q1),
            min(self.k0, other.k0),
            max(self.k1, other.k1),
            min(self.lo, other.lo),
            max(self.hi, other.hi),
        )

    def thin(self, q_start: int, k_start: int, step: int) -> Band | None:
        """The band seen by every step-th row and column, in their own numbering.

        Row i stands for position q_start + i * step, column j for k_start + j * step; rows and columns before
        the starts are left out.

        >>> tight(0, 8, 0, 8, hi=0).thin(q_start=1, k_start=0, step=2)  # queries 1 3 5 7, keys 0 2 4 6
        Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0)
        >>> tight(0, 8, 0, 8, hi=0).thin(q_start=0, k_start=1, step=2)  # queries 0 2 4 6, keys 1 3 5 7
        Band(q0=1, q1=4, k0=0, k1=3, lo=-3, hi=-1)
        """
        offset = k_start - q_start
        return tight(
            max(0, ceil_div(self.q0 - q_start, step)),
            ceil_div(self.q1 - q_start, step),
            max(0, ceil_div(self.k0 - k_start, step)),
            ceil_div(self.k1 - k_start, step),
            lo=ceil_div(self.lo - offset, step),
            hi=(self.hi - offset) // step,
        )


def tight(q0: int, q1: int, k0: int, k1: int, *, lo: int = -UNBOUNDED, hi: int = UNBOUNDED) -> Band | None:
    """The band of these bounds with every bound as strong as it can be, or None if it holds no pair.

    >>> tight(0, 8, 4, 6, hi=0)  # rows before 4 see no key
    Band(q0=4, q1=8, k0=4, k1=6, lo=-3, hi=0)
    >>> tight(0, 4, 4, 8, hi=0) is None
    True
    """
    if lo > hi:
        return None
    # Comparisons, not max and min: packs of thousands of documents come through here at every step of training.
    if q0 < k0 - hi:
        q0 = k0 - hi
    if q1 > k1 - lo:
        q1 = k1 - lo
    if k0 < q0 + lo:
        k0 = q0 + lo
    if k1 > q1 + hi:
        k1 = q1 + hi
    if q0 >= q1 or k0 >= k1:
        return None
    return Band(q0, q1, k0, k1, lo if lo > k0 - q1 else k0 - q1 + 1, hi if hi < k1 - q0 else k1 - 1 - q0)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up.

    >>> ceil_div(7, 2), ceil_div(-7, 2)
    (4, -3)
    """
    return -(-a // b)
