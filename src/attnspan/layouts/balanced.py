"""Equal tokens, equal work, few bytes, few runs: the layout to use when the mask is known.

It weighs five ways to divide the sequence and takes the simplest that is good enough:

    Contiguous, HeadTail    where they are as fair as anything else (full; causal)
    a split necklace        fewer than two runs per rank on average, fair for any mask (necklace.py)
    by slope                a few runs per rank, exactly fair where the work is a few lines (by_slope.py)
    dealt blocks            only if nothing else is as fair (round_robin.py); many runs

[Note: what is minimised] First the largest rank's work, up to `TOLERANCE` above the mean, which is spent on moving
fewer keys, then on fewer runs; up to `EQUAL` where a few tries do not reach that. Where few runs cannot do so, blocks
are dealt if they are fairer by `EQUAL` of a fair share, or by `WORTH` if they make many runs. If all rows lie on one
line the answer is known: Contiguous if it is flat, HeadTail if it climbs, up to the rounding of a length that
2 * ranks does not divide.

[Note: where it is fair] Random packs at up to 512 ranks are within 2 % and have at most 8 runs a rank, if no row sees
more keys than 2 % of a rank's fair share of pairs (tests/layouts/test_balanced.py). Beyond that, a single token is
more than the unevenness that is allowed: 64 tokens a rank, and documents of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeGuard

import torch

from attnspan.errors import LayoutError, integer
from attnspan.layouts.by_slope import by_slope
from attnspan.layouts.by_work import ByWork
from attnspan.layouts.contiguous import Contiguous
from attnspan.layouts.crossing import crossing
from attnspan.layouts.evening import evened
from attnspan.layouts.fair_window import DivisionRules
from attnspan.layouts.head_tail import HeadTail
from attnspan.layouts.layout import Shards
from attnspan.layouts.necklace import divided, mended, shards_of
from attnspan.layouts.round_robin import dealt, largest_dealt
from attnspan.layouts.run import Run, Runs, joined_runs, tokens_in
from attnspan.masks.columns import Columns
from attnspan.masks.piecewise import Piecewise, row_work, weighted

TOLERANCE = 0.004
"""How far above the mean the largest rank's work may be, if that saves bytes or runs."""

EQUAL = 0.01
"""Half of the imbalance that is promised: to gain less than this by dealing blocks is not worth a few runs more."""

FEW = 8
"""The most runs of a rank that are few."""

WORTH = 0.1
"""The part of a fair share that dealing blocks must gain where it makes more runs than that."""


@dataclass(frozen=True, slots=True, repr=False)
class Balanced(ByWork):
    """Divides the work of a mask, or the weighted sum of several, over ranks with equal token counts.

    `chunk` is the shortest run it makes (where the sequence is long enough for a few of them per rank, and no few rows
    hold a large part of a rank's work). One division for the whole batch, or one for each batch row of the mask if
    `per_row`. With `most_runs` a rank has at most so many runs, as suits recurrent layers, and the division is the
    fairest of those; what that costs is its `imbalance` in a plan.

    >>> from attnspan.masks import Causal, Documents, SlidingWindow
    >>> Balanced(Causal(), ranks=2).shards(1024) == HeadTail(ranks=2).shards(1024)
    True
    >>> print(Balanced(Causal() & Documents([512, 1536, 1024, 1024]), ranks=2))
    Balanced(Causal() & Documents([512, 1536, 1024, 1024]), ranks=2) on 4096 tokens
    0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 0 0  each cell is 128 tokens
    rank 0: [0, 1792) [3840, 4096)
    rank 1: [1792, 3840)
    >>> Balanced([Causal(), SlidingWindow(1024)], weights=[1, 5], ranks=4).tokens(65536)
    [16384, 16384, 16384, 16384]
    """

    chunk: int = field(default=128, kw_only=True)
    most_runs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        ByWork.__post_init__(self)  # not super(): a slotted dataclass is made twice, and loses itself
        object.__setattr__(self, "chunk", integer("chunk", self.chunk, at_least=1, error=LayoutError))
        if self.most_runs is not None:
            most = integer("most_runs", self.most_runs, at_least=1, error=LayoutError)
            object.__setattr__(self, "most_runs", most)

    def _shards(self, seq_len: int, row: int) -> Shards:
        with torch.inference_mode():  # thousands of small operations: no autograd beside each
            ways = _Portfolio(seq_len, self.ranks, self.chunk, self.rows > 1, self._weighted(seq_len, row))
            found = ways.best()
            few = self.most_runs is None or max(map(len, found)) <= self.most_runs
            return found if few or self.most_runs is None else ways.fairest_of_few(self.most_runs)

    def __repr__(self) -> str:
        return self._shown(chunk=self.chunk if self.chunk != 128 else None, most_runs=self.most_runs)


