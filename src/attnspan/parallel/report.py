"""Reports what a session was used for: calls, bytes, work and times of its attention.

Calls are counted where attention runs (attention/uses.py), so layers that bypass it are missing;
`ContextParallel.assert_used` proves that there are none. Bytes are those received from other ranks, derived from the
plan (plan/traffic.py); the recomputation of a checkpointed region counts as a forward pass. Traffic of other methods of
the session is not counted.

Times are the medians of the latest passes on this rank (attention/pass_timer.py), next to the cost model's prediction,
with a warning if they differ by more than half of it. Nothing is predicted on virtual ranks, which share one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from attnspan.attention.uses import PassTime, Uses
from attnspan.errors import AttentionError, integer
from attnspan.plan import Hardware, Plan, Shape, predict
from attnspan.plan.drawing import in_bytes, in_seconds, table
from attnspan.plan.traffic import NOTHING, Bytes, received_bytes

ENOUGH = 3
"""Passes that are timed before a prediction is doubted: the first ones compile, and allocate."""

APART = 0.5
"""How far measured times may be from predicted ones, as a part of these."""


class Machine(NamedTuple):
    """What the cost model knows of a session's ranks: by shape, and whether gradients of keys travel rounded."""

    hardware: Callable[[Shape], Hardware | None]
    rounds: bool


@dataclass(frozen=True, slots=True)
class ReportLine:
    """The use of one plan on tensors of one shape."""

    mask: str
    plan: Plan
    shape: Shape
    rank: int
    calls: int
    recomputed: int
    backwards: int
    from_kept: int  # of the backward passes, those from kept keys
    forward: PassTime
    backward: PassTime
    machine: Machine

    @property
    def strategy(self) -> str:
        return self.plan.strategy_name

    @property
    def received(self) -> Bytes:
        """Bytes that arrived in forward passes (recomputed ones too), and in backward passes."""
        plan, shape, rank, rounds = self.plan, self.shape, self.rank, self.machine.rounds
        each, kept = (received_bytes(plan, shape, rank, kept=kept, rounds=rounds) for kept in (False, True))
        backward = (self.backwards - self.from_kept) * each.backward + self.from_kept * kept.backward
        return Bytes((self.calls + self.recomputed) * each.forward, backward)

    @property
    def pairs(self) -> float:
        """Pairs of query and key that this rank computed in calls, over batch rows; heads do not count."""
        return self.calls * self.plan.work(self.rank) * self._alike

    @property
    def all_pairs(self) -> float:
        """The same of all ranks."""
        return self.calls * sum(self.plan.group_works()) * self._alike

    @property
    def measured(self) -> float:
        """Seconds of a call on this rank, forward and backward if it had one; 0 where no time is known yet."""
        return self.forward.seconds + self.backward.seconds

    @property
    def predicted(self) -> float:
        """The same, as the cost model predicts it; 0 where it does not."""
        hardware = self.machine.hardware(self.shape)
        if hardware is None:
            return 0.0
        backward, keeps = self.backward.passes > 0, 2 * self.from_kept > self.backwards
        timeline = predict(self.plan, self.rank, self.shape, hardware, backward=backward, keep_keys=keeps)
        return timeline.seconds

    @property
    def warning(self) -> str:
        """That measured and predicted times are far apart; empty where they are not, or too little was measured."""
        predicted, hardware = self.predicted, self.machine.hardware(self.shape)
        if self.forward.passes < ENOUGH or not predicted or abs(self.measured / predicted - 1) <= APART:
            return ""
        assert hardware is not None, "or nothing would be predicted"
        unknown = [name for name, known in (("rates", hardware.curves), ("links", hardware.links)) if not known]
        why = f"{' and '.join(unknown)} are a preset's" if unknown else "the machine is not as it was measured"
        return (
            f"{self.strategy} takes {in_seconds(self.measured)} where {in_seconds(predicted)} was predicted: {why}; "
            "run attnspan tune"
        )

    @property
    def _alike(self) -> int:
        """How many batch rows each row of the plan stands for."""
        return self.shape.batch if self.plan.batch_rows == 1 else 1


@dataclass(frozen=True, slots=True)
class PastUses:
    """The uses of plans that are no longer known, added up: a mask made for every step makes many."""

    mask: str = ""
    calls: int = 0
    recomputed: int = 0
    backwards: int = 0
    received: Bytes = NOTHING
    pairs: float = 0
    all_pairs: float = 0
    strategy, measured, predicted, warning = "-", 0.0, 0.0, ""

    def settled(self, uses: Uses, rank: int, machine: Machine, most: int) -> PastUses:
        """With the oldest of some uses, which are then forgotten there, so that they are at most so many."""
        lines = [_line_of("", uses, use, rank, machine) for use in list(_used(uses))[:-most]]
        for line in lines:
            uses.forget((line.plan, line.shape))
        sums = Report(rank, 0, (self, *lines))
        counts = (sums.calls, sums.recomputed, sums.backwards)
        return PastUses(self.mask, *counts, sums.received, sums.pairs, sums.all_pairs)


