"""Where every token of a batch lies: the layout as tensors, for whoever moves many tokens at once.

Shards lie side by side, rank after rank, each in its own order; a place in that line is a column. Batch rows that lie
alike are one row here. Everything is on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan.layouts.layout import Layout


@dataclass(frozen=True)
class Placement:
    """For `rows` batch rows: the position in every column, and who holds it where.

    >>> from attnspan.layouts import HeadTail
    >>> placement = Placement.of(HeadTail(ranks=2), seq_len=6, rows=1)
    >>> placement.position.tolist(), placement.holder.tolist(), placement.place.tolist()
    ([[0, 4, 5, 1, 2, 3]], [0, 0, 0, 1, 1, 1], [[0, 1, 2, 0, 1, 2]])
    """

    ranks: int
    position: Tensor  # (rows, seq_len)
    holder: Tensor  # (seq_len,): the rank of every column
    place: Tensor  # (rows, seq_len): where on its rank, counted through all rows
    column: Tensor  # (rows, seq_len): by position

    @staticmethod
    def of(layout: Layout, seq_len: int, rows: int) -> Placement:
        """The placement of a layout, whose rows are `rows` or one for all."""
        position = torch.stack([layout.permutation(seq_len, row) for row in range(layout.rows)]).expand(rows, -1)
        counts = torch.tensor(layout.tokens(seq_len), device="cpu")
        each, row = torch.arange(seq_len, device="cpu"), torch.arange(rows, device="cpu").unsqueeze(1)
        holder = torch.arange(layout.ranks, device="cpu").repeat_interleave(counts)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        column = torch.empty(rows, seq_len, dtype=torch.int64, device="cpu")
        column.scatter_(1, position, each.expand(rows, -1))
        place = each - first + row * counts.repeat_interleave(counts)
        return Placement(layout.ranks, position, holder, place, column)
