"""No rank waits forever for a lost one: a broken NCCL group is aborted, and a device that waits too long ends us.

gloo's waits end with an exception when the group's timeout has passed. NCCL's do not: the host has gone on, and the
device waits in a kernel. Two cases:

1. The host hears of a lost peer, by a header (operations.py) or by NCCL, and raises. If the device still waits then,
   `abort` gives the group up: the kernels that wait end, so that the host can synchronise, clean up and exit.
2. The host waits for its device, as `loss.item()` does. It hears nothing and cannot raise. The watchdog knows what the
   device was made to wait for. If that has not arrived when the group's timeout has passed, the process says what it
   waited for, prints where each of its threads is, and ends by SIGABRT.

[Note: torch's watchdog] torch ends such processes too, but first lets a dump of its flight recorder take a minute, and
a process that exits by itself waits for that as well. To wake the host instead and go on would mean to compute with
what has not arrived. TORCH_NCCL_ASYNC_ERROR_HANDLING=0, which switches torch's watchdog off, switches this one off.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import NamedTuple

import torch

REST_SECONDS = 1.0
"""How long a device may take to finish what does not depend on other ranks, before their group is aborted."""

ABORT_SECONDS = 5.0
"""How long an abort may take before the error that caused it is raised all the same."""

EXIT_SECONDS = 5
"""How long the exit of a process may take after a group broke."""

LOOK_EVERY = 1.0  # seconds


class Awaited(NamedTuple):
    """Something that a device waits for: an event behind it, until when it must be there, and what it is."""

    event: torch.cuda.Event
    deadline: float
    message: str


class Watchdog:
    """What the devices of this process wait for; `end` is called with what is overdue."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._awaited: deque[Awaited] = deque()
        self._lock = Lock()
        self._thread: Thread | None = None

    def watch(self, message: str, seconds: float) -> None:
        """What the current stream has been made to wait for must be there in so many seconds."""
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            while self._awaited and self._awaited[0].event.query():
                self._awaited.popleft()
            self._awaited.append(Awaited(event, time.monotonic() + seconds, message))
            if self._thread is None:
                self._thread = Thread(target=self._look, name="attnspan watchdog", daemon=True)
                self._thread.start()

    def overdue(self) -> str | None:
        """What should have arrived and has not. Only what is late is asked for: most has arrived long before."""
        now = time.monotonic()
        with self._lock:
            late = [each for each in self._awaited if each.deadline < now]
            return next((each.message for each in late if not each.event.query()), None)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            message = self.overdue()
            if message is not None:
                return self._end(message)


def is_enabled() -> bool:
    """Whether processes whose NCCL operations fail are ended. See [Note: torch's watchdog]."""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"


def abort(device: torch.device, give_up: Callable[[], None]) -> None:
    """Give a group up, in no more than `ABORT_SECONDS`, unless its device comes to rest by itself.

    Either way this process takes no more than `EXIT_SECONDS` to exit from then on: see [Note: torch's watchdog].
    """
    atexit.unregister(_exit_in_time)
    atexit.register(_exit_in_time)
    if not _ends(partial(torch.cuda.synchronize, device), REST_SECONDS):
        _ends(give_up, ABORT_SECONDS)


def _ends(work: Callable[[], None], seconds: float) -> bool:
    """Whether something is done in so many seconds, in a thread of its own, which is left behind if it is not."""
    thread = Thread(target=work, name="attnspan abort", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _exit_in_time() -> None:
    # A signal that Python does not handle: Python's threads have ended when C++ begins to wait.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS)


def end_process(message: str) -> None:
    """Say what was awaited and where every thread is, and end this process."""
    print(f"attnspan: {message}; the device cannot be interrupted, so this process ends", file=sys.stderr, flush=True)
    with suppress(Exception):  # stderr may be no file
        faulthandler.dump_traceback(all_threads=True)
    os.abort()


WATCHDOG = Watchdog(end_process)
