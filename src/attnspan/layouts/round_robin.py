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

from attnspan.errors import LayoutError, integer
from attnspan.layouts.by_work import ByWork
from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run
from attnspan.masks.profile import Tally


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
        return dealt(self._tally(seq_len, row), seq_len, self.ranks, self.block)

    def __repr__(self) -> str:
        return self._shown(block=self.block if self.block != 128 else None)


def dealt(work: Tally, seq_len: int, ranks: int, block: int) -> Shards:
    """The blocks of each rank, in ascending order."""
    blocks = [Run(start, min(start + block, seq_len)) for start in range(0, seq_len, block)]
    sums = [work.before(run.start) for run in blocks] + [work.before(seq_len)]
    whole_blocks = seq_len // block
    order = sorted(range(whole_blocks), key=lambda i: sums[i] - sums[i + 1])  # stable: ties stay in order
    order += range(whole_blocks, len(blocks))  # [Note: short block]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for turn, i in enumerate(order):
        lap, seat = divmod(turn, ranks)
        hands[ranks - 1 - seat if lap % 2 else seat].append(i)
    return tuple(tuple(blocks[i] for i in sorted(hand)) for hand in hands)
