"""How long passes take: by the clock on CPUs, by events on CUDA, without waiting for the device.

The time of a pass is unknown until the device has finished it, and in a CUDA graph that is being captured.
"""

from __future__ import annotations

from time import perf_counter

import torch

Moment = float | torch.cuda.Event | None


class PassTimer:
    """Times one pass, from construction to `end`."""

    __slots__ = ("_device", "_start", "_stop")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop: Moment = None
        self._start = now(device)

    def end(self) -> PassTimer:
        """To be called when all of the pass has been launched."""
        self._stop = now(self._device)
        return self

    @property
    def seconds(self) -> float | None:
        """How long it took, if that is known by now."""
        return between(self._start, self._stop)


def between(start: Moment, stop: Moment) -> float | None:
    """Seconds from one moment to another, if they are known by now."""
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1e3 if stop.query() else None
    return stop - start if isinstance(start, float) and isinstance(stop, float) else None


def now(device: torch.device) -> Moment:
    """This moment on a device."""
    if device.type != "cuda":
        return perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
