"""Timed spans of a pass: computing, transfers, and waiting for them.

Recorded while a group is profiled (parallel/profile.py); otherwise the cost is one check per step. A transfer lasts
from posting its messages until they have been waited for. It may have finished earlier, which only a wait would reveal;
so the recorded time of a transfer that overlaps with compute is an upper bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from attnspan.attention.pass_timer import Moment, between, now
from attnspan.attention.uses import Direction, Use
from attnspan.transports import Pending, Transport

Kind = Literal["compute", "transfer", "wait"]

MAX_RECORDED = 16
"""How many passes are kept for each plan and shape."""


class TimedSpan(NamedTuple):
    """A part of a pass, in seconds since the pass began."""

    kind: Kind
    what: str
    start: float
    stop: float


@dataclass(eq=False)
class RecordedPass:
    """One pass, while it runs and afterwards."""

    direction: Direction
    use: Use
    device: torch.device
    start: Moment = field(init=False)
    stop: Moment = None
    moments: list[tuple[Kind, str, Moment, Moment]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = now(self.device)

    @property
    def seconds(self) -> float | None:
        """How long it took, if that is known by now."""
        return between(self.start, self.stop)

    @property
    def spans(self) -> list[TimedSpan]:
        """Its parts whose times are known."""
        found = [(kind, what, between(self.start, a), between(self.start, b)) for kind, what, a, b in self.moments]
        return [TimedSpan(kind, what, a, b) for kind, what, a, b in found if a is not None and b is not None]


@dataclass(eq=False)
class Recorder:
    """The latest passes of a group, by what they did."""

    passes: dict[tuple[Direction, Use], deque[RecordedPass]] = field(default_factory=dict)
    running: RecordedPass | None = None


@contextmanager
def recorded(transport: Transport, direction: Direction, use: Use) -> Iterator[None]:
    """A block in which one pass runs."""
    recorder: Recorder | None = transport.memo.get(Recorder)
    if recorder is None:
        yield
        return
    recorder.running = RecordedPass(direction, use, transport.device)
    try:
        yield
        recorder.running.stop = now(transport.device)
        recorder.passes.setdefault((direction, use), deque(maxlen=MAX_RECORDED)).append(recorder.running)
    finally:
        recorder.running = None


@contextmanager
def computing(transport: Transport, what: str) -> Iterator[None]:
    """A block in which a pass computes."""
    running, start = _running(transport)
    yield
    if running is not None:
        running.moments.append(("compute", what, start, now(running.device)))


def travelling(transport: Transport, pending: Pending, what: str) -> Pending:
    """The pending messages, whose transfer and wait are recorded if the group is profiled."""
    running, posted = _running(transport)
    if running is None:
        return pending

    def wait() -> None:
        start = now(running.device)
        pending.wait()
        stop = now(running.device)
        running.moments += [("transfer", what, posted, stop), ("wait", what, start, stop)]

    return Pending(wait)


def _running(transport: Transport) -> tuple[RecordedPass | None, Moment]:
    """The pass that is recorded now, and the time."""
    recorder: Recorder | None = transport.memo.get(Recorder)
    running = None if recorder is None else recorder.running
    return running, None if running is None else now(running.device)
