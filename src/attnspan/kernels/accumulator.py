"""Accumulates the partial results of tiles into attention, with as few passes over memory as possible.

The keys of a row come in several tiles. Its first two partial results are kept as they are; a third one causes them to
be merged into a buffer in the accumulator's precision, and each later one waits for the next. So the result of a single
tile is never copied, and the last merge writes the final result, in its own dtype, in one pass.

Rows are kept in row ranges that had the same tiles; a tile that covers part of a row range splits it. Knows nothing of
masks or ranks. Shapes: out (B, H, S, D), lse (B, H, S).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnspan.kernels.merge import PartialResult, merge


@dataclass(slots=True)
class _MergedRows:
    """Rows [start, stop) that had the same tiles: their sum in the buffer, if any, and the parts that wait."""

    start: int
    stop: int
    summed: bool = False
    waiting: list[PartialResult] = field(default_factory=list)


class Accumulator:
    """The joined result of rows.

    >>> rows = Accumulator((1, 1, 3, 1), torch.float32)
    >>> rows.add(range(0, 2), torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2))
    >>> rows.add(range(1, 2), torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 1))
    >>> out, lse = rows.result(torch.float32)
    >>> out.flatten().tolist(), lse.exp().flatten().tolist()  # the last row never saw a key
    ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0])

    What is added belongs to the accumulator from then on; a tile that covers all rows and stays alone is the result.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._row_ranges = [_MergedRows(0, shape[2])] if shape[2] else []
        self._buffer: PartialResult | None = None

    def add(self, rows: range, out: Tensor, lse: Tensor) -> None:
        """Join a tile's result into `rows`."""
        if rows.step > 1:
            self._add_strided(rows, PartialResult(out, lse))
            return
        self._cut(rows.start)
        self._cut(rows.stop)
        index = bisect_left(self._row_ranges, rows.start, key=lambda row_range: row_range.start)
        while index < len(self._row_ranges) and self._row_ranges[index].start < rows.stop:
            row_range = self._row_ranges[index]
            if len(row_range.waiting) + row_range.summed == 2:
                self._settle(row_range)
            part = PartialResult(out, lse).rows(row_range.start - rows.start, row_range.stop - rows.start)
            row_range.waiting.append(part)
            index += 1

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse); a row that was never added has out 0 and lse -inf."""
        if len(self._row_ranges) == 1 and not self._row_ranges[0].summed and len(self._row_ranges[0].waiting) == 1:
            out, lse = self._row_ranges[0].waiting[0]
            return out.to(dtype), lse.to(self._dtype)
        final = self._empty(dtype)
        for row_range in self._row_ranges:
            self._finish(row_range, final.rows(row_range.start, row_range.stop))
        return final.out, final.lse

    # ---- inside ------------------------------------------------------------------------------------------------

    def _settle(self, row_range: _MergedRows) -> None:
        """Merge all parts of a row range into the buffer."""
        self._finish(row_range, self._summed(row_range))
        row_range.summed, row_range.waiting = True, []

    def _finish(self, row_range: _MergedRows, into: PartialResult) -> None:
        """Write the merge of a row range's parts, two at most."""
        parts = ([self._summed(row_range)] if row_range.summed else []) + row_range.waiting
        if len(parts) == 2:
            merge(into, *parts)
            return
        out, lse = parts[0] if parts else (0.0, -torch.inf)
        into.out[...], into.lse[...] = out, lse

    def _summed(self, row_range: _MergedRows) -> PartialResult:
        if self._buffer is None:
            self._buffer = self._empty(self._dtype)
        return self._buffer.rows(row_range.start, row_range.stop)

    def _empty(self, dtype: torch.dtype) -> PartialResult:
        out = torch.empty(self._shape, dtype=dtype, device=self._device)
        return PartialResult(out, torch.empty(self._shape[:3], dtype=self._dtype, device=self._device))

    def _cut(self, row: int) -> None:
        """Make a row the start of a row range."""
        index = bisect_left(self._row_ranges, row, key=lambda row_range: row_range.stop)
        if (
            index == len(self._row_ranges)
            or self._row_ranges[index].start >= row
            or self._row_ranges[index].stop == row
        ):
            return
        whole = self._row_ranges[index]
        at = row - whole.start
        left, right = (
            [part.rows(first, last) for part in whole.waiting]
            for first, last in ((0, at), (at, whole.stop - whole.start))
        )
        self._row_ranges[index : index + 1] = [
            _MergedRows(whole.start, row, whole.summed, left),
            _MergedRows(row, whole.stop, whole.summed, right),
        ]

    def _add_strided(self, rows: range, part: PartialResult) -> None:
        """Every n-th row would cut into row ranges of one row: settle all rows instead, and join in the buffer."""
        for row_range in self._row_ranges:
            self._settle(row_range)
        self._row_ranges = [_MergedRows(0, self._shape[2], summed=True)]
        buffer = self._summed(self._row_ranges[0])
        at = (slice(None), slice(None), slice(rows.start, rows.stop, rows.step))
        target = PartialResult(buffer.out[at], buffer.lse[at])
        merge(target, target, part)
