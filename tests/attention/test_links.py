"""Ranks plan with one link, whatever each of them measures; what cannot be measured has a stated default."""

import gc
import os
import threading
import weakref
from dataclasses import replace

import pytest
import torch

import attnspan as span
from attnspan.attention import attention, links, tuned
from attnspan.attention.links import Links, measured_links, place_if_measured
from attnspan.attention.tuned import GroupTuning, group_tuning, hardware_for
from attnspan.errors import TransportError, TuningError
from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.plan import Link, Shape
from attnspan.testing import loopback
from attnspan.transports import Counting, probe
from attnspan.transports.probe import Speed
from tests.processes import on_backends, spawn
from tests.tuning.test_table import table

RANKS, TOKENS = 4, 4096
FAST, SLOW = Speed(1e-5, 1e12, 1e12), Speed(1e-5, 1e6, 1e6)
SHAPE = Shape(heads=4, head_dim=8, dtype="float32")


@pytest.fixture
def real(monkeypatch):
    """Virtual ranks that are taken for real ones, and may measure."""
    monkeypatch.delenv("ATTNSPAN_TUNING")
    monkeypatch.setattr(tuned, "table_for", lambda device: None)
    monkeypatch.setattr(links, "World", ())


@pytest.fixture
def speeds(monkeypatch, real):
    """What each rank measures by itself, to be set by the test."""
    found = {}

    def seconds(self, size):
        mine = found[int(threading.current_thread().name.split()[-1])]
        own = mine.latency + size / (mine.bandwidth if len(self.targets) == 1 else mine.spread)
        return max(probe.all_gather_object(self.transport, own, "a measurement"))

    monkeypatch.setattr(probe.LinkProbe, "seconds", seconds)
    return found


