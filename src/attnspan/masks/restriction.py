"""What a set of bands looks like to a rank that holds only some rows and some columns.

Rows and columns are given as lists of ranges of positions (with a step, for striped ones). Each band meets each pair of
ranges in at most a few pieces, and a piece is again a band, in the numbering of its own rows and columns:

* ranges of equal step keep a band a band (`Band.thin`);
* a rectangle stays a rectangle whatever the steps;
* otherwise both ranges are parted into strides of their common multiple, and each pair of strides holds a band.

Knows nothing of ranks: who holds the ranges is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import NamedTuple

from attnspan.masks.band import Band, tight
from attnspan.masks.ranges import Ranges


class Piece(NamedTuple):
    """A band inside row range number `row_range` and column range number `col_range`.

    `rows` and `cols` are the entries of those ranges that the band's own rows and columns stand for.
    """

    row_range: int
    col_range: int
    rows: range
    cols: range
    band: Band


def restrict_rows(found: Iterable[tuple[int, Band]], rows: Sequence[range], columns: Ranges) -> Iterator[Piece]:
    """The pieces of bands inside every pair of a row range and a column range, non-empty ones only.

    `found` are the `row_pieces` of the bands. Ranges of one side must not overlap; their order is free.

    >>> causal, rows = [tight(0, 8, 0, 8, hi=0)], [range(6, 8)]
    >>> for piece in restrict_rows(row_pieces(causal, rows), rows, Ranges([range(0, 2), range(6, 8)])):
    ...     print(piece.col_range, piece.band)
    0 Band(q0=0, q1=2, k0=0, k1=2, lo=-1, hi=1)
    1 Band(q0=0, q1=2, k0=0, k1=2, lo=-1, hi=0)
    """
    for i, piece in found:
        for j in columns.meeting(piece.k0, piece.k1):
            yield from _pieces(piece, (i, j), rows[i], columns.ranges[j])


def restrict_column(bands: Sequence[Band], rows: Ranges, number: int, col: range) -> Iterator[Piece]:
    """`restrict_rows` to a single column range, whose number is given, and any of many row ranges.

    >>> causal = [tight(0, 8, 0, 8, hi=0)]
    >>> [piece.row_range for piece in restrict_column(causal, Ranges([range(0, 4), range(4, 8)]), 0, range(4, 6))]
    [1]
    """
    for band in bands:
        piece = band.cut(band.q0, band.q1, col.start, col.stop)
        if piece is not None:
            for i in rows.meeting(piece.q0, piece.q1):
                yield from _pieces(piece, (i, number), rows.ranges[i], col)


def row_pieces(bands: Sequence[Band], rows: Sequence[range]) -> Iterator[tuple[int, Band]]:
    """Each band cut to the hull of each row range it meets, with the number of the range."""
    for number, row in enumerate(rows):
        for band in bands:
            piece = band.cut(row.start, row.stop, band.k0, band.k1)
            if piece is not None:
                yield number, piece


def _pieces(band: Band, where: tuple[int, int], row: range, col: range) -> Iterator[Piece]:
    inside = band.cut(row.start, row.stop, col.start, col.stop)
    if inside is None:
        return
    if row.step == col.step == 1:
        yield Piece(*where, range(len(row)), range(len(col)), inside.shift(-row.start, -col.start))
        return
    if row.step == col.step or inside.is_rectangle:
        local = inside.thin(row.start, col.start, row.step) if row.step == col.step else _block(inside, row, col)
        if local:
            yield Piece(*where, range(len(row)), range(len(col)), local)
        return
    step = lcm(row.step, col.step)
    for i in range(min(step // row.step, len(row))):
        for j in range(min(step // col.step, len(col))):
            local = inside.thin(row[i], col[j], step)
            if local:
                rows = range(i, len(row), step // row.step)
                yield Piece(*where, rows, range(j, len(col), step // col.step), local)


def _block(rectangle: Band, row: range, col: range) -> Band | None:
    """The entries of two ranges that fall into a rectangle."""
    i0, i1 = (len(range(row.start, edge, row.step)) for edge in (rectangle.q0, rectangle.q1))
    j0, j1 = (len(range(col.start, edge, col.step)) for edge in (rectangle.k0, rectangle.k1))
    return tight(i0, i1, j0, j1)
