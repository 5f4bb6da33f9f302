"""Virtual ranks: a group of N ranks inside one process, on one device.

Each rank is a thread, its transport a `World`; messages go through a `Post` that all share::

    results = Loopback(ranks=4).run(fn)  # fn(world) on every rank; what each returned

The code above takes the same path as on a real group, and the double is stricter than one:

[Note: as late as allowed] A message is copied, straight from the sender's buffer to the receiver's, when the first of
the two waits for it. Until then the receiver's buffer keeps its old content and the sender's is still looked at, so
that reading or overwriting too early shows in the result. Ends that disagree on size, dtype or operation, messages that
nobody takes, and messages that nobody waits for are errors.

[Note: no hangs] A rank that raises ends the waits of all others, and its error is what `run` raises, with a note of
its rank. When no rank can go on, because each has ended or waits for a message whose other end was never posted, the
error lists who waits for what. A rank that is busy elsewhere is given up on after ``timeout`` seconds.

[Note: state of threads] torch keeps some of its state per thread. Every rank starts with the caller's grad mode,
inference mode, autocast, default device, CUDA stream and context variables. Not carried over: dispatch and function
modes, such as FlopCounterMode, and saved-tensor hooks; enter them in ``fn``. Shared by all ranks, as is anything
global: the default dtype, the choice of SDPA kernel, determinism flags, and the random generator, which ranks draw from
in no fixed order; pass a generator of your own. Backward runs in the thread that calls it: autograd's one thread for a
CUDA device would run one rank's backward, in which it would wait for the others'.

[Note: traced without a GPU] A torch that is built for CUDA and finds no device puts a stand-in in the device's place
when it first traces something. In torch 2.11 the stand-in belongs to the thread that traced, and once that has ended
the next one to trace reads freed memory. Ranks are threads that end, so the caller has one put there before they start.
"""

from __future__ import annotations

import contextvars
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.errors import TransportError, integer
from attnspan.transports.operations import Operation, ledger_of
from attnspan.transports.transport import Messages, Pending, Transport

T = TypeVar("T")

VIRTUAL: contextvars.ContextVar[World | None] = contextvars.ContextVar("attnspan_virtual_rank", default=None)
"""The virtual rank that runs here, for what a real rank keeps per process."""