def run_auto(world):
    """What travelled, by auto's choice."""
    counting = Counting(world)
    query, key = (torch.randn(1, heads, TOKENS // RANKS, 8) for heads in (4, 4))
    how = {"mask": Causal(), "layout": HeadTail(RANKS), "seq_len": TOKENS, "group": counting}
    for _ in range(2):
        attention(query, key, key, **how)
    return [event.what for event in counting.log if event.kind == "exchange" and event.what != "a measurement"]


def test_ranks_that_measure_different_links_choose_alike(speeds):
    ran = {}
    for name, found in {"fast": [FAST] * 4, "slow": [SLOW] * 4, "one is slow": [FAST, FAST, SLOW, FAST]}.items():
        speeds.update(enumerate(found))
        ran[name] = loopback(RANKS).run(run_auto)
        assert len({tuple(each) for each in ran[name]}) == 1, name
    assert ran["one is slow"] == ran["slow"]
    assert ran["fast"] != ran["slow"], "or links would not matter"


def measured(world):
    """The links that a rank plans with, the strategy it takes, and how often it measured."""
    os.environ.pop("ATTNSPAN_TUNING", None)
    os.environ["XDG_CACHE_HOME"] = "/nonexistent"
    if world.rank == 1:  # measures three times what the others do
        clock = probe.perf_counter
        probe.perf_counter = lambda: 3 * clock()
    cp = span.ContextParallel(world, seq_len=256, mask=Causal())
    x = torch.randn(1, 4, len(cp.positions), 8)
    with torch.no_grad():
        cp.attention(x, x, x)
        cp.attention(x, x, x)
    return group_tuning(world).links, repr(cp.plan.strategy)


@on_backends(2, slow=(4,))
def test_real_ranks_measure_and_choose_alike(ranks, backend):
    found = spawn(ranks, measured, backend=backend)
    assert len(set(found)) == 1
    measured_on, _ = found[0]
    assert measured_on.inside.bandwidth > 1e5
    assert (measured_on.between, measured_on.ranks_per_node) == (None, ranks)
    assert measured_on.ranks_per_device == (ranks if backend == "nccl" and torch.cuda.device_count() == 1 else 1)


def test_it_is_measured_once_for_a_group(speeds):
    speeds.update(dict.fromkeys(range(RANKS), FAST))

    def rank(world):
        counting = Counting(world)
        for _ in range(3):
            known = group_tuning(counting)
        return known, counting.calls["agree"]

    for known, agreements in loopback(RANKS).run(rank):
        assert known.links.inside.bandwidth == pytest.approx(1e12, rel=0.1)
        assert agreements == 7, "places; latency, a guess and a large message, to one peer and to all"


def test_nothing_keeps_the_group_alive(speeds):
    speeds.update(dict.fromkeys(range(2), FAST))

    def rank(world):
        group_tuning(world)
        return weakref.ref(world)

    found = loopback(2).run(rank)
    gc.collect()
    assert [each() for each in found] == [None, None]


# ---- what is not measured --------------------------------------------------------------------------------------------


def planned_with(world):
    counting = Counting(world)
    known = group_tuning(counting)
    return known.links, [event.what for event in counting.log if event.kind == "exchange"]


def test_virtual_ranks_and_a_group_of_one_have_the_presets_link(monkeypatch):
    monkeypatch.delenv("ATTNSPAN_TUNING")
    monkeypatch.setattr(tuned, "table_for", lambda device: None)
    assert loopback(2).run(planned_with) == [(Links(), [])] * 2
    monkeypatch.setattr(links, "World", ())
    assert loopback(1).run(planned_with) == [(Links(), [])]
    machine = hardware_for(GroupTuning(), SHAPE, torch.device("cpu"))
    assert machine.inside == Link(1e9, 2e-4)
    assert machine.links == "", "a preset's"


@pytest.mark.parametrize(("name", "value"), [("ATTNSPAN_LINK", "none"), ("ATTNSPAN_TUNING", "none")])
def test_it_is_skipped_where_asked_for(real, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert loopback(2).run(planned_with) == [(Links(), [])] * 2


def test_runs_that_must_be_alike_measure_nothing(real, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert loopback(2).run(planned_with) == [(Links(), [])] * 2


def test_one_rank_that_asks_for_none_decides_for_all(real, monkeypatch):
    def place(transport):
        return None if transport.rank == 1 else place_if_measured(transport)

    monkeypatch.setattr(tuned, "place_if_measured", place)
    assert loopback(3).run(planned_with) == [(Links(), [])] * 3


def test_other_values_are_refused_on_every_rank(real, monkeypatch):
    monkeypatch.setenv("ATTNSPAN_LINK", "fast")
    with pytest.raises(TuningError, match=r"^ATTNSPAN_LINK must be 'none' or unset, got 'fast'"):
        loopback(2).run(group_tuning)


def test_what_a_table_has_is_not_measured(speeds, monkeypatch):
    speeds.update(dict.fromkeys(range(RANKS), FAST))
    monkeypatch.setattr(tuned, "table_for", lambda device: table(inside=Link(1e6, 1e-3)))

    def rank(world):
        links, posted = planned_with(world)
        return hardware_for(group_tuning(world), SHAPE, world.device), links, posted

    for machine, measured, posted in loopback(RANKS).run(rank):
        assert (machine.inside, machine.links) == (Link(1e6, 1e-3), "measured 2026-01-01 by attnspan tune")
        assert measured == Links(ranks_per_node=RANKS)
        assert posted == []


@pytest.mark.parametrize(
    ("hosts", "inside", "between", "node"),
    [("aabb", True, True, 2), ("abcd", False, True, 1), ("aaab", False, True, 1), ("abab", False, True, 1)],
)
def test_links_inside_and_between_hosts_are_told_apart(speeds, hosts, inside, between, node):
    speeds.update(dict.fromkeys(range(RANKS), FAST))
    places = [(host, "") for host in hosts]
    found = loopback(RANKS).run(lambda world: measured_links(world, places))
    assert len(set(found)) == 1
    assert (found[0].inside is not None, found[0].between is not None, found[0].ranks_per_node) == (
        inside,
        between,
        node,
    )


def test_ranks_that_share_a_device_take_turns(speeds):
    speeds.update(dict.fromkeys(range(RANKS), FAST))
    places = [("a", "gpu 0"), ("a", "gpu 0"), ("a", "gpu 1"), ("a", "gpu 1")]
    found = loopback(RANKS).run(lambda world: measured_links(world, places))[0]
    assert found.ranks_per_device == 2
    alone = hardware_for(GroupTuning(links=replace(found, ranks_per_device=1)), SHAPE, torch.device("cpu"))
    shared = hardware_for(GroupTuning(links=found), SHAPE, torch.device("cpu"))
    assert shared.copying(1e6) == 2 * alone.copying(1e6)
    plan = span.Plan(Causal(), HeadTail(RANKS), TOKENS, "ring")
    tiles = plan.steps(0)[0].tiles
    assert shared.compute(tiles, 100) == 2 * alone.compute(tiles, 100)


def test_a_rank_that_raises_while_it_measures_breaks_the_group(real, monkeypatch):
    def seconds(self, size):
        if self.transport.rank == 1:
            raise MemoryError("no room")
        return max(probe.all_gather_object(self.transport, 1.0, "a measurement"))

    monkeypatch.setattr(probe.LinkProbe, "seconds", seconds)

    def rank(world):
        with pytest.raises((MemoryError, TransportError)):
            group_tuning(world)
        with pytest.raises(TransportError, match="an earlier attention broke off here"):
            group_tuning(world)
        if world.rank == 1:
            raise MemoryError("no room")

    with pytest.raises((MemoryError, TransportError)):
        loopback(2).run(rank)