class RecurrenceUse(NamedTuple):
    """How often a rule ran, recomputations included, and the bytes of maps that arrive in its forward and backward
    passes."""

    calls: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a session was used for on this rank since it was made, or last reset. Prints as a table."""

    rank: int
    ranks: int
    lines: tuple[ReportLine | PastUses, ...]
    recurrences: Mapping[str, RecurrenceUse] = field(default_factory=dict)  # by the name of the rule

    @property
    def calls(self) -> int:
        """Forward passes of attention."""
        return sum(line.calls for line in self.lines)

    @property
    def recomputed(self) -> int:
        """Forward passes that activation checkpointing ran again."""
        return sum(line.recomputed for line in self.lines)

    @property
    def backwards(self) -> int:
        """Backward passes of attention."""
        return sum(line.backwards for line in self.lines)

    @property
    def received(self) -> Bytes:
        """Bytes that arrived, forward and backward."""
        each = [line.received for line in self.lines]
        return Bytes(sum(size.forward for size in each), sum(size.backward for size in each))

    @property
    def pairs(self) -> float:
        """Pairs of query and key that this rank computed in calls."""
        return sum(line.pairs for line in self.lines)

    @property
    def all_pairs(self) -> float:
        """The same of all ranks."""
        return sum(line.all_pairs for line in self.lines)

    @property
    def share(self) -> float:
        """This rank's part of the pairs of all ranks; a fair one is 1 / ranks."""
        return self.pairs / self.all_pairs if self.all_pairs else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was predicted far from what was measured."""
        return tuple(line.warning for line in self.lines if line.warning)

    def __str__(self) -> str:
        head = ["mask", "strategy", "calls", "recomputed", "backwards", "pairs", "received forward", "backward"]
        head += ["predicted", "measured"]
        lines = [
            [
                line.mask or "-",
                line.strategy,
                line.calls,
                line.recomputed,
                line.backwards,
                f"{line.pairs:,.0f}",
                *(in_bytes(size) for size in line.received),
                *(in_seconds(each) if each else "-" for each in (line.predicted, line.measured)),
            ]
            for line in self.lines
        ]
        title = f"rank {self.rank} of {self.ranks}: {self.calls} calls, {self.share:.1%} of the work"
        warned = [f"warning: {each}" for each in self.warnings]
        recurrent = [
            f"{name}: {calls} calls; maps received: {in_bytes(forward)} forward, {in_bytes(backward)} backward"
            for name, (calls, forward, backward) in self.recurrences.items()
        ]
        shown = [title, table(head, lines)] if lines else [f"{title}: attention has not run"]
        return "\n".join([*shown, *recurrent, *warned])


def report(rank: int, ranks: int, uses: Mapping[str, Uses], past: PastUses, machine: Machine) -> Report:
    """The report of some uses, by the name of their mask."""
    lines: list[ReportLine | PastUses] = [
        _line_of(name, used, use, rank, machine) for name, used in uses.items() for use in _used(used)
    ]
    return Report(rank, ranks, (*lines, past) if past.calls or past.recomputed or past.backwards else tuple(lines))


def _used(uses: Uses) -> Iterable[tuple[Plan, Shape]]:
    """What was used, the oldest first."""
    return [(plan, shape) for plan, shape in {**uses.forward, **uses.recomputed, **uses.backward} if shape is not None]


def _line_of(name: str, uses: Uses, use: tuple[Plan, Shape], rank: int, machine: Machine) -> ReportLine:
    counts = (uses.forward[use], uses.recomputed[use], uses.backward[use], uses.from_kept[use])
    return ReportLine(name, *use, rank, *counts, uses.took("forward", use), uses.took("backward", use), machine)


def check_used(found: Report, layers: int | Mapping[str, int], passes: int) -> None:
    """Refuse another number of calls than `layers` in each of `passes`; by mask, where they are given by mask."""
    passes = integer("passes", passes, at_least=1, error=AttentionError)
    by_mask = layers if isinstance(layers, Mapping) else {None: layers}
    for mask, count in by_mask.items():
        count = integer("layers", count, error=AttentionError)
        of = "" if mask is None else f" with mask {mask!r}"
        calls = sum(line.calls for line in found.lines if mask is None or line.mask == mask)
        if calls != count * passes:
            raise AttentionError(
                f"attention{of} must have run {count} x {passes} = {count * passes} times since the last reset, it ran "
                f"{calls} times: {_hint(calls, count * passes)}"
            )


def _hint(calls: int, expected: int) -> str:
    if calls == 0:
        return "run the model inside cp.sdpa() or cp.flex(), attach it, or call cp.attention(...)"
    if calls > expected:
        return "for several forward passes give passes=, or call cp.reset() before"
    return (
        "some layers do not call F.scaled_dot_product_attention or flex_attention, or call it outside of cp.sdpa() and "
        "cp.flex()"
    )
