"""`tune`: a table of this device, and of the links between ranks where there are any.

With ranks, all of them measure at the same time and the slowest counts: cores that share a memory, or a GPU that shares
a power limit, are slower together, and together is how they will run.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from attnspan.attention.links import group_links
from attnspan.dtypes import LONG_NAMES
from attnspan.errors import TuningError, one_of
from attnspan.kernels import KERNELS
from attnspan.masks.tile import Kind
from attnspan.measure.stopwatch import seconds
from attnspan.measure.tiles import SIZES, Case, launch
from attnspan.plan.cost import DTYPES
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object
from attnspan.transports.probe import THOROUGH
from attnspan.tuning import Table, device_name

COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes that are copied to see how fast memory is: more than caches hold."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What to measure."""

    device: torch.device
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    heads: int
    kv_heads: int
    kernels: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(
        device: torch.device,
        *,
        dtypes: tuple[str, ...] = (),
        head_dims: tuple[int, ...] = (),
        heads: int | None = None,
        kv_heads: int | None = None,
        kernels: tuple[str, ...] = (),
        sizes: tuple[int, ...] = (),
    ) -> Tuning:
        """What was asked for; what was not, as suits the device."""
        cuda = device.type == "cuda"
        for dtype in dtypes:
            one_of("dtype", dtype, list(DTYPES), error=TuningError)
        for kernel in kernels:
            one_of("kernel", kernel, list(KERNELS), error=TuningError)
        heads = heads or (32 if cuda else 4)
        usual = (name for name, each in KERNELS.items() if each.traits.measured and each.traits.runs_on(device))
        return Tuning(
            device,
            tuple(LONG_NAMES.get(dtype, dtype) for dtype in dtypes) or (("bfloat16",) if cuda else ("float32",)),
            head_dims or ((64, 128) if cuda else (64,)),
            heads,
            kv_heads or heads,
            kernels or tuple(usual),
            sizes or SIZES[device.type],
        )

    @property
    def cases(self) -> list[Case]:
        """Every tile to time."""
        return [
            Case(kernel, kind, size, dtype, dim, self.heads, self.kv_heads)
            for dtype in self.dtypes
            for dim in self.head_dims
            for kind in KINDS
            for size in self.sizes
            for kernel in self.kernels
        ]


KINDS: tuple[Kind, ...] = ("full", "causal", "general")


def tune(
    asked: Tuning, transport: Transport | None = None, track: Callable[[list[Case]], Iterator[Case]] = iter
) -> Table:
    """Measure; with a transport, on all its ranks together, and every rank gets the same table."""
    measured = [case.rate(asked.device) for case in track(asked.cases)]
    if not any(measured):
        raise TuningError(f"none of the kernels {', '.join(asked.kernels)} computes such tiles on {asked.device}")
    fixed = launch(next(r.kernel for r in measured if r is not None), asked.cases[0], asked.device)
    table = Table(
        device=device_name(asked.device),
        torch=torch.__version__,
        date=str(datetime.date.today()),
        rates=tuple(r for r in measured if r is not None),
        memory_bandwidth=_memory_bandwidth(asked.device),
        launch=fixed,
    )
    return table if transport is None else _together(table, transport)


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def _together(table: Table, transport: Transport) -> Table:
    """The slowest rank's times, and the links."""
    count, rates = len(table.rates), table.rates
    times = [*(r.forward for r in rates), *(r.backward for r in rates), 1 / table.memory_bandwidth, *table.launch]
    slowest = [max(each) for each in zip(*all_gather_object(transport, times, "measurements"), strict=True)]
    forward, backward, (memory, *fixed) = slowest[:count], slowest[count : 2 * count], slowest[2 * count :]
    rates = tuple(
        replace(rate, forward=there, backward=back) for rate, there, back in zip(rates, forward, backward, strict=True)
    )
    table = replace(table, rates=rates, memory_bandwidth=1 / memory, launch=(fixed[0], fixed[1]))
    return linked(table, transport) if transport.ranks > 1 else table


def linked(table: Table, transport: Transport) -> Table:
    """The table with the links inside and between hosts."""
    links = group_links(transport, THOROUGH)
    return replace(table, ranks_per_node=links.ranks_per_node, inside=links.inside, between=links.between)
