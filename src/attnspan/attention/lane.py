"""A lane: the tensors of some batch rows and heads on a rank, and their steps.

For each step a lane lists the messages that bring its keys, has a kernel compute its tiles, and in backward lists the
messages that take gradients to the owners of keys. The loop over steps, which exchanges all these, is in loop.py. A
lane makes no decisions: they are all in the plan.

[Note: gradients that travel] The gradient of a key is computed on every rank that used the key, sent to the key's
owner, and summed there in float32. It travels in float32, or in the tensors' dtype, which is half the bytes, if the
requested kernel rounds it to that anyway. Ranks must agree on it, so it does not depend on the tiles
(`rounds_gradients`).

Shapes: query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); packed buffers as in attention/wire.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.attention.sums import DeferredSum, RunningSum
from attnspan.attention.wire import (
    ReturningGradients,
    RunOffsets,
    StagedMessage,
    empty_packed,
    pack,
    receive_views,
    run_offsets,
    send_views,
    unpack_views,
)
from attnspan.dtypes import lse_dtype
from attnspan.kernels import (
    Accumulator,
    GlobalPositions,
    GradientBuffers,
    Kernel,
    MergedOutputs,
    RowSums,
    StepTiles,
    choose_kernel,
    rounds_gradients,
    write_into,
)
from attnspan.layouts.run import Runs, positions_of
from attnspan.plan import Ring
from attnspan.plan.step import Step, Transfer
from attnspan.plan.strategy import between_groups

Message = tuple[int, Tensor]


class RowsAndHeads(NamedTuple):
    """Which batch rows and query heads of the whole attention a lane's tensors are."""

    batch: range
    heads: range


class Arena(NamedTuple):
    """The keys and values of one step, or the latents; with `is_own`, they are the rank's own tensors, not copied."""

    key: Tensor
    value: Tensor
    is_own: bool


class KeySum(RunningSum):
    """Gradients of keys and values, side by side in one packed buffer, ready to travel."""

    __slots__ = ("packed",)

    def __init__(self, packed: Tensor, head_dim: int):
        super().__init__(*unpack_views(packed, head_dim))
        self.packed = packed


