"""Sets of bands: intersection, difference, union, and joining pieces back together.

A set of pairs is a tuple of disjoint bands. The operations keep the pieces disjoint and cost about
(bands in + bands out) x log, because pairs of bands are only compared where their rows meet.
Knows nothing of masks or lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attnspan.masks.band import UNBOUNDED, Band, tight

Bands = tuple[Band, ...]


def area(bands: Iterable[Band]) -> int:
    """The number of pairs in disjoint bands.

    >>> area([tight(0, 2, 0, 2), tight(2, 4, 0, 4)])
    12
    """
    return sum(band.area for band in bands)


def intersect(left: Sequence[Band], right: Sequence[Band]) -> Bands:
    """The pairs in both sets.

    >>> intersect([tight(0, 4, 0, 4, hi=0)], [tight(0, 2, 0, 2), tight(2, 4, 2, 4)])
    (Band(q0=0, q1=2, k0=0, k1=2, lo=-1, hi=0), Band(q0=2, q1=4, k0=2, k1=4, lo=-1, hi=0))
    """
    if len(left) == 1 or len(right) == 1:  # as where documents are causal
        (one,), others = (left, right) if len(left) == 1 else (right, left)
        both = [one & other for other in others]
    else:
        both = [left[i] & right[j] for i, j in meeting(left, right)]
    return tuple(sorted(band for band in both if band is not None))


def union(left: Sequence[Band], right: Sequence[Band]) -> Bands:
    """The pairs in either set, disjoint.

    >>> union([tight(0, 4, 0, 4, hi=0)], [tight(0, 4, 0, 4)])
    (Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=3),)
    """
    return joined([*left, *subtract(right, left)])


def subtract(left: Sequence[Band], right: Sequence[Band]) -> Bands:
    """The pairs of the left set that are not in the right one.

    >>> subtract([tight(0, 4, 0, 4)], [tight(0, 4, 0, 4, hi=0)])
    (Band(q0=0, q1=3, k0=1, k1=4, lo=1, hi=3),)
    """
    holes: dict[int, list[Band]] = {}
    for i, j in meeting(left, right):
        holes.setdefault(i, []).append(right[j])
    return joined([piece for i, band in enumerate(left) for piece in _without(band, holes.get(i, []))])


def joined(bands: Iterable[Band]) -> Bands:
    """The same set in fewer, larger bands: neighbours whose union is a band become one.

    Two disjoint bands join exactly when their hull holds no pair beyond theirs.

    >>> joined([tight(0, 2, 0, 2, hi=0), tight(2, 4, 0, 2), tight(2, 4, 2, 4, hi=0)])
    (Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0),)
    """
    pieces = list(bands)
    while True:
        before = len(pieces)
        pieces = _joined_neighbours(sorted(pieces, key=lambda b: (b.q0, b.q1, b.k0)))
        pieces = _joined_neighbours(sorted(pieces, key=lambda b: (b.k0, b.k1, b.q0)))
        pieces = _joined_neighbours(sorted(pieces))
        if len(pieces) == before:
            return tuple(pieces)


def meeting(left: Sequence[Band], right: Sequence[Band]) -> Iterator[tuple[int, int]]:
    """The index pairs (i, j) whose bands share a row, each once.

    >>> sorted(meeting([tight(0, 4, 0, 1), tight(4, 8, 0, 1)], [tight(2, 6, 0, 1)]))
    [(0, 0), (1, 0)]
    """
    stack = [(list(range(len(left))), list(range(len(right))), -UNBOUNDED, UNBOUNDED)]
    while stack:
        ours, theirs, first, last = stack.pop()
        if not ours or not theirs:
            continue
        middle = _middle([*(left[i] for i in ours), *(right[j] for j in theirs)], first, last)
        if len(ours) * len(theirs) <= 32 or middle is None:
            for i in ours:
                a = left[i]
                for j in theirs:
                    b = right[j]
                    # A pair that spans several slabs is told apart by its first common row.
                    if first <= max(a.q0, b.q0) < min(a.q1, b.q1, last):
                        yield i, j
            continue
        above = [i for i in ours if left[i].q0 < middle], [j for j in theirs if right[j].q0 < middle]
        below = [i for i in ours if left[i].q1 > middle], [j for j in theirs if right[j].q1 > middle]
        stack += [(*above, first, middle), (*below, middle, last)]


def _middle(bands: list[Band], first: int, last: int) -> int | None:
    """The median row edge strictly inside (first, last), where a cut parts the work, or None."""
    edges = sorted(edge for b in bands for edge in (b.q0, b.q1) if first < edge < last)
    return edges[len(edges) // 2] if edges else None


def _without(band: Band, holes: list[Band]) -> list[Band]:
    """The pieces of a band outside all the holes."""
    holes = [hole for hole in holes if band & hole is not None]
    if len(holes) > 4:  # many holes: part the band first, so that each piece meets few
        cut = _middle(holes, band.q0, band.q1)
        if cut is not None:
            above = band.cut(band.q0, cut, band.k0, band.k1)
            below = band.cut(cut, band.q1, band.k0, band.k1)
            return [piece for part in (above, below) if part for piece in _without(part, holes)]
    pieces = [band]
    for hole in holes:
        pieces = [rest for piece in pieces for rest in _around(piece, hole)]
    return pieces


def _around(band: Band, hole: Band) -> Iterator[Band]:
    """The parts of a band above, below, left, right and on both diagonal sides of a hole."""
    inner = band & hole
    if inner is None:
        yield band
        return
    q0, q1, k0, k1, lo, hi = inner
    rest = (
        band.cut(band.q0, q0, band.k0, band.k1),
        band.cut(q1, band.q1, band.k0, band.k1),
        band.cut(q0, q1, band.k0, k0),
        band.cut(q0, q1, k1, band.k1),
        tight(q0, q1, k0, k1, lo=band.lo, hi=lo - 1),
        tight(q0, q1, k0, k1, lo=hi + 1, hi=band.hi),
    )
    yield from (piece for piece in rest if piece is not None)


def _joined_neighbours(pieces: list[Band]) -> list[Band]:
    """One pass over a sorted list: each band joins the one before it if their union is a band."""
    out: list[Band] = []
    for piece in pieces:
        while out:
            last = out[-1]
            if _are_apart(last, piece):
                break
            hull = last.hull(piece)
            if hull.area != last.area + piece.area:
                break
            out.pop()
            piece = hull
        out.append(piece)
    return out


def _are_apart(a: Band, b: Band) -> bool:
    """Whether bands that share no row and no column, as documents do, have a pair of their hull between them.

    It looks at two pairs, and is asked first because it is quick: no answer says that there is none.
    """
    if (a.q1 > b.q0 and b.q1 > a.q0) or (a.k1 > b.k0 and b.k1 > a.k0):
        return False
    lo, hi = min(a.lo, b.lo), max(a.hi, b.hi)
    return lo <= b.k0 - a.q1 + 1 <= hi or lo <= a.k1 - 1 - b.q0 <= hi
