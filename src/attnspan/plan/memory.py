"""How much memory a rank's attention takes at its peak: its steps are walked through, what is alive is added up.

What is counted, by name::

    given       the caller's own query, key and value; in backward also out, lse and the gradient of out
    arenas      keys of the step that is computed, and of the next one, which are arriving
    expanded    keys and values that are made of the latents of a step
    packed      a copy of own keys to send from, where the caller's lie otherwise in memory
    parts       results of tiles that wait to be merged, and their float32 sum where a row has three or more
    tile        what one kernel call writes, and its workspace
    sums        gradients that wait to be summed, dq, dk and dv of own tokens; and dk and dv of the keys in arenas
    returning   gradients of own keys that come home
    heads       under Ulysses, what changed hands, and the buffers it travels in
    result      out and lse, or the gradients in their own dtype

memory_walk.py is a model of the loops in `attention`, held to them by tests/plan/test_memory_counted.py and
benchmarks/memory.py; not of a transport's own buffers or of the allocator's rounding. Not counted: the copies of
transfers that have many runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnspan.layouts.run import tokens_in
from attnspan.plan.cost import Shape
from attnspan.plan.heads import Heads, split_heads
from attnspan.plan.memory_walk import BytesByName, Kernels, LaneSizes, LaneWalk
from attnspan.plan.strategy import Ring, between_groups

if TYPE_CHECKING:
    from attnspan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the moment when a rank holds the most, by what they are for.

    >>> str(Memory({"given": 3 * 2**20, "arenas": 2**20}))
    '4.0 MiB: given 3.0, arenas 1.0'
    """

    terms: BytesByName

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """The names of the terms that make up nine tenths, the largest first."""
        names, left = [], 0.9 * self.total
        for name, size in sorted(self.terms.items(), key=lambda term: -term[1]):
            if left > 0:
                names.append(name)
            left -= size
        return ", ".join(names)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in self.terms.items() if size)
        return f"{self.total / 2**20:.1f} MiB: {parts}"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One batch row of a plan on one rank, or all of them where they are alike."""

    plan: Plan
    rank: int
    shape: Shape
    row: int
    backward: bool
    kernels: Kernels
    keeps: bool = False

    def saved(self) -> float:
        """What autograd saves of a call: the caller's tensors, out and lse."""
        sizes, (rows, keys) = self._sizes(None), self._tokens
        return rows * (sizes.q + sizes.out + sizes.lse) + keys * sizes.kv

    def kept(self) -> float:
        """Keys that are kept from forward to backward, and under Ulysses the tensors of own heads."""
        walk = self._walk()
        sizes, rows, keys = walk.counts
        return walk.arenas(len(walk.steps)) + (rows * sizes.q + keys * sizes.kv if self.plan.degree > 1 else 0.0)

    def given(self) -> float:
        """The caller's tensors, and backward's."""
        sizes, (rows, keys) = self._sizes(None), self._tokens
        return rows * sizes.q + keys * sizes.kv + (rows * (2 * sizes.out + sizes.lse) if self.backward else 0.0)

    def moments(self) -> Iterator[BytesByName]:
        """What else is alive, moment by moment."""
        plan, walk = self.plan, self._walk()
        if plan.degree == 1:
            yield from walk.moments()
            return
        here, there = (self._traded(*each) for each in ((self._sizes(None), *self._tokens), walk.counts))
        sizes, rows, keys = walk.counts
        inputs = rows * sizes.q + keys * sizes.kv
        kept = {"arenas": self.kept() - inputs, "heads": inputs} if self.keeps and self.backward else {"heads": 0.0}
        yield {**kept, "heads": kept["heads"] + here + there}  # sent and received
        yield {**kept, "heads": kept["heads"] + 2 * there + here / plan.degree}  # received and laid out by position
        yield from ({**moment, "heads": kept["heads"] + there} for moment in walk.moments())
        back, home = (self._results(*each) for each in (walk.counts, (self._sizes(None), *self._tokens)))
        yield {**walk.held, "heads": kept["heads"] + there + (3 - 1 / plan.degree) * back}  # computed, sent, received
        yield {**walk.held, "heads": kept["heads"] + there + 2 * back + home}  # computed, received and laid out by head

    def _traded(self, sizes: LaneSizes, rows: int, keys: int) -> float:
        """What leaves, or arrives, beforehand."""
        inputs = 0.0 if self.keeps and self.backward else rows * sizes.q + keys * sizes.kv
        return inputs + rows * (2 * sizes.out + sizes.lse) * self.backward

    def _results(self, sizes: LaneSizes, rows: int, keys: int) -> float:
        """What leaves, or arrives, afterwards."""
        if not self.backward:
            return rows * (sizes.out + sizes.lse)
        return rows * sizes.q + keys * sizes.kv * self.shape.widened_heads(self.plan.degree)

    def _walk(self) -> LaneWalk:
        plan, share = self.plan, None
        if plan.degree > 1:
            share = split_heads(self.shape.heads, self.shape.kv_heads, plan.degree)[self.rank % plan.degree]
        ring = isinstance(between_groups(plan.strategy), Ring)
        rows = tokens_in(plan.queries(self.rank, self.row))
        return LaneWalk(
            self._sizes(share),
            plan.keys(self.rank, self.row),
            rows,
            plan.steps(self.rank, self.row),
            ring,
            self.kernels,
            self.backward,
            self.keeps,
        )

    def _sizes(self, share: Heads | None) -> LaneSizes:
        return LaneSizes.of(self.shape, share, self.plan.batch_rows)

    @property
    def _tokens(self) -> tuple[int, int]:
        """The queries and keys that the caller holds."""
        plan = self.plan
        sides = ((plan.layout, plan.seq_len), (plan.key_layout, plan.key_len))
        rows, keys = (tokens_in(layout.runs(length, self.rank, self.row)) for layout, length in sides)
        return rows, keys


def memory(plan: Plan, rank: int, shape: Shape, backward: bool, kernels: Kernels, keeps: bool) -> Memory:
    """`Plan.memory`. Batch rows with steps of their own are taken to have their peak at once, except under
    Ulysses, where one comes after another."""
    rows = [MemoryRow(plan, rank, shape, row, backward, kernels, keeps) for row in range(plan.batch_rows)]
    peaks = [max(row.moments(), key=lambda moment: sum(moment.values())) for row in rows]
    if plan.degree > 1:
        peaks = [max(peaks, key=lambda moment: sum(moment.values()))]
        if keeps:  # all rows keep, whichever is computed
            others = sum(row.kept() for row in rows) * (1 - 1 / len(rows))
            peaks.append({"heads": others})
    terms = Counter({"given": sum(row.given() for row in rows)})
    for moment in peaks:
        terms.update(moment)
    return Memory(dict(terms))


def between_passes(plan: Plan, rank: int, shape: Shape) -> tuple[float, float]:
    """Bytes that wait from forward to backward: what autograd saves of a call, and keys if they are kept."""
    rows = [MemoryRow(plan, rank, shape, row, True, Kernels(False, True)) for row in range(plan.batch_rows)]
    return sum(row.saved() for row in rows), sum(row.kept() for row in rows)