class Lane:
    """The tensors of some batch rows and heads, on their way through the steps of a rank."""

    def __init__(self, bound: BoundPlan, batch_row: int, rows_and_heads: RowsAndHeads, inputs: Inputs):
        plan, rank, degree = bound.plan, bound.rank, bound.plan.degree
        steps = plan.steps(rank, batch_row)
        if degree > 1:  # transfers name groups; the peer in another group has this rank's place in its own
            steps = tuple(step.between(degree, rank % degree) for step in steps)
        self.steps, self.rows_and_heads, self.kernel = steps, rows_and_heads, bound.kernel
        self._queries, self._own = plan.queries(rank, batch_row), plan.keys(rank, batch_row)
        self._is_ring = isinstance(between_groups(plan.strategy), Ring)  # which passes whole buffers on
        self.query, self.key, self.value, self.captured = *inputs[:3], inputs.captured
        self.expander = inputs.expander
        self.spec = bound.spec(inputs)
        self._own_offsets = run_offsets(self._own)
        self._own_packed: Tensor | None = None
        self._ring_buffer: Tensor | None = None  # what a ring sends next: it passes whole buffers on

    # ---- keys travel -------------------------------------------------------------------------------------------

    def key_messages(self, step: Step) -> tuple[list[Message], list[Message], Arena, list[StagedMessage]]:
        """The sends and receives of a step, the arena that they fill, and messages to be copied into it on arrival."""
        if not step.receives and step.arena == self._own:
            sends = [(t.target, part) for t in step.sends for part in self._send_views(t)]
            return sends, [], Arena(self.key, self.value, is_own=True), []
        offsets = run_offsets(step.arena)
        buffer = empty_packed(self.key, self.value, len(offsets))
        arena = Arena(*unpack_views(buffer, self.key.shape[3]), is_own=False)
        self._copy_own(arena, offsets, step)
        if step.own and step.own == self._own:  # own keys are all in the arena: not packed again to be sent
            sends = [(t.target, part) for t in step.sends for part in send_views(buffer, offsets, t)]
        else:
            sends = [(t.target, part) for t in step.sends for part in self._send_views(t)]
        receives, staged = [], []
        for transfer in step.receives:
            parts, late = ([buffer], None) if self._is_ring else receive_views(buffer, offsets, transfer)
            receives += [(transfer.source, part) for part in parts]
            staged += [late] if late else []
        self._ring_buffer = buffer
        return sends, receives, arena, staged

    def _send_views(self, transfer: Transfer) -> list[Tensor]:
        if self._is_ring:
            buffer = pack(self.key, self.value) if self._ring_buffer is None else self._ring_buffer
            return [buffer]
        return send_views(self._packed(), self._own_offsets, transfer)

    def _packed(self) -> Tensor:
        if self._own_packed is None:
            self._own_packed = pack(self.key, self.value)
        return self._own_packed

    def _copy_own(self, arena: Arena, offsets: RunOffsets, step: Step) -> None:
        """Copy the rank's own keys to their places in the arena."""
        for to, source in zip(offsets.slices(step.own), self._own_offsets.slices(step.own), strict=True):
            write_into(arena.key[:, :, to], self.key[:, :, source])
            write_into(arena.value[:, :, to], self.value[:, :, source])

    # ---- forward -----------------------------------------------------------------------------------------------

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients of keys travel. See [Note: gradients that travel]."""
        own = self.key.dtype
        return own if rounds_gradients(self.kernel, self.query.device) else lse_dtype(own)

    def accumulator(self) -> Accumulator:
        dim = self.value.shape[-1] if self.expander is None else self.expander.v_head_dim
        shape = (*self.query.shape[:3], dim)
        return Accumulator(shape, lse_dtype(self.query.dtype), self.query.device)

    def forward(self, step: Step, arena: Arena, total: Accumulator) -> None:
        """Every tile of a step, joined into the total."""
        if step.tiles:
            keys = arena[:2] if self.expander is None else self.expander.forward(arena.key)[:2]
            self._kernel_for(step, *keys).forward(self.spec, self.query, *keys, self._step_tiles(step), total)

    def _kernel_for(self, step: Step, key: Tensor, value: Tensor) -> Kernel:
        return choose_kernel(self.kernel, self.spec, self.query, key, value, step.tiles)

    def _step_tiles(self, step: Step) -> StepTiles:
        return StepTiles(step.tiles, functools.partial(self._global_positions, step), self.captured, self.is_final)

    def _global_positions(self, step: Step) -> GlobalPositions:
        """The positions that a step's rows and columns stand for."""
        device = self.query.device
        runs = tuple(run.positions for run in self._queries), tuple(run.positions for run in step.arena)
        rows, cols = positions(self._queries, device), positions(step.arena, device)
        return GlobalPositions(rows, cols, *self.rows_and_heads, runs)

    @functools.cached_property
    def is_final(self) -> bool:
        """Whether one step computes everything, so that its results are final and may be rounded."""
        return sum(bool(step.tiles) for step in self.steps) == 1

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(self, step: Step, arena: Arena, merged: MergedOutputs, grads: GradientSums) -> KeySum | None:
        """The gradients of every tile of a step, from the final out and lse. See [Note: final out and lse] in
        kernels/kernel.py.

        Returns the gradients of the arena's keys and values; None for an arena of own keys, whose gradients are added
        to `grads`.
        """
        keys = None
        if not arena.is_own:
            keys = KeySum(
                empty_packed(self.key, self.value, arena.key.shape[2], self.gradient_dtype), self.key.shape[3]
            )
        into = grads.keys if keys is None else keys
        if step.tiles and self.expander is None:
            self._backward(step, arena[:2], merged, StepGrads(self, grads, into, arena[:2]))
        elif step.tiles:
            self._backward_latent(step, arena.key, merged, grads, into)
        return keys

    def _backward(self, step: Step, keys: tuple[Tensor, Tensor], merged: MergedOutputs, into: StepGrads) -> None:
        self._kernel_for(step, *keys).backward(self.spec, merged, self.query, *keys, self._step_tiles(step), into)

    def _backward_latent(
        self, step: Step, latent: Tensor, merged: MergedOutputs, grads: GradientSums, into: DeferredSum | KeySum
    ) -> None:
        """Expand the latents again, and backpropagate the gradients of keys and values through the expansion."""
        assert self.expander is not None, "there is a latent"
        made = self.expander.recorded(latent)
        of_latent, of_weights = self.expander.backward(made, *self._expanded_gradients(step, made[:2], merged, grads))
        into.add(range(latent.shape[2]), of_latent, latent[..., :0])
        for weight, part in zip(grads.weights, of_weights, strict=True):
            weight += part

    def _expanded_gradients(
        self, step: Step, keys: tuple[Tensor, Tensor], merged: MergedOutputs, grads: GradientSums
    ) -> tuple[Tensor, ...]:
        """The gradients of expanded keys and values, rounded; their float32 sums are freed."""
        total = DeferredSum([x.shape for x in keys], lse_dtype(self.key.dtype), self.key.device)
        self._backward(step, keys, merged, StepGrads(self, grads, total, keys))
        return total.result(self.key.dtype)

    def gradient_messages(
        self, step: Step, keys: KeySum | None, grads: GradientSums
    ) -> tuple[list[Message], ReturningGradients]:
        """Sends for the gradients of other ranks' keys, and buffers for those of own keys from other ranks."""
        sends = []
        if keys is not None:
            self._add_own(step, keys, grads)
            offsets = run_offsets(step.arena)
            sends = [(t.target, part) for t in step.grad_sends for part in send_views(keys.packed, offsets, t)]
        buffer = functools.partial(empty_packed, self.key, self.value, dtype=self.gradient_dtype)
        return sends, ReturningGradients(step.grad_receives, buffer)

    def _add_own(self, step: Step, keys: KeySum, grads: GradientSums) -> None:
        """Add the gradients of own keys that were copied into the arena."""
        used = run_offsets(step.arena).slices(step.own)
        for source, to in zip(used, self._own_offsets.slices(step.own), strict=True):
            stacks = (part.unsqueeze(0) for part in keys.result(source))
            grads.keys.gather(range(to.start, to.stop), *stacks, wait=self._is_last(step))  # that holds all of `keys`

    def add_returned_gradients(self, step: Step, arrivals: ReturningGradients, grads: GradientSums) -> None:
        """Add the gradients of own keys that arrived from other ranks."""
        for run, parts in arrivals.parts():
            (rows,) = self._own_offsets.slices((run,))
            stacks = unpack_views(parts, self.key.shape[3])
            grads.keys.gather(range(rows.start, rows.stop), *stacks, wait=self._is_last(step) and not arrivals.many)

    def _is_last(self, step: Step) -> bool:
        return step is self.steps[-1]


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Sums of the gradients of queries, of own keys and values (or latents), of tensors that a score_mod captured, and
    of the weights that expand a latent."""

    query: DeferredSum
    keys: DeferredSum
    captured: Sequence[Tensor | None] = ()
    weights: Sequence[Tensor] = ()
    row_sums: RowSums = field(default_factory=RowSums)

    @classmethod
    def of(cls, lane: Lane, captured: Sequence[Tensor | None], weights: Sequence[Tensor] = ()) -> GradientSums:
        """Empty sums; `captured` and `weights` are shared by all lanes."""
        query, key, value = lane.query, lane.key, lane.value
        of_query = DeferredSum([query.shape], lse_dtype(query.dtype), query.device)
        return cls(of_query, DeferredSum([key.shape, value.shape], lse_dtype(key.dtype), key.device), captured, weights)

    def results(self, query_dtype: torch.dtype, key_dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(dq, dk, dv) in these dtypes; sums of captured tensors are complete afterwards."""
        self.row_sums.close()
        return *self.query.result(query_dtype), *self.keys.result(key_dtype)


