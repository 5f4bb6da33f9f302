"""Strategies measured beside what the timeline predicts of them: the library part of `attnspan bench`.

A `Workload` is a mask, a length, a layout and the sizes of an attention; a `Bench` runs it on a group under every
strategy and kernel. Ranks start together; a repeat takes as long as its slowest rank, and of the repeats the median
counts.

[Note: virtual ranks] On virtual ranks one device does everybody's work and nothing travels. What is measured is then
the sum over ranks of their computing, and that is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from attnspan.attention import Attention
from attnspan.attention.agreement import local_error
from attnspan.attention.inputs import Inputs
from attnspan.attention.tuned import NO_TUNING, GroupTuning, hardware_for
from attnspan.dtypes import LONG_NAMES
from attnspan.errors import AttnspanError
from attnspan.layouts import Layout
from attnspan.masks import Mask
from attnspan.measure.watched import Watched, again
from attnspan.plan import Hardware, Plan, Shape, Timeline, predict
from attnspan.plan.choose import choice_for
from attnspan.transports import Transport, World
from attnspan.transports.consensus import all_gather_object

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is attended."""

    mask: Mask
    seq_len: int
    layout: Layout
    shape: Shape
    backward: bool = True

    def plan(self, strategy: str, hardware: Hardware) -> Plan:
        """The plan of a strategy; of "auto" the one that the cost model chooses."""
        if strategy != AUTO:
            return Plan(self.mask, self.layout, self.seq_len, strategy)
        any_strategy = Plan(self.mask, self.layout, self.seq_len)
        return choice_for(any_strategy, shape=self.shape, hardware=hardware, backward=self.backward).plan

    def tensors(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key and value of a rank, and the gradient of its output."""
        rows, shape = self.layout.tokens(self.seq_len)[rank], self.shape
        dtype: torch.dtype = getattr(torch, LONG_NAMES.get(shape.dtype, shape.dtype))
        dims = ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
        q, k, v = (torch.randn(shape.batch, h, rows, d, dtype=dtype, device=device) for h, d in dims)
        return q, k, v, torch.randn(shape.batch, shape.heads, rows, v.shape[3], dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Measured:
    """One strategy with one kernel: what was measured and predicted, in seconds, or why it was refused."""

    strategy: str
    kernel: str
    seconds: float = 0.0
    predicted: float = 0.0
    exposed: float = 0.0  # of the predicted time, what nothing is computed in
    waits: float = 0.0  # of the measured time
    wire: float = 0.0  # the same messages, with nothing computed
    refused: str = ""
    chosen: str = ""  # for auto: what it took

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.seconds / self.predicted if self.predicted else float("nan")

    @property
    def hidden(self) -> float:
        """Of the time on the wire, what passes under compute."""
        return max(0.0, self.wire - self.waits)

    def data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Bench:
    """A workload on this rank's end of a group, and what it is predicted with."""

    work: Workload
    transport: Transport
    known: GroupTuning = NO_TUNING
    repeats: int = 3

    def run(
        self,
        strategies: Iterable[str],
        kernels: Iterable[str] = (AUTO,),
        track: Callable[[list[tuple[str, str]]], Iterable[tuple[str, str]]] = iter,
    ) -> Iterator[Measured]:
        """Every strategy with every kernel; all ranks call it alike, and get the same."""
        for strategy, kernel in track([(strategy, kernel) for strategy in strategies for kernel in kernels]):
            yield self.measured(strategy, kernel)

    def measured(self, strategy: str, kernel: str) -> Measured:
        hardware = hardware_for(self.known, self.work.shape, self.transport.device, kernel)
        try:
            plan = self.work.plan(strategy, hardware)
        except AttnspanError as refused:  # the same on every rank
            return Measured(strategy, kernel, refused=str(refused))
        watched = Watched(self.transport)
        attend = Attention(plan, watched, kernel=kernel, keep_keys=False)
        q, k, v, grad = self.work.tensors(self.transport.rank, self.transport.device)
        wrong = local_error(attend.bound, Inputs(q, k, v))
        complaints = set(all_gather_object(self.transport, "" if wrong is None else str(wrong), "refusals")) - {""}
        if complaints:
            return Measured(strategy, kernel, refused="; ".join(sorted(complaints)))
        timelines = self._timelines(plan, hardware)
        seconds, waits = self._timed(watched, lambda: self._step(attend, q, k, v, grad))
        measured = Measured(
            strategy,
            kernel,
            seconds,
            self._predicted(timelines),
            chosen=plan.strategy_name if strategy == AUTO else "",
        )
        if self.virtual:
            return measured
        exposed = max(timelines, key=lambda each: each.seconds).exposed
        return replace(measured, exposed=exposed, waits=waits, wire=self._timed(watched, again(watched.calls))[0])

    def forecast(self, strategies: Iterable[str], kernels: Iterable[str] = (AUTO,)) -> float:
        """About how many seconds `run` will take, as predicted: every repeat, and its messages once more alone."""
        seconds = 0.0
        for kernel in kernels:
            hardware = hardware_for(self.known, self.work.shape, self.transport.device, kernel)
            for strategy in strategies:
                try:
                    timelines = self._timelines(self.work.plan(strategy, hardware), hardware)
                except AttnspanError:  # refused, and not measured
                    continue
                wire = 0.0 if self.virtual else max(each.travelling for each in timelines)
                seconds += (self.repeats + 1) * (self._predicted(timelines) + wire)
        return seconds

    def _timelines(self, plan: Plan, hardware: Hardware) -> list[Timeline]:
        shape, backward = self.work.shape, self.work.backward
        return [predict(plan, rank, shape, hardware, backward=backward) for rank in range(plan.ranks)]

    @property
    def virtual(self) -> bool:
        """See [Note: virtual ranks]."""
        return isinstance(self.transport, World)

    def _predicted(self, timelines: list[Timeline]) -> float:
        if self.virtual:
            return sum(each.computing for each in timelines)
        return max(each.seconds for each in timelines)

    def _step(self, attend: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
        if not self.work.backward:
            with torch.no_grad():
                attend(q, k, v)
            return
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*leaves), leaves, grad)

    def _timed(self, watched: Watched, work: Callable[[], None]) -> tuple[float, float]:
        """The median over repeats of the slowest rank's time, and how long that rank waited for messages.

        The first repeat, in which all agree, is left out.
        """
        found = []
        for _ in range(self.repeats + 1):
            watched.begin()
            self.transport.all_gather_bytes(b"", "a barrier")
            self._synchronise()
            start = perf_counter()
            work()
            self._synchronise()
            found.append((perf_counter() - start, watched.waited))
        said = all_gather_object(self.transport, found[1:], "measurements")
        slowest = sorted(max(each) for each in zip(*said, strict=True))
        seconds, waits = slowest[len(slowest) // 2]
        return seconds, waits

    def _synchronise(self) -> None:
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize(self.transport.device)
