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
from typing import Any, Literal

from attnspan.errors import PlanError, integer
from attnspan.layouts.balanced import Balanced, fitting_chunk
from attnspan.layouts.contiguous import Contiguous
from attnspan.layouts.layout import Layout, check_ranks
from attnspan.masks import Mask
from attnspan.masks.real_tensors import with_real_tensors
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.drawing import in_bytes, in_seconds, table
from attnspan.plan.plan import Plan
from attnspan.plan.recurrent import RecurrentCost, RecurrentLayers
from attnspan.plan.strategy import Gather, Needed, Ring, Strategy, Ulysses
from attnspan.plan.timeline import Timeline, predict
from attnspan.plan.traffic import received_bytes

KeepKeys = bool | Literal["auto"]

SAMPLED = 32
"""The most ranks whose steps are worked out for a prediction, if nobody says; of more, evenly spaced ones."""

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, less whole numbers, are spread evenly, however many they are, and by no fixed stride."""

EQUAL = 0.05
"""Predicted times that differ by less than this part are the same: the model knows no better. Of such plans that with
the fewest exchanges is taken: it has least to lose where a link or a device is slower than was measured."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, and what the cost model says of it: bytes of keys at its peak and of keys that it keeps for backward
    (None where it keeps none), and when things happen."""

    plan: Plan
    shape: Shape
    imbalance: float
    peak: int
    timeline: Timeline
    backward: bool
    rounds: bool  # gradients of keys, on their way home
    refused: str = ""
    kept: int | None = None
    recurrent: RecurrentCost | None = None  # layers beside this one

    @property
    def moved(self) -> int:
        """The most bytes that arrive at a rank in a call, of those looked at; counted when asked for."""
        kept, rounds = self.kept is not None, self.rounds
        ranks = sampled_ranks(self.plan)
        arrives = [received_bytes(self.plan, self.shape, rank, kept=kept, rounds=rounds) for rank in ranks]
        return max(each.forward + (each.backward if self.backward else 0) for each in arrives)

    @property
    def needs(self) -> int:
        """Bytes of keys in all."""
        return self.peak + (self.kept or 0)

    @property
    def seconds(self) -> float:
        """The predicted time of the slowest rank looked at, and of the recurrent layers."""
        return self.timeline.seconds + (self.recurrent.seconds if self.recurrent else 0.0)

    @property
    def runs(self) -> int:
        """The most runs of a rank in a batch row."""
        plan = self.plan
        return max(len(runs) for row in range(plan.layout.rows) for runs in plan.layout.shards(plan.seq_len, row))

    @property
    def exchanges(self) -> int:
        """How often that rank exchanges anything."""
        return sum(event.lane == "link" for event in self.timeline.events)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates: the one that is taken, then by time, those refused last; `plan` is the first. See `EQUAL`."""

    candidates: tuple[Candidate, ...]
    shape: Shape
    hardware: Hardware
    keep_keys: KeepKeys = False

    @property
    def plan(self) -> Plan:
        return self.candidates[0].plan

    def explain(self) -> str:
        """The comparison, and for every other candidate why it lost; and what was measured, rates and links."""
        best = self.candidates[0]
        kept = ["kept KV"] if self.keep_keys else []
        besides = ["runs", "maps/rank", "map work", "recurrent"] if best.recurrent else []
        head = ["strategy", "layout", "imbalance", "moved/rank", "peak KV", *kept, *besides, "predicted", "why"]
        lines = [
            [
                c.plan.strategy_name,
                type(c.plan.layout).__name__,
                f"{c.imbalance:.3f}",
                in_bytes(c.moved),
                in_bytes(c.peak),
                *(["-" if c.kept is None else in_bytes(c.kept)] if kept else []),
                *_beside(c),
                in_seconds(c.seconds),
                _why(c, best),
            ]
            for c in self.candidates
        ]
        return "\n".join([table(head, lines), *self._measured()])

    def _measured(self) -> Iterator[str]:
        """What predictions rest on, where it was measured."""
        machine = self.hardware
        if machine.curves:
            yield f"rates: {machine.name}, {machine.note}"
        if machine.links:
            node = min(machine.ranks_per_node, self.plan.ranks)
            inside = [f"{machine.inside} inside a host"] if node > 1 else []
            between = [f"{machine.between} between hosts"] if self.plan.ranks > node else []
            shared = machine.ranks_per_device
            turns = f"; {shared} ranks take turns on a device" if shared > 1 else ""
            yield f"link: {', '.join([*inside, *between])}, {machine.links}{turns}"

    def __str__(self) -> str:
        return self.explain()