class StepGrads(NamedTuple):
    """Where a kernel puts the gradients of one step: those of queries into their total; those of own keys into their
    total, those of received keys into the buffer that is sent to their owners."""

    lane: Lane
    totals: GradientSums
    keys: DeferredSum | KeySum
    like: tuple[Tensor, Tensor]

    @property
    def captured(self) -> Sequence[Tensor | None]:
        return self.totals.captured

    @property
    def row_sums(self) -> RowSums:
        return self.totals.row_sums

    def add(self, rows: range, cols: range, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.totals.query.add(rows, dq)
        self.keys.add(cols, dk, dv)

    def open(self) -> GradientBuffers:
        """Buffers for one writer; dq in the tensors' dtype if this step's is final."""
        lane = self.lane
        (dq,), begun = ((lane.query.new_empty(lane.query.shape),), False) if lane.is_final else self.totals.query.open()
        if isinstance(self.keys, KeySum):
            dk, dv = self.keys.views
        else:
            dk, dv = (x.new_empty(x.shape, dtype=lane.gradient_dtype) for x in self.like)
        return GradientBuffers(dq, dk, dv, begun)

    def close(self, into: GradientBuffers) -> None:
        if self.lane.is_final:
            self.totals.query.add(range(into.dq.shape[2]), into.dq)
        if isinstance(self.keys, KeySum):
            self.keys.mark_written()
        else:
            self.keys.add(range(into.dk.shape[2]), into.dk, into.dv)


@functools.lru_cache(maxsize=256)
def positions(runs: Runs, device: torch.device) -> Tensor:
    """The positions of runs, one after another."""
    with torch.inference_mode(False):  # made during evaluation, they may be saved for backward later
        return positions_of(runs).to(device)
