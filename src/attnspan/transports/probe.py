"""What the link between ranks gives, measured while all of them exchange at once.

Three exchanges are timed, of messages that nobody reads::

    a few bytes to the next peer            latency
    a large message to the next peer        bandwidth, as a ring has it
    as many bytes, a part to every peer     bandwidth, as gathers and exchanges of heads have it

Each is done a few times in a row; the first, for which connections are made and buffers of the network fill up, does
not count. A round takes as long as it does on the slowest rank, and the median of the rounds counts: a pause of a host
is not the link's, and neither is what a network lets pass after one. All ranks hear of all, so that every rank
returns the same numbers. Messages grow towards one whose bytes take `enough` seconds, or eight latencies if that is
longer (but not more than `STEADY`, unless a latency is); half of that will do. So where ranks take turns on a device,
and whatever they do ends with a turn, the bandwidth is right to within a tenth. On a fast link everything takes
milliseconds; with a latency of 20 ms about two seconds. Many networks let some bytes pass at full speed after a pause:
`THOROUGH` outlasts them.

On a CUDA device the host waits for the device before it looks at the clock. The exchanges are one operation of the
group (operations.py): ranks that do something else meanwhile are told that they are out of step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from attnspan.transports.consensus import all_gather_object
from attnspan.transports.operations import enter_operation
from attnspan.transports.transport import Transport

REPEATS = 5
SMALL, GUESS, LARGE = 1 << 10, 1 << 17, 1 << 27
"""Bytes of messages: few, for a first guess, and at most."""

ENOUGH, THOROUGH = 4e-3, 0.1
"""Seconds that a large message should take: before a group is first used, and where there is time."""

STEADY = 0.08
"""Seconds of bytes beside which a latency need not be steady."""


class Speed(NamedTuple):
    """Seconds before the first byte, and bytes per second that a rank receives from one peer and from all of them."""

    latency: float
    bandwidth: float
    spread: float


def speed(transport: Transport, targets: Sequence[int], sources: Sequence[int], enough: float = ENOUGH) -> Speed:
    """The link to some peers and from as many others, as many on every rank; a collective."""
    one, every = LinkProbe(transport, targets[:1], sources[:1]), LinkProbe(transport, targets, sources)
    with enter_operation(transport, "a measurement of the link"):
        latency, bandwidth = one.speed(enough)
        return Speed(latency, bandwidth, every.speed(enough)[1] if len(targets) > 1 else bandwidth)


def fitting_size(size: int, seconds: float, latency: float, enough: float = ENOUGH) -> int:
    """How large a message must be to take `enough` seconds, by what a smaller one took: a power of two.

    >>> fitting_size(size=1 << 16, seconds=1e-4, latency=3.6e-5)  # 1 GB/s
    4194304
    >>> fitting_size(1 << 16, seconds=6e-3, latency=5e-4), fitting_size(1 << 16, seconds=2e-5, latency=2e-5)
    (65536, 134217728)
    """
    wanted = size / _travelling(seconds, latency) * _wanted(latency, enough)
    while size < min(wanted, LARGE):
        size *= 2
    return size


def _wanted(latency: float, enough: float) -> float:
    """Seconds that the bytes of a large message should take."""
    return max(enough, latency, min(8 * latency, STEADY))


def _travelling(seconds: float, latency: float) -> float:
    """Of the time of a message, what its bytes take; not nothing, however the clock ran."""
    return max(seconds - latency, seconds / 8, 1e-9)


class LinkProbe:
    """Messages to some peers, from as many others."""

    def __init__(self, transport: Transport, targets: Sequence[int], sources: Sequence[int]):
        self.transport, self.targets, self.sources = transport, targets, sources

    def speed(self, enough: float) -> tuple[float, float]:
        """Seconds before the first byte, and bytes per second that arrive from all peers together."""
        latency, size = self.seconds(SMALL), GUESS
        seconds = self.seconds(size)
        while seconds - latency < _wanted(latency, enough) / 2 and size < LARGE:
            size = max(2 * size, fitting_size(size, seconds, latency, enough))
            seconds = self.seconds(size)
        return latency, size / _travelling(seconds, latency)

    def seconds(self, size: int) -> float:
        """The median round of so many bytes, divided among the peers, on its slowest rank."""
        leaving, arriving = (
            torch.zeros(len(self.targets), size // len(self.targets), dtype=torch.uint8, device=self.transport.device)
            for _ in range(2)
        )
        sends = list(zip(self.targets, leaving.unbind(), strict=True))
        receives = list(zip(self.sources, arriving.unbind(), strict=True))
        times: list[float] = []
        for _ in range(REPEATS + 1):
            start = perf_counter()
            self.transport.exchange(sends, receives, "a measurement").wait()
            if self.transport.device.type == "cuda":
                torch.cuda.current_stream(self.transport.device).synchronize()
            times.append(perf_counter() - start)
        said = all_gather_object(self.transport, times[1:], "a measurement")
        rounds: list[float] = [max(each) for each in zip(*said, strict=True)]
        return median(rounds)
