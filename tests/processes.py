"""Real processes for the suite: ``spawn(ranks, fn, *args)`` calls ``fn(rank, *args)`` in each of a group.

They are `attnspan.testing.processes`, with what only tests need. Warnings are errors, ranks compute on one thread, and
limits are in seconds of an idle machine (pace.py). Importing torch costs a process seconds. A server therefore imports
it once per session (`PRELOADED`), computes nothing and starts no thread; every rank is a fork of it.
"""

import multiprocessing
import warnings
from multiprocessing.connection import wait

import torch

from attnspan.errors import RankError
from attnspan.testing import Processes
from tests.pace import patiently, stretched

PRELOADED = [
    "torch._dynamo.testing",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "attnspan",
    "hypothesis",
    "pytest",
    "transformers",
]


class Died:
    """Stands for the result of a process that ended by a signal."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Died) and self.by == other.by

    def __repr__(self):
        return f"Died(by={self.by})"


class Patient(Processes):
    """Ranks that are given more time where the machine is slow, and start as forks where there is no CUDA."""

    def _context(self):
        # An import may have woken CUDA, which does not survive a fork.
        if torch.cuda.is_available():
            return super()._context()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        return context

    def _ready(self, pipes, began):
        found = []

        def look(seconds):
            found[:] = wait(pipes, seconds)
            return found

        patiently(look, self.timeout, began)
        return found


def spawn(ranks, fn, *args, backend="gloo", timeout=60, group_timeout=30, may_die=False):
    """What ``fn(rank, *args)`` returned in each of ``ranks`` processes of one group.

    With ``may_die`` a process that was killed has `Died` for its result; otherwise that too is a `RankError`. Times are
    in seconds of an idle machine.
    """
    try:
        return Patient(ranks, backend, timeout, stretched(group_timeout)).run(strictly, fn, *args)
    except RankError as error:
        if not may_die or any(outcome.kind not in ("returned", "died") for outcome in error.outcomes):
            raise
        return [Died(each.value) if each.kind == "died" else each.value for each in error.outcomes]


def strictly(world, fn, *args):
    """Run a test's function as tests run: every warning is an error, on one thread."""
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning
    )  # as pyproject.toml
    torch.set_num_threads(1)
    return fn(world.rank, *args)
