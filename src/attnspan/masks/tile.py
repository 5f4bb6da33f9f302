"""A tile: one kernel call, and how bands become tiles.

A tile takes some rows of the query buffer and some columns of the key buffer, and says which pairs count by two
diagonals, counted from the tile's own corner: lo <= column - row <= hi.

    full       no diagonal bites                       any attention kernel, no mask
    causal     hi = 0 and nothing bites on the left    is_causal, aligned at the top left
    general    anything else                           a kernel that knows bands, or block-sized masks

Bands are first joined over the whole buffer, because kernels want few large tiles, then a band that only the upper
diagonal cuts is parted into a full tile and a causal one: both are the fastest calls there are.
Knows nothing of ranks, positions or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from attnspan.masks.algebra import joined
from attnspan.masks.band import Band, tight
from attnspan.masks.spans import merged

MAX_STACKED = 32
"""The most full tiles of one buffer that are looked at for a better cut: few and large ones gain by it."""

Kind = Literal["full", "causal", "general"]


class Tile(NamedTuple):
    """Rows and columns of two buffers, and the diagonals between them.

    >>> tile = Tile(range(4, 8), range(0, 4), lo=-3, hi=3)
    >>> tile.kind, tile.area
    ('full', 16)
    >>> Tile(range(4, 8), range(4, 8), lo=-3, hi=0).kind
    'causal'
    """

    rows: range
    cols: range
    lo: int
    hi: int
    needs_mask_mod: bool = False
    """Whether kernels must evaluate the mask's function, as in a partial block of a BlockMask (masks/cover.py)."""

    @staticmethod
    def of(band: Band, needs_mask_mod: bool = False) -> Tile:
        """The tile of a band over two buffers."""
        q0, q1, k0, k1, lo, hi = band
        return Tile(range(q0, q1), range(k0, k1), lo - k0 + q0, hi - k0 + q0, needs_mask_mod)

    @property
    def kind(self) -> Kind:
        """What kind of kernel call it is."""
        if self.lo > 1 - len(self.rows):
            return "general"
        return "full" if self.hi >= len(self.cols) - 1 else "causal" if self.hi == 0 else "general"

    @property
    def band(self) -> Band:
        """The allowed pairs, counted from the tile's corner."""
        band = tight(0, len(self.rows), 0, len(self.cols), lo=self.lo, hi=self.hi)
        assert band is not None, "a tile holds at least one pair"
        return band

    @property
    def area(self) -> int:
        """The number of allowed pairs."""
        return self.band.area

    def __str__(self) -> str:
        within = f" within {self.lo}..{self.hi}" if self.kind == "general" else ""
        mod = ", needs mask_mod" if self.needs_mask_mod else ""
        return f"{self.kind} {_span(self.rows)} x {_span(self.cols)}{within}{mod}"


def tiles_of(bands: Iterable[Band], needs_mask_mod: bool = False) -> Iterator[Tile]:
    """The tiles of disjoint bands over one pair of buffers.

    >>> for tile in tiles_of([tight(4, 8, 0, 8, hi=0)]):
    ...     print(tile)
    full [4, 8) x [0, 4)
    causal [4, 8) x [4, 8)
    """
    parts = [part for band in joined(bands) for part in _parted(band)]
    full = [part for part in parts if part.is_rectangle]
    for part in (*_stacked(full), *(part for part in parts if not part.is_rectangle)):
        yield Tile.of(part, needs_mask_mod)


def _parted(band: Band) -> Iterator[Band]:
    """A band as a rectangle and a triangle where only the upper diagonal cuts it, else as it is."""
    q0, q1, k0, k1, lo, hi = band
    corner = q0 + hi  # the last key of the first row: every row sees the keys before it, and it
    if lo > k0 - q1 + 1 or hi >= k1 - 1 - q0 or corner == k0:
        yield band
        return
    for part in (band.cut(q0, q1, k0, corner), band.cut(q0, q1, corner, k1)):
        assert part is not None, "the corner lies inside the band"
        yield part


def _stacked(full: list[Band]) -> list[Band]:
    """The same rectangles, cut so that every column is in as few as can be, if that makes no more of them.

    Two query chunks over key prefixes of different length share the shorter prefix: as one tile over both chunks it is
    one kernel call with more rows, and in backward its keys get one gradient, not two to be added.

    >>> _stacked([tight(0, 2, 0, 4), tight(2, 4, 0, 8)])
    [Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=3), Band(q0=2, q1=4, k0=4, k1=8, lo=1, hi=5)]
    """
    if not 2 <= len(full) <= MAX_STACKED:
        return full
    edges = sorted({edge for band in full for edge in (band.k0, band.k1)})
    columns = (
        tight(q0, q1, k0, k1)
        for k0, k1 in pairwise(edges)
        for q0, q1 in merged((band.q0, band.q1) for band in full if band.k0 <= k0 and k1 <= band.k1)
    )
    stacked = joined(column for column in columns if column is not None)
    return list(stacked) if len(stacked) <= len(full) else full


def band_of(tile: Tile) -> Band:
    """The band of a tile of neighbouring rows and columns: the way back from `Tile.of`.

    >>> band_of(Tile(range(4, 8), range(2, 6), lo=-3, hi=0))
    Band(q0=4, q1=8, k0=2, k1=6, lo=-5, hi=-2)
    """
    assert tile.rows.step == tile.cols.step == 1, "every n-th row of a buffer is no band of it"
    return tile.band.shift(tile.rows.start, tile.cols.start)


def _span(span: range) -> str:
    return f"[{span.start}, {span.stop})" + (f" step {span.step}" if span.step > 1 else "")
