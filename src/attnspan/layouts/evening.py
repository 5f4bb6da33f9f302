"""Move borders between ranks by a few tokens until no rank works more than a goal.

A split necklace has equal token counts, and work that is equal up to what whole tokens and the shortest run
allow. The last unevenness goes if counts may differ a little: a rank that is above the goal gives rows at one
of its borders to the neighbour there, who passes on what it cannot keep. Counts stay within one chunk of each
other, no run gets shorter than a chunk, and no run is added.
"""

from __future__ import annotations

from itertools import pairwise

from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, tokens_in
from attnspan.masks.piecewise import Piecewise

SWEEPS = 32
"""How often the ranks above the goal are visited."""


def evened(shards: Shards, work: Piecewise, chunk: int, goal: float) -> Shards:
    """The same runs with borders moved, so that as few ranks as possible are above the goal.

    >>> from attnspan.masks.band import tight
    >>> from attnspan.masks.columns import Columns
    >>> from attnspan.masks.piecewise import row_work, weighted
    >>> work = weighted(row_work, [(1, Columns.of([tight(0, 64, 0, 64, hi=0)]))])
    >>> evened(((Run(0, 32),), (Run(32, 64),)), work, 16, goal=1400)  # 528 + 1552 pairs become 703 + 1377
    ((Run(start=0, stop=37, step=1),), (Run(start=37, stop=64, step=1),))
    """
    borders = _Borders(shards, work, chunk, goal)
    for _ in range(SWEEPS):
        if not borders.sweep():
            break
    return borders.shards()


class _Borders:
    """The cuts of a sequence, in order, and who owns what lies between them."""

    def __init__(self, shards: Shards, work: Piecewise, chunk: int, goal: float):
        pieces = sorted((run.start, run.stop, rank) for rank, runs in enumerate(shards) for run in runs)
        self.cuts = [start for start, _, _ in pieces] + [pieces[-1][1]]
        self.owner = [rank for _, _, rank in pieces]
        self.row_work, self.chunk, self.goal = work, chunk, goal
        self.work = [sum(work.between(run.start, run.stop) for run in runs) for runs in shards]
        self.tokens = list(map(tokens_in, shards))
        mean = self.cuts[-1] / len(shards)
        self.fewest, self.most = mean - chunk / 2, mean + chunk / 2
        self.sides: list[list[int]] = [[] for _ in shards]
        for i, (left, right) in enumerate(pairwise(self.owner), start=1):
            self.sides[left].append(i)
            self.sides[right].append(i)

    def sweep(self) -> bool:
        """Let every rank above the goal give rows away; whether any did."""
        above = sorted((-work, rank) for rank, work in enumerate(self.work) if work > self.goal)
        return sum(self._relieve(rank) for _, rank in above) > 0

    def _relieve(self, rank: int) -> bool:
        # The neighbour with the least work first: it has the most room.
        sides = sorted((self.work[self._other(i, rank)], i) for i in self.sides[rank])
        return sum(self._give(i, rank) for _, i in sides if self.work[rank] > self.goal) > 0

    def _other(self, cut: int, rank: int) -> int:
        left, right = self.owner[cut - 1], self.owner[cut]
        return right if left == rank else left

    def _give(self, cut: int, rank: int) -> bool:
        """Move a cut into the rank's run: until the goal is reached, or the neighbour has as much."""
        other = self._other(cut, rank)
        if self.work[other] >= self.work[rank]:
            return False
        excess = self.work[rank] - self.goal
        even = (self.work[rank] - self.work[other]) / 2
        left = self.owner[cut - 1] == rank
        length = self.cuts[cut] - self.cuts[cut - 1] if left else self.cuts[cut + 1] - self.cuts[cut]
        room = min(length - self.chunk, self.tokens[rank] - self.fewest, self.most - self.tokens[other])
        rows = self._rows(cut, left, int(room), min(excess, even))
        given = self._between(cut, left, rows)
        if rows <= 0 or self.work[other] + given >= self.work[rank]:
            return False
        self.cuts[cut] += -rows if left else rows
        self.tokens[rank] -= rows
        self.tokens[other] += rows
        self.work[rank] -= given
        self.work[other] += given
        return True

    def _rows(self, cut: int, left: bool, room: int, wanted: float) -> int:
        """The fewest rows next to a cut that hold the wanted work; at most `room`."""
        low, high = 0, max(room, 0)
        while low < high:
            middle = (low + high) // 2
            if self._between(cut, left, middle) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low

    def _between(self, cut: int, left: bool, rows: int) -> float:
        at = self.cuts[cut]
        return self.row_work.between(at - rows, at) if left else self.row_work.between(at, at + rows)

    def shards(self) -> Shards:
        out: list[list[Run]] = [[] for _ in self.work]
        for rank, (start, stop) in zip(self.owner, pairwise(self.cuts), strict=True):
            out[rank].append(Run(start, stop))
        return tuple(map(tuple, out))
