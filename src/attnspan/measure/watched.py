"""A transport under a stopwatch: how long its caller waits for messages, and how long they take on the wire.

Wraps any transport and is one::

    watched = Watched(transport)
    Attention(plan, watched)(query, key, value)
    watched.waited  # seconds in which nothing could be computed
    again(watched.calls)()  # the same messages with nothing computed: their time on the wire

What is on the wire and not waited for is hidden under compute. On the CPU the host waits, and its clock tells how long.
On a CUDA device the current stream waits, and events before and after tell; `waited` is then read once the device is
done. Agreements are left out: they belong to the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from attnspan.transports import Pending, Transport
from attnspan.transports.transport import Messages


class Watched(Transport):
    """A transport, what was asked of it, and how long that was waited for."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.ranks = transport.rank, transport.ranks
        self.device, self.name = transport.device, transport.name
        self.begin()

    def begin(self) -> None:
        """Start to watch, as if nothing had been asked before."""
        self.calls: list[Callable[[], Pending]] = []
        self._waits: list[Callable[[], float]] = []

    @property
    def waited(self) -> float:
        """Seconds, of all that has been waited for."""
        return sum(seconds() for seconds in self._waits)

    def exchange(self, sends: Messages, receives: Messages, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        leaving, arriving = ([(peer, _sizes(tensor)) for peer, tensor in each] for each in (sends, receives))

        def again() -> Pending:
            to, source = ([(peer, self._empty(size)) for peer, size in each] for each in (leaving, arriving))
            return self.transport.exchange(to, source, what)

        self.calls.append(again)
        return self._timed(self.transport.exchange(sends, receives, what))

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        own, others = _sizes(tensor), [_sizes(output) for output in outputs]
        self.calls.append(lambda: self.transport.gather(self._empty(own), [self._empty(each) for each in others], what))
        return self._timed(self.transport.gather(tensor, outputs, what))

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        own, others = _sizes(output), [_sizes(each) for each in inputs]
        self.calls.append(
            lambda: self.transport.reduce_scatter([self._empty(each) for each in others], self._empty(own), what)
        )
        return self._timed(self.transport.reduce_scatter(inputs, output, what))

    def all_reduce(self, tensor: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        size = _sizes(tensor)
        self.calls.append(lambda: self.transport.all_reduce(self._empty(size), what))
        return self._timed(self.transport.all_reduce(tensor, what))

    def agree(self, payload: bytes, what: str = "an agreement") -> list[bytes]:
        """As the wrapped transport's."""
        return self.transport.agree(payload, what)

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        raise AssertionError("every method goes to the wrapped transport")

    def _timed(self, pending: Pending) -> Pending:
        return Pending(
            lambda: self._waits.append(_on_device(pending) if self.device.type == "cuda" else _here(pending))
        )

    def _empty(self, size: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(size[0], dtype=size[1], device=self.device)


def again(calls: Sequence[Callable[[], Pending]]) -> Callable[[], None]:
    """Work that repeats calls, each waited for before the next."""

    def work() -> None:
        for call in calls:
            call().wait()

    return work


def _sizes(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _here(pending: Pending) -> Callable[[], float]:
    start = perf_counter()
    pending.wait()
    seconds = perf_counter() - start
    return lambda: seconds


def _on_device(pending: Pending) -> Callable[[], float]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    pending.wait()
    after.record()
    return lambda: before.elapsed_time(after) / 1e3
