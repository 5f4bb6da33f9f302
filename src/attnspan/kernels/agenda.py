"""The work of a kernel that computes many tiles in one call: which block of rows sees which columns.

Rows that lie in the same tiles are a stretch; a stretch is cut into blocks, and every block is the work of one program,
which goes over the stretch's tiles one after another. So a row's keys are met by one program alone: its result is
whole, and nothing is merged::

    rows of a tile        columns of its tile
    [ 0, 70)              [0, 70)  causal               block [ 0, 64): tile 0
    [40, 90)              [70, 99) full                 block [40, 70): tiles 0 and 1 ...

Seen from the other side, a block of columns and the rows that see it, it is the same with the diagonals turned round.
Blocks with the most work come first, so that programs end together. Rows in no tile are blocks without work: what is
theirs is written all the same.

Pure data, but that the tables end up on a device, where they stay for the next call with the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.masks.tile import Tile

Side = Literal["rows", "cols"]


class Agenda(NamedTuple):
    """Blocks (first, last + 1, first span, last span + 1) and spans (first, last + 1, lo, hi), int32 tables."""

    blocks: Tensor
    spans: Tensor


class Span(NamedTuple):
    """A tile seen from one side: of `rows`, what lies in [start, stop) with lo <= it - row <= hi."""

    rows: range
    start: int
    stop: int
    lo: int
    hi: int

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
def agenda(tiles: tuple[Tile, ...], side: Side, count: int, block: int, device: torch.device) -> Agenda:
    """What the blocks of `count` rows (or columns) are to do.

    >>> tiles = (Tile(range(0, 70), range(0, 70), -69, 0), Tile(range(40, 90), range(70, 99), -49, 28))
    >>> blocks, spans = agenda(tiles, "rows", 100, 64, torch.device("cpu"))
    >>> blocks.tolist()  # the last ten rows see nothing
    [[40, 70, 1, 3], [0, 40, 0, 1], [70, 90, 3, 4], [90, 100, 4, 4]]
    >>> spans[1:3].tolist()
    [[0, 70, -69, 0], [70, 99, -19, 58]]
    """
    blocks: list[tuple[int, tuple[int, int, int, int]]] = []
    spans: list[tuple[int, int, int, int]] = []
    for first, last, met in _stretches([_span(tile, side) for tile in tiles], count):
        at = len(spans)
        met = list(_joined(met, first, last - 1))
        spans += [(span.start, span.stop, span.lo, span.hi) for span in met]
        for top in range(first, last, block):
            bottom = min(top + block, last)
            work = sum(span.seen(top, bottom - 1) for span in met)
            blocks.append((-work, (top, bottom, at, len(spans))))
    table = [item for _, item in sorted(blocks)]
    with torch.inference_mode(False):  # made during evaluation, they serve training later
        return Agenda(_table(table, device), _table(spans, device))


def _span(tile: Tile, side: Side) -> Span:
    rows, cols = tile.rows, tile.cols
    assert rows.step == cols.step == 1, "neighbours in a tile are neighbours in its buffers"
    shift = cols.start - rows.start  # beyond a tile's corners, a diagonal does not bite
    lo, hi = max(tile.lo, 1 - len(rows)) + shift, min(tile.hi, len(cols) - 1) + shift
    return Span(rows, cols.start, cols.stop, lo, hi) if side == "rows" else Span(cols, rows.start, rows.stop, -hi, -lo)


def _stretches(spans: list[Span], count: int) -> Iterator[tuple[int, int, list[Span]]]:
    """(first, last + 1, spans) of rows that lie in the same ones."""
    edges = sorted({0, count, *(edge for span in spans for edge in (span.rows.start, span.rows.stop))})
    starting: dict[int, list[Span]] = {}
    for span in spans:
        starting.setdefault(span.rows.start, []).append(span)
    met: list[Span] = []
    for first, last in pairwise(edges):
        met = [span for span in met if span.rows.stop > first] + starting.get(first, [])
        yield first, last, met


def _joined(spans: list[Span], first: int, last: int) -> Iterator[Span]:
    """Neighbouring spans as one, where rows [first, last] see the end of one and the beginning of the next.

    So a full tile and the causal one beside it become the band that they were cut from, with one edge less.
    """
    whole: Span | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if whole is not None and whole.stop == span.start and whole.leads(first, last) and span.follows(first, last):
            whole = Span(whole.rows, whole.start, span.stop, whole.lo, span.hi)
            continue
        if whole is not None:
            yield whole
        whole = span
    if whole is not None:
        yield whole


def _table(rows: list[tuple[int, int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(-1, 4).to(device)