@with_real_tensors
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
    keep_keys: KeepKeys = False,
    sampled: int = SAMPLED,
    recurrent: Sequence[RecurrentLayers] = (),
) -> Choice:
    """The fastest plan, as predicted, whose keys fit into `memory` bytes per rank (default: half the machine's).

    `layouts` limits the layouts that are tried; without it, Balanced with the chunk that fits the length
    (`fitting_chunk`) and Contiguous are. `backward` False plans for inference. With `keep_keys` keys stay until
    backward and must fit too, those of one call; "auto" keeps them under a plan where they fit and take no more memory
    than what autograd saves of the call. Of more than `sampled` ranks (or groups of them), so many are looked at, and
    the busiest.

    `recurrent` layers, so many for each attention layer, count in the time; Balanced with few runs is tried for them.
    """
    machine, ranks = Hardware.of(hardware), check_ranks(ranks)
    seq_len = integer("seq_len", seq_len, at_least=1, error=PlanError)
    limit = machine.memory / 2 if memory is None else checked_memory(memory)
    _check_args(mask, shape, layouts, ranks, keep_keys, recurrent)
    layouts_tried = layouts or _layouts(mask, seq_len, ranks, bool(recurrent))
    tried = [(layout, strategy) for layout in layouts_tried for strategy in _strategies(ranks, shape)]
    if _fits_ulysses(ranks, shape):  # who owns which tokens hardly matters
        tried.append((layouts[0] if layouts else Contiguous(ranks), Ulysses()))
    options: Any = {"limit": limit, "backward": backward, "keep_keys": keep_keys, "sampled": sampled}
    found = {id(layout): [each.over(layout, mask, seq_len) for each in recurrent] for layout, _ in tried}
    beside = {layout: RecurrentCost.of(each, machine, backward) for layout, each in found.items()}
    candidates = [
        predicted(Plan(mask, layout, seq_len, strategy), shape, machine, recurrent=beside[id(layout)], **options)
        for layout, strategy in tried
    ]
    ordered = sorted(candidates, key=lambda c: (bool(c.refused), c.seconds))
    if ordered[0].refused:
        least = min(ordered, key=lambda c: c.needs)
        instead = " or keep_keys='auto'" if least.kept else ""
        raise PlanError(
            f"memory: no plan fits into {in_bytes(limit)} of keys per rank; the least, {least.plan.strategy_name}, "
            f"needs {in_bytes(least.needs)}; use more ranks{instead}"
        )
    equal = [c for c in ordered if not c.refused and c.seconds <= ordered[0].seconds * (1 + EQUAL)]
    taken = min(equal, key=lambda c: c.exchanges)
    ordered.sort(key=lambda c: c is not taken)
    return Choice(tuple(ordered), shape, machine, keep_keys if backward else False)


def _layouts(mask: Mask, seq_len: int, ranks: int, recurrent: bool) -> list[Layout]:
    """The layouts that are tried; recurrent layers like few runs."""
    chunk = fitting_chunk(seq_len, ranks)
    balanced = Balanced(mask, ranks=ranks, chunk=chunk)
    few = Balanced(mask, ranks=ranks, chunk=chunk, most_runs=2)
    differs = recurrent and few.shards(seq_len) != balanced.shards(seq_len)
    return [balanced, *([few] if differs else []), Contiguous(ranks)]


def choice_for(plan: Plan, **options: Any) -> Choice:
    """What the cost model says of every strategy for the mask and layout of a plan; `options` are those of `choose`."""
    return choose(plan.mask, seq_len=plan.seq_len, ranks=plan.ranks, layouts=[plan.layout], **options)


