"""How long things take: the sizes of an attention, the speed of a machine, and the time of one tile or one exchange.

A model, not a measurement: a tile runs at its kind's rate, lower for few rows, plus a launch; an exchange takes the
slower of its links inside and between nodes. Good enough to rank strategies; the presets are figures measured on such
machines where we have them and data sheets elsewhere. Replace them with your own: `Hardware` is plain data, and
`attnspan tune` measures it, with a `Curve` for each kind of tile (tuning/table.py).
Knows tiles and tokens; nothing of masks or layouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log

from attnspan.dtypes import LONG_NAMES, SIZES
from attnspan.errors import PlanError, integer, one_of
from attnspan.masks.tile import Kind, Tile
from attnspan.plan.heads import repeats_key_heads, split_heads

BACKWARD = 2.5
"""Operations of backward over those of forward: five products of matrices where there were two."""

DTYPES = SIZES | {short: SIZES[name] for short, name in LONG_NAMES.items()}


@dataclass(frozen=True, slots=True, init=False)
class Shape:
    """The sizes of an attention beyond its length.

    >>> Shape(heads=32, kv_heads=8, head_dim=128).kv_bytes  # K and V of one position: 8 x 256 values of 2 bytes
    4096

    With `latent`, so many numbers travel for K and V, which are made of them where they arrive:

    >>> Shape(heads=128, head_dim=192, v_head_dim=128).kv_bytes, Shape(128, None, 192, 128, latent=576).kv_bytes
    (81920, 1152)
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int
    dtype: str
    latent: int | None

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int = 128,
        v_head_dim: int | None = None,
        batch: int = 1,
        dtype: str = "bfloat16",
        latent: int | None = None,
    ):
        for name, value in (
            ("heads", heads),
            ("kv_heads", heads if kv_heads is None else kv_heads),
            ("head_dim", head_dim),
            ("v_head_dim", head_dim if v_head_dim is None else v_head_dim),
            ("batch", batch),
        ):
            object.__setattr__(self, name, integer(name, value, at_least=1, error=PlanError))
        if self.heads % self.kv_heads:
            raise PlanError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        latent = None if latent is None else integer("latent", latent, at_least=1, error=PlanError)
        object.__setattr__(self, "latent", latent)
        object.__setattr__(self, "dtype", one_of("dtype", dtype, list(DTYPES), error=PlanError))

    @property
    def _dims(self) -> int:
        return self.head_dim + self.v_head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V for one position, all key heads, all batch rows; or of the latent that stands for them."""
        return self.batch * self.kv_values(self.kv_heads) * self.width

    @property
    def expanded(self) -> Shape:
        """The same where keys and values travel themselves."""
        return Shape(self.heads, self.kv_heads, self.head_dim, self.v_head_dim, self.batch, self.dtype)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of K and V for one position that are made of a latent; nothing where they travel themselves."""
        return self.batch * self.kv_heads * self._dims * self.width if self.latent else 0

    def kv_values(self, kv_heads: int) -> int:
        """Values that travel for one position of a batch row, of so many key heads."""
        return self.latent or kv_heads * self._dims

    @property
    def q_bytes(self) -> int:
        """Bytes of Q and of the output for one position."""
        return self.batch * self.heads * self._dims * self.width

    @property
    def head_values(self) -> tuple[int, int, int]:
        """Values of Q, of the output and of lse for one position, all query heads, all batch rows."""
        each = self.batch * self.heads
        return each * self.head_dim, each * self.v_head_dim, each

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return DTYPES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of one allowed pair, forward, all heads, all batch rows."""
        return 2 * self.batch * self.heads * self._dims

    @property
    def expansion_flops(self) -> int:
        """The same to make K and V of the latent of one position, if that is a product with a matrix."""
        return 2 * self.batch * self.kv_heads * self._dims * (self.latent or 0)

    def kv_share(self, degree: int) -> float:
        """The largest part of the key heads that a rank of a Ulysses group of `degree` holds."""
        return max(1, -(-self.kv_heads // degree)) / self.kv_heads

    def widened_heads(self, degree: int) -> float:
        """How many times as many bytes a gradient of a key has as the key, on its way out of a Ulysses group."""
        repeats = repeats_key_heads(split_heads(self.heads, self.kv_heads, degree))
        return max(4, self.width) / self.width if repeats else 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second that a rank can receive from one peer, and the seconds before the first byte.

    `spread` is what it receives from all its peers together, where that is another rate: several connections carry
    more than one, or share less.

    >>> print(Link(bandwidth=5e9, latency=3e-5))
    5 GB/s, 30 µs
    >>> print(Link(1e9, 1e-4, spread=2.5e9))
    1 GB/s (2.5 GB/s from several peers), 100 µs
    """

    bandwidth: float
    latency: float
    spread: float | None = None

    def __str__(self) -> str:
        several = "" if self.spread is None else f" ({self.spread / 1e9:.3g} GB/s from several peers)"
        return f"{self.bandwidth / 1e9:.3g} GB/s{several}, {self.latency * 1e6:.0f} µs"

    def seconds(self, size: float, peers: int = 1) -> float:
        """The time to receive `size` bytes from so many peers; nothing takes no time."""
        return self.latency + size / self.rate(peers) if size else 0.0

    def rate(self, peers: int) -> float:
        """Bytes per second from so many peers: no more than each of them gives, and than all together do."""
        return self.bandwidth if peers < 2 or self.spread is None else min(self.spread, peers * self.bandwidth)


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured rates of one kind of tile by its size (`size_of`), forward and backward; in between, log-linear.

    Rates are operations of the forward pass per second, for backward too.

    >>> curve = Curve("full", sizes=(100.0, 10000.0), forward=(1e9, 4e9), backward=(1e9, 1e9))
    >>> [round(curve.rate(size) / 1e9, 3) for size in (10, 100, 1000, 99999)]
    [1.0, 1.0, 2.0, 4.0]
    """

    kind: Kind
    sizes: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def rate(self, size: float, backward: bool = False) -> float:
        """Operations per second at a size; beyond what was measured, that of the nearest."""
        rates = self.backward if backward else self.forward
        right = bisect_right(self.sizes, size)
        if right in (0, len(self.sizes)):
            return rates[min(right, len(rates) - 1)]
        near, far = self.sizes[right - 1 : right + 1]
        share = log(size / near) / log(far / near)
        return exp(log(rates[right - 1]) * (1 - share) + log(rates[right]) * share)


def size_of(rows: int, area: int) -> float:
    """What a tile's rate depends on: its rows or the mean keys of a row, whichever are fewer.

    >>> size_of(rows=512, area=512 * 64)
    64.0
    """
    return min(rows, area / rows)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: attention rates by kind of tile (FLOP/s), what a launch costs, memory, and links.

    `half_rows` is how many rows a tile needs to reach half its rate. Where there are `curves`, they say it better;
    `launch` is then what a tile costs besides, and `launch_backward` in backward. `rounds`: whether gradients of keys
    travel in the tensors' dtype, as those of library kernels on CUDA do. `joins_below`: operations below which tiles
    are small, and all tiles of a step one call (kernels/registry.py); 0 where each is a call of its own. Ranks that
    share a device (`ranks_per_device`) take turns on it; see `overlaps`. `links` says how links were measured; where it
    is empty, the figures are a preset's.

    >>> Hardware.of("h100-nvlink").ranks_per_node
    8
    """

    name: str
    full: float
    causal: float
    general: float
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    ranks_per_node: int = 8
    half_rows: int = 256
    launch: float = 1e-5
    launch_backward: float | None = None
    rounds: bool = True
    joins_below: float = 1.5e11
    curves: tuple[Curve, ...] = ()
    ranks_per_device: int = 1
    note: str = field(default="", compare=False)
    links: str = field(default="", compare=False)

    @staticmethod
    def of(hardware: Hardware | str) -> Hardware:
        """A machine from its name."""
        if isinstance(hardware, Hardware):
            return hardware
        return PRESETS[one_of("hardware", hardware, list(PRESETS), error=PlanError)]

    @property
    def overlaps(self) -> bool:
        """Whether messages travel while tiles are computed. See [Note: turns] in timeline.py."""
        return self.ranks_per_device == 1

    def compute(self, tiles: Iterable[Tile], flops: float, *, backward: bool = False) -> float:
        """Seconds for tiles at `flops` operations per pair, forward; or for their backward."""
        launch = self.launch_backward if backward and self.launch_backward is not None else self.launch
        sizes = [(tile.kind, len(tile.rows), tile.area) for tile in tiles]
        if self._joined(sizes, flops):
            sizes = [("general", rows, area) for _, rows, area in sizes]
            launch /= len(sizes)
        alone = sum(launch + area * flops / self.rate(kind, rows, area, backward) for kind, rows, area in sizes)
        return alone * self.ranks_per_device

    def _joined(self, sizes: list[tuple[Kind, int, int]], flops: float) -> bool:
        """Whether tiles are computed in one call: many small ones, or such as need a kernel for bands anyway."""
        if not self.joins_below or len(sizes) < 2:
            return False
        small = flops * sum(area for _, _, area in sizes) < self.joins_below * len(sizes)
        return small or all(kind == "general" for kind, _, _ in sizes)

    def rate(self, kind: Kind, rows: int, area: int, backward: bool = False) -> float:
        """Operations of the forward pass per second for a tile, forward or backward."""
        for curve in self.curves:
            if curve.kind == kind:
                return curve.rate(size_of(rows, area), backward)
        rate: float = {"full": self.full, "causal": self.causal, "general": self.general}[kind]
        return rate * rows / (rows + self.half_rows) / (BACKWARD if backward else 1.0)

    def copying(self, size: float) -> float:
        """Seconds to read and write `size` bytes in memory."""
        return 2 * size / self.memory_bandwidth * self.ranks_per_device

    def exchange(self, inside: float, between: float, peers: tuple[int, int] = (1, 1)) -> float:
        """Seconds for one exchange: bytes from the same node and from other nodes, of so many peers each, arrive side
        by side."""
        return max(self.inside.seconds(inside, peers[0]), self.between.seconds(between, peers[1]))


