"""Counts of how often attention ran, by plan and shape.

Counted inside the custom op, so that compiled code counts too, and a layer that bypassed attention does not. A
recomputation by activation checkpointing runs inside backward, and counts as recomputed. The latest passes are timed
(pass_timer.py).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

import torch

from attnspan.assumptions import Assumption
from attnspan.attention.pass_timer import PassTimer
from attnspan.plan import Plan, Shape

Use = tuple[Plan, Shape | None]  # a shape that the cost model cannot weigh is None


Direction = Literal["forward", "backward"]

MAX_TIMED = 16
"""How many passes are timed."""


class PassTime(NamedTuple):
    """The median of the latest passes in seconds, and how many there are."""

    seconds: float
    passes: int


@dataclass(eq=False)
class Uses:
    """How often each plan ran, on tensors of which shape, and how long the latest passes took."""

    forward: Counter[Use] = field(default_factory=Counter)
    recomputed: Counter[Use] = field(default_factory=Counter)
    backward: Counter[Use] = field(default_factory=Counter)
    from_kept: Counter[Use] = field(default_factory=Counter)  # of the backward passes, those that no key travelled for
    latest: Plan | None = None
    latest_shape: Shape | None = None
    timers: dict[tuple[Direction, Use], deque[PassTimer]] = field(default_factory=dict)

    def add_forward(self, plan: Plan, shape: Shape | None, timer: PassTimer) -> None:
        """A forward pass, or its recomputation."""
        IN_BACKWARD.verify()
        in_backward = torch._C._current_graph_task_id() != -1
        (self.recomputed if in_backward else self.forward)[plan, shape] += 1
        self.latest, self.latest_shape = plan, shape
        self._time("forward", (plan, shape), timer)

    def add_backward(self, plan: Plan, shape: Shape | None, from_kept: bool, timer: PassTimer) -> None:
        self.backward[plan, shape] += 1
        self.from_kept[plan, shape] += from_kept
        self._time("backward", (plan, shape), timer)

    def _time(self, direction: Direction, use: Use, timer: PassTimer) -> None:
        self.timers.setdefault((direction, use), deque(maxlen=MAX_TIMED)).append(timer.end())

    def took(self, direction: Direction, use: Use) -> PassTime:
        """How long passes of a plan take; 0 where no time is known yet."""
        timers = tuple(self.timers.get((direction, use), ()))
        known = [seconds for timer in timers if (seconds := timer.seconds) is not None]
        return PassTime(median(known) if known else 0.0, len(known))

    def forget(self, use: Use) -> None:
        """Drop the counts of a plan on tensors of some shape."""
        for counted in (self.forward, self.recomputed, self.backward, self.from_kept):
            counted.pop(use, None)
        for direction in ("forward", "backward"):
            self.timers.pop((direction, use), None)

    def clear(self) -> None:
        """Start again; the plan last used stays known."""
        for counted in (self.forward, self.recomputed, self.backward, self.from_kept):
            counted.clear()
        self.timers.clear()


def _backward_is_seen() -> bool:
    """Whether code knows that it runs in backward."""
    x, found = torch.ones(1, device="cpu", requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: found.append(torch._C._current_graph_task_id()))
    before = torch._C._current_graph_task_id()
    y.sum().backward()
    return before == -1 and len(found) == 1 and found[0] != -1


IN_BACKWARD = Assumption(
    "code that runs in backward is told from code that does not",
    "attention/uses.py",
    "`torch._C._current_graph_task_id`",
    _backward_is_seen,
)
