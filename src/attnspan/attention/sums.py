"""Sums of gradients with as few passes over memory as possible.

A gradient is the sum of the gradients of tiles, and most rows of a large buffer belong to a single tile. `RunningSum`,
for gradients that are sent, is not zeroed first: the first part of a row is written, later ones are added, and rows
without any become zero. `DeferredSum`, for gradients that stay, collects parts until the total is needed, then adds and
rounds them in one pass; adding each part to a float32 sum at once would read and write the sum every time.

Shapes: every view and part is (B, H, S, anything); rows are those of dim 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.kernels import add_into, sum_into, write_into
from attnspan.plan.waiting import crowded


class RunningSum:
    """Sums over the same rows of several views, held in uninitialised memory until written.

    >>> import torch
    >>> total = RunningSum(torch.empty(1, 1, 4, 1))
    >>> total.add(range(0, 2), torch.ones(1, 1, 2, 1))
    >>> total.add(range(1, 3), torch.ones(1, 1, 2, 1))
    >>> total.result()[0].flatten().tolist()
    [1.0, 2.0, 1.0, 0.0]
    """

    __slots__ = ("_seen", "views")

    def __init__(self, *views: Tensor):
        self.views = views
        self._seen = bytearray(views[0].shape[2])

    def add(self, rows: range, *parts: Tensor) -> None:
        """Add one part per view to some rows."""
        for first, last, seen in self._row_ranges(rows):
            at = slice(*_bounds(rows[first:last]))
            for view, part in zip(self.views, parts, strict=True):
                (add_into if seen else write_into)(view[:, :, at], part[:, :, first:last])
        self._seen[slice(*_bounds(rows))] = b"\1" * len(rows)

    def open(self) -> bool:
        """For one writer of all rows: whether they hold a sum already, that it must add to.

        >>> import torch
        >>> total = RunningSum(torch.empty(1, 1, 2, 1))
        >>> total.open(), total.open()
        (False, True)
        """
        begun = any(self._seen)
        if begun:
            self.result()
        self.mark_written()
        return begun

    def mark_written(self) -> None:
        """All rows have been written, by one writer."""
        self._seen[:] = b"\1" * len(self._seen)

    def gather(self, rows: range, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Add all parts of some stacks per view to some rows, in one pass."""
        for first, last, seen in self._row_ranges(rows):
            at = slice(*_bounds(rows[first:last]))
            for view, parts in zip(self.views, stacks, strict=True):
                sum_into(view[:, :, at], [stack[:, :, :, first:last] for stack in parts], add=seen)
        self._seen[slice(*_bounds(rows))] = b"\1" * len(rows)

    def result(self, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Some rows of the views; rows without parts are zero."""
        start, stop, _ = rows.indices(len(self._seen))
        for first, last, seen in self._row_ranges(range(start, stop)):
            if not seen:
                for view in self.views:
                    view[:, :, start + first : start + last] = 0
        return tuple(view[:, :, rows] for view in self.views)

    def _row_ranges(self, rows: range) -> Iterator[tuple[int, int, bool]]:
        """(first, last, seen) of the ranges of rows that were all written, or all not."""
        marks = self._seen[slice(*_bounds(rows))]
        first = 0
        while first < len(marks):
            seen = marks[first]
            last = marks.find(1 - seen, first)
            last = len(marks) if last < 0 else last
            yield first, last, bool(seen)
            first = last


class StackedParts(NamedTuple):
    """Parts of some rows: for each view a stack (any number, B, H, rows, anything), to be summed."""

    rows: range
    stacks: tuple[Tensor, ...]


class DeferredSum:
    """Sums over the same rows of several tensors, added up when the total is needed.

    Parts must not change until then. The parts of a row wait as long as they take no more memory than a sum in `dtype`
    and one part would; with one more, all of them are added to such a sum.

    >>> total = DeferredSum([torch.Size((1, 1, 4, 1))], torch.float32)
    >>> total.add(range(0, 2), torch.ones(1, 1, 2, 1))
    >>> total.add(range(1, 3), torch.ones(1, 1, 2, 1))
    >>> total.result(torch.bfloat16)[0].flatten().tolist()
    [1.0, 2.0, 1.0, 0.0]
    """

    __slots__ = ("_device", "_dtype", "_shapes", "_sum", "_waiting")

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device | str = "cpu"):
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._waiting: list[StackedParts] = []
        self._sum: RunningSum | None = None

    def add(self, rows: range, *parts: Tensor) -> None:
        """Add one part per view to some rows."""
        self.gather(rows, *(part.unsqueeze(0) for part in parts))

    def gather(self, rows: range, *stacks: Tensor, wait: bool = True) -> None:
        """Add all parts of one stack per view to some rows; at once unless `wait`."""
        width = self._dtype.itemsize / stacks[0].element_size()
        if crowded([each.rows for each in self._waiting], rows, width, self._sum is not None):
            self._settle()
        if rows.step > 1:
            self._begun().gather(rows, [[stack] for stack in stacks])
            return
        self._waiting.append(StackedParts(rows, stacks))
        if not wait:
            self._settle()

    def open(self) -> tuple[tuple[Tensor, ...], bool]:
        """The sum in memory, for one writer of all rows, and whether the writer must add to it."""
        self._settle()
        total = self._begun()
        return total.views, total.open()

    def _settle(self) -> None:
        """Add waiting parts to a sum in memory, and free them."""
        for rows, waiting in self._row_ranges():
            if waiting:
                self._begun().gather(rows, waiting)
        self._waiting.clear()

    def result(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The totals in a dtype, contiguous; rows without parts are zero."""
        ready = self._ready()
        if ready is not None and all(part.dtype == dtype and _is_own(part) for part in ready):
            return ready
        summed = () if self._sum is None else self._sum.result()
        found = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in self._shapes)
        for rows, waiting in self._row_ranges():
            at = slice(rows.start, rows.stop)
            for index, target in enumerate(found):
                stacks = [view[:, :, at].unsqueeze(0) for view in summed[index : index + 1]]
                stacks += waiting[index] if waiting else []
                if stacks:
                    sum_into(target[:, :, at], stacks)
                else:
                    target[:, :, at] = 0
        return found

    def _ready(self) -> tuple[Tensor, ...] | None:
        """The total if it is in memory already: a sum without waiting parts, or a single part of all rows."""
        if self._sum is not None:
            return None if self._waiting else self._sum.result()
        stacks = [each.stacks for each in self._waiting if len(each.rows) == self._shapes[0][2]]
        if len(self._waiting) != 1 or len(stacks) != 1 or len(stacks[0][0]) != 1:
            return None
        return tuple(stack[0] for stack in stacks[0])

    def _begun(self) -> RunningSum:
        if self._sum is None:
            self._sum = RunningSum(
                *(torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes)
            )
        return self._sum

    def _row_ranges(self) -> Iterator[tuple[range, list[list[Tensor]]]]:
        """Rows for which the same parts wait, and these, by view."""
        edges = sorted({0, self._shapes[0][2], *(edge for w in self._waiting for edge in (w.rows.start, w.rows.stop))})
        for start, stop in pairwise(edges):
            met = [each for each in self._waiting if each.rows.start <= start and stop <= each.rows.stop]
            cut = [[x[:, :, :, start - rows.start : stop - rows.start] for x in stacks] for rows, stacks in met]
            yield range(start, stop), [list(stacks) for stacks in zip(*cut, strict=True)]


def _is_own(x: Tensor) -> bool:
    """Whether a tensor is contiguous and has its memory to itself."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def _bounds(rows: range) -> tuple[int, int, int]:
    return rows.start, rows.stop, rows.step
