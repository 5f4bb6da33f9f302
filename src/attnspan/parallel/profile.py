"""Passes of attention step by step, measured beside predicted: what `ContextParallel.profile` records.

Each pass has a row for every step of its plan, one for the exchanges of heads, and one for the rest: packing, merging,
sums. Measured times are medians of the latest passes on this rank (attention/recording.py); predicted ones come from
the timeline (plan/timeline.py). The transfers of a step are its keys, and in backward the gradients sent home after it.
The time of a transfer that overlaps with compute is an upper bound, since only a wait shows that it has ended.

Virtual ranks are threads of one process: their compute times are real, a transfer is a copy, and waiting includes the
work of other ranks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from attnspan.attention.recording import Kind, RecordedPass, Recorder, TimedSpan
from attnspan.attention.uses import Direction
from attnspan.errors import AttentionError
from attnspan.masks.drawing import shortened
from attnspan.plan import Hardware, Plan, Shape, predict
from attnspan.plan.drawing import in_seconds, table
from attnspan.plan.timeline import Event
from attnspan.transports import Transport

KINDS: tuple[Kind, ...] = ("compute", "transfer", "wait")
NOTHING: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
HEADS, REST = "heads", "rest"
_STEP = re.compile(r" of step (\d+)$")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one row of a pass, by kind: what was predicted and what was measured."""

    name: str
    predicted: dict[Kind, float]
    measured: dict[Kind, float]


@dataclass(frozen=True, slots=True)
class PassProfile:
    """The passes of one plan on tensors of one shape, forward or backward."""

    plan: Plan
    shape: Shape
    rank: int
    direction: Direction
    passes: int
    predicted: float
    measured: float
    rows: tuple[StepTimes, ...]

    def __str__(self) -> str:
        head = ["step", *(title for kind in KINDS for title in (kind, "measured"))]
        lines = [
            [row.name, *(_shown(times[kind]) for kind in KINDS for times in (row.predicted, row.measured))]
            for row in self.rows
        ]
        title = (
            f"{self.direction}, {shortened(repr(self.plan.mask), 50)}, {self.plan.strategy_name}, rank {self.rank} "
            f"of {self.plan.ranks}\npredicted {in_seconds(self.predicted)}, measured {in_seconds(self.measured)} "
            f"(median of {self.passes})"
        )
        return f"{title}\n{table(head, lines)}"


class Profile:
    """What attention on a group of ranks took while a ``with`` block was open. Prints as tables, one for each pass."""

    def __init__(self, transport: Transport, hardware: Callable[[Shape], Hardware]) -> None:
        self._transport, self._hardware = transport, hardware
        self._recorder = Recorder()

    def __enter__(self) -> Profile:
        if Recorder in self._transport.memo:
            raise AttentionError("profile: these ranks are being profiled already; close that block first")
        self._transport.memo[Recorder] = self._recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport.memo.pop(Recorder, None)

    @property
    def passes(self) -> tuple[PassProfile, ...]:
        """Every kind of pass that ran: by plan, by the shape of its tensors, forward and backward."""
        return tuple(self._profile(use, direction, found) for direction, use, found in self._recorded())

    def trace(self, path: str | Path) -> Path:
        """Write a Chrome trace: of every kind of pass the latest one, below its prediction."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._events())}), encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.passes)) or "attention has not run since the block was opened"

    def _recorded(self) -> Iterator[tuple[Direction, tuple[Plan, Shape], list[RecordedPass]]]:
        for (direction, (plan, shape)), found in self._recorder.passes.items():
            done = [each for each in found if each.seconds is not None]
            if done and shape is not None:
                yield direction, (plan, shape), done

    def _profile(self, use: tuple[Plan, Shape], direction: Direction, found: list[RecordedPass]) -> PassProfile:
        plan, shape = use
        timeline = Predicted.of(plan, shape, self._transport.rank, self._hardware(shape), direction)
        measured = [_by_row(each.spans, each.seconds or 0.0) for each in found]
        steps = [str(index) for index in range(len(plan.steps(self._transport.rank)))]
        names = [*steps, *([HEADS] if plan.degree > 1 else []), REST]
        rows = [
            StepTimes(
                name,
                timeline.rows.get(name, NOTHING),
                {kind: median(each.get(name, NOTHING)[kind] for each in measured) for kind in KINDS},
            )
            for name in names
        ]
        seconds = median(each.seconds or 0.0 for each in found)
        where = (plan, shape, self._transport.rank, direction, len(found))
        return PassProfile(*where, timeline.seconds, seconds, tuple(rows))

    def _events(self) -> Iterator[dict[str, Any]]:
        start = 0.0
        lanes = [f"{kind}, {which}" for kind in KINDS for which in ("predicted", "measured")]
        for lane, name in enumerate(lanes):
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"rank {self._transport.rank}"}}
        for direction, (plan, shape), found in self._recorded():
            timeline = Predicted.of(plan, shape, self._transport.rank, self._hardware(shape), direction)
            latest = found[-1]
            for which, spans in (("predicted", timeline.spans), ("measured", latest.spans)):
                for kind, what, begin, stop in spans:
                    yield {
                        "ph": "X",
                        "name": f"{direction}: {what}",
                        "pid": 0,
                        "tid": lanes.index(f"{kind}, {which}"),
                        "ts": (start + begin) * 1e6,
                        "dur": (stop - begin) * 1e6,
                    }
            start += max(timeline.seconds, latest.seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One pass of a timeline: its spans, which begin at 0, and what they sum up to."""

    spans: tuple[TimedSpan, ...]
    seconds: float
    rows: dict[str, dict[Kind, float]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, shape: Shape, rank: int, hardware: Hardware, direction: Direction) -> Predicted:
        forward = predict(plan, rank, shape, hardware)
        if direction == "forward":
            events, start, stop = forward.events, 0.0, forward.seconds
        else:
            both = predict(plan, rank, shape, hardware, backward=True)
            events, start, stop = both.events[len(forward.events) :], forward.seconds, both.seconds
        spans = tuple(
            TimedSpan(kind, what, begin - start, end - start)
            for kind, what, begin, end in _with_waits(events, start, stop)
        )
        return Predicted(spans, stop - start, _by_row(spans, stop - start))


def _with_waits(events: Iterable[Event], start: float, stop: float) -> Iterator[TimedSpan]:
    """The events of a timeline as spans, and the waiting between them: for the transfer that ends when it does."""
    clock, latest = start, ""
    transfers: dict[float, str] = {}
    for lane, begin, end, what in events:
        if lane == "link":
            transfers[end], latest = what, what
            yield TimedSpan("transfer", what, begin, end)
            continue
        if begin > clock:
            yield TimedSpan("wait", transfers.get(begin, latest), clock, begin)
        yield TimedSpan("compute", what, begin, end)
        clock = end
    if stop > clock:
        yield TimedSpan("wait", transfers.get(stop, latest), clock, stop)


def _by_row(spans: Iterable[TimedSpan], seconds: float) -> dict[str, dict[Kind, float]]:
    """Seconds by row and kind; what is neither a step nor the waiting for one is the rest."""
    rows: dict[str, dict[Kind, float]] = defaultdict(NOTHING.copy)
    known = 0.0
    for kind, what, start, stop in spans:
        step = _STEP.search(what)
        name = step[1] if step else HEADS
        if kind == "compute" and step is None:
            continue
        rows[name][kind] += stop - start
        known += (stop - start) * (kind != "transfer")
    rows[REST]["compute"] = max(0.0, seconds - known)
    return dict(rows)


def _shown(seconds: float) -> str:
    return in_seconds(seconds) if seconds else "-"