def fitting_chunk(seq_len: int, ranks: int) -> int:
    """A chunk with which Balanced keeps its promise: 128, or so many that each rank has 64 of them.

    >>> fitting_chunk(1 << 20, 64), fitting_chunk(1 << 20, 1024), fitting_chunk(100, 2)
    (128, 16, 1)
    """
    return min(128, max(1, seq_len // (64 * ranks)))


@dataclass(frozen=True)
class _Portfolio:
    """The ways to divide one sequence, and the choice between them."""

    seq_len: int
    ranks: int
    chunk: int
    same_counts: bool  # as HeadTail's: the batch rows of one tensor have shards of equal length
    bands: list[tuple[int, Columns]]  # with their weights
    _largest: dict[int, tuple[float, Shards]] = field(default_factory=dict)

    def best(self) -> Shards:
        """[Note: what is minimised], from the simplest to the last resort."""
        sloped = by_slope(self.work, self.seq_len, self.ranks)
        # A single line: as fair as whole tokens can be.
        if sloped in (self.contiguous, self.head_tail) and self._allowed(sloped):
            return sloped
        simple = [self.contiguous, self.head_tail]
        splits = list(self._splits())
        split = next((split for split in splits if self.largest(split) <= self.enough), None)
        fair = self.goal if split is None else min(self.goal, self.largest(split) * (1 + TOLERANCE))
        for shards in filter(self._allowed, simple):
            fits = all(self._work_of(runs) <= fair for runs in shards)
            if fits and (split is None or self._crossed(shards) <= 1.05 * self._crossed(split)):
                return shards
        if split is not None:
            return split
        few = [*simple, *splits, *([sloped] if self._long_enough(sloped) else [])]
        fewest = min(filter(self._allowed, few), key=self.largest)
        return self._dealt() if self._is_worth_dealing(fewest) else fewest

    def fairest_of_few(self, most: int) -> Shards:
        """The fairest way in which no rank has more runs: necklaces of longer and longer chunks, and simple ones."""
        ends = list(accumulate(self.counts))
        in_turn = tuple((Run(end - count, end),) if count else () for end, count in zip(ends, self.counts, strict=True))
        ways, chunk = [in_turn, self.contiguous, self.head_tail], self.chunk
        while self.seq_len >= 2 * chunk * self.ranks:
            ways += replace(self, chunk=chunk, _largest={})._splits()
            chunk *= 2
        sloped = by_slope(self.work, self.seq_len, self.ranks)
        ways += [sloped] if self._long_enough(sloped) else []
        return min((way for way in ways if self._allowed(way) and max(map(len, way)) <= most), key=self.largest)

    @cached_property
    def contiguous(self) -> Shards:
        return Contiguous(self.ranks).shards(self.seq_len)

    @cached_property
    def head_tail(self) -> Shards:
        return HeadTail(self.ranks).shards(self.seq_len)

    @cached_property
    def fair(self) -> float:
        """The mean work of a rank."""
        return self.work.total / self.ranks

    @property
    def goal(self) -> float:
        """The work of a rank that is good enough."""
        return self.fair * (1 + TOLERANCE)

    @property
    def enough(self) -> float:
        """The work of a rank that is not worth another try."""
        return self.fair * (1 + EQUAL)

    @cached_property
    def work(self) -> Piecewise:
        return weighted(row_work, self.bands)

    @cached_property
    def crossing(self) -> Piecewise:
        return weighted(crossing, self.bands)

    @cached_property
    def counts(self) -> list[int]:
        """The tokens of every rank, HeadTail's: they differ by two at most."""
        return list(map(tokens_in, self.head_tail))

    def largest(self, shards: Shards) -> float:
        """The work of the rank that has most."""
        if id(shards) not in self._largest:
            self._largest[id(shards)] = max(map(self._work_of, shards)), shards  # which keeps its id
        return self._largest[id(shards)][0]

    def _work_of(self, runs: Runs) -> float:
        return sum([self.work.between(run.start, run.stop) for run in runs])

    def _splits(self) -> Iterator[Shards]:
        """Split necklaces, each stricter than the one before; none where there are too few chunks."""
        if self.ranks == 1 or self.seq_len < 2 * self.chunk * self.ranks:
            return
        depth = (self.ranks - 1).bit_length()
        for tolerance in (TOLERANCE, 0.0):
            rules = DivisionRules(self.work, self.crossing, self.fair, tolerance, self.chunk, depth)
            circles = divided(self.seq_len, self.counts, rules)
            if circles is None:
                return
            circles = mended(circles, self.goal, self.enough, rules)
            split = shards_of(circles)
            self._largest[id(split)] = max(circle.work for circle in circles), split
            if not self.same_counts and self.largest(split) > self.enough:
                split = evened(split, self.work, self.chunk, self.enough)
            yield split
            if self.largest(split) <= self.enough:
                return

    def _is_worth_dealing(self, fewest: Shards) -> bool:
        """Whether dealt blocks are fairer by enough for the runs that they make."""
        few = self.seq_len <= FEW * self.chunk * self.ranks
        gain = self.largest(fewest) - largest_dealt(self.work, self.seq_len, self.ranks, self.chunk)
        return gain > (EQUAL if few else WORTH) * self.fair and self._allowed(self._dealt())

    def _dealt(self) -> Shards:
        return tuple(map(joined_runs, dealt(self.work, self.seq_len, self.ranks, self.chunk)))

    def _long_enough(self, shards: Shards | None) -> TypeGuard[Shards]:
        runs = (run for runs in shards or () for run in runs)
        return shards is not None and all(run.stop - run.start >= self.chunk for run in runs)

    def _allowed(self, shards: Shards) -> bool:
        return not self.same_counts or list(map(tokens_in, shards)) == self.counts

    def _crossed(self, shards: Shards) -> float:
        starts = torch.tensor([run.start for runs in shards for run in runs], device="cpu")
        return float(self.crossing.at(starts).sum())