PRESETS = {
    machine.name: machine
    for machine in (
        Hardware(
            name="h200-nvlink",
            full=6.0e14,
            causal=6.0e14,
            general=4.2e14,
            memory=141e9,
            memory_bandwidth=4.2e12,
            inside=Link(3.6e11, 1e-5),
            between=Link(4.5e10, 2e-5),
            note="attention rates measured with cuDNN and compiled FlexAttention; links from data sheets",
        ),
        Hardware(
            name="h100-nvlink",
            full=5.8e14,
            causal=5.8e14,
            general=4.1e14,
            memory=80e9,
            memory_bandwidth=2.9e12,
            inside=Link(3.6e11, 1e-5),
            between=Link(4.5e10, 2e-5),
            note="scaled from the H200's figures; links from data sheets",
        ),
        Hardware(
            name="a100-nvlink",
            full=1.9e14,
            causal=1.8e14,
            general=1.4e14,
            memory=80e9,
            memory_bandwidth=1.7e12,
            inside=Link(2.4e11, 1e-5),
            between=Link(2.2e10, 2e-5),
            note="from published figures",
        ),
        Hardware(
            name="cpu-gloo",
            full=4e10,
            causal=4e10,
            general=2e10,
            memory=16e9,
            memory_bandwidth=1e10,
            inside=Link(1e9, 2e-4),
            between=Link(1e8, 1e-3),
            ranks_per_node=64,
            half_rows=16,
            launch=3e-5,
            rounds=False,
            joins_below=0.0,
            note="a laptop: one core per rank",
        ),
    )
}
