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
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnspan.transports import Pending, Transport
from attnspan.transports.transport import Messages
from attnspan.transports.wrapped import Wrapped


class Watched(Wrapped):
    """A transport, what was asked of it, and how long that was waited for."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
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
        return self._watched(self.transport.exchange, sends, receives, what)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        return self._watched(self.transport.gather, tensor, outputs, what)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        return self._watched(self.transport.reduce_scatter, inputs, output, what)

    def all_reduce(self, tensor: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        return self._watched(self.transport.all_reduce, tensor, what)

    def all_gather_bytes(self, payload: bytes, what: str = "an agreement") -> list[bytes]:
        """As the wrapped transport's."""
        return self.transport.all_gather_bytes(payload, what)

    def _watched(self, method: Callable[..., Pending], *args: object) -> Pending:
        """The call of a method, timed; repeated, it has tensors of the same shapes."""
        empty = tree_map_only(Tensor, self._empty, args)
        self.calls.append(lambda: method(*tree_map_only(partial, lambda tensor: tensor(), empty)))
        pending = method(*args)
        timed = _on_device if self.device.type == "cuda" else _here
        return Pending(lambda: self._waits.append(timed(pending)))

    def _empty(self, tensor: Tensor) -> partial[Tensor]:
        """Makes a tensor like this one, when it is called."""
        return partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=self.device)


def again(calls: Sequence[Callable[[], Pending]]) -> Callable[[], None]:
    """Work that repeats calls, each waited for before the next."""

    def work() -> None:
        for call in calls:
            call().wait()

    return work


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
