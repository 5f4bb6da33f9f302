"""Forward and backward: two short loops over the steps of a plan.

Each iteration waits for the step's keys, starts the exchange of the next step, and computes. So communication overlaps
with the compute of the previous step, and at most two arenas are alive. In backward the gradients of a step's keys are
sent to their owners during the compute of the next step. Keys that forward kept (kept.py) do not travel again.

Batch rows with different steps are separate lanes; their messages are exchanged together.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnspan.attention.kept import ArenasByStep, KeptKeys
from attnspan.attention.lane import Arena, GradientSums, KeySum, Lane, Message
from attnspan.attention.recording import computing, travelling
from attnspan.kernels import Accumulator, MergedOutputs
from attnspan.transports import Pending, Transport


def forward(transport: Transport, lanes: Sequence[Lane], kept: KeptKeys | None = None) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of every lane."""
    totals = [lane.accumulator() for lane in lanes]
    received: ArenasByStep = []
    coming = KeyExchange(transport, lanes, 0)
    for index in range(_step_count(lanes)):
        arenas = coming.wait()
        coming = KeyExchange(transport, lanes, index + 1)
        with computing(transport, f"tiles of step {index}"):
            _compute(lanes, arenas, totals, index)
        if kept is not None:
            received.append(arenas)
    if kept is not None:
        kept.loops.append(received)
    return [total.result(lane.query.dtype) for lane, total in zip(lanes, totals, strict=True)]


def _compute(lanes: Sequence[Lane], arenas: list[Arena], totals: list[Accumulator], index: int) -> None:
    # A function of its own, so that no variable of a loop keeps an arena alive while the next one is made.
    for lane, arena, total in zip(lanes, arenas, totals, strict=True):
        lane.forward(lane.steps[index], arena, total)


def backward(
    transport: Transport,
    lanes: Sequence[Lane],
    merged_outputs: Sequence[MergedOutputs],
    captured: Sequence[Tensor | None] = (),
    weights: Sequence[Tensor] = (),
    kept: ArenasByStep | None = None,
) -> list[GradientSums]:
    """The gradients of every lane. Gradients of captured tensors are added to `captured`, those of an expansion's
    weights to `weights`."""
    grads = [GradientSums.of(lane, captured, weights) for lane in lanes]
    coming = KeyExchange(transport, lanes, 0, kept)
    going: GradientExchange | None = None
    for index in range(_step_count(lanes)):
        arenas = coming.wait()
        coming = KeyExchange(transport, lanes, index + 1, kept)
        with computing(transport, f"gradients of step {index}"):
            keys = [
                lane.backward(lane.steps[index], arena, merged, grad)
                for lane, arena, merged, grad in zip(lanes, arenas, merged_outputs, grads, strict=True)
            ]
        if going is not None:
            going.wait()
        going = GradientExchange(transport, lanes, keys, grads, index)
    if going is not None:
        going.wait()
    return grads


class KeyExchange:
    """The exchange of one step's keys, under way; empty after the last step, and for arenas that forward kept."""

    def __init__(self, transport: Transport, lanes: Sequence[Lane], index: int, kept: ArenasByStep | None = None):
        sends: list[Message] = []
        receives: list[Message] = []
        is_step = index < _step_count(lanes)
        self._arenas: list[Arena] = kept[index] if kept is not None and is_step else []
        self._staged = []
        for lane in lanes if kept is None and is_step else []:
            out, into, arena, staged = lane.key_messages(lane.steps[index])
            sends += out
            receives += into
            self._arenas.append(arena)
            self._staged += staged
        self._pending = Pending()
        if sends or receives:
            posted = transport.exchange(sends, receives, "keys")
            self._pending = travelling(transport, posted, f"keys of step {index}")

    def wait(self) -> list[Arena]:
        """The arenas, filled."""
        self._pending.wait()
        for staged in self._staged:
            staged.land()
        return self._arenas


class GradientExchange:
    """The exchange of one step's key gradients with their owners, under way."""

    def __init__(
        self,
        transport: Transport,
        lanes: Sequence[Lane],
        keys: Sequence[KeySum | None],
        grads: list[GradientSums],
        index: int,
    ):
        sends: list[Message] = []
        receives: list[Message] = []
        self._landing = []
        for lane, key, grad in zip(lanes, keys, grads, strict=True):
            step = lane.steps[index]
            out, arrivals = lane.gradient_messages(step, key, grad)
            sends += out
            receives += arrivals.receives
            self._landing.append((lane, step, arrivals, grad))
        self._pending = Pending()
        if sends or receives:
            posted = transport.exchange(sends, receives, "gradients")
            self._pending = travelling(transport, posted, f"gradients of step {index}")

    def wait(self) -> None:
        self._pending.wait()
        for lane, step, arrivals, grad in self._landing:
            lane.add_returned_gradients(step, arrivals, grad)


def _step_count(lanes: Sequence[Lane]) -> int:
    return len(lanes[0].steps) if lanes else 0  # a rank of a large Ulysses group may have no heads
