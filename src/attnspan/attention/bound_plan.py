"""A plan bound to a group of ranks, with a kernel, a scale and a score_mod: the state that all passes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnspan.attention.handles import object_of
from attnspan.attention.inputs import Inputs
from attnspan.attention.score import Score
from attnspan.attention.tuned import GroupTuning, group_tuning, hardware_for, known_tuning
from attnspan.attention.ulysses import HeadAllToAll, Side
from attnspan.attention.uses import Uses
from attnspan.dtypes import lse_dtype
from attnspan.errors import AttentionError, MaskError, PlanError
from attnspan.kernels import Mods, Spec, explain_programs, needs_mask_program
from attnspan.layouts.run import Runs
from attnspan.masks import Mask
from attnspan.masks.tracing import traced
from attnspan.plan import Hardware, Plan, Shape
from attnspan.plan.choose import KeepKeys
from attnspan.plan.heads import split_heads
from attnspan.plan.kind import latents_pay, strategy_for
from attnspan.transports import Transport
from attnspan.tuning import table_for

if TYPE_CHECKING:
    from attnspan.attention.agreement import Agreement


@dataclass(eq=False)
class BoundPlan:
    """A plan, this rank's end of the group, and the kernel, scale and score_mod that were asked for."""

    plan: Plan
    transport: Transport
    kernel: str = "auto"
    scale: float | None = None
    score: Score | None = None
    auto: bool = False  # whether `for_inputs` chooses the strategy by shapes; the plan's own is then a placeholder
    keep_keys: KeepKeys = False  # from forward to backward, see kept.py
    uses: Uses = field(default_factory=Uses, repr=False)  # shared by the calls that suit different shapes
    check_before_forward: Callable[[], None] | None = field(default=None, repr=False)  # may refuse
    watched: Mask | None = field(default=None, repr=False)  # refused once it has changed, see agreement.py
    agreed: dict[tuple[object, ...], Agreement] = field(default_factory=dict, init=False, repr=False)  # by shapes
    _by_shape: dict[Shape, BoundPlan] = field(default_factory=dict, init=False, repr=False)
    _mods: dict[tuple[torch.device, torch.dtype], Mods | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.keep_keys not in (True, False, "auto"):
            raise AttentionError(f"keep_keys must be True, False or 'auto', got {self.keep_keys!r}")
        if self.transport.ranks != self.plan.ranks:
            raise AttentionError(f"group must have the plan's {self.plan.ranks} ranks, got {self.transport.ranks}")

    @staticmethod
    def of(handle: Tensor) -> BoundPlan:
        """The bound plan that a handle stands for. See [Note: handles] in handles.py."""
        bound = object_of(handle, "handle is a copy whose original is gone; keep the Attention that it belongs to")
        assert isinstance(bound, BoundPlan), "the handle of an Attention"
        return bound

    def for_inputs(self, inputs: Inputs) -> BoundPlan:
        """This object; with strategy "auto", one whose strategy suits the shapes of the inputs.

        The strategy is chosen here because shapes are only known once tensors arrive. It is a pure function of the
        shapes and of a tuning table and links that all ranks share (tuned.py), so that all ranks choose the same.
        Tensors without a readable shape are refused later, by all ranks together.
        """
        if not self.auto:
            return self
        known, shape = group_tuning(self.transport), inputs.shape
        return self if shape is None else self._for_shape(shape, known)

    def _for_shape(self, shape: Shape, known: GroupTuning) -> BoundPlan:
        if shape not in self._by_shape:
            machine = hardware_for(known, shape, self.transport.device, self.kernel)
            plan = _with_strategy(self.plan, shape, machine, self.keep_keys)
            self._by_shape.setdefault(shape, replace(self, plan=plan, auto=False))
        return self._by_shape[shape]

    def latents_pay(self, shape: Shape) -> bool:
        """Whether latents of that shape should travel, rather than the keys and values that they expand to."""
        if not self.auto:
            return self.plan.degree == 1
        machine = hardware_for(group_tuning(self.transport), shape, self.transport.device, self.kernel)
        return latents_pay(self.plan, shape, machine, self.keep_keys)

    def plan_ahead(self, shape: Shape) -> None:
        """Plan for tensors of some shape in advance, without communication. Errors are left to the call itself."""
        known = known_tuning(self.transport)
        if self.auto and known is None:
            return
        with suppress(PlanError, MaskError):
            plan = self._for_shape(shape, known).plan if self.auto and known is not None else self.plan
            for row in range(plan.batch_rows):
                plan.steps(self.rank, row)

    @property
    def latest(self) -> Plan:
        """The plan that last ran, or would."""
        return self.uses.latest or self.plan

    @property
    def rank(self) -> int:
        return self.transport.rank

    def spec(self, inputs: Inputs) -> Spec:
        """What all tiles have in common."""
        query = inputs.query
        preference = table_for(query.device) if self.kernel == "auto" else None
        scale = query.shape[-1] ** -0.5 if self.scale is None else abs(self.scale) or 1.0
        return Spec(scale, self.mods(query), preference, inputs.dropout)

    def signed(self, query: Tensor) -> Tensor:
        """A query, or its gradient, times the sign of the scale: kernels get one above 0, as libraries mask with -inf
        before they multiply."""
        if self.scale is None or self.scale > 0:
            return query
        return -query if self.scale < 0 else query * 0

    def mods(self, query: Tensor) -> Mods | None:
        """The programs that kernels run, for such queries; None where there are none."""
        known = query.device, lse_dtype(query.dtype)
        if known not in self._mods:
            self._mods[known] = self._found_mods(*known)
        return self._mods[known]

    @property
    def programs(self) -> list[str]:
        """Lines of `explain` on the programs that ran."""
        return [
            line
            for mods in self._mods.values()
            for line in explain_programs(mods, needs_mask_mod=self.plan.needs_mask_mod)
        ]

    def _found_mods(self, device: torch.device, dtype: torch.dtype) -> Mods | None:
        score = None if self.score is None else self.score.program(dtype).on(device)
        plan, mask = self.plan, None
        if plan.needs_mask_mod or score is not None or needs_mask_program(self.kernel):
            mask_mod = plan.mask.mask_mod(plan.seq_len, plan.key_len)
            mask = replace(traced(mask_mod, error=AttentionError).on(device), name=repr(plan.mask))
        return None if score is mask is None else Mods(score, mask)

    def head_exchange(self, batch_row: int, heads: int, kv_heads: int) -> HeadAllToAll:
        """The exchange of heads inside this rank's group, for a batch row of the plan."""
        plan, degree = self.plan, self.plan.degree
        first = self.rank - self.rank % degree
        members = range(first, first + degree)
        shards: dict[Side, tuple[Runs, ...]] = {
            "query": plan.layout.shards(plan.seq_len, batch_row)[first : first + degree],
            "key": plan.key_layout.shards(plan.key_len, batch_row)[first : first + degree],
        }
        arenas: dict[Side, Runs] = {"query": plan.queries(self.rank, batch_row), "key": plan.keys(self.rank, batch_row)}
        return HeadAllToAll(self.transport, members, split_heads(heads, kv_heads, degree), shards, arenas)


def _with_strategy(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> Plan:
    """The plan with the strategy that suits its kind; cross-attention keeps its own."""
    if (plan.key_len, plan.key_layout) != (plan.seq_len, plan.layout):
        return plan
    return replace(plan, strategy=strategy_for(plan, shape, hardware, keep_keys))
