"""Ranks for tests, notebooks and a single GPU: virtual ones in this process, or processes that are started for it.

>>> def both(world):
...     total = torch.tensor([world.rank + 1.0])
...     world.all_reduce(total).wait()
...     return total.item()
>>> loopback(ranks=2).run(both)
[3.0, 3.0]

`loopback` takes any function and starts nothing; `processes` has the wire, the streams and the faults of a real group.
"""

import torch

from attnspan.testing.launcher import Processes, RankOutcome
from attnspan.transports.loopback import Loopback, World

__all__ = ["Loopback", "Processes", "RankOutcome", "World", "loopback", "processes"]


def loopback(ranks: int = 4, device: torch.device | str = "cpu", *, timeout: float = 60.0) -> Loopback:
    """A group of virtual ranks on one device; ``.run(fn)`` calls ``fn(world)`` on each and returns the results.

    A world stands where a process group or a DeviceMesh does. Ranks are threads: what that means for random numbers,
    autocast and the like is told in the docstring of `attnspan.transports.loopback`.

    >>> loopback(ranks=3).run(lambda world: world.rank)
    [0, 1, 2]
    """
    return Loopback(ranks, device, timeout)


def processes(
    ranks: int = 2, backend: str = "gloo", *, timeout: float = 120.0, group_timeout: float | None = None
) -> Processes:
    """A group of processes on this machine; ``.run(fn, *args)`` calls ``fn(world, *args)`` in each.

    ``fn`` stands at the top of a module, and arguments and results travel by pickle. A world stands where a process
    group or a DeviceMesh does; torch.distributed is initialised, so functions may also make meshes of their own, on
    devices of the type ``world.device.type``.

    ``backend`` is "gloo" (the CPU), "nccl" (a CUDA device for each rank, or one for all where there are too few) or
    "cpu:gloo,cuda:nccl" (NCCL, and tensors of the CPU travel too). A run that takes more than ``timeout`` seconds, the
    start of the processes included, is ended. ``group_timeout``, by default half of it, is how long ranks await each
    other. A rank that raises, dies or does not end makes the run an `attnspan.RankError`, whose ``outcomes`` tell of
    every rank. No process outlives the run, or the ``with`` block that keeps them for several:

    >>> from operator import attrgetter
    >>> with processes(ranks=2) as group:
    ...     group.run(attrgetter("rank")), group.run(attrgetter("ranks"))
    ([0, 1], [2, 2])
    """
    return Processes(ranks, backend, timeout, group_timeout)
