"""A table of measured times: kinds of tile x sizes x kernels on one device, and links between ranks.

Two questions are put to it. *How long will this take?* `hardware(shape)` is the machine that the cost model
(plan/cost.py) predicts with: for every kind of tile a curve of rates, those of the kernel that is asked for, or at
every size the fastest. *Which kernel?* `order(...)` has the kernels that were measured on such a tile, the fastest
first; kernels/registry.py asks it where the caller said "auto".

[Note: where it speaks] Kernels are ordered only for a dtype and a head dim that were measured, and by forward and
backward together: the caller does not say which will follow. Times that differ by less than `EQUAL` are the same, and
then the order is the registry's own. Of tiles that take less than two launches it says nothing either: what was
measured there was the host. Predictions take the nearest head dim that was measured, and none of another dtype.

What it does not know: how rates change with the number of heads. They are those of the heads that it was measured with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import inf, isfinite, log
from typing import Any, get_args

from attnspan.errors import TuningError
from attnspan.masks.spans import merged
from attnspan.masks.tile import Kind, Tile
from attnspan.plan import Hardware, Link, Shape
from attnspan.plan.cost import DTYPES, Curve, size_of

FORMAT = 1
EQUAL = 0.03
"""Times that differ by less than this part are the same: a second measurement would turn them around."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement: seconds of a kernel on one tile of so many rows and pairs, forward and backward.

    >>> Rate("band", "bfloat16", 128, heads=32, kind="causal", rows=8, area=36, forward=1.0, backward=2.5).flops
    589824
    """

    kernel: str
    dtype: str
    head_dim: int
    heads: int
    kind: Kind
    rows: int
    area: int
    forward: float
    backward: float

    @property
    def flops(self) -> int:
        """Operations of the forward pass."""
        return self.area * Shape(self.heads, head_dim=self.head_dim, dtype=self.dtype).flops

    @property
    def size(self) -> float:
        """What rates depend on."""
        return size_of(self.rows, self.area)


@dataclass(frozen=True, slots=True, eq=False)  # its hash is asked for at every tile, and its numbers are many
class Table:
    """What was measured on a device, when and with which torch. `launch`: seconds of a tile that is hardly there."""

    device: str
    torch: str
    date: str
    rates: tuple[Rate, ...]
    memory_bandwidth: float
    launch: tuple[float, float]
    inside: Link | None = None
    between: Link | None = None
    ranks_per_node: int | None = None

    def hardware(self, shape: Shape, base: Hardware, kernel: str = "auto") -> Hardware:
        """The machine as measured, for such an attention; what was not measured is `base`'s."""
        forward, backward = self.launch
        return replace(
            base,
            name=self.device,
            memory_bandwidth=self.memory_bandwidth,
            inside=self.inside or base.inside,
            between=self.between or base.between,
            ranks_per_node=self.ranks_per_node or base.ranks_per_node,
            launch=forward,
            launch_backward=backward,
            curves=tuple(self._curves(shape, kernel)),
            note=f"measured {self.date} with torch {self.torch} by attnspan tune",
            links=f"measured {self.date} by attnspan tune" if self.inside or self.between else base.links,
        )

    def order(self, dtype: str, head_dim: int, tile: Tile) -> tuple[str, ...]:
        """The kernels that were measured on such tiles, the fastest first, those as fast in the order they were
        measured in; none where the table does not speak. See [Note: where it speaks]."""
        return _order(self, dtype, head_dim, tile.kind, len(tile.rows), tile.area)

    def in_one_call(self, kernels: tuple[str, ...], dtype: str, head_dim: int, tiles: tuple[Tile, ...]) -> str | None:
        """Which of some kernels computes all tiles in one call the fastest, if that takes less time than each tile by
        its own fastest kernel; None otherwise, or where the table does not speak.

        A call is as fast as on one tile of all its rows and pairs. Merging what was computed apart is not counted.
        """
        return _in_one_call(self, kernels, dtype, head_dim, tiles)

    def explain(self) -> str:
        """Which kernel is taken for which tiles, and at which rate."""
        lines = [f"{self.device}, torch {self.torch}, {self.date}"]
        for dtype, head_dim, kind in dict.fromkeys((r.dtype, r.head_dim, r.kind) for r in self.rates):
            here = [r for r in self.rates if (r.dtype, r.head_dim, r.kind) == (dtype, head_dim, kind)]
            for size in sorted({r.size for r in here}):
                at = {r.kernel: r for r in here if r.size == size}
                first, *others = _close_first({name: r.forward + r.backward for name, r in at.items()})
                listed = ", ".join(_told(at[name]) for name in (first, *others))
                lines.append(f"{dtype} head dim {head_dim} {kind:8} {at[first].rows:6} rows: {listed}")
        return "\n".join(lines)

    def _curves(self, shape: Shape, kernel: str) -> Iterator[Curve]:
        same = [r for r in self.rates if DTYPES[r.dtype] == shape.width and kernel in ("auto", r.kernel)]
        dims = {r.head_dim for r in same}
        nearest = min(dims, key=lambda dim: (abs(log(dim / shape.head_dim)), dim), default=0)
        for kind in get_args(Kind):
            rates = [r for r in same if r.head_dim == nearest and r.kind == kind]
            if rates:
                yield _curve(kind, rates, self.launch)

    # ---- as JSON -------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """For json.dumps; `of` reads it back."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def of(data: object, origin: str) -> Table:
        """A table from its data; `origin` is named where it is refused."""
        if not isinstance(data, dict) or "format" not in data:
            raise TuningError(f"{origin} is no tuning table; {AGAIN}")
        if data["format"] != FORMAT:
            raise TuningError(f"{origin} has format {data['format']!r}, this version reads {FORMAT}; {AGAIN}")
        known = {field.name for field in fields(Table)}
        try:
            given = {name: value for name, value in data.items() if name != "format"}
            if unknown := given.keys() - known:
                raise TypeError(f"unknown {', '.join(sorted(unknown))}")
            rates = tuple(Rate(**rate) for rate in given.pop("rates"))
            links = {name: Link(**given[name]) for name in ("inside", "between") if given.get(name)}
            table = Table(**{**given, **links, "rates": rates, "launch": tuple(given["launch"])})
            _check(table)
        except (TypeError, KeyError, ValueError, AttributeError) as wrong:
            raise TuningError(f"{origin} is damaged: {wrong}; {AGAIN}") from wrong
        return table


