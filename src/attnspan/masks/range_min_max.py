"""The least and greatest entry of a table within an interval of its indices, for many intervals at once.

A table is halved again and again; each level keeps the extremes of two neighbours of the one before::

    level 0    3   1   4   1   5   9   2   6        an interval of at most 2^l indices lies in two neighbours
    level 1      1   .   1   .   5   .   2          of level l: what these hold is what is answered
    level 2          1       .       2

So an answer may be wider than the truth, where an interval does not begin at a multiple of its length; it is never
narrower. A table of two dims is halved in both. Memory: twice the table, or 4/3 in two dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor


class RangeMinMax:
    """Of a table, given as its least and its greatest values (one tensor twice, or reduced over a dim).

    >>> table = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> low, high = RangeMinMax(table, table).within([(torch.tensor([0, 4]), torch.tensor([1, 7]))])
    >>> low.tolist(), high.tolist()
    ([1, 2], [3, 9])
    """

    def __init__(self, least: Tensor, greatest: Tensor):
        levels = [(least, greatest)]
        while max(levels[-1][0].shape, default=1) > 1:
            least, greatest = levels[-1]
            for dim in range(least.dim()):
                least, greatest = torch.minimum(*_neighbours(least, dim)), torch.maximum(*_neighbours(greatest, dim))
            levels.append((least, greatest))
        self.least, self.greatest = (torch.cat([each[side].flatten() for each in levels]) for side in (0, 1))
        sizes = torch.tensor([each[0].numel() for each in levels], device=least.device)
        self._first = sizes.cumsum(0) - sizes
        self._strides = torch.tensor([_strides(each[0].shape) for each in levels], device=least.device)
        self._lengths = 2 ** torch.arange(len(levels) - 1, device=least.device)

    def within(self, intervals: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """For an interval [first, last] of indices in each dim, all inside the table: values between which all lie."""
        level = torch.zeros((), dtype=torch.int64, device=self.least.device)
        for first, last in intervals:
            level = torch.maximum(level, torch.bucketize(last - first, self._lengths, right=True))
        low: Tensor | None = None
        high: Tensor | None = None
        for corner in product(*intervals):
            at = self._first[level]
            for dim, index in enumerate(corner):
                at = at + (index >> level) * self._strides[level, dim]
            low = self.least[at] if low is None else torch.minimum(low, self.least[at])
            high = self.greatest[at] if high is None else torch.maximum(high, self.greatest[at])
        assert low is not None, "a table has at least one dim"
        assert high is not None, "a table has at least one dim"
        return low, high


def _neighbours(table: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Every second entry, and those beside them; the last may be beside itself."""
    if table.shape[dim] % 2:
        table = torch.cat([table, table.narrow(dim, -1, 1)], dim)
    even, odd = table.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return even, odd


def _strides(shape: Sequence[int]) -> list[int]:
    return [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
