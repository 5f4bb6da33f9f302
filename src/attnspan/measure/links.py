"""Links between ranks: how long a small and a large exchange take, while all ranks exchange at once.

Every rank sends to the rank `hop` further on and receives from the one `hop` before, as a ring does, so that a link is
measured under the load it will bear. The slowest rank counts. Latency is the time of a few bytes; bandwidth what
remains for a large message.
"""

from __future__ import annotations

from time import perf_counter

import torch

from attnspan.plan import Link
from attnspan.transports import Transport
from attnspan.transports.consensus import heard

SMALL, LARGE = 1 << 10, 1 << 23
REPEATS = 5


def link(transport: Transport, hop: int, large: int = LARGE) -> Link:
    """The link between ranks that are `hop` apart, the same on every rank."""
    latency = _slowest(transport, _exchange(transport, hop, SMALL))
    whole = _slowest(transport, _exchange(transport, hop, large))
    return Link(bandwidth=large / max(whole - latency, 1e-9), latency=latency)


def _exchange(transport: Transport, hop: int, size: int) -> float:
    """The median of some exchanges; the first, for which connections are made, does not count."""
    leaving, arriving = (torch.zeros(size, dtype=torch.uint8, device=transport.device) for _ in range(2))
    to, source = (transport.rank + hop) % transport.ranks, (transport.rank - hop) % transport.ranks
    times = []
    for _ in range(REPEATS + 1):
        transport.agree(b"", "a barrier")
        start = perf_counter()
        transport.exchange([(to, leaving)], [(source, arriving)], "a measurement").wait()
        if transport.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


def _slowest(transport: Transport, value: float) -> float:
    return max(heard(transport, value, "measurements"))