class Loopback:
    """A group of virtual ranks. Holds no threads: each `run` starts its own and ends them."""

    def __init__(self, ranks: int, device: torch.device | str = "cpu", timeout: float = 60.0) -> None:
        self.ranks = integer("ranks", ranks, at_least=1, error=TransportError)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes the current one, "cuda:0"
        self.timeout = timeout

    def run(self, fn: Callable[[World], T]) -> list[T]:
        """Call ``fn(world)`` on every virtual rank at once; what each returned, by rank."""
        post = Post(self.ranks, self.timeout)
        results: list[Any] = [None] * self.ranks
        entered = _surroundings(self.device)
        _stand_in_for_cuda()

        def live(rank: int) -> None:
            try:
                with entered():
                    world = World(post, rank, self.device)
                    VIRTUAL.set(world)
                    results[rank] = fn(world)
            except BaseException as error:
                error.add_note(f"on virtual rank {rank}")
                post.fail(error, f"rank {rank} raised {type(error).__name__}: {error}")
            finally:
                post.leave(rank)

        threads = [
            Thread(target=contextvars.copy_context().run, args=(live, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # the caller was interrupted
            post.fail(error, f"the caller raised {type(error).__name__}")
            raise
        post.close()
        return results

    def __repr__(self) -> str:
        return f"Loopback(ranks={self.ranks}, device='{self.device}')"


class World(Transport):
    """One virtual rank's end."""

    def __init__(self, post: Post, rank: int, device: torch.device) -> None:
        self.post, self.rank, self.ranks, self.device = post, rank, post.ranks, device
        self.name = "'loopback'"

    @property
    def hosts(self) -> World:
        """The same rank, for tensors of the host."""
        return self if self.device.type == "cpu" else World(self.post, self.rank, torch.device("cpu"))

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        operation = ledger_of(self).current
        leaving = [Parcel(self.rank, peer, True, tensor, what, operation) for peer, tensor in sends]
        arriving = [Parcel(peer, self.rank, False, tensor, what, operation) for peer, tensor in receives]
        self.post.take(leaving + arriving)
        return Pending(lambda: self.post.wait(self.rank, leaving + arriving))


@dataclass(eq=False, slots=True)
class Parcel:
    """One end of a message: what is to be sent, or the buffer to be filled."""

    source: int
    target: int
    leaving: bool
    tensor: Tensor
    what: str
    operation: Operation | None = None
    partner: Parcel | None = field(default=None, repr=False)
    delivered: bool = False

    @property
    def owner(self) -> int:
        """The rank that posted it."""
        return self.source if self.leaving else self.target

    @property
    def awaited(self) -> str:
        """What its owner waits for."""
        if self.leaving:
            return f"rank {self.target} to take {self.what}"
        return f"{self.what} from rank {self.source}"

    @property
    def content(self) -> str:
        return f"{self.what} {tuple(self.tensor.shape)} {dtype_name(self.tensor.dtype)}"


class Post:
    """Where parcels meet: everything that ranks share, under one lock. Lives for one `Loopback.run`."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.changed = Condition()
        self.unmet: dict[tuple[int, int], deque[Parcel]] = defaultdict(deque)  # by source and target; one side only
        self.undelivered: set[Parcel] = set()
        self.waiting: dict[int, Sequence[Parcel]] = {}
        self.left: set[int] = set()
        self.failure: BaseException | None = None
        self.reason = ""

    def take(self, parcels: Sequence[Parcel]) -> None:
        """Post parcels; each meets the oldest of the other side between the same two ranks, if there is one."""
        with self.changed:
            self._stop_if_failed()
            for parcel in parcels:
                queue = self.unmet[parcel.source, parcel.target]
                self.undelivered.add(parcel)
                if queue and queue[0].leaving != parcel.leaving:
                    _join(parcel, queue.popleft())
                else:
                    queue.append(parcel)
            self.changed.notify_all()

    def wait(self, rank: int, parcels: Sequence[Parcel]) -> None:
        """Return when all parcels are delivered; see [Note: no hangs]."""
        deadline = monotonic() + self.timeout
        with self.changed:
            self.waiting[rank] = parcels
            try:
                while not self._deliver(parcels):
                    self._stop_if_failed()
                    self._stop_if_stuck()
                    if not self.changed.wait(deadline - monotonic()):
                        raise TransportError(
                            f"rank {rank} waited {self.timeout:g} s for {_awaited(parcels)}; a rank that is still busy "
                            "needs a longer timeout="
                        )
            finally:
                del self.waiting[rank]

    def leave(self, rank: int) -> None:
        """A rank has ended: what it did not post will never come."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def fail(self, error: BaseException, reason: str) -> None:
        """End everybody's waits. The first error is the one that counts."""
        with self.changed:
            if self.failure is None:
                self.failure, self.reason = error, reason
            self.changed.notify_all()

    def close(self) -> None:
        """Raise what went wrong, when all ranks have ended."""
        if self.failure is not None:
            raise self.failure
        if self.undelivered:
            lost = sorted((parcel.owner, parcel.awaited) for parcel in self.undelivered)
            lines = [f"rank {owner} did not wait for {awaited}" for owner, awaited in lost]
            raise TransportError("every rank has ended, but some messages never arrived: " + "; ".join(lines))

    def _deliver(self, parcels: Sequence[Parcel]) -> bool:
        """Copy what can be copied; whether that was all. See [Note: as late as allowed]."""
        for parcel in parcels:
            if parcel.partner is not None and not parcel.delivered:
                sent, filled = (parcel, parcel.partner) if parcel.leaving else (parcel.partner, parcel)
                filled.tensor.copy_(sent.tensor.view_as(filled.tensor))
                for end in (sent, filled):
                    end.delivered = True
                    self.undelivered.discard(end)
                self.changed.notify_all()
        return all(parcel.delivered for parcel in parcels)

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise TransportError(f"given up: {self.reason}") from self.failure

    def _stop_if_stuck(self) -> None:
        living = set(range(self.ranks)) - self.left
        if all(rank in self.waiting and _awaited(self.waiting[rank]) for rank in living):
            lines = [f"rank {rank} waits for {_stuck_in(self.waiting[rank])}" for rank in sorted(living)]
            lines += [f"rank {rank} has ended" for rank in sorted(self.left)]
            raise TransportError("no rank can go on: " + "; ".join(lines))


def _join(one: Parcel, other: Parcel) -> None:
    sent, filled = (one, other) if one.leaving else (other, one)
    _check_operations(one, other)
    if (sent.tensor.numel(), sent.tensor.dtype) != (filled.tensor.numel(), filled.tensor.dtype):
        raise TransportError(
            f"rank {sent.source} sends rank {sent.target} {sent.content}, which expects {filled.content}"
        )
    one.partner, other.partner = other, one


def _check_operations(one: Parcel, other: Parcel) -> None:
    """Both ends of a message belong to one operation: see operations.py, [Note: headers]."""
    headers = [None if each.operation is None else each.operation.header for each in (one, other)]
    if headers[0] != headers[1]:
        raise TransportError(
            f"ranks are out of step: rank {one.owner} is in {one.operation or 'none'}, rank {other.owner} in "
            f"{other.operation or 'none'}; every rank must make the same calls in the same order, backward passes "
            "included"
        )


def _awaited(parcels: Sequence[Parcel]) -> str:
    """What is awaited of those who have not posted their end; nothing if the parcels can all be delivered."""
    return ", ".join(parcel.awaited for parcel in parcels if parcel.partner is None)


def _stuck_in(parcels: Sequence[Parcel]) -> str:
    """What is awaited, and in which operation."""
    operation = next((parcel.operation for parcel in parcels if parcel.partner is None), None)
    return _awaited(parcels) + (f" in {operation}" if operation is not None else "")


def _surroundings(device: torch.device) -> Callable[[], Any]:
    """The caller's thread-local state, as a context to enter in another thread; see [Note: state of threads]."""
    grad, inference, home = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
    kinds = [kind for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    cached = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            if home != torch.device("cpu"):
                stack.enter_context(home)
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return entered


@functools.cache
def _stand_in_for_cuda() -> None:
    """See [Note: traced without a GPU]."""
    # Devices are counted, not asked for by is_available(): processes that are forked later could not use them then.
    if torch.version.cuda and not torch.cuda.device_count():
        torch._C._ensureCUDADeviceGuardSet()
