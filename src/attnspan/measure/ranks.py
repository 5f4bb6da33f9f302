"""Ranks to measure on: those that torchrun started, or processes started here, or virtual ones.

`run(job)` calls ``job(transport)`` on every rank and returns what rank 0 got; under torchrun the other ranks get None,
and should be silent. A job travels to processes by pickle, so it is a function at the top of a module, or a partial of
one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from attnspan.errors import AttnspanError, TransportError, one_of, whole
from attnspan.testing import loopback
from attnspan.transports import Transport, transport_of

Job = Callable[[Transport], Any]

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


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
            whole("ranks", self.ranks, at_least=1, error=TransportError)

    @property
    def launched(self) -> bool:
        """Whether torchrun started this process as a rank."""
        return all(name in os.environ for name in TORCHRUN)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return int(os.environ["WORLD_SIZE"]) if self.launched else self.ranks or 1

    def run(self, job: Job) -> Any:
        """What rank 0's job returned; None on the other ranks of torchrun."""
        if self.launched:
            return self._joined(job)
        if self.virtual or self.count == 1:
            return loopback(self.count, self.device or "cpu", timeout=600.0).run(job)[0]
        if self.device == "cuda" and torch.cuda.device_count() < self.count:
            raise TransportError(
                f"ranks must be at most the {torch.cuda.device_count()} CUDA devices here, got {self.count}; "
                "use fewer, torchrun, or virtual ranks on one device"
            )
        return self._started(job)

    def _joined(self, job: Job) -> Any:
        if self.ranks is not None and self.ranks != self.count:
            raise TransportError(f"ranks are the {self.count} that torchrun started, got {self.ranks}; leave them out")
        if self.virtual:
            raise TransportError("virtual ranks live in one process; start it without torchrun")
        _join(self.device or "cpu", int(os.environ["LOCAL_RANK"]), init_method="env://")
        try:
            answer = job(transport_of(None))
            return answer if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()

    def _started(self, job: Job) -> Any:
        """Processes of our own; nothing outlives this call."""
        spawn = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            pipes = [spawn.Pipe(duplex=False) for _ in range(self.count)]
            rest = (self.count, self.device, f"file://{folder}/store", job)
            children = [
                spawn.Process(target=_live, args=(rank, *rest, pipe), daemon=True)
                for rank, (_, pipe) in enumerate(pipes)
            ]
            try:
                for child, (_, pipe) in zip(children, pipes, strict=True):
                    child.start()
                    pipe.close()  # the child's end: its death then reads as the end of the pipe
                return _heard([mine for mine, _ in pipes])
            finally:
                for child in children:
                    if child.pid is not None:
                        child.kill()
                        child.join()


def _heard(pipes: list[Connection]) -> Any:
    """Rank 0's answer, once all have answered; the first complaint otherwise."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers]):
            rank = pipes.index(ready)  # type: ignore[arg-type]
            try:
                kind, answers[rank] = pipes[rank].recv()
            except EOFError:
                raise TransportError(f"rank {rank} ended without an answer; its error is above") from None
            if kind == "refused":
                raise answers[rank]
    return answers[0]


def _live(rank: int, ranks: int, device: str, store: str, job: Job, pipe: Connection) -> None:
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    _join(device, rank, init_method=store, rank=rank, world_size=ranks)
    try:
        answer = ("returned", job(transport_of(None)))
    except AttnspanError as refused:
        answer = ("refused", type(refused)(str(refused)))
    pipe.send(answer)
    dist.barrier()  # a rank that left at once would be missed by one that is still reading
    pipe.close()
    os._exit(0)


def _join(device: str, local: int, **how: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **how)
