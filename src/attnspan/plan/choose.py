"""Which plan should I use? Every strategy that fits, predicted and compared, and why each of the others lost.

>>> from attnspan.masks import Causal, SlidingWindow
>>> from attnspan.plan import Shape
>>> choice = choose(SlidingWindow(4095), seq_len=1 << 20, ranks=16, shape=Shape(32, 8), hardware="h100-nvlink")
>>> choice.plan.strategy
Needed(stages=2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Real

from attnspan.errors import PlanError, integer
from attnspan.layouts.balanced import Balanced, fitting_chunk
from attnspan.layouts.contiguous import Contiguous
from attnspan.layouts.layout import Layout, check_ranks
from attnspan.masks import Mask
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.drawing import in_seconds, table
from attnspan.plan.plan import Plan
from attnspan.plan.strategy import Gather, Needed, Ring, Strategy, Ulysses, name_of
from attnspan.plan.timeline import Timeline, head_bytes, predict

SAMPLED = 32
"""The most ranks whose steps are worked out for a prediction, if nobody says; of more, evenly spaced ones."""

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, less whole numbers, are spread evenly, however many they are, and by no fixed stride."""

EQUAL = 0.005
"""Predicted times that differ by less than this part are the same: the model knows no better."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, and what the cost model says of it."""

    plan: Plan
    imbalance: float
    moved: int
    peak: int
    timeline: Timeline
    refused: str = ""

    @property
    def seconds(self) -> float:
        """The predicted time of the slowest rank looked at."""
        return self.timeline.seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, fastest first, those refused last; `plan` is the first."""

    candidates: tuple[Candidate, ...]
    shape: Shape
    hardware: Hardware

    @property
    def plan(self) -> Plan:
        return self.candidates[0].plan

    def explain(self) -> str:
        """The comparison, and for every other candidate why it lost; where rates were measured, by whom."""
        best = self.candidates[0]
        head = ["strategy", "layout", "imbalance", "moved/rank", "peak KV", "predicted", "why"]
        lines = [
            [
                name_of(c.plan.strategy),
                type(c.plan.layout).__name__,
                f"{c.imbalance:.3f}",
                in_bytes(c.moved),
                in_bytes(c.peak),
                in_seconds(c.seconds),
                _why(c, best),
            ]
            for c in self.candidates
        ]
        measured = [f"rates: {self.hardware.name}, {self.hardware.note}"] if self.hardware.curves else []
        return "\n".join([table(head, lines), *measured])

    def __str__(self) -> str:
        return self.explain()


def choose(
    mask: Mask,
    *,
    seq_len: int,
    ranks: int,
    shape: Shape,
    hardware: Hardware | str = "h100-nvlink",
    memory: float | None = None,
    layouts: Sequence[Layout] | None = None,
    backward: bool = True,
    sampled: int = SAMPLED,
) -> Choice:
    """The fastest plan, as predicted, whose keys fit into `memory` bytes per rank (default: half the machine's).

    `layouts` limits the layouts that are tried; `backward` False plans for inference. Without it, Balanced with the
    chunk that fits the length (`fitting_chunk`) and Contiguous are tried. Of more than `sampled` ranks (or groups of
    them), so many are looked at, and the busiest.
    """
    machine, ranks = Hardware.of(hardware), check_ranks(ranks)
    seq_len = integer("seq_len", seq_len, at_least=1, error=PlanError)
    limit = machine.memory / 2 if memory is None else checked_memory(memory)
    _check_parts(mask, shape, layouts, ranks)
    tried = [
        (layout, strategy)
        for layout in layouts or (Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks)), Contiguous(ranks))
        for strategy in _strategies(ranks, shape)
    ]
    if 1 < ranks <= shape.heads:  # all heads apart: who owns which tokens hardly matters
        tried.append((layouts[0] if layouts else Contiguous(ranks), Ulysses()))
    plans = (Plan(mask, layout, seq_len, strategy) for layout, strategy in tried)
    candidates = [predicted(plan, shape, machine, limit=limit, backward=backward, sampled=sampled) for plan in plans]
    ordered = tuple(sorted(candidates, key=lambda c: (bool(c.refused), c.seconds)))
    if ordered[0].refused:
        least = min(ordered, key=lambda c: c.peak)
        raise PlanError(
            f"memory: no plan fits into {in_bytes(limit)} of keys per rank; the least, {name_of(least.plan.strategy)}, "
            f"needs {in_bytes(least.peak)}; use more ranks"
        )
    return Choice(ordered, shape, machine)


def predicted(
    plan: Plan,
    shape: Shape,
    hardware: Hardware,
    *,
    limit: float = inf,
    backward: bool = True,
    sampled: int = SAMPLED,
) -> Candidate:
    """What the cost model says of a plan, and why it is refused if its keys need more than `limit` bytes."""
    looked = sampled_ranks(plan, sampled)
    key_bytes = shape.kv_bytes / plan.rows * shape.kv_share(plan.degree)
    peak = int(max(plan.peak_keys(rank) for rank in looked) * key_bytes)
    timelines = [predict(plan, rank, shape, hardware, backward=backward) for rank in looked]
    return Candidate(
        plan=plan,
        imbalance=plan.imbalance(),
        moved=int(max(sum(plan.bytes_received(rank, shape).values()) for rank in looked) + head_bytes(plan, shape)),
        peak=peak,
        timeline=max(timelines, key=lambda timeline: timeline.seconds),
        refused=f"needs {in_bytes(peak)}, the limit is {in_bytes(limit)}" if peak > limit else "",
    )


def sampled_ranks(plan: Plan, most: int = SAMPLED) -> list[int]:
    """The first rank of each group, or of some groups if there are many: of the one with most work, the one that
    exchanges most keys, and some between.

    >>> from attnspan.layouts import HeadTail
    >>> from attnspan.masks import Causal
    >>> sampled_ranks(Plan(Causal(), HeadTail(ranks=8), 64, "ulysses(2) x ring"))
    [0, 2, 4, 6]
    """
    groups = {*range(plan.groups)}
    if plan.groups > most:
        works, traffic = plan.group_works(), plan.group_traffic()
        busiest = {each.index(max(each)) for each in (works, traffic)}
        groups = busiest | {int(i * GOLDEN % 1 * plan.groups) for i in range(most - 1)}
    return [group * plan.degree for group in sorted(groups)]


def checked_memory(memory: object) -> float:
    """A number of bytes, or a PlanError."""
    if isinstance(memory, bool) or not isinstance(memory, Real) or not isfinite(memory) or memory <= 0:
        raise PlanError(f"memory must be a positive number of bytes, got {memory!r}")
    return float(memory)


def _check_parts(mask: Mask, shape: Shape, layouts: Sequence[Layout] | None, ranks: int) -> None:
    if not isinstance(mask, Mask):
        raise PlanError(f"mask must be a mask such as Causal(), got {mask!r}")
    if not isinstance(shape, Shape):
        raise PlanError(f"shape must be a Shape such as Shape(heads=32, kv_heads=8), got {shape!r}")
    mask.check_rows(shape.batch)
    for layout in layouts or ():
        if not isinstance(layout, Layout):
            raise PlanError(f"layouts must hold layouts such as HeadTail(ranks={ranks}), got {layout!r}")
    if any(layout.ranks != ranks for layout in layouts or ()):
        raise PlanError(f"layouts must have {ranks} ranks, got {[layout.ranks for layout in layouts or ()]}")


def _strategies(ranks: int, shape: Shape) -> Iterator[Strategy]:
    """Every strategy worth trying with any layout."""
    yield from (Gather(), Needed(1), Needed(2), Needed(4), Ring())
    for degree in (d for d in range(2, ranks) if ranks % d == 0 and d <= shape.heads and d <= 8):
        yield from (Ulysses(degree, inner) for inner in (Gather(), Needed(2), Ring()))


def _why(candidate: Candidate, best: Candidate) -> str:
    if candidate.refused:
        return candidate.refused
    if candidate is best:
        return "chosen"
    if candidate.seconds <= best.seconds * (1 + EQUAL):
        return "as fast"
    slower = f"{candidate.seconds / best.seconds:.2f}x: " if best.seconds else ""  # an empty mask takes no time
    waits = candidate.timeline.exposed - best.timeline.exposed
    works = candidate.timeline.computing - best.timeline.computing
    if waits > works:
        return f"{slower}waits {in_seconds(candidate.timeline.exposed)} for keys"
    if candidate.imbalance > best.imbalance * 1.02:
        return f"{slower}its busiest rank has {candidate.imbalance:.2f}x the mean work"
    return f"{slower}smaller tiles and merges"


def in_bytes(size: float) -> str:
    """A size for people.

    >>> in_bytes(4096), in_bytes(3.2e9)
    ('4.1 KB', '3.2 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
