"""A link is measured as it is, alike on every rank, and as an operation of its group."""

import math
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch

from attnspan.errors import TransportError
from attnspan.testing import loopback
from attnspan.transports import Counting, Delayed, Pending, Wrapped, probe
from attnspan.transports.operations import ledger_of
from attnspan.transports.probe import ENOUGH, GUESS, LARGE, SMALL, THOROUGH, fitting_size, speed
from tests.pace import stretched
from tests.processes import on_backends, spawn


def around(world):
    hops = range(1, world.ranks)
    return [(world.rank + hop) % world.ranks for hop in hops], [(world.rank - hop) % world.ranks for hop in hops]


class Wire(Wrapped):
    """Messages that take as long as a link of a known speed would: each peer has a connection, all share one end.

    The first `burst` bytes after a pause cost nothing.
    """

    def __init__(self, transport, latency, connection, end, burst=0):
        super().__init__(transport)
        self.latency, self.connection, self.end = latency, connection, end
        self.burst, self.now = burst, 0.0

    def _post(self, sends, receives, what):
        pending = self.transport._post(sends, receives, what)
        sizes = [max(tensor.nbytes - self.burst, 0) for _, tensor in receives]
        took = self.latency + max(max(sizes, default=0) / self.connection, sum(sizes) / self.end)

        def finish():
            pending.wait()
            self.now += took

        return Pending(finish)


@pytest.fixture
def wired(monkeypatch):
    """Time that messages alone take: a clock for each rank's thread."""
    clocks = {}

    def on(world, kind=Wire, **speeds):
        wire = clocks[threading.get_ident()] = kind(world, **speeds)
        return wire

    def now():
        return clocks[threading.get_ident()].now

    monkeypatch.setattr(probe, "perf_counter", now)
    return on


class TakingTurns(Wire):
    """A wire whose every exchange ends with a turn of `TURN` seconds, as ranks take them on a device, or one later."""

    TURN = 2e-3

    def __init__(self, transport, seed, **speeds):
        super().__init__(transport, **speeds)
        self.draw = random.Random(seed * transport.ranks + transport.rank)

    def _post(self, sends, receives, what):
        pending = super()._post(sends, receives, what)

        def finish():
            before = self.now
            pending.wait()
            turns = math.ceil((self.now - before) / self.TURN) + self.draw.randrange(2)
            self.now = before + turns * self.TURN

        return Pending(finish)


SPEEDS = [  # latency, bytes per second of a connection and of an end
    (1e-5, 3e11, 3e11),
    (2e-5, 1e9, 2.5e9),
    (5e-4, 1.2e7, 1.2e7),
    (2e-2, 1.2e7, 1.2e7),
]


def test_ranks_that_take_turns_leave_the_bandwidth_right(wired):
    def rank(world, seed):
        return speed(wired(world, TakingTurns, seed=seed, latency=7.5e-3, connection=1.5e8, end=2e8), *around(world))

    for seed in range(10):
        (found, *_) = loopback(4).run(partial(rank, seed=seed))
        assert found.bandwidth == pytest.approx(1.5e8, rel=0.1)
        assert found.spread == pytest.approx(2e8, rel=0.1)


