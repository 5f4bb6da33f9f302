"""How long something takes: on a CPU by the clock, on a CUDA device by its own events.

The least of several repeats: whatever else the machine does can only add time. The first run, in which plans are made,
memory is found and kernels are compiled, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

REPEATS = 3
MIN_SECONDS = 0.02
"""Seconds that a measurement lasts at least: what is shorter is run several times between two looks at the clock."""


def seconds(
    work: Callable[[], object], device: torch.device, repeats: int = REPEATS, least: float = MIN_SECONDS
) -> float:
    """The least time of one run."""
    work()
    once = _timed(work, device, 1)
    runs = max(1, min(1000, round(least / max(once, 1e-7))))
    return min(_timed(work, device, runs) for _ in range(repeats))


def _timed(work: Callable[[], object], device: torch.device, runs: int) -> float:
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(runs):
            work()
        after.record()
        after.synchronize()
        elapsed: float = before.elapsed_time(after)
        return elapsed / 1e3 / runs
    start = perf_counter()
    for _ in range(runs):
        work()
    return (perf_counter() - start) / runs
