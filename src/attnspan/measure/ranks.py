"""Ranks to measure on: those that torchrun started, or processes started here, or virtual ones.

`run(job)` calls ``job(transport)`` on every rank and returns what rank 0 got; under torchrun the other ranks get None,
and should be silent. A job travels to processes by pickle, so it is a function at the top of a module, or a partial of
one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from attnspan.errors import AttnspanError, RankError, TransportError, integer, one_of
from attnspan.testing import loopback, processes
from attnspan.transports import Transport, transport_of

Job = Callable[[Transport], Any]

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

JOB_TIMEOUT, GROUP_TIMEOUT = 86400.0, 600.0
"""Seconds that a job on started processes may take, and that its ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many, on which device ("cpu" or "cuda"; by default CUDA if there is one), in processes or virtual."""

    ranks: int | None = None
    device: str | None = None
    virtual: bool = False

    def __post_init__(self) -> None:
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        object.__setattr__(self, "device", one_of("device", device, ["cpu", "cuda"], error=TransportError))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise TransportError("device: there is no CUDA device here; use cpu")
        if self.ranks is not None:
            integer("ranks", self.ranks, at_least=1, error=TransportError)

    @property
    def launched(self) -> bool:
        """Whether torchrun started this process as a rank."""
        return all(name in os.environ for name in TORCHRUN)

    @property
    def count(self) -> int:
        return int(os.environ["WORLD_SIZE"]) if self.launched else self.ranks or 1

    def run(self, job: Job) -> Any:
        """What rank 0's job returned; None on the other ranks of torchrun."""
        if self.launched:
            return self._joined(job)
        if self.virtual or self.count == 1:
            return loopback(self.count, self.device or "cpu", timeout=600.0).run(job)[0]
        return self._started(job)

    def _joined(self, job: Job) -> Any:
        if self.ranks is not None and self.ranks != self.count:
            raise TransportError(f"ranks are the {self.count} that torchrun started, got {self.ranks}; leave them out")
        if self.virtual:
            raise TransportError("virtual ranks live in one process; start it without torchrun")
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo", init_method="env://")
        try:
            answer = job(transport_of(None))
            return answer if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()

    def _started(self, job: Job) -> Any:
        """Processes of our own; nothing outlives this call."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        try:
            return processes(self.count, backend, timeout=JOB_TIMEOUT, group_timeout=GROUP_TIMEOUT).run(job)[0]
        except RankError as failed:
            if isinstance(failed.__cause__, AttnspanError):
                raise failed.__cause__ from None
            raise
