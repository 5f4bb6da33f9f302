"""Attention of many rows, gathered tile by tile, with as few passes over memory as can be.

A row's keys come in several tiles. Its first two partial results wait as they came; with a third they are joined into a
buffer in the accumulator's precision, and each later one waits until the next. So nothing is copied that one tile
computed alone, and the last join writes the result itself, in its own dtype, in one pass: two tiles are read and
written once.

Rows are kept in stretches that had the same tiles; a tile that covers part of a stretch cuts it. Knows nothing of
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
        self._stretches = [_MergedRows(0, shape[2])] if shape[2] else []
        self._buffer: PartialResult | None = None

    def add(self, rows: range, out: Tensor, lse: Tensor) -> None:
        """Join a tile's result into `rows`."""
        if rows.step > 1:
            self._add_strided(rows, PartialResult(out, lse))
            return
        self._cut(rows.start)
        self._cut(rows.stop)
        index = bisect_left(self._stretches, rows.start, key=lambda stretch: stretch.start)
        while index < len(self._stretches) and self._stretches[index].start < rows.stop:
            stretch = self._stretches[index]
            if len(stretch.waiting) + stretch.summed == 2:
                self._settle(stretch)
            part = PartialResult(out, lse).rows(stretch.start - rows.start, stretch.stop - rows.start)
            stretch.waiting.append(part)
            index += 1

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse); a row that was never added has out 0 and lse -inf."""
        if len(self._stretches) == 1 and not self._stretches[0].summed and len(self._stretches[0].waiting) == 1:
            out, lse = self._stretches[0].waiting[0]
            return out.to(dtype), lse.to(self._dtype)
        final = self._empty(dtype)
        for stretch in self._stretches:
            self._finish(stretch, final.rows(stretch.start, stretch.stop))
        return final.out, final.lse

    # ---- inside ------------------------------------------------------------------------------------------------

    def _settle(self, stretch: _MergedRows) -> None:
        """Everything that a stretch holds into the buffer."""
        self._finish(stretch, self._summed(stretch))
        stretch.summed, stretch.waiting = True, []

    def _finish(self, stretch: _MergedRows, into: PartialResult) -> None:
        """Write what a stretch holds, two parts at most."""
        parts = ([self._summed(stretch)] if stretch.summed else []) + stretch.waiting
        if len(parts) == 2:
            merge(into, *parts)
            return
        out, lse = parts[0] if parts else (0.0, -torch.inf)
        into.out[...], into.lse[...] = out, lse

    def _summed(self, stretch: _MergedRows) -> PartialResult:
        if self._buffer is None:
            self._buffer = self._empty(self._dtype)
        return self._buffer.rows(stretch.start, stretch.stop)

    def _empty(self, dtype: torch.dtype) -> PartialResult:
        out = torch.empty(self._shape, dtype=dtype, device=self._device)
        return PartialResult(out, torch.empty(self._shape[:3], dtype=self._dtype, device=self._device))

    def _cut(self, row: int) -> None:
        """Make a row the start of a stretch."""
        index = bisect_left(self._stretches, row, key=lambda stretch: stretch.stop)
        if index == len(self._stretches) or self._stretches[index].start >= row or self._stretches[index].stop == row:
            return
        whole = self._stretches[index]
        at = row - whole.start
        left, right = (
            [part.rows(first, last) for part in whole.waiting]
            for first, last in ((0, at), (at, whole.stop - whole.start))
        )
        self._stretches[index : index + 1] = [
            _MergedRows(whole.start, row, whole.summed, left),
            _MergedRows(row, whole.stop, whole.summed, right),
        ]

    def _add_strided(self, rows: range, part: PartialResult) -> None:
        """Every n-th row would cut into stretches of one row: settle all rows instead, and join in the buffer."""
        for stretch in self._stretches:
            self._settle(stretch)
        self._stretches = [_MergedRows(0, self._shape[2], summed=True)]
        buffer = self._summed(self._stretches[0])
        at = (slice(None), slice(None), slice(rows.start, rows.stop, rows.step))
        target = PartialResult(buffer.out[at], buffer.lse[at])
        merge(target, target, part)
