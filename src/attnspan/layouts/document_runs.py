"""The stretches of a layout: neighbouring positions of one document on one rank.

What a recurrent layer runs over in one go, given the state before it. Documents are chains of stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnspan.layouts.layout import Layout
from attnspan.layouts.placement import Placement
from attnspan.layouts.run import Run


@dataclass(frozen=True)
class Stretches:
    """All stretches of all ranks in the order of the sequence, batch row after batch row: one number each.

    >>> from attnspan.layouts import HeadTail
    >>> of = Stretches.of(HeadTail(ranks=2), 8, torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1]]))
    >>> of.start.tolist(), of.length.tolist(), of.rank.tolist(), of.document.tolist()
    ([0, 2, 6, 7], [2, 4, 1, 1], [0, 1, 0, 0], [0, 0, 0, 1])
    """

    rows: int
    documents: int  # of all rows together
    row: Tensor
    start: Tensor
    length: Tensor
    rank: Tensor
    place: Tensor  # of its first token on its rank, counted through all rows
    document: Tensor  # numbered through all rows

    @staticmethod
    def of(layout: Layout, seq_len: int, documents: Tensor) -> Stretches:
        """The stretches of a layout; `documents` (rows, seq_len) tells the document of every position."""
        rows = max(layout.rows, len(documents))
        at = Placement.of(layout, seq_len, rows)
        begins = torch.ones(len(documents), seq_len, dtype=torch.bool, device="cpu")
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        begins = begins.expand(rows, -1)
        number = begins.flatten().cumsum(0).view(rows, seq_len) - 1
        new = begins.gather(1, at.position)
        new[:, 1:] |= at.position[:, 1:] != at.position[:, :-1] + 1
        new[:, 1:] |= at.holder[1:] != at.holder[:-1]
        new[:, 0] = True
        first = new.flatten().nonzero().flatten()
        length = torch.diff(first, append=torch.tensor([new.numel()], device="cpu"))
        start, row = at.position.flatten()[first], first // seq_len
        order = (row * seq_len + start).argsort()
        found = (row, start, length, at.holder.repeat(rows)[first], at.place.flatten()[first])
        row, start, length, rank, place = (each[order] for each in found)
        return Stretches(rows, int(number.max()) + 1, row, start, length, rank, place, number[row, start])

    @cached_property
    def step(self) -> Tensor:
        """The number of each in its chain, from 0."""
        return torch.arange(len(self.row), device="cpu") - self._first[self.document]

    @cached_property
    def back(self) -> Tensor:
        """The number of each in its chain, counted from the end."""
        return self.chains[self.document] - 1 - self.step

    @cached_property
    def chains(self) -> Tensor:
        """How many stretches every document has."""
        return torch.bincount(self.document, minlength=self.documents)

    @cached_property
    def _first(self) -> Tensor:
        return self.chains.cumsum(0) - self.chains

    def on(self, rank: int) -> list[list[Run]]:
        """The stretches of a rank by batch row, in the order of its shard."""
        mine = (self.rank == rank).nonzero().flatten()
        found: list[list[Run]] = [[] for _ in range(self.rows)]
        for i in mine[self.place[mine].argsort()].tolist():
            found[int(self.row[i])].append(Run(int(self.start[i]), int(self.start[i] + self.length[i])))
        return found
