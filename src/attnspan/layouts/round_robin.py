"""Blocks sorted by their work and dealt back and forth.

The heaviest block goes to rank 0, the next to rank 1, ..., then the direction turns: a rank that had the
heaviest of one round has the lightest of the next. Every rank gets the same number of blocks, give or take
one. Balance is good where blocks are many; neighbours are torn apart, so a rank has as many runs as blocks
(`Balanced` makes few).

[Note: short block] Where the length is no multiple of `block`, the last block is short. It is dealt last
whatever its work, so that each batch row of a per-row layout gives a rank the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnspan.errors import LayoutError, integer
from attnspan.layouts.by_work import ByWork
from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run
from attnspan.masks.piecewise import Piecewise, row_work, weighted


@dataclass(frozen=True, slots=True, repr=False)
class RoundRobinByWork(ByWork):
    """Blocks of `block` positions, heaviest first, dealt forward then backward.

    The work of a block is its exact number of allowed pairs, over all batch rows, or of its own row if
    `per_row`. Several masks with `weights` (head groups, layer kinds) are summed.

    >>> from attnspan.masks import Causal
    >>> RoundRobinByWork(Causal(), ranks=2, block=2).positions(8)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> RoundRobinByWork(Causal(), ranks=2, block=2).positions(9)  # the short block is dealt last
    [[0, 1, 6, 7, 8], [2, 3, 4, 5]]
    """

    block: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        ByWork.__post_init__(self)  # not super(): a slotted dataclass is made twice, and loses itself
        object.__setattr__(self, "block", integer("block", self.block, at_least=1, error=LayoutError))

    def _shards(self, seq_len: int, row: int) -> Shards:
        return dealt(weighted(row_work, self._weighted(seq_len, row)), seq_len, self.ranks, self.block)

    def __repr__(self) -> str:
        return self._shown(block=self.block if self.block != 128 else None)


def dealt(work: Piecewise, seq_len: int, ranks: int, block: int) -> Shards:
    """The blocks of each rank, in ascending order."""
    hands: list[list[Run]] = [[] for _ in range(ranks)]
    for i, rank in enumerate(_seats(work, seq_len, ranks, block)[1].tolist()):
        hands[rank].append(Run(i * block, min(i * block + block, seq_len)))
    return tuple(map(tuple, hands))


def largest_dealt(work: Piecewise, seq_len: int, ranks: int, block: int) -> float:
    """The work of the rank that would have most."""
    sums, seats = _seats(work, seq_len, ranks, block)
    return float(sums.new_zeros(ranks).index_add(0, seats, sums).max())


def _seats(work: Piecewise, seq_len: int, ranks: int, block: int) -> tuple[Tensor, Tensor]:
    """The work of each block, and its rank."""
    starts = torch.arange(0, seq_len, block, device="cpu")
    sums = torch.diff(work.before(torch.cat([starts, starts.new_full((1,), seq_len)])))
    whole_blocks = seq_len // block
    order = sums[:whole_blocks].argsort(descending=True, stable=True)  # ties stay in order
    order = torch.cat([order, torch.arange(whole_blocks, len(sums), device="cpu")])  # [Note: short block]
    turn = torch.arange(len(sums), device="cpu")
    lap, seat = turn // ranks, turn % ranks
    return sums, torch.empty_like(turn).index_copy(0, order, torch.where(lap % 2 == 1, ranks - 1 - seat, seat))
