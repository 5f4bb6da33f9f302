"""The doctor says what is here, and does not call a sick attention well."""

import os
import signal

import pytest
from typer.testing import CliRunner

from attnspan.cli import doctor as command
from attnspan.cli.app import app
from attnspan.errors import AttentionError
from attnspan.kernels import KERNELS, reference
from attnspan.measure.checkup import Finding, Findings
from tests.processes import Patient


def doctor(*args):
    return CliRunner().invoke(app, ["doctor", *args])


def test_it_names_versions_kernels_and_the_result():
    said = doctor()
    assert said.exit_code == 0
    assert "torch 2." in said.output
    assert all(f"  {name}" in said.output for name in KERNELS)
    assert "cudnn runs on cuda" in said.output
    assert said.output.rstrip().endswith("all well")


def test_twin_a_wrong_kernel_is_told_and_ends_with_1(monkeypatch):
    monkeypatch.setattr("attnspan.kernels.cpu_flash.forward", lambda spec, q, k, v, tile: _wrong(spec, q, k, v, tile))
    said = doctor()
    assert said.exit_code == 1
    assert "wrong: rank 0, ring: error " in said.output
    assert "all well" not in said.output


def _wrong(spec, q, k, v, tile):
    out, lse = reference.forward(spec, q, k, v, tile)
    return out * 1.001, lse


# ---- on processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Processes that start as the suite's do."""
    monkeypatch.setattr(command, "processes", Patient)


def test_processes_are_tested_and_their_link_is_measured(started):
    said = doctor("--ranks", "2")
    assert said.exit_code == 0, said.output
    *_, head, ring, gather, needed, ulysses, hybrid, link, took, verdict = said.output.splitlines()
    assert head.split() == ["strategy", "largest", "error", "on", "rank", "bytes", "received", "planned"]
    for line in (ring, gather, needed, ulysses, hybrid):
        *_, received, planned, passed = line.split()
        assert (int(received) > 0, planned, passed) == (True, received, "passed")
    assert link.startswith("link: ")
    assert link.endswith(", all ranks sending at once")
    assert "to start the processes" in took
    assert verdict == "all well"


def inexact(world):
    return Findings((Finding("ring", 0.5 * world.rank, 64, 64),), None, 0.1)


def raising(world):
    if world.rank == 1:
        raise AttentionError("ring: something is odd")
    return inexact(world)


def dying(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return inexact(world)


@pytest.mark.parametrize(
    ("sick", "message"),
    [
        (inexact, "wrong: rank 1, ring: error 5.0e-01, above 2e-05"),
        (raising, "wrong: rank 1 raised AttentionError: ring: something is odd"),
        (dying, "wrong: rank 1 was ended by SIGKILL"),
    ],
)
def test_a_failure_names_the_rank_and_ends_with_1(sick, message, started, monkeypatch):
    monkeypatch.setattr(command, "self_test", sick)
    said = doctor("--ranks", "2")
    assert said.exit_code == 1
    assert said.output.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("1", "--ranks must be a whole number >= 2, got 1"),
        ("0", "--ranks must be a whole number >= 1, got 0"),
        ("two", "--ranks: expected a whole number such as 4096, "),
        ("1M", "ranks must be at most "),
    ],
)
def test_ranks_that_cannot_be_started_are_refused(ranks, message):
    said = doctor("--ranks", ranks)
    assert said.exit_code == 2
    assert message in said.stderr
    assert "Traceback" not in said.output
