"""What a session took stands beside what was predicted, and is explained."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import attnspan as span
from attnspan.attention import tuned
from attnspan.attention.pass_timer import PassTimer
from attnspan.attention.tuned import NO_TUNING, hardware_for
from attnspan.parallel import attentions
from attnspan.testing import loopback
from attnspan.transports import transport_of
from tests.processes import on_backends, spawn
from tests.tuning.test_table import table

LENGTH = 64


def trained(world, passes=3, **options):
    cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal(), **options)
    for _ in range(passes):
        q, k, v = (torch.randn(1, 4, len(cp.positions), 8, requires_grad=True) for _ in range(3))
        cp.attention(q, k, v).sum().backward()
    return cp


@pytest.fixture
def speed(monkeypatch):
    """How fast the machine is thought to be, times the preset; virtual ranks are then predicted too."""
    found = {"times": 1.0}

    def machine(transport, shape, kernel="auto"):
        base = hardware_for(NO_TUNING, shape, transport.device, kernel)
        times = found["times"]
        slower = {name: getattr(base, name) * times for name in ("full", "causal", "general", "memory_bandwidth")}
        link = span.plan.Link(base.inside.bandwidth * times, base.inside.latency / times)
        return replace(base, **slower, launch=base.launch / times, inside=link, between=link)

    monkeypatch.setattr(attentions, "machine_here", machine)
    return found


def test_times_are_measured_and_on_virtual_ranks_nothing_is_predicted():
    def rank(world):
        (line,) = trained(world).report().lines
        assert line.forward.passes == line.backward.passes == 3
        assert 0 < line.forward.seconds < line.measured < 60
        assert (line.predicted, line.warning) == (0.0, "")
        return str(trained(world).report())

    text = loopback(2).run(rank)[0].splitlines()
    assert text[1].split()[-2:] == ["predicted", "measured"]
    assert text[2].split()[-3] == "-"
    assert len(text) == 3


@pytest.mark.parametrize("times", [1e-4, 1e4])
def test_a_prediction_that_is_far_off_is_warned_of(speed, times):
    speed["times"] = times

    def rank(world):
        once, often = trained(world, passes=1, strategy="ring").report(), trained(world, strategy="ring").report()
        assert once.warnings == (), "it may have compiled something"
        (warning,) = often.warnings
        assert str(often).splitlines()[-1] == f"warning: {warning}"
        assert str(once).count("warning") == 0
        return warning

    for warning in loopback(2).run(rank):
        assert warning.startswith("ring takes ")
        assert warning.endswith(" was predicted: rates and links are a preset's; run attnspan tune")


def test_a_prediction_that_is_right_is_not_warned_of(speed):
    def rank(world):
        cp = trained(world)
        (line,) = cp.report().lines
        exact = replace(line, forward=line.forward._replace(seconds=0.9 * line.predicted - line.backward.seconds))
        assert exact.measured == pytest.approx(0.9 * line.predicted)
        assert exact.warning == ""
        for ratio, warns in ((0.49, True), (0.51, False), (1.49, False), (1.51, True)):
            seconds = ratio * line.predicted - line.backward.seconds
            assert bool(replace(line, forward=line.forward._replace(seconds=seconds)).warning) is warns

    loopback(2).run(rank)


def test_times_are_forgotten_with_the_rest():
    def rank(world):
        cp = trained(world)
        cp.reset()
        trained_again = trained(world, passes=1)
        return cp.attentions.named[""].bound.uses.timers, len(trained_again.report().lines)

    assert loopback(2).run(rank) == [({}, 1)] * 2


def test_it_explains_what_lost_and_why():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        before = cp.explain()
        trained(world)
        return before, trained(world).explain(), trained(world, strategy="ring").explain()

    before, auto, given = loopback(2).run(rank)[0]
    assert before == "attention has not run: strategies are compared for the shapes of its tensors"
    lines = auto.splitlines()
    assert lines[0].split()[:3] == ["strategy", "layout", "imbalance"]
    assert lines[1].endswith("chosen")
    assert lines[-2] == "link: 1 GB/s, 200 µs, that of cpu-gloo; not measured (virtual ranks)"
    assert lines[-1].startswith(f"ran: {lines[1].split()[0]}")
    assert "; measured " in lines[-1]
    assert given.splitlines()[-1].startswith("ran: ring, as given; measured ")


def test_virtual_ranks_explain_by_the_table_that_they_chose_with(monkeypatch):
    monkeypatch.setattr(tuned, "table_for", lambda device: table(device="a cpu"))

    def rank(world):
        return trained(world).explain()

    assert "rates: a cpu, measured 2026-01-01 with torch 2.13 by attnspan tune" in loopback(2).run(rank)[0]


def explained(world):
    import os

    os.environ.pop("ATTNSPAN_TUNING", None)
    os.environ["XDG_CACHE_HOME"] = "/nonexistent"
    cp = trained(transport_of(dist.new_group()))  # of which nothing is known
    alone = cp.report().lines[0].predicted if world.rank == 0 else 1.0  # asks nobody
    return cp.explain().splitlines()[-2], alone


@on_backends(2)
def test_real_ranks_tell_the_link_that_they_measured(ranks, backend):
    for link, predicted in spawn(ranks, explained, backend=backend):
        assert link.startswith("link: ")
        assert "inside a host, measured when auto first ran on the group" in link
        assert predicted > 0


@pytest.mark.cuda
def test_a_device_is_not_waited_for():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    timer = PassTimer(device)
    for _ in range(200):
        x = x @ x * 1e-4
    assert timer.end().seconds is None
    torch.cuda.synchronize()
    assert timer.seconds > 1e-3
