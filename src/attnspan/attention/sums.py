"""Sums that need no zeros: the first part of a row is written, later ones are added, rows without any become zero.

A gradient is a sum of tiles' gradients, and most rows of a large buffer belong to one tile only. Filling it with zeros
first and adding would read and write everything once more than needed.

Shapes: every view is (B, H, S, anything); rows are those of dim 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from attnspan.kernels import add_into, write_into


class Sum:
    """Sums over the same rows of several views, held in uninitialised memory until written.

    >>> import torch
    >>> total = Sum(torch.empty(1, 1, 4, 1))
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
        for first, last, seen in self._stretches(rows):
            at = slice(*_bounds(rows[first:last]))
            for view, part in zip(self.views, parts, strict=True):
                (add_into if seen else write_into)(view[:, :, at], part[:, :, first:last])
        self._seen[slice(*_bounds(rows))] = b"\1" * len(rows)

    def open(self) -> bool:
        """For one writer of all rows: whether they hold a sum already, that it must add to.

        >>> import torch
        >>> total = Sum(torch.empty(1, 1, 2, 1))
        >>> total.open(), total.open()
        (False, True)
        """
        begun = any(self._seen)
        if begun:
            self.result()
        self._seen[:] = b"\1" * len(self._seen)
        return begun

    def result(self, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Some rows of the views, those that nothing was added to filled with zeros."""
        start, stop, _ = rows.indices(len(self._seen))
        for first, last, seen in self._stretches(range(start, stop)):
            if not seen:
                for view in self.views:
                    view[:, :, start + first : start + last] = 0
        return tuple(view[:, :, rows] for view in self.views)

    def _stretches(self, rows: range) -> Iterator[tuple[int, int, bool]]:
        """(first, last, seen) of the stretches of rows that were all written, or all not."""
        first = 0
        for seen, group in groupby(self._seen[slice(*_bounds(rows))]):
            last = first + len(list(group))
            yield first, last, bool(seen)
            first = last


def _bounds(rows: range) -> tuple[int, int, int]:
    return rows.start, rows.stop, rows.step
