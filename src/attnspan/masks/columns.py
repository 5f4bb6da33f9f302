"""Bands as six columns of numbers, one tensor each: where thousands of them are asked at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
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
    def of(cls, bands: Sequence[Band]) -> Columns:
        numbers = array("q", chain(chain.from_iterable(bands), (0,) * 6))  # one more: an empty buffer is refused
        return cls(*torch.frombuffer(numbers, dtype=torch.int64).view(-1, 6)[:-1].T.contiguous())

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
