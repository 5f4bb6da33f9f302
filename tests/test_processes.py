"""Ranks are processes of their own that begin as if they were started afresh."""

import os

import torch.distributed as dist

from tests.processes import spawn

MARK = "ATTNSPAN_TEST_MARK"


def here(rank):
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
