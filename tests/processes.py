"""Real processes: ``spawn(ranks, fn, *args)`` calls ``fn(rank, *args)`` in each of a group, gloo's or NCCL's.

``fn`` and its results travel by pickle, so ``fn`` stands at the top of a module. A child that raises is reported with
its traceback; when one is silent for too long all are killed. No rank outlives a spawn.

Importing torch costs a process seconds. A server therefore imports it once per session (`PRELOADED`), computes nothing
and starts no thread; every rank is a fork of it. A rank has the caller's environment, not the server's.
"""

import os
import signal
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


class ChildError(AssertionError):
    """A process raised, died or did not end."""


class Died:
    """Stands for the result of a process that ended by a signal."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Died) and self.by == other.by

    def __repr__(self):
        return f"Died(by={self.by})"


def spawn(ranks, fn, *args, backend="gloo", timeout=60, group_timeout=30, may_die=False):
    """What ``fn(rank, *args)`` returned in each of ``ranks`` processes of one group.

    With ``may_die`` a process that was killed has `Died` for its result; otherwise that too is an error. Times are in
    seconds of an idle machine, see pace.py.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        joining = {
            "backend": backend,
            "init_method": f"file://{Path(folder) / 'store'}",
            "world_size": ranks,
            "timeout": timedelta(seconds=stretched(group_timeout)),
        }
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        children = [
            context.Process(target=_live, args=(dict(os.environ), joining, rank, pipe, fn, args), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        try:
            for child, (_, pipe) in zip(children, pipes, strict=True):
                child.start()
                pipe.close()  # the child's end: so that its death reads as the end of the pipe
            began = time.monotonic()
            told = [
                _told(rank, child, pipe, began, timeout)
                for rank, (child, (pipe, _)) in enumerate(zip(children, pipes, strict=True))
            ]
        finally:
            for child in children:
                if child.pid is not None:
                    child.kill()
                    child.join()
    failures = [said for kind, said in told if kind == "raised" or (kind == "died" and not may_die)]
    if failures:
        raise ChildError("\n".join(map(str, failures)))
    return [said for _, said in told]


def _context():
    """How ranks start: afresh where there is CUDA, which an import may have woken and which does not survive a fork."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _told(rank, child, pipe, began, timeout):
    """What became of a child: ("returned", result), ("raised", text) or ("died", signal)."""
    if not patiently(pipe.poll, timeout, began):
        return "raised", f"rank {rank} did not end in time"
    try:
        return pipe.recv()
    except EOFError:
        child.join()
        return "died", Died(signal.Signals(-child.exitcode).name if child.exitcode < 0 else child.exitcode)


def _live(environment, joining, rank, pipe, fn, args):
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning
    )  # as pyproject.toml
    torch.set_num_threads(1)
    if joining["backend"] == "nccl":
        joining["device_id"] = _claimed_device(rank, joining["world_size"])
    try:
        dist.init_process_group(rank=rank, **joining)
        pipe.send(("returned", fn(rank, *args)))
    except BaseException:
        pipe.send(("raised", f"rank {rank}:\n{traceback.format_exc()}"))
    # Leaving by the front door waits for peers that may be dead.
    pipe.close()
    os._exit(0)


def _claimed_device(rank, ranks):
    """A CUDA device for each rank; where there are too few, one for all.

    NCCL lets ranks of different hosts share a device, so each claims a host of its own, and they talk over sockets.
    """
    if torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
