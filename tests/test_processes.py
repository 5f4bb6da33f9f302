"""Processes that are started as ranks: what they get, how they fail, and that none is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import attnspan as span
from attnspan.errors import RankError, TransportError
from attnspan.testing import Processes, launcher, loopback, processes
from tests.pace import pace, patiently, stretched
from tests.processes import Patient, spawn

MARK = "ATTNSPAN_TEST_MARK"


def here(world):
    """Who a rank is, what it was told by the environment, and whether what it changes stays its own."""
    found = os.getpid(), os.environ.get(MARK), dist.get_rank(), dist.get_world_size()
    os.environ[MARK] = "changed by a rank"
    return found


def test_a_rank_is_a_process_with_the_environment_of_its_caller(monkeypatch):
    pids = {os.getpid()}
    for mark in ("one", "another", None):
        if mark is None:
            monkeypatch.delenv(MARK)
        else:
            monkeypatch.setenv(MARK, mark)
        told = spawn(2, here)
        pids |= {pid for pid, *_ in told}
        assert [rest for _, *rest in told] == [[mark, 0, 2], [mark, 1, 2]]
        assert os.environ.get(MARK) == mark
    assert len(pids) == 7


def attended(world, seq_len):
    """The same function on virtual ranks and on processes."""
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, seq_len, 8, dtype=torch.float64, generator=random).to(world.device) for _ in range(3)]
    cp = span.ContextParallel(world, seq_len=seq_len, mask=span.Causal())
    out = cp.unshard(cp.attention(*(cp.shard(x, dim=2) for x in whole)), dim=2)
    return out, torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)


def test_a_function_of_a_world_runs_on_virtual_ranks_and_on_processes():
    threads, children = loopback(3).run(lambda world: attended(world, 29)), Patient(3).run(attended, 29)
    for (out, expected), (same, _) in zip(threads, children, strict=True):
        torch.testing.assert_close(out, expected)
        assert torch.equal(out, same)


def pid(world):
    return os.getpid()


def fail_on(world, rank, how):
    if world.rank != rank:
        return world.rank
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        os._exit(3)
    if how == "unpicklable":
        return lambda: None
    if how == "own error":
        raise span.PoolExhausted(3, 2)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_inside_a_block_the_processes_stay_and_after_a_failure_others_come():
    with Patient(2) as group:
        first = group.run(pid)
        assert group.run(pid) == first
        with pytest.raises(RankError):
            group.run(fail_on, 1, "raise")
        second = group.run(pid)
        assert group.run(pid) == second
        os.kill(second[1], signal.SIGKILL)  # between two runs
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
            group.run(pid)
        third = group.run(pid)
        assert len({*first, *second, *third}) == 6
    assert len({*third, *group.run(pid), *group.run(pid)}) == 6  # outside of it each run has its own


@pytest.mark.parametrize(
    ("how", "kind", "value", "said"),
    [
        ("raise", "raised", "boom", "rank 1 raised ValueError:\nTraceback"),
        ("exit", "died", "3", "rank 1 exited with 3"),
        ("kill", "died", "SIGKILL", "rank 1 was ended by SIGKILL"),
        (
            "unpicklable",
            "raised",
            "fn returned function, which does not travel between processes: .*; return numbers, text or tensors",
            "rank 1 raised TransportError:",
        ),
        ("own error", "raised", "PoolExhausted: 3 pages needed.*", "rank 1 raised RuntimeError:\nTraceback"),
    ],
)
def test_a_failure_is_told_with_what_became_of_every_rank(how, kind, value, said):
    with pytest.raises(RankError) as caught:
        Patient(2).run(fail_on, 1, how)
    assert str(caught.value).startswith(f"rank 1 of 2 failed\n{said}")
    returned, failed = caught.value.outcomes
    assert (returned.kind, returned.value) == ("returned", 0)
    assert str(returned) == "returned 0"
    assert failed.kind == kind
    assert re.fullmatch(value, str(failed.value))
    assert caught.value.__cause__ is (failed.value if kind == "raised" else None)


def test_a_rank_that_does_not_end_is_killed_and_told_of(monkeypatch):
    monkeypatch.setattr(Patient, "_ready", Processes._ready)
    with Patient(2) as group:
        _, sleeper = group.run(pid)
        group.timeout = limit = stretched(2)
        with pytest.raises(RankError) as caught:
            group.run(fail_on, 1, "sleep")
    said = str(caught.value)
    assert said.startswith(f"rank 1 of 2 failed\nrank 1 did not end within {limit:g} s, and was in:\n")
    assert "time.sleep(600)" in said.splitlines()[-1]
    assert [outcome.kind for outcome in caught.value.outcomes] == ["returned", "unfinished"]
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper, 0)


def eventually(look):
    """Whether something comes true in time."""

    def wait(seconds):
        deadline = time.monotonic() + seconds
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    return patiently(wait, 30)


CALLER = """
import os, sys, time
from pathlib import Path
from attnspan.testing import processes

