"""A device that waits too long for other ranks ends its process, in words; one whose data arrives does not."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch

from attnspan.transports import watchdog
from attnspan.transports.watchdog import Watchdog
from tests.pace import stretched


class Event:
    """Stands for an event on a device, which happens when it is told to."""

    made: ClassVar[list["Event"]] = []

    def __init__(self):
        self.happened = False
        Event.made.append(self)

    def record(self):
        pass

    def query(self):
        return self.happened


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    return Event.made


def test_only_what_has_not_arrived_in_time_is_overdue(events):
    dog = Watchdog(end=lambda message: None)
    dog.watch("keys from rank 1", seconds=-1)
    assert dog.overdue() == "keys from rank 1"
    dog.watch("keys from rank 2", seconds=1000)
    events[0].happened = True
    assert dog.overdue() is None
    events[1].happened = True
    dog.watch("gradients from rank 1", seconds=-1)
    assert dog.overdue() == "gradients from rank 1"


def test_what_has_arrived_is_not_kept(events):
    dog = Watchdog(end=lambda message: None)
    for _ in range(100):
        dog.watch("keys", seconds=1000)
        events[-1].happened = True
    assert len(dog._awaited) == 1


def test_the_end_is_called_once_with_what_is_overdue(events, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_EVERY", 0.01)
    ended, told = threading.Event(), []

    def end(message):
        told.append(message)
        ended.set()

    dog = Watchdog(end)
    dog.watch("keys from rank 1", seconds=0.0)
    assert ended.wait(stretched(5))
    time.sleep(0.1)
    assert told == ["keys from rank 1"]


def test_a_process_ends_by_a_signal_and_says_what_it_waited_for():
    code = "from attnspan.transports.watchdog import end_process; end_process('rank 0 of 2: waiting for keys')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    assert ended.stderr.startswith("attnspan: rank 0 of 2: waiting for keys; the device cannot be interrupted, so ")
    assert "end_process" in ended.stderr  # where the thread is


EXITING = """
import atexit, threading, time, torch
from attnspan.transports import watchdog

atexit.register(time.sleep, {exit})  # runs after what is registered later
watchdog.EXIT_SECONDS = {limit}
torch.cuda.synchronize = lambda device: threading.Event().wait()  # a device that waits in vain
watchdog.abort(torch.device("cuda"), lambda: None)
raise SystemExit(3)
"""


@pytest.mark.parametrize(("exit", "limit", "code"), [(6000, 1, -signal.SIGALRM), (0, 6000, 3)])
def test_after_an_abort_an_exit_that_hangs_is_cut_short_and_another_keeps_its_code(exit, limit, code):
    program = EXITING.format(exit=exit, limit=limit)
    ended = subprocess.run([sys.executable, "-c", program], timeout=stretched(60), env=dict(os.environ))
    assert ended.returncode == code


CUDA = torch.device("cuda")


@pytest.fixture
def abort(monkeypatch):
    """Aborts whose limits are short; the exit of this process stays as it is."""
    monkeypatch.setattr(watchdog, "REST_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(watchdog.atexit, "register", lambda call: None)
    return watchdog.abort


def test_an_abort_that_hangs_is_not_waited_for(abort, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: over.wait())
    abort(CUDA, over.wait)
    over.set()


def test_a_group_is_given_up_only_if_its_device_does_not_come_to_rest(abort, monkeypatch):
    given_up, over = [], threading.Event()
    monkeypatch.setattr(watchdog, "ABORT_SECONDS", stretched(60))  # what ends by itself is awaited
    with monkeypatch.context() as at_rest:
        at_rest.setattr(watchdog, "REST_SECONDS", stretched(60))
        at_rest.setattr(torch.cuda, "synchronize", lambda device: None)
        abort(CUDA, lambda: given_up.append("at rest"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: over.wait())
    abort(CUDA, lambda: given_up.append("waiting"))
    over.set()
    assert given_up == ["waiting"]


def test_torchs_switch_is_ours_too(monkeypatch):
    assert watchdog.is_enabled()
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert not watchdog.is_enabled()
