"""Boxes of pairs, and the search for those that a mask does not decide as a whole.

A box is a rectangle of the grid that its size makes of queries and keys: box (i, j) holds the queries
[i * height, (i + 1) * height) and the keys [j * width, (j + 1) * width), as far as there are any. Halving a box in
both directions gives four of half the size::

    ? ?      █ ·      a box is decided where all of its pairs are known to count, or none: the search ends there;
    ? ?      ░ █      only what is left (░) is halved, so the cost is that of the edges of a mask, not of S x S

Boxes are searched depth first, so many at a time, and never all at once. Knows nothing of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnspan.masks.band import ceil_div
from attnspan.masks.row_spans import RowSpans

AT_ONCE = 1 << 16
"""Boxes that are looked at together."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one size between so many queries and keys; `source` says which box of a search each came from.

    >>> Boxes.covering((5, 9), (4, 4)).halved().halved().first
    (tensor([0, 0, 4, 4, 0, 4]), tensor([0, 4, 0, 4, 8, 8]))
    """

    i: Tensor
    j: Tensor
    source: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def at(cls, i: Tensor, j: Tensor, size: tuple[int, int], lengths: tuple[int, int]) -> Boxes:
        """Boxes that are searched by themselves."""
        return cls(i, j, torch.arange(len(i), device=i.device), size, lengths)

    @classmethod
    def covering(cls, lengths: tuple[int, int], least: tuple[int, int], device: torch.device | str = "cpu") -> Boxes:
        """The one box that holds all pairs, and can be halved to boxes of the least size."""
        grown = max(ceil_div(length, size) - 1 for length, size in zip(lengths, least, strict=True)).bit_length()
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return cls.at(nothing, nothing, (least[0] << grown, least[1] << grown), lengths)

    def __len__(self) -> int:
        return len(self.i)

    @property
    def first(self) -> tuple[Tensor, Tensor]:
        """The first query and the first key of each."""
        return self.i * self.size[0], self.j * self.size[1]

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """The last query and the last key of each, included."""
        return self._last(self.i, 0), self._last(self.j, 1)

    @property
    def area(self) -> Tensor:
        """The number of pairs of each."""
        (q, k), (q_last, k_last) = self.first, self.last
        return (q_last - q + 1) * (k_last - k + 1)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The queries (N, height) and the keys (N, width) of each; beyond the last one, that again."""
        spread = zip(self.first, self.size, self.lengths, strict=True)
        q, k = ((x[:, None] + torch.arange(size, device=x.device)).clamp(max=n - 1) for x, size, n in spread)
        return q, k

    @property
    def inside(self) -> Tensor | None:
        """(N, height, width): which of these pairs there are; None if all."""
        if not any(length % size for length, size in zip(self.lengths, self.size, strict=True)):
            return None
        within = [
            first[:, None] + torch.arange(size, device=first.device) < length
            for first, size, length in zip(self.first, self.size, self.lengths, strict=True)
        ]
        return within[0][:, :, None] & within[1][:, None, :]

    def spans(self, height: int) -> RowSpans:
        """The keys of each, in rows of so many queries, of which a box has a number."""
        once = RowSpans(self.i, self.first[1], self.last[1] + 1).cpu()
        return once.repeated(self.size[0] // height, rows=ceil_div(self.lengths[0], height))

    def chosen(self, which: Tensor) -> Boxes:
        """Some of them."""
        return replace(self, i=self.i[which], j=self.j[which], source=self.source[which])

    def halved(self) -> Boxes:
        """Four for each, less those beyond the last query or key."""
        size = self.size[0] // 2, self.size[1] // 2
        down, right = (torch.tensor(each, device=self.i.device) for each in ((0, 0, 1, 1), (0, 1, 0, 1)))
        i, j = ((2 * index[:, None] + half).flatten() for index, half in ((self.i, down), (self.j, right)))
        halves = Boxes(i, j, self.source.repeat_interleave(4), size, self.lengths)
        q, k = halves.first
        return halves.chosen((q < self.lengths[0]) & (k < self.lengths[1]))

    def parts(self, most: int) -> Iterator[Boxes]:
        """The same boxes, so many at a time."""
        for start in range(0, len(self), most):
            yield self.chosen(torch.arange(start, min(start + most, len(self)), device=self.i.device))

    def _last(self, index: Tensor, side: int) -> Tensor:
        return ((index + 1) * self.size[side]).clamp(max=self.lengths[side]) - 1


Decide = Callable[[Boxes], tuple[Tensor, Tensor]]
"""Of boxes: those whose pairs are known to count, and those of which none does."""


def searched(boxes: Boxes, least: tuple[int, int], decide: Decide) -> Iterator[tuple[bool, Boxes]]:
    """(True, boxes that are full) and (False, boxes of the least size that were not decided); other pairs do not count.

    >>> causal = lambda boxes: (boxes.first[0] >= boxes.last[1], boxes.last[0] < boxes.first[1])
    >>> for full, found in searched(Boxes.covering((4, 4), (2, 2)), (2, 2), causal):
    ...     print(full, found.size, found.i.tolist(), found.j.tolist())
    True (4, 4) [] []
    True (2, 2) [1] [0]
    False (2, 2) [0, 1] [0, 1]
    """
    waiting = list(boxes.parts(AT_ONCE))
    while waiting:
        some = waiting.pop()
        full, empty = decide(some)
        yield True, some.chosen(full)
        rest = some.chosen(~(full | empty))
        if some.size == least:
            yield False, rest
        else:
            waiting += list(rest.halved().parts(AT_ONCE))
