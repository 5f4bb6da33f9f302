"""Decoding by CUDA graphs: the model's kernels are captured once for a number of rows, and replayed by one call.

A step in which every sample gets one token is always the same work on other numbers, and the numbers are where they
were: plans never move (paged/step_plan.py), tokens are copied into a buffer that stays. A batch is padded to one of a
few sizes with rows that see no key, so that a handful of graphs serve every batch.

A model that reads numbers back to the host halfway cannot be captured, and is refused with CUDA's own message; one with
soft-caps is refused before (model_runner.py). An engine without `cuda_graphs` serves both.

[Note: no garbage collection] CUDA ends a capture at the first call that it takes for unsafe, and freeing another graph
is one. Python may free an engine whenever its collector runs, so the collector is off during a capture. What other
threads do meanwhile does not matter: only the calls of this thread are watched.
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

Decode = Callable[[Tensor], Tensor]
"""The model on (rows,) tokens, one for each sample of the plans; logits (rows, V)."""

WARMUP_RUNS = 2
"""Runs before a capture, in which kernels are compiled and libraries take their memory."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """A graph, and where its logits appear."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class CudaGraphs:
    """Graphs by their number of rows, for batches of at most `most`."""

    def __init__(self, most: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise EngineError(f"cuda_graphs=True needs a model on a CUDA device, got one on {device}")
        self._most = most
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._captured: dict[int, CapturedGraph] = {}
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Drop all graphs: they hold kernels and addresses of a model that has changed."""
        if self._captured:
            torch.cuda.synchronize(self._device)  # a replay may still be running
            self._captured.clear()
            self._memory = torch.cuda.graph_pool_handle()

    def padded_rows(self, count: int) -> int:
        """How many rows a batch of so many is padded to."""
        return min(padded(count), self._most)

    @property
    def sizes(self) -> list[int]:
        """All numbers of rows that batches are padded to."""
        return sorted({self.padded_rows(count) for count in range(1, self._most + 1)})

    def run(self, decode: Decode, tokens: Tensor, rows: int) -> Tensor:
        """The logits (tokens, V) of a step that was planned with so many rows. Tokens are on the device or pinned."""
        self._tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if rows not in self._captured:
            self._captured[rows] = self._capture(decode, self._tokens[:rows])
        captured = self._captured[rows]
        captured.graph.replay()
        return captured.logits[: len(tokens)]

    def _capture(self, decode: Decode, tokens: Tensor) -> CapturedGraph:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARMUP_RUNS):
                decode(tokens)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_garbage_collection(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                logits = decode(tokens)
        except (RuntimeError, ValueError) as error:
            torch.cuda.set_stream(here)  # a capture that CUDA has ended leaves its own stream behind
            raise EngineError(f"cuda_graphs=True: the model cannot be captured as a graph ({error})") from error
        return CapturedGraph(graph, logits)


_ONE_AT_A_TIME = Lock()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """One thread at a time, and no garbage is collected. See [Note: no garbage collection]."""
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
