"""Sums of what score_mods learn row by row, over all steps of a lane, as exact as in one softmax.

[Note: exact sums] The gradients of a row's scores, probability x (grad @ value - delta), sum to 0 but for rounding:
delta = sum(grad * out) comes from an out that was rounded. A slope multiplies each of them by a distance, and what is
left of such a sum is the row's mean distance times what was rounded off. So where all of a row's gradients belong to
one entry, that is taken away again. With p the probabilities and f the derivative of the score by what was looked up::

    sum(slope * f) - (sum(p * d_share) - delta) * sum(p * f)

Both sums are over all keys of the row, in whatever steps they come: `RowSums` keeps them until a lane ends.

Shapes: B batch rows, H heads, n rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class RowSums:
    """What is summed row by row until a lane ends: see [Note: exact sums]."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._put: Callable[[Tensor], None] | None = None

    def add(self, rows: range, whole: tuple[int, ...], sums: Tensor, put: Callable[[Tensor], None]) -> None:
        """Sums (parts, B, H, rows) of some of (B, H, n); `put` takes those of all when the lane ends."""
        if self._sums is None:
            self._sums = sums.new_zeros(len(sums), *whole)
        self._sums[..., rows.start : rows.stop : rows.step] += sums
        self._put = put

    def close(self) -> None:
        """Nothing more will come."""
        if self._sums is not None and self._put is not None:
            self._put(self._sums)
        self._sums = None
