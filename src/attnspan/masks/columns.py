"""Bands as six columns of numbers, one tensor each: where thousands of them are asked at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.masks.band import Band


class Columns(NamedTuple):
    """The bounds of bands, each by its name (band.py).

    >>> from attnspan.masks.band import tight
    >>> columns = Columns.of([tight(0, 4, 0, 4, hi=0), tight(4, 6, 4, 6)])
    >>> columns.hi.tolist(), columns.rows_meeting(3, 5), columns.cols_meeting(0, 4)
    ([0, 1], [0, 1], [0])
    """

    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor
    lo: Tensor
    hi: Tensor

    @classmethod
    def squares(cls, starts: Tensor, stops: Tensor) -> Columns:
        """The bands of the squares [start, stop) x [start, stop) on the diagonal.

        >>> Columns.squares(torch.tensor([0, 3]), torch.tensor([3, 4])).bands()
        (Band(q0=0, q1=3, k0=0, k1=3, lo=-2, hi=2), Band(q0=3, q1=4, k0=3, k1=4, lo=0, hi=0))
        """
        reach = stops - starts - 1
        return cls(starts, stops, starts, stops, -reach, reach)

    @classmethod
    def of(cls, bands: Sequence[Band]) -> Columns:
        numbers = array("q", chain(chain.from_iterable(bands), (0,) * 6))  # one more: an empty buffer is refused
        return cls(*torch.frombuffer(numbers, dtype=torch.int64).view(-1, 6)[:-1].T.contiguous())

    def bands(self) -> tuple[Band, ...]:
        """The bands, one by one."""
        return tuple(starmap(Band, zip(*(column.tolist() for column in self), strict=True)))

    def some(self, numbers: list[int]) -> tuple[Band, ...]:
        """Some of the bands, by their numbers."""
        chosen = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return Columns(*(column.index_select(0, chosen) for column in self)).bands()

    def __and__(self, band: Band) -> Columns:
        """What each has in common with a band, where that is anything: `Band.__and__` for all at once.

        >>> from attnspan.masks.band import tight
        >>> (Columns.of([tight(0, 4, 0, 4), tight(4, 6, 4, 6)]) & tight(0, 5, 0, 5, hi=0)).bands()
        (Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0), Band(q0=4, q1=5, k0=4, k1=5, lo=0, hi=0))
        """
        lo, hi = self.lo.clamp(min=band.lo), self.hi.clamp(max=band.hi)
        q0, q1 = self.q0.clamp(min=band.q0), self.q1.clamp(max=band.q1)
        k0, k1 = self.k0.clamp(min=band.k0), self.k1.clamp(max=band.k1)
        # As `tight` does it, bound after bound.
        q0, q1 = torch.maximum(q0, k0 - hi), torch.minimum(q1, k1 - lo)
        k0, k1 = torch.maximum(k0, q0 + lo), torch.minimum(k1, q1 + hi)
        lo, hi = torch.maximum(lo, k0 - q1 + 1), torch.minimum(hi, k1 - 1 - q0)
        held = (q0 < q1) & (k0 < k1) & (lo <= hi)
        found = q0, q1, k0, k1, lo, hi
        return Columns(*(found if bool(held.all()) else (column[held] for column in found)))

    def rows_meeting(self, start: int, stop: int) -> list[int]:
        """The numbers of the bands with a row in [start, stop)."""
        return _numbers((self.q0 < stop) & (self.q1 > start))

    def cols_meeting(self, start: int, stop: int) -> list[int]:
        """The numbers of the bands with a column in [start, stop)."""
        return _numbers((self.k0 < stop) & (self.k1 > start))


def _numbers(held: Tensor) -> list[int]:
    numbers: list[int] = held.nonzero().squeeze(1).tolist()
    return numbers


def counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For so many of each: whose each is, and which of its own.

    >>> [each.tolist() for each in counted(torch.tensor([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    whose = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return whose, torch.arange(len(whose), device=counts.device) - (counts.cumsum(0) - counts)[whose]