AGAIN = "measure it again with attnspan tune"


def _check(table: Table) -> None:
    """Every time is a positive number, and every kind, kernel and dtype a word that is known."""
    times = [table.memory_bandwidth, *table.launch]
    times += [each for rate in table.rates for each in (rate.forward, rate.backward, rate.rows, rate.area, rate.heads)]
    links = [link for link in (table.inside, table.between) if link]
    times += [each for link in links for each in (link.bandwidth, link.latency, link.rate(peers=2))]
    if len(table.launch) != 2 or not all(isfinite(each) and each > 0 for each in times):
        raise ValueError("a time that is not a positive number")
    if not all(isinstance(word, str) for word in (table.device, table.torch, table.date)):
        raise ValueError("device, torch and date must be words")
    for rate in table.rates:
        if rate.kind not in get_args(Kind) or rate.dtype not in DTYPES:
            raise ValueError(f"a rate of {rate.kind!r} tiles in {rate.dtype!r}")
    if not table.rates:
        raise ValueError("no rates")


def _curve(kind: Kind, rates: list[Rate], launch: tuple[float, float]) -> Curve:
    """At every size the kernel that auto would take: the fastest, forward and backward together."""
    by_size = {size: [r for r in rates if r.size == size] for size in sorted({r.size for r in rates})}
    best = [min(each, key=lambda r: r.forward + r.backward) for each in by_size.values()]
    forward = tuple(_without(launch[0], r.flops, r.forward) for r in best)
    return Curve(kind, tuple(by_size), forward, tuple(_without(launch[1], r.flops, r.backward) for r in best))


def _without(launch: float, flops: int, seconds: float) -> float:
    """The rate of a tile. A launch is added to every tile, so it is not in it, except for half of the time at most."""
    return flops / max(seconds - launch, seconds / 2)


@functools.lru_cache(maxsize=4096)
def _order(table: Table, dtype: str, head_dim: int, kind: Kind, rows: int, area: int) -> tuple[str, ...]:
    measured = [r for r in table.rates if (r.dtype, r.head_dim, r.kind) == (dtype, head_dim, kind)]
    size, seconds = size_of(rows, area), {}
    flops = area * Shape(measured[0].heads, head_dim=head_dim, dtype=dtype).flops if measured else 0
    for kernel in dict.fromkeys(r.kernel for r in measured):
        curve = _curve(kind, [r for r in measured if r.kernel == kernel], table.launch)
        seconds[kernel] = flops * (1 / curve.rate(size) + 1 / curve.rate(size, backward=True))
    return _close_first(seconds) if seconds and min(seconds.values()) > 2 * sum(table.launch) else ()


@functools.lru_cache(maxsize=4096)
def _in_one_call(
    table: Table, kernels: tuple[str, ...], dtype: str, head_dim: int, tiles: tuple[Tile, ...]
) -> str | None:
    rows = sum(stop - start for start, stop in merged((tile.rows.start, tile.rows.stop) for tile in tiles))
    whole, launch = size_of(rows, sum(tile.area for tile in tiles)), sum(table.launch)
    measured = [r for r in table.rates if (r.dtype, r.head_dim) == (dtype, head_dim)]

    def seconds(kernel: str, tile: Tile, size: float) -> float:
        rates = [r for r in measured if (r.kernel, r.kind) == (kernel, tile.kind)]
        if not rates:
            return inf
        curve = _curve(tile.kind, rates, table.launch)
        flops = tile.area * Shape(rates[0].heads, head_dim=head_dim, dtype=dtype).flops
        return flops * (1 / curve.rate(size) + 1 / curve.rate(size, backward=True))

    def alone(tile: Tile) -> float:
        others = {r.kernel for r in measured}
        return launch + min(seconds(each, tile, size_of(len(tile.rows), tile.area)) for each in others)

    at_once = {each: launch + sum(seconds(each, tile, whole) for tile in tiles) for each in kernels} if measured else {}
    first = min(at_once, key=lambda each: at_once[each], default=None)
    return first if first is not None and at_once[first] <= sum(map(alone, tiles)) < inf else None


def _close_first(seconds: dict[str, float]) -> tuple[str, ...]:
    """Names by time; again and again those within `EQUAL` of the fastest that is left, in the order they came.

    >>> _close_first({"a": 1.02, "b": 1.0, "c": 3.0, "d": 2.0})
    ('a', 'b', 'd', 'c')
    """
    left, ordered = dict(seconds), []
    while left:
        bound = min(left.values()) * (1 + EQUAL)
        close = [name for name, each in left.items() if each <= bound]
        ordered += close
        left = {name: each for name, each in left.items() if name not in close}
    return tuple(ordered)


def _told(rate: Rate) -> str:
    return (
        f"{rate.kernel} {rate.flops / rate.forward / 1e12:.3g} / {2.5 * rate.flops / rate.backward / 1e12:.3g} TFLOP/s"
    )
