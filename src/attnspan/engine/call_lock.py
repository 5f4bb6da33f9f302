"""Allows one call of an engine at a time, and defines what happens to calls from other threads.

Methods that read or change an engine are `exclusive`. A call from another thread waits until the running one returns,
which for `step` is one call of the model. A nested call from the same thread, by a hook, a tokenizer or a finalizer,
cannot wait and is refused.

Over ranks the order of calls must be the same on every rank, which locks between threads cannot ensure. There the first
thread that calls owns the engine, and calls from others are refused.

[Note: finalizers] Python may collect garbage at any line, even in the middle of a step. So a caller that is collected
cancels nothing itself: its requests belong to a `CallerHandle`, which lives as long as the caller's frame, and whose
weak reference is appended to a queue when it dies. Appending is one call in C: no Python line runs, and nothing can
interrupt it. The next call of the engine begins by cancelling what is in the queue.

[Note: one line] A `with` whose block is on the same line has no line between block and release at which an interrupt
(or a debugger, or a tracer that raises) could come. Longer blocks are moved into a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from threading import Lock, RLock, current_thread, get_ident
from typing import Concatenate, ParamSpec, TypeVar
from weakref import ref

from attnspan.engine.request import Request
from attnspan.errors import EngineError

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="HasCallLock")


class CallerHandle:
    """An object that a caller's frame keeps while it wants its requests."""


class CallerRef(ref[CallerHandle]):
    """A weak reference to a handle, with the requests to cancel when the handle dies."""

    requests: Sequence[Request] = ()  # until it is given some: an interrupt may come first


class CallLock:
    """The lock that one call of an engine at a time holds. `ranks` as in the engine's group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lock = RLock()  # between threads
        self.inside = Lock()  # taken while a call is under way, so that a call within it is recognised
        self.thread: int | None = None  # over ranks: the one that may call
        self.name = ""

    @property
    def reentered(self) -> bool:
        """Whether a call of this thread is under way; under the lock."""
        return self.inside.locked()

    @property
    def may_act(self) -> bool:
        """Whether this thread may change the engine now; under the lock."""
        return not self.inside.locked() and (self.ranks == 1 or self.thread in (None, get_ident()))

    def check(self, what: str) -> None:
        """EngineError for a call that must not be made here and now; under the lock."""
        if self.inside.locked():
            raise EngineError(
                f"{what} was called in the middle of another call of the same engine, by a hook, a tokenizer or a "
                "finalizer; call it when that call has returned"
            )
        if self.ranks > 1 and self.thread != get_ident():
            if self.thread is not None:
                raise EngineError(
                    f"{what} was called in thread {current_thread().name!r}, and over ranks an engine belongs to the "
                    f"first thread that calls it, here {self.name!r}: ranks make the same calls in the same order, "
                    "which threads do not; hand requests to that thread"
                )
            self.name, self.thread = current_thread().name, get_ident()


class HasCallLock:
    """What one call at a time may use."""

    _call_lock: CallLock


def exclusive(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A method of which one call is under way at a time. See [Note: one line]."""

    @wraps(method)
    def call(self: E, /, *args: P.args, **named: P.kwargs) -> R:
        with self._call_lock.lock: return call_exclusively(self, method, args, named)  # fmt: skip  # noqa: E701

    return call


def locked(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A method that waits for calls of other threads, and may be called within one of its own."""

    @wraps(method)
    def call(self: E, /, *args: P.args, **named: P.kwargs) -> R:
        with self._call_lock.lock: return method(self, *args, **named)  # fmt: skip  # noqa: E701

    return call


def call_exclusively(
    engine: HasCallLock, method: Callable[..., R], args: tuple[object, ...], named: dict[str, object]
) -> R:
    """Call a method, under the lock."""
    engine._call_lock.check(method.__name__.strip("_"))
    with engine._call_lock.inside: return method(engine, *args, **named)  # fmt: skip  # noqa: E701
