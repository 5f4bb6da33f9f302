"""Real ranks for tests: processes of this machine that form one group, of gloo or of NCCL.

::

    results = Processes(ranks=2, backend="gloo").run(fn)  # fn(world) in every process; what each returned

``world`` is the transport of the group. It stands where a process group or a DeviceMesh does, as a virtual rank's does,
so that one function runs on both. Inside ``fn`` torch.distributed is initialised, and the group is the default one.

[Note: pickles] Processes start afresh ("spawn"): they import the module of ``fn`` and find it there by name, so ``fn``
is a function at the top of a module. Arguments, results and exceptions travel by pickle, tensors as copies.

[Note: no orphans] A thread of every rank listens to the caller. When the caller ends, however it ends, the pipe between
them closes and the rank kills itself. `run` and `close` kill all ranks, also when the caller is interrupted.

[Note: failures] A rank that raises tells its exception and ends; the others see that as they would see any rank that
ends, or wait until the group's timeout. `run` waits for all of them and then raises a `RankError` with the outcome of
every rank. What does not end within ``timeout`` seconds is killed.

[Note: one GPU] NCCL refuses two ranks on one device if they claim the same host. Where there are fewer devices than
ranks, every rank claims a host of its own, and all share device 0 and talk over loopback sockets. A message travels in
pieces, for each of which both processes must have their turn on the device: `LARGE_PIECES` makes them few (measured on
an H200: 4 ranks gather 32 MB from each other in 53 ms instead of 131).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, main_thread
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from attnspan.errors import RankError, TransportError, integer, one_of
from attnspan.transports import Transport, transport_of

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")

MEMORY = 150 << 20
"""Bytes that a process with torch takes for itself, at the least."""

GRACE = 10.0
"""Seconds until a process whose pipe is closed must have ended, and until a stuck one must have sent its stack."""

LARGE_PIECES = {"NCCL_BUFFSIZE": str(16 << 20), "NCCL_P2P_NET_CHUNKSIZE": str(1 << 20)}
"""NCCL's settings for ranks that share a device, unless the environment has others; see [Note: one GPU]."""

ASK_STACK = b""
"""Asks a rank for its stack; no job is empty."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What became of a rank. ``kind`` says what ``value`` is::

    "returned"    what fn returned
    "raised"      the exception; ``trace`` is its traceback
    "died"        the name of the signal that ended the process, or its exit status
    "unfinished"  the seconds after which it was killed; ``trace`` is where it was, if it could say
    """

    kind: str
    value: Any
    trace: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "raised":
                return f"raised {type(self.value).__name__}:\n{self.trace}"
            case "died":
                return f"was ended by {self.value}" if isinstance(self.value, str) else f"exited with {self.value}"
            case "unfinished":
                return f"did not end within {self.value:g} s" + (f", and was in:\n{self.trace}" if self.trace else "")
        return f"returned {self.value!r}"


