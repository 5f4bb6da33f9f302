"""Real processes for the suite: ``spawn(ranks, fn, *args)`` calls ``fn(world, *args)`` in each of a group.

They are `attnspan.testing.processes`, with what only tests need. Warnings are errors, ranks compute on one thread, and
limits are in seconds of an idle machine (pace.py). Importing torch costs a process seconds. A server therefore imports
it once per session (`PRELOADED`), computes nothing and starts no thread; every rank is a fork of it.

[Note: the NCCL lane] Tests that ``@on_backends(...)`` decorates run on gloo, and, marked `nccl`, on NCCL: the same
functions, whose tensors are on the world's device by default. NCCL's processes cannot be forks and take long to start,
so those of one number of ranks serve all tests of a session; what a function leaves behind in one (warning filters,
environment, compiled code) is cleared away. A function that ends its group, or its process, asks for ``fresh`` ones.
"""

import multiprocessing
import os
import sys
import warnings
from contextlib import nullcontext
from multiprocessing.connection import wait

import pytest
import torch
from torch.utils._pytree import tree_map_only

from attnspan.errors import RankError
from attnspan.testing import Processes
from tests.pace import patiently, stretched

PRELOADED = [
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
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


POOLS = {}


def on_backends(*gloo, slow=(), nccl=None):
    """A mark that gives a test its ``ranks`` and ``backend``: these numbers on gloo, and on NCCL, if not others."""
    nccl = sorted({*gloo, *slow}) if nccl is None else nccl

    def marked(test):
        rows = [
            *(pytest.param(ranks, "gloo") for ranks in gloo),
            *(pytest.param(ranks, "gloo", marks=pytest.mark.slow) for ranks in slow),
            *(pytest.param(ranks, "nccl", marks=[pytest.mark.nccl, _worker_of(ranks, test)]) for ranks in nccl),
        ]
        return pytest.mark.parametrize(("ranks", "backend"), rows)(test)

    return marked


def _worker_of(ranks, test):
    """Tests of one number of ranks share a worker of pytest-xdist, and its processes; those of sessions have theirs."""
    return pytest.mark.xdist_group(f"{ranks} ranks of {'sessions' if '.parallel.' in test.__module__ else 'the rest'}")


def spawn(ranks, fn, *args, backend="gloo", timeout=60, group_timeout=30, may_die=False, fresh=False):
    """What ``fn(world, *args)`` returned in each of ``ranks`` processes of one group, tensors on the CPU.

    With ``may_die`` a process that was killed has `Died` for its result; otherwise that too is a `RankError`. Times are
    in seconds of an idle machine; processes that serve many tests are more patient than each asks for.
    """
    if backend == "gloo" or may_die or fresh:
        group = Patient(ranks, backend, timeout, stretched(group_timeout))
    else:
        group = _pool(ranks, backend)
        group.timeout = max(timeout, 2 * POOLED)
    try:
        return group.run(strictly, fn, *args)
    except RankError as error:
        if not may_die or any(outcome.kind not in ("returned", "died") for outcome in error.outcomes):
            raise
        return [Died(each.value) if each.kind == "died" else each.value for each in error.outcomes]


POOLED = 90
"""Seconds for which ranks that serve many tests await each other: CUDA loads, and triton compiles, at first use."""


def _pool(ranks, backend):
    """Processes that stay; see [Note: the NCCL lane]."""
    if (ranks, backend) not in POOLS:
        POOLS[ranks, backend] = Patient(ranks, backend, 2 * POOLED, stretched(POOLED)).__enter__()
    return POOLS[ranks, backend]


THEIRS = [
    ("`torch.jit.script_method` is deprecated", DeprecationWarning),  # as pyproject.toml
    ("TensorFloat32 tensor cores", UserWarning),  # inductor's advice on CUDA, where float32 is meant
]
"""Warnings of torch that are no errors."""


def strictly(world, fn, *args):
    """Run a test's function as tests run: every warning is an error, on one thread, on the world's device."""
    environment = dict(os.environ)
    torch.set_num_threads(1)
    if world.device.type == "cuda":
        # autograd's thread needs a context before cuBLAS makes one there, and warns: see conftest.py, `awake`.
        torch.ones(2, device=world.device, requires_grad=True).exp().sum().backward()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    try:
        # The CPU needs no naming, and torch.compile follows plain code best.
        with warnings.catch_warnings(), nullcontext() if world.device.type == "cpu" else world.device:
            warnings.simplefilter("error")
            for message, category in THEIRS:
                warnings.filterwarnings("ignore", message, category)
            found = fn(world, *args)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return tree_map_only(torch.Tensor, lambda x: x.cpu(), found)
