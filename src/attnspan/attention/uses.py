"""What a call was used for: a witness, kept where attention really runs.

Counted inside the custom op, so that compiled code counts too, and a layer that went another way does not. A
recomputation by activation checkpointing runs inside backward; it is a replay, not another use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from attnspan.assumptions import Assumption
from attnspan.plan import Plan, Shape

Use = tuple[Plan, Shape | None]  # a shape that the cost model cannot weigh is None


@dataclass(eq=False)
class Uses:
    """How often each plan ran, on tensors of which shape."""

    forward: Counter[Use] = field(default_factory=Counter)
    replayed: Counter[Use] = field(default_factory=Counter)
    backward: Counter[Use] = field(default_factory=Counter)
    from_kept: Counter[Use] = field(default_factory=Counter)  # of the backward passes, those that no key travelled for
    latest: Plan | None = None

    def add_forward(self, plan: Plan, shape: Shape | None) -> None:
        """A forward pass, or its replay."""
        IN_BACKWARD.hold()
        in_backward = torch._C._current_graph_task_id() != -1
        (self.replayed if in_backward else self.forward)[plan, shape] += 1
        self.latest = plan

    def add_backward(self, plan: Plan, shape: Shape | None, from_kept: bool) -> None:
        self.backward[plan, shape] += 1
        self.from_kept[plan, shape] += from_kept

    def clear(self) -> None:
        """Start again; the plan last used stays known."""
        for counted in (self.forward, self.replayed, self.backward, self.from_kept):
            counted.clear()


def _tells() -> bool:
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
    _tells,
)
