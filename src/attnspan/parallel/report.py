"""What a session was used for: the witness of attention/uses.py, in words and bytes.

Counted where attention ran, so a layer that went another way is missing here: `ContextParallel.assert_used` is how a
training script proves that none did. Bytes are those that arrived at this rank from others, worked out from the plan;
tests hold them against the wire::

    forward     keys and values that the plan moves; under Ulysses also heads, there and back
    backward    the same keys again, if they were not kept, and gradients of keys in float32; under Ulysses heads,
                there and back
    a replay    of a checkpointed region is a forward pass

Not counted: gradients through lse, sinks, and what other calls of the session move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from attnspan.attention.uses import Uses
from attnspan.errors import AttentionError, integer
from attnspan.layouts.run import tokens_in
from attnspan.plan import Plan, Shape
from attnspan.plan.cost import DTYPES
from attnspan.plan.drawing import table
from attnspan.plan.heads import split_heads
from attnspan.plan.strategy import name_of


class Bytes(NamedTuple):
    """What arrives at a rank, of one call."""

    forward: int
    backward: int


NOTHING = Bytes(0, 0)


@dataclass(frozen=True, slots=True)
class ReportLine:
    """The use of one plan on tensors of one shape."""

    mask: str
    plan: Plan
    shape: Shape
    rank: int
    calls: int
    replays: int
    backwards: int
    from_kept: int  # of the backward passes, those from kept keys

    @property
    def strategy(self) -> str:
        return name_of(self.plan.strategy)

    @property
    def received(self) -> Bytes:
        """Bytes that arrived in forward passes (replays too), and in backward passes."""
        each, kept = (arriving(self.plan, self.shape, self.rank, kept=kept) for kept in (False, True))
        backward = (self.backwards - self.from_kept) * each.backward + self.from_kept * kept.backward
        return Bytes((self.calls + self.replays) * each.forward, backward)

    @property
    def pairs(self) -> float:
        """Pairs of query and key that this rank computed in calls, over batch rows; heads do not count."""
        return self.calls * self.plan.work(self.rank) * self._alike

    @property
    def all_pairs(self) -> float:
        """The same of all ranks."""
        return self.calls * sum(self.plan.group_works()) * self._alike

    @property
    def _alike(self) -> int:
        """How many batch rows each row of the plan stands for."""
        return self.shape.batch if self.plan.rows == 1 else 1


@dataclass(frozen=True, slots=True)
class PastUses:
    """The uses of plans that are no longer known, added up: a mask made for every step makes many."""

    mask: str = ""
    calls: int = 0
    replays: int = 0
    backwards: int = 0
    received: Bytes = NOTHING
    pairs: float = 0
    all_pairs: float = 0
    strategy = "-"

    def settled(self, uses: Uses, rank: int, most: int) -> PastUses:
        """With the oldest of some uses, which are then forgotten there, so that they are at most so many."""
        lines = [_line_of("", uses, use, rank) for use in list(_used(uses))[:-most]]
        for line in lines:
            for counted in (uses.forward, uses.replayed, uses.backward, uses.from_kept):
                counted.pop((line.plan, line.shape), None)
        sums = Report(rank, 0, (self, *lines))
        counts = (sums.calls, sums.replays, sums.backwards)
        return PastUses(self.mask, *counts, sums.received, sums.pairs, sums.all_pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """What a session was used for on this rank since it was made, or last reset. Prints as a table."""

    rank: int
    ranks: int
    lines: tuple[ReportLine | PastUses, ...]

    @property
    def calls(self) -> int:
        """Forward passes of attention."""
        return sum(line.calls for line in self.lines)

    @property
    def replays(self) -> int:
        """Forward passes that activation checkpointing ran again."""
        return sum(line.replays for line in self.lines)

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

    def __str__(self) -> str:
        head = ["mask", "strategy", "calls", "replays", "backwards", "pairs", "received forward", "backward"]
        lines = [
            [
                line.mask or "-",
                line.strategy,
                line.calls,
                line.replays,
                line.backwards,
                f"{line.pairs:,.0f}",
                *(_sized(size) for size in line.received),
            ]
            for line in self.lines
        ]
        title = f"rank {self.rank} of {self.ranks}: {self.calls} calls, {self.share:.1%} of the work"
        return "\n".join([title, table(head, lines)]) if lines else f"{title}: attention has not run"


def report(rank: int, ranks: int, uses: Mapping[str, Uses], past: PastUses) -> Report:
    """The report of some uses, by the name of their mask."""
    lines: list[ReportLine | PastUses] = [
        _line_of(name, used, use, rank) for name, used in uses.items() for use in _used(used)
    ]
    return Report(rank, ranks, (*lines, past) if past.calls or past.replays or past.backwards else tuple(lines))


def _used(uses: Uses) -> Iterable[tuple[Plan, Shape]]:
    """What was used, the oldest first."""
    return [(plan, shape) for plan, shape in {**uses.forward, **uses.replayed, **uses.backward} if shape is not None]


def _line_of(name: str, uses: Uses, use: tuple[Plan, Shape], rank: int) -> ReportLine:
    counts = (uses.forward[use], uses.replayed[use], uses.backward[use], uses.from_kept[use])
    return ReportLine(name, *use, rank, *counts)


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


# ---- what arrives --------------------------------------------------------------------------------------------------


def arriving(plan: Plan, shape: Shape, rank: int, *, kept: bool = False) -> Bytes:
    """What arrives at a rank in one call: keys and their gradients, and what the exchange of heads brings, tokens of
    own heads and then own tokens of all heads. Backward needs no keys, and no heads of the inputs, that were kept."""
    narrow, wide = DTYPES[shape.dtype], max(4, DTYPES[shape.dtype])
    batch = shape.batch if plan.rows == 1 else 1
    dim, value_dim = shape.head_dim, shape.v_head_dim
    shares = split_heads(shape.heads, shape.kv_heads, plan.degree)
    here, first = rank % plan.degree, rank - rank % plan.degree
    taken_q, taken_k = len(shares[here].query), len(shares[here].key)
    forward = backward = 0
    for row in range(plan.rows):
        for step in plan.steps(rank, row):
            keys = sum(transfer.tokens for transfer in step.receives) * taken_k * (dim + value_dim) * narrow
            forward += keys
            backward += 0 if kept else keys
            backward += sum(transfer.tokens for transfer in step.returns) * taken_k * (dim + value_dim) * wide
        own_q, own_k = _held(plan, rank, row)
        for member in range(plan.degree):
            if member == here:
                continue
            q, k = _held(plan, first + member, row)
            given_q, given_k = len(shares[member].query), len(shares[member].key)
            brought = (q * taken_q * dim + k * taken_k * (dim + value_dim)) * narrow  # q, k, v
            forward += brought + own_q * given_q * (value_dim * narrow + wide)  # and out and lse
            backward += (0 if kept else brought) + q * taken_q * (2 * value_dim * narrow + wide)  # out, grad, lse
            backward += (own_q * given_q * dim + own_k * given_k * (dim + value_dim)) * wide  # gradients
    return Bytes(forward * batch, backward * batch)


def _held(plan: Plan, rank: int, row: int) -> tuple[int, int]:
    """How many queries and keys of a batch row lie on a rank."""
    sides = (plan.layout, plan.seq_len), (plan.key_layout, plan.key_len)
    queries, keys = (tokens_in(layout.runs(length, rank, row if layout.rows > 1 else 0)) for layout, length in sides)
    return queries, keys


def _sized(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit takes all")
