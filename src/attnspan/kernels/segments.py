"""The tiles of a step as few calls of a FlashAttention kernel that takes sequences of variable length.

A segment is one such sequence: n rows over m columns, seen through a window that is counted from the bottom right
corner. Row i sees column j if::

    i + (m - n) - left <= j <= i + (m - n) + right

Every band is such a window, so every tile is a segment. A query chunk over its key prefix is one, with right = 0 and
no bound on the left; a plan has it as a full tile beside a causal one, and `joined_tiles` puts them together again.

A call takes many segments at once, each with an offset and a length, and one window for all of them:

* Forward reads keys, so the segments of a call may share columns, but no row. Calls whose rows differ write to one
  buffer, a layer; only rows that are in several layers are merged.
* Backward writes to keys too. The segments of a call share neither rows nor columns, and both increase: FlashAttention
  pads the offsets of its sums by the number of the segment, and sums that are out of order would overlap.

A tile of every n-th row or column is a call of its own. Pure data. Knows tiles; nothing of tensors or of any library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from attnspan.masks.algebra import joined
from attnspan.masks.band import Band
from attnspan.masks.spans import merged
from attnspan.masks.tile import Tile, band_of

Tiles = tuple[Tile, ...]
Window = tuple[int | None, int | None]
Spans = tuple[range, ...]


class Segment(NamedTuple):
    """Rows over columns; a bound is None where it does not bite.

    >>> Segment.of(Tile(range(4, 8), range(0, 8), lo=-3, hi=4))  # a query chunk over its key prefix
    Segment(rows=range(4, 8), cols=range(0, 8), left=None, right=0)
    """

    rows: range
    cols: range
    left: int | None
    right: int | None

    @staticmethod
    def of(tile: Tile) -> Segment:
        """A tile, without rows that see nothing and columns that are not seen."""
        q0, q1, k0, k1, lo, hi = tile.band
        left, right = k1 - q1 - lo, hi - (k1 - q1)
        return Segment(
            tile.rows[q0:q1],
            tile.cols[k0:k1],
            None if left == k1 - k0 - 1 else left,
            None if right == q1 - q0 - 1 else right,
        )

    def fits(self, window: Window) -> bool:
        """Whether it sees the same pairs through that window: a bound that does not bite may be any that does not.

        >>> short = Segment.of(Tile(range(4), range(4), lo=-3, hi=0))
        >>> short.fits((None, 0)), short.fits((3, 0)), short.fits((2, 0))
        (True, True, False)
        """
        left, right = window
        same_left = left is None or left >= len(self.cols) - 1 if self.left is None else self.left == left
        same_right = right is None or right >= len(self.rows) - 1 if self.right is None else self.right == right
        return same_left and same_right

    @property
    def is_dense(self) -> bool:
        """Whether neighbours in it are neighbours in its buffers."""
        return self.rows.step == self.cols.step == 1


@dataclass(frozen=True, slots=True)
class SegmentCall:
    """Segments that one kernel call computes through one window: in forward those with the most columns first, because
    blocks start in this order and short ones fill the end; in backward in the order of their rows and columns."""

    window: Window
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> range:
        """From the first row of any segment to the last."""
        return _hull([segment.rows for segment in self.segments])

    @property
    def cols(self) -> range:
        """From the first column of any segment to the last."""
        return _hull([segment.cols for segment in self.segments])


@dataclass(frozen=True, slots=True)
class CallLayer:
    """Calls that have no row in common, and write to one buffer; `spans` are their rows, neighbours as one."""

    calls: tuple[SegmentCall, ...]
    spans: Spans

    @property
    def rows(self) -> range:
        """From the first row of any call to the last."""
        return _hull(self.spans)


class BackwardCall(NamedTuple):
    """A call of backward, and whether an earlier one had some of its rows, or of its columns."""

    call: SegmentCall
    rows_again: bool
    cols_again: bool


class Coverage(NamedTuple):
    """The rows (or columns) of all calls of backward, neighbours as one, and whether some call has both rows that an
    earlier one had and rows that none had."""

    spans: Spans
    mixed: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """What forward and backward call, and which rows and columns backward writes to.

    >>> from attnspan.layouts import HeadTail
    >>> from attnspan.masks import Causal
    >>> from attnspan.plan import Plan
    >>> (step,) = Plan(Causal(), HeadTail(ranks=2), seq_len=8, strategy="gather").steps(rank=0)
    >>> print(packed_calls(step.tiles))
    forward: [2, 4) x [0, 8) and [0, 2) x [0, 2) within None..0
    backward: [2, 4) x [0, 8) within None..0
    backward: [0, 2) x [0, 2) within None..0
    """

    forward: tuple[CallLayer, ...]
    backward: tuple[BackwardCall, ...]
    rows: Coverage
    cols: Coverage

    def __str__(self) -> str:
        lines = [f"forward: {_told(call)}" for layer in self.forward for call in layer.calls]
        return "\n".join(lines + [f"backward: {_told(turn.call)}" for turn in self.backward])


@lru_cache(maxsize=2048)
def packed_calls(tiles: Tiles) -> Calls:
    """The calls that compute tiles, as few as can be found."""
    segments = [Segment.of(tile) for tile in joined_tiles(tiles)]
    groups = _by_window([segment for segment in segments if segment.is_dense])
    alone = [SegmentCall((segment.left, segment.right), (segment,)) for segment in segments if not segment.is_dense]
    forward = [
        SegmentCall(window, tuple(sorted(part, key=lambda segment: -len(segment.cols))))
        for window, group in groups
        for part in _parts(group, _follows_forward)
    ]
    backward = [
        SegmentCall(window, tuple(part)) for window, group in groups for part in _parts(group, _follows_backward)
    ]
    backward.sort(key=lambda call: -sum(len(segment.cols) for segment in call.segments))  # others add to what is there
    forward, backward = forward + alone, backward + alone
    rows, cols = ([_ranges(call, side) for call in backward] for side in ("rows", "cols"))
    turns = (BackwardCall(*each) for each in zip(backward, _again(rows), _again(cols), strict=True))
    return Calls(tuple(_layers(forward)), tuple(turns), _coverage(rows), _coverage(cols))


@lru_cache(maxsize=2048)
def joined_tiles(tiles: Tiles) -> Tiles:
    """The same pairs in tiles that are joined where their union is a band: for kernels to which any band is one call.

    >>> full, causal = Tile(range(4, 8), range(0, 4), -3, 3), Tile(range(4, 8), range(4, 8), -3, 0)
    >>> print(*joined_tiles((full, causal)))
    general [4, 8) x [0, 8) within -3..4
    """
    beside: dict[tuple[int, int], list[Band]] = {}  # by their rows: a row's keys are to be in few tiles, so these first
    for part in _cut([band_of(tile) for tile in tiles if _is_band(tile)]):
        beside.setdefault((part.q0, part.q1), []).append(part)
    whole = joined(band for parts in beside.values() for band in joined(parts))
    return (*map(Tile.of, whole), *(tile for tile in tiles if not _is_band(tile)))


def _is_band(tile: Tile) -> bool:
    """Whether its pairs are a band of the buffers."""
    return tile.rows.step == tile.cols.step == 1 and not tile.needs_mask_mod


def _cut(bands: list[Band]) -> Iterator[Band]:
    """Bands, cut where a neighbour to the left or right begins or ends: the parts beside each other can be joined."""
    edges: dict[int, list[int]] = {}  # by column: the first and last rows of bands that begin or end there
    for band in bands:
        for col in (band.k0, band.k1):
            edges.setdefault(col, []).extend((band.q0, band.q1))
    for band in bands:
        inner = {row for col in (band.k0, band.k1) for row in edges[col] if band.q0 < row < band.q1}
        for top, bottom in pairwise(sorted({band.q0, band.q1, *inner})):
            part = band.cut(top, bottom, band.k0, band.k1)
            assert part is not None, "every row of a band holds a pair"
            yield part


def _by_window(segments: list[Segment]) -> list[tuple[Window, list[Segment]]]:
    """Segments by a window that they fit, the first that is there; those with the most bounds choose first."""
    groups: dict[Window, list[Segment]] = {}
    for segment in sorted(segments, key=lambda each: (each.left is None) + (each.right is None)):
        window = next((each for each in groups if segment.fits(each)), (segment.left, segment.right))
        groups.setdefault(window, []).append(segment)
    return list(groups.items())


Follows = Callable[[Segment, Segment], bool]


def _follows_forward(segment: Segment, last: Segment) -> bool:
    return last.rows.stop <= segment.rows.start


def _follows_backward(segment: Segment, last: Segment) -> bool:
    return last.rows.stop <= segment.rows.start and last.cols.stop <= segment.cols.start


def _parts(segments: list[Segment], follows: Follows) -> list[list[Segment]]:
    """Segments in lists in which each follows the one before: each is added where its columns come soonest after.

    Forward, where only rows count, no fewer lists would do.
    """
    parts: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda each: (each.rows.start, each.cols.start)):
        free = [part for part in parts if follows(segment, part[-1])]
        if free:
            max(free, key=lambda part: part[-1].cols.stop).append(segment)
        else:
            parts.append([segment])
    return parts


def _layers(calls: list[SegmentCall]) -> Iterator[CallLayer]:
    """Calls in layers: each in the first that has none of its rows."""
    layers: list[list[SegmentCall]] = []
    for call in calls:
        rows = _ranges(call, "rows")
        free = (layer for layer in layers if not any(_meet(rows, _ranges(other, "rows")) for other in layer))
        layer = next(free, None)
        if layer is None or not call.segments[0].is_dense:
            layers.append([call])
        else:
            layer.append(call)
    for layer in layers:
        yield CallLayer(tuple(layer), _spans(rows for call in layer for rows in _ranges(call, "rows")))


def _ranges(call: SegmentCall, side: Literal["rows", "cols"]) -> list[range]:
    return [getattr(segment, side) for segment in call.segments]


def _again(calls: list[list[range]]) -> Iterator[bool]:
    """For each call, given by its rows, whether one before it had some of them."""
    return (any(_meet(rows, other) for other in calls[:index]) for index, rows in enumerate(calls))


def _coverage(calls: list[list[range]]) -> Coverage:
    before: Spans = ()
    mixed = False
    for rows in calls:
        now = _spans([*before, *rows])
        mixed = mixed or (_meet(rows, before) and now != before)
        before = now
    return Coverage(before, mixed)


def _meet(ours: Sequence[range], theirs: Sequence[range]) -> bool:
    """Whether rows of two calls meet; steps count as if they were filled."""
    there = merged(map(_ends, theirs))
    starts = [start for start, _ in there]
    for start, stop in map(_ends, ours):
        index = bisect_left(starts, stop)
        if index and there[index - 1][1] > start:
            return True
    return False


def _spans(ranges: Iterable[range]) -> Spans:
    """Ranges, neighbours as one; those with a step as they are."""
    ranges = list(ranges)
    plain = merged(_ends(each) for each in ranges if each.step == 1)
    return (*(range(*span) for span in plain), *(each for each in ranges if each.step > 1))


def _ends(span: range) -> tuple[int, int]:
    return span.start, span[-1] + 1


def _hull(spans: Sequence[range]) -> range:
    return spans[0] if len(spans) == 1 else range(min(s.start for s in spans), max(s[-1] + 1 for s in spans))


def _told(call: SegmentCall) -> str:
    each = (f"[{rows.start}, {rows.stop}) x [{cols.start}, {cols.stop})" for rows, cols, _, _ in call.segments)
    return f"{' and '.join(each)} within {call.window[0]}..{call.window[1]}"