def predicted(
    plan: Plan,
    shape: Shape,
    hardware: Hardware,
    *,
    limit: float = inf,
    backward: bool = True,
    keep_keys: KeepKeys = False,
    sampled: int = SAMPLED,
    recurrent: RecurrentCost | None = None,
) -> Candidate:
    """What the cost model says of a plan, and why it is refused if its keys need more than `limit` bytes."""
    looked = sampled_ranks(plan, sampled)
    key_bytes = shape.kv_bytes / plan.batch_rows * shape.kv_share(plan.degree)
    peak = int(max(plan.peak_keys(rank) for rank in looked) * key_bytes)
    if shape.latent:  # expanded step by step; their gradients are summed in float32
        times = 1 + max(4, shape.width) / shape.width if backward else 1
        peak += int(max(plan.expanded_keys(rank) for rank in looked) * shape.expanded_bytes / plan.batch_rows * times)
    kept = _kept(plan, shape, limit - peak, keep_keys, looked) if backward and keep_keys else None
    keeps, needs = kept is not None, peak + (kept or 0)
    timelines = [predict(plan, rank, shape, hardware, backward=backward, keep_keys=keeps) for rank in looked]
    return Candidate(
        plan=plan,
        shape=shape,
        imbalance=plan.imbalance(),
        peak=peak,
        timeline=max(timelines, key=lambda timeline: timeline.seconds),
        backward=backward,
        rounds=hardware.rounds,
        refused=f"needs {in_bytes(needs)}, the limit is {in_bytes(limit)}" if needs > limit else "",
        kept=kept,
        recurrent=recurrent,
    )


def _kept(plan: Plan, shape: Shape, room: float, keep_keys: KeepKeys, looked: Sequence[int]) -> int | None:
    """Bytes that a rank keeps for backward, at most; None where "auto" keeps none."""
    kept = int(max(plan.kept_bytes(rank, shape) for rank in looked))
    if keep_keys == "auto" and not (kept <= room and all(plan.may_keep(rank, shape) for rank in looked)):
        return None
    return kept


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


def _check_args(
    mask: Mask,
    shape: Shape,
    layouts: Sequence[Layout] | None,
    ranks: int,
    keep_keys: KeepKeys,
    recurrent: Sequence[RecurrentLayers],
) -> None:
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
    if keep_keys not in (True, False, "auto"):
        raise PlanError(f"keep_keys must be True, False or 'auto', got {keep_keys!r}")
    if not all(isinstance(each, RecurrentLayers) for each in recurrent):
        raise PlanError(
            f"recurrent must hold RecurrentLayers, as in [RecurrentLayers('KDA', 16, 128)], got {recurrent!r}"
        )


def all_strategies(ranks: int, shape: Shape) -> list[Strategy]:
    """Every strategy worth trying with one layout."""
    return [*_strategies(ranks, shape), *([Ulysses()] if _fits_ulysses(ranks, shape) else [])]


def _fits_ulysses(ranks: int, shape: Shape) -> bool:
    """Whether each rank can have heads of its own, all tokens of them; a latent has none."""
    return 1 < ranks <= shape.heads and not shape.latent


def _strategies(ranks: int, shape: Shape) -> Iterator[Strategy]:
    """Every strategy worth trying with any layout."""
    yield from (Gather(), Needed(1), Needed(2), Needed(4), Ring())
    for degree in (d for d in range(2, ranks) if ranks % d == 0 and d <= shape.heads and d <= 8 and not shape.latent):
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
    if candidate.recurrent and best.recurrent:
        more = candidate.recurrent.seconds - best.recurrent.seconds
        if more > max(waits, works):
            return f"{slower}its recurrent layers take {in_seconds(candidate.recurrent.seconds)}"
    if waits > works:
        return f"{slower}waits {in_seconds(candidate.timeline.exposed)} for keys"
    if candidate.imbalance > best.imbalance * 1.02:
        return f"{slower}its busiest rank has {candidate.imbalance:.2f}x the mean work"
    return f"{slower}smaller tiles and merges"


def _beside(candidate: Candidate) -> list[str]:
    """What recurrent layers take, in words."""
    found = candidate.recurrent
    if found is None:
        return []
    return [str(candidate.runs), in_bytes(found.moved), f"{found.extra:+.1%}", in_seconds(found.seconds)]
