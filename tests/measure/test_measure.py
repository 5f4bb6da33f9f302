"""The stopwatch: links, tables of several ranks, and where ranks come from."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from attnspan.attention import links
from attnspan.errors import TransportError, TuningError
from attnspan.measure import Ranks, Tuning, stopwatch, tune
from attnspan.measure.stopwatch import seconds
from attnspan.measure.tiles import Case
from attnspan.testing import loopback
from tests.tuning.test_table import rate

CPU = torch.device("cpu")


class Clock:
    """Time that passes by `sleep` alone: a busy machine adds nothing to it."""

    def __init__(self, monkeypatch):
        self.now, self.slept = 0.0, 0
        monkeypatch.setattr(stopwatch, "perf_counter", lambda: self.now)

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + 1


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_first_run_is_not_counted_and_the_least_counts(clock):
    runs = iter([0.01, 0.05, 0.06, 0.03, 0.05])
    assert seconds(lambda: clock.sleep(next(runs)), CPU) == pytest.approx(0.03)


def test_what_is_short_is_run_often_between_two_looks_at_the_clock(clock):
    assert seconds(lambda: clock.sleep(1e-4), CPU, repeats=1) == pytest.approx(1e-4)
    assert clock.slept > 100


def test_the_clock_is_a_real_one():
    assert seconds(lambda: time.sleep(0.03), CPU, repeats=1) >= 0.03


def test_of_ranks_that_measure_together_the_slowest_counts(monkeypatch):
    def timed(case, device):
        rank = int(threading.current_thread().name.split()[-1])
        return replace(rate(case.kernel, case.kind, case.size), forward=1.0 + rank, backward=9.0 - rank)

    monkeypatch.setattr(Case, "rate", timed)
    asked = Tuning.of(CPU, sizes=(16,), kernels=("cpu_flash",))
    tables = loopback(2).run(lambda world: tune(asked, world).data())
    assert tables[0] == tables[1]
    assert {(r["forward"], r["backward"]) for r in tables[0]["rates"]} == {(2.0, 9.0)}
    assert tables[0]["inside"] is not None
    assert tables[0]["ranks_per_node"] == 2


def test_what_hosts_hold_tells_links_apart(monkeypatch):
    monkeypatch.setattr(links, "host_and_device", lambda device: (threading.current_thread().name, ""))
    asked = Tuning.of(CPU, sizes=(16,), kernels=("cpu_flash",), heads=1, head_dims=(8,))
    found = loopback(2).run(lambda world: tune(asked, world))[0]
    assert (found.inside, found.ranks_per_node) == (None, 1)
    assert found.between.bandwidth > 0


def test_kernels_that_all_refuse_leave_nothing_to_keep():
    with pytest.raises(TuningError, match="none of the kernels cudnn computes such tiles on cpu"):
        tune(Tuning.of(CPU, sizes=(16,), kernels=("cudnn",)))


def test_virtual_ranks_run_in_this_process():
    assert Ranks(3, "cpu", virtual=True).run(lambda transport: transport.ranks) == 3
    assert Ranks(device="cpu").run(lambda transport: transport.ranks) == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ranks": 3}, "ranks are the 2 that torchrun started, got 3; leave them out"),
        ({"virtual": True}, "virtual ranks live in one process; start it without torchrun"),
    ],
)
def test_under_torchrun_the_ranks_are_its(how, message, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match=message):
        Ranks(device="cpu", **how).run(lambda transport: None)


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(TransportError, match="device: there is no CUDA device here; use cpu"):
        Ranks(2, "cuda")