@pytest.mark.parametrize(("latency", "connection", "end"), SPEEDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_link_is_as_fast_as_it_is(wired, ranks, latency, connection, end):
    def rank(world):
        return speed(wired(world, latency=latency, connection=connection, end=end), *around(world))

    found = loopback(ranks).run(rank)
    assert len(set(found)) == 1
    assert found[0].latency == pytest.approx(latency + SMALL / connection, rel=0.02)
    assert found[0].bandwidth == pytest.approx(connection, rel=0.05)
    assert found[0].spread == pytest.approx(min((ranks - 1) * connection, end), rel=0.05)


@pytest.mark.parametrize(("enough", "right"), [(THOROUGH, True), (ENOUGH, False)])
def test_a_thorough_measurement_outlasts_what_a_network_lets_pass_after_a_pause(wired, enough, right):
    def rank(world):
        wire = wired(world, latency=5e-4, connection=1.25e7, end=1.25e7, burst=1 << 16)
        return speed(wire, *around(world), enough)

    found = loopback(2).run(rank)[0].bandwidth
    assert (found == pytest.approx(1.25e7, rel=0.1)) == right, f"{found / 1e6:.1f} MB/s"


def test_the_slowest_rank_counts_for_all(wired):
    def rank(world):
        return speed(wired(world, latency=1e-5 * (1 + world.rank), connection=1e9, end=1e9), *around(world))

    found = loopback(3).run(rank)
    assert len(set(found)) == 1
    assert found[0].latency == pytest.approx(3e-5, rel=0.05)


@pytest.mark.parametrize(
    ("latency", "connection", "most"), [(1e-5, 4e11, 0.01), (2e-4, 1e9, 0.1), (5e-4, 1e7, 0.2), (2e-2, 1e7, 2.5)]
)
def test_little_time_is_spent(wired, latency, connection, most):
    def rank(world):
        wire = wired(world, latency=latency, connection=connection, end=connection)
        speed(wire, *around(world))
        return wire.now

    assert max(loopback(4).run(rank)) < most


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-3, 10.0])
@pytest.mark.parametrize("latency", [0.0, 1e-7, 1e-3, 10.0])
def test_a_large_message_is_large_and_not_too_large_however_the_clock_ran(seconds, latency):
    assert GUESS <= fitting_size(GUESS, seconds, latency) <= LARGE


def test_a_delay_is_latency():
    found = loopback(3).run(lambda world: speed(Delayed(world, 0.01), *around(world)))
    assert len(set(found)) == 1
    assert 0.01 <= found[0].latency < stretched(0.5)
    assert found[0].bandwidth > 0


def test_it_is_one_operation_and_leaves_none_under_way():
    def rank(world):
        counting = Counting(world)
        speed(counting, *around(world))
        assert ledger_of(world).current is None
        return Counter(event.what for event in counting.log if event.kind == "exchange"), next(ledger_of(world).numbers)

    found = loopback(2).run(rank)
    assert set(found[0][0]) == {"a measurement"}
    assert found[0] == found[1]


def test_ranks_that_do_something_else_hear_of_it():
    def rank(world):
        if world.rank == 1:
            return world.all_gather_bytes(b"", "something else")
        return speed(world, *around(world))

    with pytest.raises(TransportError, match=r"ranks are out of step: .*a measurement of the link"):
        loopback(2).run(rank)


def probed(world):
    began = time.perf_counter()
    found = speed(world, *around(world))
    return found, time.perf_counter() - began


@on_backends(3, nccl=[2, 4])
def test_real_ranks_measure_a_link(ranks, backend):
    found = [each for each, _ in spawn(ranks, probed, backend=backend)]
    assert len(set(found)) == 1
    assert all(0 < each < float("inf") for each in found[0])


def missing(world):
    if world.rank == 1:
        return "elsewhere"
    try:
        speed(world, *around(world))
    except TransportError as lost:
        return str(lost)
    return "measured"


@pytest.mark.slow
def test_a_rank_that_is_missing_is_named():
    said = spawn(2, missing, group_timeout=2)
    assert "a measurement from rank 1" in said[0]


def test_what_is_sent_is_on_the_groups_device():
    def rank(world):
        seen = []

        class Looking(Wire):
            def _post(self, sends, receives, what):
                seen.extend(tensor.device for _, tensor in [*sends, *receives])
                return self.transport._post(sends, receives, what)

        with torch.device("meta"):  # whatever the caller's default is
            speed(Looking(world, 0, 1, 1), *around(world))
        return set(seen)

    assert loopback(2).run(rank) == [{torch.device("cpu")}] * 2
