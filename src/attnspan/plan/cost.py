"""How long things take: the sizes of an attention, the speed of a machine, and the time of one tile or one exchange.

A model, not a measurement: a tile runs at its kind's rate, lower for few rows, plus a launch; an exchange takes the
slower of its links inside and between nodes. Good enough to rank strategies; the presets are figures measured on such
machines where we have them and data sheets elsewhere. Replace them with your own: `Hardware` is plain data.
Knows tiles and tokens; nothing of masks or layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from attnspan.errors import PlanError, one_of, whole
from attnspan.masks.tile import Tile

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an attention beyond its length.

    >>> Shape(heads=32, kv_heads=8, head_dim=128).kv_bytes  # K and V of one position: 8 x 256 values of 2 bytes
    4096
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int = 128
    v_head_dim: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value in (
            ("heads", self.heads),
            ("kv_heads", self.heads if self.kv_heads is None else self.kv_heads),
            ("head_dim", self.head_dim),
            ("v_head_dim", self.head_dim if self.v_head_dim is None else self.v_head_dim),
            ("batch", self.batch),
        ):
            object.__setattr__(self, name, whole(name, value, at_least=1, error=PlanError))
        if self.heads % self._kv_heads:
            raise PlanError(f"heads must be a multiple of kv_heads, got {self.heads} and {self._kv_heads}")
        one_of("dtype", self.dtype, list(DTYPES), error=PlanError)

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads  # type: ignore[return-value]  # filled in __post_init__

    @property
    def _dims(self) -> int:
        return self.head_dim + self.v_head_dim  # type: ignore[operator]  # filled in __post_init__

    @property
    def kv_values(self) -> int:
        """Values of K and V for one position, all key heads, all batch rows."""
        return self.batch * self._kv_heads * self._dims

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V for one position, all key heads, all batch rows."""
        return self.kv_values * DTYPES[self.dtype]

    @property
    def q_bytes(self) -> int:
        """Bytes of Q and of the output for one position."""
        return self.batch * self.heads * self._dims * DTYPES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of one allowed pair, forward, all heads, all batch rows."""
        return 2 * self.batch * self.heads * self._dims

    def kv_share(self, degree: int) -> float:
        """The largest part of the key heads that a rank of a Ulysses group of `degree` holds."""
        return max(1, -(-self._kv_heads // degree)) / self._kv_heads


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second that a rank can receive, and the seconds before the first byte."""

    bandwidth: float
    latency: float

    def seconds(self, size: float) -> float:
        """The time to receive `size` bytes; nothing takes no time."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: attention rates by kind of tile (FLOP/s), what a launch costs, memory, and links.

    `half_rows` is how many rows a tile needs to reach half its rate.

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
    note: str = field(default="", compare=False)

    @staticmethod
    def of(hardware: Hardware | str) -> Hardware:
        """A machine from its name."""
        if isinstance(hardware, Hardware):
            return hardware
        return PRESETS[one_of("hardware", hardware, list(PRESETS), error=PlanError)]

    def compute(self, tiles: Iterable[Tile], flops: float) -> float:
        """Seconds for tiles at `flops` operations per pair."""
        total = 0.0
        for tile in tiles:
            rate = {"full": self.full, "causal": self.causal, "general": self.general}[tile.kind]
            rows = len(tile.rows)
            total += self.launch + tile.area * flops / (rate * rows / (rows + self.half_rows))
        return total

    def exchange(self, inside: float, between: float) -> float:
        """Seconds for one exchange: bytes from the same node and from other nodes arrive side by side."""
        return max(self.inside.seconds(inside), self.between.seconds(between))


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
            note="a laptop: one core per rank",
        ),
    )
}
