"""Decoding by CUDA graphs: the model's kernels are noted once for a number of rows, and started by one call later.

A step in which every sample gets one token is always the same work on other numbers, and the numbers are where they
were: plans never move (paged/step_plan.py), tokens are copied into a buffer that stays. Rows are filled up to one of a
few sizes with rows that see nothing, so that a handful of graphs serve every batch.

A model that asks the host for numbers halfway cannot be noted, and is refused by what CUDA says of it; one with
soft-caps is refused before (runner.py). An engine without `cuda_graphs` serves both.

[Note: nothing else meanwhile] CUDA ends a capture at the first call that it takes for unsafe, and to free another graph
is one. Python frees an engine that nobody holds any more whenever its collector comes by, so it rests while a graph is
noted. What other threads do meanwhile is their own affair: only this one's calls are watched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from attnspan.errors import EngineError

WARMUP_RUNS = 2
"""Runs before one is noted, in which kernels are compiled and libraries take their memory."""


Call = Callable[[Tensor], Tensor]
"""Runs the model on (1, rows) tokens as they lie in the plans; logits (rows, V)."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """A graph, and where its logits appear."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class CudaGraphs:
    """CudaGraphs by rows, for batches of at most so many."""

    def __init__(self, most: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise EngineError(f"cuda_graphs=True needs a model on a CUDA device, got one on {device}")
        self._most = most
        self._tokens = torch.zeros(1, most, dtype=torch.int64, device=device)
        self._captured: dict[int, CapturedGraph] = {}
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Let go of all graphs: they hold kernels and addresses of a model that is another one by now."""
        if self._captured:
            torch.cuda.synchronize(self._device)  # a replay may still be running
            self._captured.clear()
            self._memory = torch.cuda.graph_pool_handle()

    def rows(self, count: int) -> int:
        """How many rows a batch is filled up to."""
        return min(padded(count), self._most)

    @property
    def sizes(self) -> list[int]:
        """All numbers of rows that batches are filled up to."""
        return sorted({self.rows(count) for count in range(1, self._most + 1)})

    def run(self, call: Call, tokens: list[int], rows: int) -> Tensor:
        """The logits (tokens, V) of a step that was planned with so many rows."""
        self._tokens[0, : len(tokens)].copy_(torch.tensor(tokens))
        if rows not in self._captured:
            self._captured[rows] = self._capture(call, self._tokens[:, :rows])
        noted = self._captured[rows]
        noted.graph.replay()
        return noted.logits[: len(tokens)]

    def _capture(self, call: Call, tokens: Tensor) -> CapturedGraph:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARMUP_RUNS):
                call(tokens)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_garbage_collection(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits = call(tokens)
        except (RuntimeError, ValueError) as error:
            torch.cuda.set_stream(here)  # a capture that CUDA has ended leaves its own stream behind
            raise EngineError(f"cuda_graphs=True: the model cannot be noted as a graph ({error})") from error
        return CapturedGraph(graph, logits)


_ONE_AT_A_TIME = Lock()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """One thread at a time, and no garbage is collected. See [Note: nothing else meanwhile]."""
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def padded(count: int) -> int:
    """A power of two up to 16, then a multiple of 16.

    >>> [padded(count) for count in (1, 3, 16, 17, 40)]
    [1, 4, 16, 32, 48]
    """
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16
