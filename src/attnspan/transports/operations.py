"""Operations: what ranks do together, and how a message says which of them it belongs to.

Messages between two ranks are matched in the order they were posted. Ranks that do the same things in another order
would take one for the other wherever sizes happen to agree: the keys of one session for those of the next, or, where
one rank ran backward in another order, one layer's gradients for another's. So everything that ranks do together is an
operation with a number and a name, and a message that belongs to an operation says so::

    with enter_operation(transport, "attention, causal, forward") as operation:
        transport.exchange(...)  # belongs to it

A number counts the operations of a group, alike on every rank. A backward pass has the number of its forward pass: it
is matched by what it differentiates, not by when it runs. Autograd keeps the forward pass's header for that.

[Note: headers] Two ranks tell each other which operation they are in with their first messages of that operation, in
one number of 8 bytes each way, a header. Between them nothing else can be mixed up: inside an operation both follow one
plan. A mismatch raises on both ends and names both operations, before anything is made of what arrived. Headers go
from host to host: virtual ranks compare them when a message is posted, processes send them by gloo, also where NCCL
moves the data (distributed.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from attnspan.transports.transport import Transport

NAMES = 4096
"""How many names a rank remembers, to say what another one is in."""

NAME_BITS = 40
"""A header is the number of an operation above the hash of its name; together less than a signed 64-bit integer."""


class Operation:
    """Something that ranks do together, and which of them have told each other so."""

    __slots__ = ("_met", "header", "name", "number")

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self.header = number % (1 << 63 - NAME_BITS) << NAME_BITS | _hash(name)
        self._met: set[int] = set()

    def greet(self, peers: Iterable[int]) -> list[int]:
        """Those of some ranks that a message of this operation has not met yet; from now on it has."""
        new = sorted(set(peers) - self._met)
        self._met.update(new)
        return new

    def __str__(self) -> str:
        return f"{self.name} (operation {self.number})"


class Ledger:
    """What a rank remembers of a group's operations."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.current: Operation | None = None
        self.thread: int | None = None  # the one that the current operation runs in
        self.names: dict[int, str] = {}

    def begin(self, name: str) -> Operation:
        """The next operation."""
        self._remember(name, _gradient(name))
        return Operation(next(self.numbers), name)

    def differentiate(self, header: int, suffix: str = "") -> Operation:
        """The backward pass of an operation."""
        name = _gradient(self.names.get(header % (1 << NAME_BITS), f"#{header:x}"))
        self._remember(name, name + suffix)
        return Operation(header >> NAME_BITS, name + suffix)

    def _remember(self, *names: str) -> None:
        for name in names:
            self.names[_hash(name)] = name
        while len(self.names) > NAMES:
            del self.names[next(iter(self.names))]

    def describe(self, header: int) -> str:
        """The operation that another rank's header stands for, by its name if this rank has been in such a one."""
        name = self.names.get(header % (1 << NAME_BITS), "one that this rank has never been in")
        return f"{name} (operation {header >> NAME_BITS})"

    def check(self, transport: Transport, operation: Operation, peer: int, header: int) -> None:
        """Raise if another rank is in another operation."""
        if header != operation.header:
            raise transport.error(
                f"ranks are out of step: this rank is in {operation}, rank {peer} in {self.describe(header)}; "
                "every rank must make the same calls in the same order, backward passes included"
            )


@contextmanager
def enter_operation(transport: Transport, name: str | int, suffix: str = "") -> Iterator[Operation]:
    """A block in which every message belongs to one operation.

    Its name is the same on every rank, and of no other operation that could be taken for it. A backward pass is known
    by the header of its forward pass instead, with a suffix where ranks could go about it in different ways.
    """
    ledger, here = ledger_of(transport), threading.get_ident()
    around, thread = ledger.current, ledger.thread
    if around is not None and thread != here:  # ranks cannot know which of two threads comes first elsewhere
        raise transport.error(
            f"another thread of this process is in {around} on the same group; "
            "use a group from one thread at a time, or make a group for each thread"
        )
    operation = ledger.begin(name) if isinstance(name, str) else ledger.differentiate(name, suffix)
    ledger.current, ledger.thread = operation, here
    try:
        yield operation
    finally:
        ledger.current, ledger.thread = around, thread


def ledger_of(transport: Transport) -> Ledger:
    """The ledger of a transport's group."""
    group = transport.group
    ledger = _LEDGERS.get(group)
    return _LEDGERS.setdefault(group, Ledger()) if ledger is None else ledger


_LEDGERS: WeakKeyDictionary[object, Ledger] = WeakKeyDictionary()  # by group, for as long as it lives


def _gradient(name: str) -> str:
    return f"the gradient of {name}"


@functools.lru_cache(maxsize=NAMES)
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=NAME_BITS // 8).digest(), "little")
