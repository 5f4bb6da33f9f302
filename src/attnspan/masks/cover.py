"""What a plan is made from where a mask is a function: pairs that are certain, and pairs to be evaluated.

Bands say exactly which pairs count. A function can only be evaluated, pair by pair, and its results may need a band for
every few pairs. So a plan is made from less: two disjoint sets of bands, where every allowed pair lies in one of them.
They are what full and partial blocks are to a BlockMask::

    certain   all of their pairs count     any kernel computes them
    partial   some of their pairs count    a kernel that evaluates the function computes them

Layouts, transfers and work are decided by both together, which is never less than what is needed; results stay exact,
because kernels evaluate the function again in partial bands. The library's own masks have none.

The two combine like the masks they stand for. With the outer set (certain and partial) and the inner one (certain)::

    a & b    outer & outer,  inner & inner
    a | b    outer | outer,  inner | inner
    ~a       all but inner,  all but outer

Knows nothing of tiles or ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from attnspan.masks.algebra import Bands, intersect, joined, subtract, union
from attnspan.masks.band import Band, tight
from attnspan.masks.row_spans import RowSpans


class Cover(NamedTuple):
    """Disjoint bands: all pairs of `certain` count, those of `partial` may; no others do.

    >>> Cover((tight(0, 4, 0, 4),)).is_exact
    True
    """

    certain: Bands
    partial: Bands = ()

    @property
    def bands(self) -> Bands:
        """Where an allowed pair can be."""
        return tuple(sorted((*self.certain, *self.partial))) if self.partial else self.certain

    @property
    def is_exact(self) -> bool:
        """Whether no pair needs to be evaluated."""
        return not self.partial

    @classmethod
    def between(cls, inner: Bands, outer: Bands) -> Cover:
        """From the pairs that surely count and those that may."""
        return cls(inner, subtract(outer, inner))

    def __and__(self, other: Cover) -> Cover:
        return Cover.between(intersect(self.certain, other.certain), intersect(self._outer, other._outer))

    def __or__(self, other: Cover) -> Cover:
        return Cover.between(union(self.certain, other.certain), union(self._outer, other._outer))

    def complement(self, everything: Band) -> Cover:
        """The other pairs of everything."""
        return Cover.between(subtract([everything], self._outer), subtract([everything], self.certain))

    @property
    def _outer(self) -> Bands:
        return joined(self.bands)


def bands_of_blocks(spans: RowSpans, height: int, q_len: int) -> Bands:
    """The bands of spans whose rows stand for so many queries each.

    >>> bands_of_blocks(RowSpans.of([[0, 0, 4], [1, 0, 4]]), 4, q_len=7)
    (Band(q0=0, q1=7, k0=0, k1=4, lo=-6, hi=3),)
    """
    merged = spans.merged()
    columns = zip(merged.row.tolist(), merged.start.tolist(), merged.stop.tolist(), strict=True)
    blocks = (tight(i * height, min((i + 1) * height, q_len), start, stop) for i, start, stop in columns)
    return joined(band for band in blocks if band is not None)