class Processes:
    """Ranks that are processes. Each `run` starts its own and ends them; inside ``with`` they live from run to run.

    ::

        with processes(ranks=4) as group:  # a Processes
            try:
                group.run(train)
            except span.RankError as error:
                print(error.outcomes)  # a RankOutcome for every rank
    """

    def __init__(
        self, ranks: int, backend: str = "gloo", timeout: float = 120.0, group_timeout: float | None = None
    ) -> None:
        self.ranks = integer("ranks", ranks, at_least=1, error=TransportError)
        self.backend = one_of("backend", backend, BACKENDS, error=TransportError)
        self.timeout = _seconds("timeout", timeout)
        self.group_timeout = self.timeout / 2 if group_timeout is None else _seconds("group_timeout", group_timeout)
        _check_built(self.backend)
        _check_memory(self.ranks)
        self._children: list[Child] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._kept = False
        self._lock = Lock()

    def run(self, fn: Callable[Concatenate[Transport, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call ``fn(world, *args)`` in every process at once; what each returned, by rank.

        A rank that raises, dies or does not end makes this a `RankError`, and ends all ranks.
        """
        job = _pickled(fn, args, kwargs)
        with self._lock:
            try:
                if not self._children:
                    self._start()
                outcomes = self._outcomes(job)
            except BaseException:
                self.close()
                raise
            failed = [rank for rank, outcome in outcomes.items() if outcome.kind != "returned"]
            if failed or not self._kept:
                self.close()
        if failed:
            first = outcomes[failed[0]]
            raise _error(outcomes, failed) from (first.value if first.kind == "raised" else None)
        return [outcomes[rank].value for rank in range(self.ranks)]

    def close(self) -> None:
        """End all ranks; a later `run` starts others."""
        children, self._children = self._children, []
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join()
            child.pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Processes:
        self._kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._kept = False
        self.close()

    def _start(self) -> None:
        context = self._context()
        self._folder = tempfile.TemporaryDirectory()
        store = f"file://{Path(self._folder.name) / 'store'}"
        spec = GroupSpec(self.ranks, self.backend, self.group_timeout, store, dict(os.environ))
        for rank in range(self.ranks):
            try:
                self._children.append(_started(context, spec, rank))
            except OSError as cause:
                raise TransportError(
                    f"ranks: {rank} of {self.ranks} processes could be started, then there was no room for another: "
                    f"{cause}; all were ended; ask for fewer"
                ) from cause

    def _context(self) -> SpawnContext:
        """How processes start."""
        return multiprocessing.get_context("spawn")

    def _outcomes(self, job: bytes) -> dict[int, RankOutcome]:
        """What became of every rank, in the order in which they ended."""
        for child in self._children:
            with suppress(OSError):  # it has died, which is found below
                child.pipe.send_bytes(job)
        began = monotonic()
        waiting = {child.pipe: rank for rank, child in enumerate(self._children)}
        outcomes = {}
        while waiting and (ready := self._ready(list(waiting), began)):
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcomes[rank] = self._children[rank].outcome()
        for rank in waiting.values():
            outcomes[rank] = RankOutcome("unfinished", self.timeout, self._children[rank].stack())
        return outcomes

    def _ready(self, pipes: Sequence[Connection], began: float) -> list[Any]:
        """Pipes in which there is something; none when the time is over."""
        return wait(pipes, max(0.0, began + self.timeout - monotonic()))

    def __repr__(self) -> str:
        return f"Processes(ranks={self.ranks}, backend={self.backend!r})"


@dataclass(frozen=True, slots=True)
class Child:
    """A rank as its caller sees it."""

    process: BaseProcess
    pipe: Connection

    def outcome(self) -> RankOutcome:
        """What it sent, or how it ended."""
        try:
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(GRACE)
            status = self.process.exitcode
            return RankOutcome("died", signal.Signals(-status).name if status is not None and status < 0 else status)
        outcome: RankOutcome = pickle.loads(answer)
        return outcome

    def stack(self) -> str:
        """The stack of a rank that is still at work; nothing if it does not answer."""
        with suppress(Exception):  # it may end, or answer its job, at this very moment
            self.pipe.send_bytes(ASK_STACK)
            if self.pipe.poll(GRACE):
                return self.outcome().trace
        return ""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a rank needs to know to join its group."""

    ranks: int
    backend: str
    timeout: float
    store: str
    environment: dict[str, str]

    def join(self, rank: int) -> Transport:
        """Become a rank."""
        how: dict[str, Any] = {"backend": self.backend, "init_method": self.store, "rank": rank}
        if "nccl" in self.backend:
            how["device_id"] = _claimed_device(rank, self.ranks)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.ranks))
        # Wait for all ranks to have joined: one that fails at once would break connections that others still make.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        dist.init_process_group(world_size=self.ranks, timeout=timedelta(seconds=self.timeout), **how)
        os.environ["TORCH_DIST_INIT_BARRIER"] = self.environment.get("TORCH_DIST_INIT_BARRIER", "0")
        return transport_of(None)


def _started(context: SpawnContext, spec: GroupSpec, rank: int) -> Child:
    ours, theirs = context.Pipe()
    # Daemonic, so that it does not hold up the end of the caller.
    process = context.Process(target=_rank_main, args=(spec, rank, theirs), daemon=True, name=f"rank {rank}")
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # the rank's death then reads as the end of the pipe
    return Child(process, ours)


def _rank_main(spec: GroupSpec, rank: int, pipe: Connection) -> None:
    """What the process of a rank runs: one job after another."""
    os.environ.clear()
    os.environ.update(spec.environment)
    multiprocessing.current_process().daemon = False  # it may have processes of its own, as a DataLoader's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller hears it too, and decides
    jobs: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(pipe, jobs), daemon=True).start()
    world = None
    while True:
        job = jobs.get()
        try:
            world = world or spec.join(rank)
            fn, args, kwargs = pickle.loads(job)
            raised, answer = False, _answer(fn(world, *args, **kwargs))
        except BaseException as error:
            raised, answer = True, pickle.dumps(RankOutcome("raised", _portable(error), traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(answer)
        if raised:
            os._exit(1)  # a normal exit waits for peers that may be dead


def _listen(pipe: Connection, jobs: SimpleQueue[bytes]) -> None:
    """Take jobs from the caller, send the main thread's stack if asked, and end with the caller: [Note: no orphans]."""
    try:
        while True:
            job = pipe.recv_bytes()
            if job == ASK_STACK:
                stack = traceback.format_stack(sys._current_frames()[main_thread().ident or 0])
                pipe.send_bytes(pickle.dumps(RankOutcome("unfinished", None, "".join(stack))))
            else:
                jobs.put(job)
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _answer(value: object) -> bytes:
    try:
        return pickle.dumps(RankOutcome("returned", value))
    except Exception as cause:
        raise TransportError(
            f"fn returned {type(value).__name__}, which does not travel between processes: {cause}; return numbers, "
            "text or tensors"
        ) from cause


def _portable(error: BaseException) -> BaseException:
    """The exception if it survives the way to the caller, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _claimed_device(rank: int, ranks: int) -> torch.device:
    """A CUDA device for each rank; where there are too few, one for all. See [Note: one GPU]."""
    shared = torch.cuda.device_count() < ranks
    if shared:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ.update({name: value for name, value in LARGE_PIECES.items() if name not in os.environ})
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    return device


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A job as it travels; see [Note: pickles]."""
    if not callable(fn):
        raise TransportError(f"fn must be a function of a rank's world, got {fn!r} ({type(fn).__name__})")
    try:
        pickle.dumps(fn)
    except Exception as cause:
        raise TransportError(
            f"fn must be a function at the top of a module, which a started process can import, got {fn!r}: {cause}; "
            "virtual ranks, attnspan.testing.loopback(), take any function"
        ) from cause
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise TransportError(
            f"fn must be a function at the top of a module, which a started process can import, got {fn!r} of an "
            "interactive session; write it to a file and import it, or use attnspan.testing.loopback()"
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as cause:
        raise TransportError(f"args must be what pickle can send to another process: {cause}") from cause


def _error(outcomes: dict[int, RankOutcome], failed: list[int]) -> RankError:
    """One error for all ranks that failed, the first of them first."""
    names = ", ".join(str(rank) for rank in sorted(failed))
    lines = [f"rank {names} of {len(outcomes)} failed"]
    lines += [f"rank {rank} {outcomes[rank]}" for rank in failed]
    return RankError("\n".join(lines), tuple(outcomes[rank] for rank in range(len(outcomes))))


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise TransportError(f"{name} must be a number of seconds > 0, got {value!r}")
    return float(value)


def _check_built(backend: str) -> None:
    """Refuse a backend that this torch or this machine does not have."""
    if "gloo" in backend and not dist.is_gloo_available():
        raise TransportError(f"backend {backend!r}: this torch is built without gloo")
    if "nccl" not in backend:
        return
    if not dist.is_nccl_available():
        raise TransportError(f"backend {backend!r}: this torch is built without NCCL; use 'gloo'")
    if not torch.cuda.device_count():
        raise TransportError(f"backend {backend!r}: NCCL needs a CUDA device, and there is none here; use 'gloo'")


def _check_memory(ranks: int) -> None:
    """Refuse ranks for which there is no memory: starting them would end other processes of this machine."""
    room = _available_memory()
    if room is not None and ranks * MEMORY > room:
        raise TransportError(
            f"ranks must be at most {room // MEMORY}, got {ranks}: a process with torch takes {MEMORY >> 20} MiB or "
            f"more, and {room >> 20} MiB are available here; ask for fewer, or use attnspan.testing.loopback()"
        )


def _available_memory() -> int | None:
    """Bytes that processes could still have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
