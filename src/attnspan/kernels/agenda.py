"""The work of a kernel that computes many tiles in one call: which block of rows sees which columns.

Consecutive rows that lie in the same tiles are a row range. A row range is cut into blocks; each block is computed by
one program, which loops over the range's tiles. So one program sees all keys of a row: its result is final, and nothing
is merged::

    rows of a tile        columns of its tile
    [ 0, 70)              [0, 70)  causal               block [ 0, 64): tile 0
    [40, 90)              [70, 99) full                 block [40, 70): tiles 0 and 1 ...

For columns, and the rows that see them, the same holds with the diagonals mirrored. Blocks with the most work come
first, so that programs finish at about the same time. Rows in no tile are blocks without work; their results are
written too.

Programs that need positions have their tiles cut at the ends of runs, so that positions are affine in the rows of a
block and in the columns of a span; tables hold the coefficients.

Pure data, except that the tables are on a device, where they are cached for the next call with the same tiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.masks.tile import Tile, band_of

Side = Literal["rows", "cols"]
Positions = tuple[range, ...]


class Agenda(NamedTuple):
    """Blocks (first, last + 1, first span, last span + 1) and spans (first, last + 1, lo, hi), int32 tables. Of each
    its `AffinePositions`, where there are runs."""

    blocks: Tensor
    spans: Tensor
    blocks_at: Tensor
    spans_at: Tensor

    def some(self, blocks: range) -> Agenda:
        """The work of some blocks alone."""
        at = slice(blocks.start, blocks.stop)
        return Agenda(self.blocks[at], self.spans, self.blocks_at[at], self.spans_at)


class Runs(NamedTuple):
    """The positions of rows and of columns, run by run."""

    rows: Positions
    cols: Positions

    def of(self, tile: Tile) -> Runs:
        """Those of a tile's rows and columns."""
        return Runs(tuple(_part(self.rows, tile.rows)), tuple(_part(self.cols, tile.cols)))

    @property
    def in_step(self) -> bool:
        """Whether the distance between neighbours is the same everywhere: a block's diagonals are distances then."""
        return len({run.step for run in (*self.rows, *self.cols) if len(run) > 1}) < 2


class AffinePositions(NamedTuple):
    """Where indices lie: `first + step * index` is a position. Whether a mask_mod decides."""

    first: int = 0
    step: int = 0
    needs_mask_mod: bool = False


class TileSpan(NamedTuple):
    """A tile seen from one side: of `rows`, what lies in [start, stop) with lo <= it - row <= hi."""

    rows: range
    start: int
    stop: int
    lo: int
    hi: int
    spot: AffinePositions = AffinePositions()

    def seen(self, first: int, last: int) -> int:
        """About how much work rows [first, last] are: what any of them sees."""
        return max(0, min(last + self.hi + 1, self.stop) - max(first + self.lo, self.start))

    def leads(self, first: int, last: int) -> bool:
        """Whether every row sees on to its end, and begins at the end at the latest."""
        return first + self.hi >= self.stop - 1 and last + self.lo <= self.stop

    def follows(self, first: int, last: int) -> bool:
        """Whether every row sees from its start, and ends just before it at the earliest."""
        return last + self.lo <= self.start and first + self.hi >= self.start - 1


@lru_cache(maxsize=2048)
def agenda(
    tiles: tuple[Tile, ...], side: Side, count: int, block: int, device: torch.device, runs: Runs | None = None
) -> Agenda:
    """What the blocks of `count` rows (or columns) are to do.

    >>> tiles = (Tile(range(0, 70), range(0, 70), -69, 0), Tile(range(40, 90), range(70, 99), -49, 28))
    >>> blocks, spans, *_ = agenda(tiles, "rows", 100, 64, torch.device("cpu"))
    >>> blocks.tolist()  # the last ten rows see nothing
    [[40, 70, 1, 3], [0, 40, 0, 1], [70, 90, 3, 4], [90, 100, 4, 4]]
    >>> spans[1:3].tolist()
    [[0, 70, -69, 0], [70, 99, -19, 58]]
    """
    blocks: list[tuple[int, tuple[int, int, int, int]]] = []
    spans: list[tuple[int, int, int, int]] = []
    places: list[AffinePositions] = []
    own, others = ((), ()) if runs is None else (runs if side == "rows" else runs[::-1])
    for first, last, met in _row_ranges(_spans(tiles, side, own, others), count):
        at = len(spans)
        met = list(_joined(met, first, last - 1))
        spans += [(span.start, span.stop, span.lo, span.hi) for span in met]
        places += [span.spot for span in met]
        for top in range(first, last, block):
            bottom = min(top + block, last)
            work = sum(span.seen(top, bottom - 1) for span in met)
            blocks.append((-work, (top, bottom, at, len(spans))))
    table = [item for _, item in sorted(blocks)]
    with torch.inference_mode(False):  # made during evaluation, they serve training later
        plain = _table(table, device), _table(spans, device)
        if runs is None:
            return Agenda(*plain, *plain)
        starts = [_spot(own, first) for first, *_ in table]
        return Agenda(*plain, _table(starts, device, 3), _table(places, device, 3))


