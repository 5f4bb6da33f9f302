"""A transport that writes down what passes through it.

Wraps any transport and is one, so the code above does not know::

    world = Counting(world)
    attention(..., group=world)
    assert world.sent == {1: 4096, 3: 4096}  # bytes, by peer
    print(world.log)  # what was posted and waited for, in order

Bytes are those the caller asked to move between ranks: not what stays at home, and not how a backend routes them.
`mark` writes a line of the caller's own, so that the log shows what happened between a post and its wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from attnspan.transports.transport import Messages, Pending, Transport
from attnspan.transports.wrapped import Wrapped


class Traffic(NamedTuple):
    """Something that happened: `kind` is the method called, ``"wait"`` or ``"mark"``; bytes are by peer."""

    kind: str
    what: str
    sent: Mapping[int, int] = {}
    received: Mapping[int, int] = {}


class Counting(Wrapped):
    """A transport and the log of its use."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.log: list[Traffic] = []

    @property
    def calls(self) -> Counter[str]:
        """How often each method was called."""
        return Counter(event.kind for event in self.log if event.kind not in ("wait", "mark"))

    @property
    def sent(self) -> Counter[int]:
        """Bytes sent, by peer."""
        return sum((Counter(event.sent) for event in self.log), Counter())

    @property
    def received(self) -> Counter[int]:
        """Bytes received, by peer."""
        return sum((Counter(event.received) for event in self.log), Counter())

    def mark(self, what: str) -> None:
        """Note in the log that the caller did something."""
        self.log.append(Traffic("mark", what))

    def exchange(self, sends: Messages, receives: Messages, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        pending = self.transport.exchange(sends, receives, what)
        return self._noted(pending, Traffic("exchange", what, self._count(sends), self._count(receives)))

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        pending = self.transport.gather(tensor, outputs, what)
        sent = self._count([(peer, tensor) for peer in range(self.ranks)])
        return self._noted(pending, Traffic("gather", what, sent, self._count(list(enumerate(outputs)))))

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        pending = self.transport.reduce_scatter(inputs, output, what)
        received = self._count([(peer, inputs[self.rank]) for peer in range(self.ranks)])
        return self._noted(pending, Traffic("reduce_scatter", what, self._count(list(enumerate(inputs))), received))

    def all_reduce(self, tensor: Tensor, what: str = "tensors") -> Pending:
        """As the wrapped transport's."""
        count = self._count([(peer, tensor) for peer in range(self.ranks)])
        return self._noted(self.transport.all_reduce(tensor, what), Traffic("all_reduce", what, count, count))

    def all_gather_bytes(self, payload: bytes, what: str = "an agreement") -> list[bytes]:
        """As the wrapped transport's. Its few bytes are not counted: they depend on what is said, not on a plan."""
        self.log.append(Traffic("agree", what))
        return self.transport.all_gather_bytes(payload, what)

    def _noted(self, pending: Pending, event: Traffic) -> Pending:
        self.log.append(event)
        return pending.then(lambda: self.log.append(Traffic("wait", event.what)))

    def _count(self, messages: Messages) -> Counter[int]:
        """Bytes by peer. What does not travel is left out: no peer has a count of 0."""
        count: Counter[int] = Counter()
        for peer, tensor in messages:
            if peer != self.rank and tensor.numel():
                count[peer] += tensor.nbytes
        return count