def note_and_sleep(world, folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    processes(2, timeout=600).run(note_and_sleep, sys.argv[1])
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked for in /proc")
def test_no_rank_outlives_a_caller_that_is_killed(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "caller.py").write_text(CALLER)
    with subprocess.Popen([sys.executable, "caller.py", "ranks"], cwd=tmp_path) as caller:
        try:
            assert eventually(lambda: len(list((tmp_path / "ranks").iterdir())) == 2)
            ranks = [Path("/proc") / path.name for path in (tmp_path / "ranks").iterdir()]
            assert all(rank.exists() for rank in ranks)
        finally:
            caller.kill()
        assert eventually(lambda: not any(rank.exists() for rank in ranks))


def interrupt_the_caller(world, caller):
    if world.rank == 0:
        os.kill(caller, signal.SIGINT)
    time.sleep(600)


@pytest.fixture
def interruptible():
    """A job that a shell started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_caller_leaves_no_rank(interruptible):
    pace()  # measured before, by a process of its own, which the interrupt must not meet
    group = Patient(2)
    with pytest.raises(KeyboardInterrupt):
        group.run(interrupt_the_caller, os.getpid())
    assert not group._children


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number >= 1, got 0"),
        ({"ranks": 2.0}, "ranks must be a whole number >= 1, got 2.0 (float)"),
        ({"timeout": 0}, "timeout must be a number of seconds > 0, got 0"),
        ({"timeout": float("inf")}, "timeout must be a number of seconds > 0, got inf"),
        ({"timeout": "60"}, "timeout must be a number of seconds > 0, got '60'"),
        ({"group_timeout": -1.5}, "group_timeout must be a number of seconds > 0, got -1.5"),
        (
            {"backend": "ncc"},
            "backend must be one of gloo, nccl, cpu:gloo,cuda:nccl, got 'ncc'; did you mean 'nccl'?",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_started_is_refused(options, message):
    with pytest.raises(TransportError, match=f"^{re.escape(message)}$"):
        processes(**options)


def test_nccl_is_refused_where_it_is_not(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(TransportError, match=r"^backend 'nccl': this torch is built without NCCL; use 'gloo'$"):
        processes(2, "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = "^backend 'nccl': NCCL needs a CUDA device, and there is none here; use 'gloo'$"
    with pytest.raises(TransportError, match=message):
        processes(2, "nccl")


def test_more_ranks_than_there_is_memory_for_are_refused_before_any_is_started(monkeypatch):
    monkeypatch.setattr(launcher, "_available_memory", lambda: 1000 << 20)
    processes(6)
    message = (
        "ranks must be at most 6, got 7: a process with torch takes 150 MiB or more, and 1000 MiB are available here; "
        "ask for fewer, or use attnspan.testing.loopback()"
    )
    with pytest.raises(TransportError, match=f"^{re.escape(message)}$"):
        processes(7)


def test_when_a_process_cannot_be_started_those_before_it_are_ended(monkeypatch):
    started, children = launcher._started, []

    def one(*how):
        if children:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        children.append(started(*how))
        return children[0]

    monkeypatch.setattr(launcher, "_started", one)
    message = (
        "ranks: 1 of 2 processes could be started, then there was no room for another: [Errno 11] Resource "
        "temporarily unavailable; all were ended; ask for fewer"
    )
    with pytest.raises(TransportError, match=f"^{re.escape(message)}$"):
        Patient(2).run(pid)
    assert not children[0].process.is_alive()


def test_a_function_that_cannot_travel_is_refused_and_nothing_is_started(monkeypatch):
    monkeypatch.setattr(launcher, "_started", None)
    with pytest.raises(TransportError, match=r"^fn must be a function at the top of a module, .*<lambda>"):
        processes(2).run(lambda world: None)
    with pytest.raises(TransportError, match=r"fn must be a function of a rank's world, got 3 \(int\)"):
        processes(2).run(3)
    with pytest.raises(TransportError, match="args must be what pickle can send to another process: "):
        processes(2).run(pid, lambda: None)


def test_a_function_of_an_interactive_session_is_refused(monkeypatch):
    session = ModuleType("__main__")  # as that of a prompt: it has no file
    exec("def fn(world): ...", vars(session))
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(TransportError) as refused:
        processes(2).run(session.fn)
    said = str(refused.value)
    assert said.startswith("fn must be a function at the top of a module, which a started process can import, got ")
    assert said.endswith(
        "of an interactive session; write it to a file and import it, or use attnspan.testing.loopback()"
    )