def _spans(tiles: tuple[Tile, ...], side: Side, own: Positions, others: Positions) -> list[TileSpan]:
    """Every tile from one side, cut where runs end."""
    spans = [_span(tile, side) for tile in tiles]
    if not own:
        return spans
    rows, cols = (own, others) if side == "rows" else (others, own)
    cut = [piece for tile in tiles for piece in _cut(tile, rows, cols)]
    return [
        _span(tile, side)._replace(
            spot=_spot(others, (tile.cols if side == "rows" else tile.rows).start, tile.needs_mask_mod)
        )
        for tile in cut
    ]


def _cut(tile: Tile, rows: Positions, cols: Positions) -> Iterator[Tile]:
    band = band_of(tile)
    for r0, r1 in _edges(rows):
        for c0, c1 in _edges(cols):
            if (piece := band.cut(r0, r1, c0, c1)) is not None:
                yield Tile.of(piece, tile.needs_mask_mod)


def _edges(runs: Positions) -> list[tuple[int, int]]:
    """The indices where runs begin and end."""
    return list(pairwise(accumulate(map(len, runs), initial=0)))


def _spot(runs: Positions, index: int, needs_mask_mod: bool = False) -> AffinePositions:
    """Of the run that an index lies in."""
    for run, (start, stop) in zip(runs, _edges(runs), strict=True):
        if start <= index < stop:
            return AffinePositions(run.start - run.step * start, run.step, needs_mask_mod)
    raise AssertionError("runs hold every index")


def _part(runs: Positions, indices: range) -> Iterator[range]:
    """The positions of some indices."""
    for run, (start, stop) in zip(runs, _edges(runs), strict=True):
        inside = indices[bisect_left(indices, start) : bisect_left(indices, stop)]
        if inside:
            yield run[inside.start - start : inside[-1] + 1 - start : inside.step]


def _span(tile: Tile, side: Side) -> TileSpan:
    rows, cols = tile.rows, tile.cols
    assert rows.step == cols.step == 1, "neighbours in a tile are neighbours in its buffers"
    shift = cols.start - rows.start  # beyond a tile's corners, a diagonal does not bite
    lo, hi = max(tile.lo, 1 - len(rows)) + shift, min(tile.hi, len(cols) - 1) + shift
    return (
        TileSpan(rows, cols.start, cols.stop, lo, hi)
        if side == "rows"
        else TileSpan(cols, rows.start, rows.stop, -hi, -lo)
    )


def _row_ranges(spans: list[TileSpan], count: int) -> Iterator[tuple[int, int, list[TileSpan]]]:
    """(first, last + 1, spans) of rows that lie in the same ones."""
    edges = sorted({0, count, *(edge for span in spans for edge in (span.rows.start, span.rows.stop))})
    starting: dict[int, list[TileSpan]] = {}
    for span in spans:
        starting.setdefault(span.rows.start, []).append(span)
    met: list[TileSpan] = []
    for first, last in pairwise(edges):
        met = [span for span in met if span.rows.stop > first] + starting.get(first, [])
        yield first, last, met


def _joined(spans: list[TileSpan], first: int, last: int) -> Iterator[TileSpan]:
    """Neighbouring spans as one, where rows [first, last] see the end of one and the beginning of the next.

    So a full tile and the causal one beside it become the band that they were cut from, with one edge less.
    """
    whole: TileSpan | None = None
    for span in sorted(spans, key=lambda span: span.start):
        beside = whole is not None and whole.stop == span.start and whole.spot == span.spot
        if whole is not None and beside and whole.leads(first, last) and span.follows(first, last):
            whole = TileSpan(whole.rows, whole.start, span.stop, whole.lo, span.hi, whole.spot)
            continue
        if whole is not None:
            yield whole
        whole = span
    if whole is not None:
        yield whole


def _table(rows: Sequence[tuple[int, ...]], device: torch.device, width: int = 4) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(-1, width).to(device)
