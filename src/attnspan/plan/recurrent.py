"""Recurrent layers beside attention: what their maps move, what work they add, and how long they take.

A rank receives the maps of all stretches of others before its last one in each document (recurrence/plan.py), so bytes
are counted from the layout alone, and are exactly those that travel. Times are a model, as for attention: operations of
chunks at the rate of general tiles, one exchange forward and one backward, before which everything waits.

>>> from attnspan.layouts import Contiguous, Striped
>>> from attnspan.masks import Causal
>>> delta = RecurrentLayers("GatedDelta", heads=16, key_dim=128)
>>> for layout in Contiguous(ranks=8), Striped(ranks=8, chunk=512):
...     print(delta.over(layout, Causal(), 65536).arriving(7))
(13631488, 0)
(233832448, 220200960)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.errors import PlanError, integer, one_of
from attnspan.layouts.document_runs import Stretches
from attnspan.layouts.layout import Layout
from attnspan.masks import Mask
from attnspan.masks.borders import borders
from attnspan.plan.cost import BACKWARD, Hardware
from attnspan.plan.drawing import in_bytes, in_seconds

ACTS = {"GatedDelta": "matrix", "KDA": "matrix", "GLA": "channel", "Lightning": "number", "SSD": "number"}
"""What a run of tokens does to the state of a head, by rule: a matrix, or a decay by channel of keys or for all."""

CHUNK = 64
"""Tokens of a chunk, for which operations are counted."""


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Layers of one rule, so many (`count`) for each attention layer: Qwen3-Next has 3.

    `batch` rows, computed in `dtype`: float32, or float64 where a tensor is.
    """

    rule: str
    heads: int
    key_dim: int
    value_dim: int | None = None
    count: float = 1
    batch: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        one_of("rule", self.rule, list(ACTS), error=PlanError)
        one_of("dtype", self.dtype, ["float32", "float64"], error=PlanError)
        object.__setattr__(self, "value_dim", self.key_dim if self.value_dim is None else self.value_dim)
        for name in ("heads", "key_dim", "value_dim", "batch"):
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=1, error=PlanError))
        count = self.count
        if isinstance(count, bool) or not isinstance(count, Real) or not isfinite(count) or count <= 0:
            raise PlanError(f"count must be a number of layers above 0, got {count!r}")

    @property
    def state(self) -> int:
        """Numbers of a state of one batch row."""
        assert self.value_dim is not None, "or it is the key_dim"
        return self.heads * self.key_dim * self.value_dim

    @property
    def matrix(self) -> int:
        """Numbers of what a run of tokens does to it."""
        return self.heads * {"matrix": self.key_dim**2, "channel": self.key_dim, "number": 1}[ACTS[self.rule]]

    @property
    def flops(self) -> float:
        """Operations for a token of one batch row, forward: see recurrence/chunked.py."""
        k, v = self.key_dim, self.state // (self.heads * self.key_dim)
        each: float = CHUNK * (k + v) + 2 * k * v
        if ACTS[self.rule] == "matrix":  # pairs of keys, the triangle, and what it takes from reads, A and B
            each += CHUNK * k + CHUNK * (k + v) / 2 + (CHUNK + k) * k + k * k * v / CHUNK
        return 2 * self.heads * each

    @property
    def map_flops(self) -> float:
        """The same for a chunk in the middle of a document: a product of maps, and the state that it corrects."""
        k, v = self.key_dim, self.state // (self.heads * self.key_dim)
        return 2 * self.heads * (k * k * (k + v) if ACTS[self.rule] == "matrix" else k * v)

    def over(self, layout: Layout, mask: Mask, seq_len: int) -> RecurrentForecast:
        """These layers on a layout, within the documents of a mask."""
        return RecurrentForecast(self, Stretches.of(layout, seq_len, borders([mask], seq_len)), layout.ranks)


@dataclass(frozen=True, eq=False)
class RecurrentForecast:
    """Layers over the ranks of a layout."""

    layers: RecurrentLayers
    stretches: Stretches
    ranks: int

    @property
    def _alike(self) -> int:
        """Batch rows that go together."""
        return self.layers.batch if self.stretches.rows == 1 else 1

    @cached_property
    def _received(self) -> tuple[Tensor, Tensor]:
        """(ranks, 2) each, forward and backward: states and matrices that arrive at a rank for one layer."""
        s, ways = self.stretches, []
        place = s.rank * s.documents + s.document
        held = torch.bincount(place, minlength=self.ranks * s.documents).view(self.ranks, -1)
        for step in (s.step, s.back):
            last = torch.zeros(held.numel(), dtype=torch.int64, device="cpu")
            last = last.scatter_reduce_(0, place, step, "amax").view_as(held)
            head = torch.empty(s.documents, dtype=torch.int64, device="cpu")
            head[s.document[step == 0]] = s.rank[step == 0]
            states = (last - held + 1) * (held > 0)
            known = (last > 0) & (head != torch.arange(self.ranks, device="cpu")[:, None])
            ways.append((states.sum(1), (states - known.long()).sum(1)))
        states, matrices = (torch.stack(each, 1) for each in zip(*ways, strict=True))
        return states, matrices

    def arriving(self, rank: int) -> tuple[int, int]:
        """Bytes of maps that come to a rank for one layer, forward and backward."""
        states, matrices = (each[rank] for each in self._received)
        width = {"float32": 4, "float64": 8}[self.layers.dtype] * self._alike
        there, back = (width * (states * self.layers.state + matrices * self.layers.matrix)).tolist()
        return there, back

    @cached_property
    def _work(self) -> tuple[Tensor, Tensor]:
        """Operations of each rank forward, for one layer: for its tokens, and for maps."""
        s, zero = self.stretches, torch.zeros(self.ranks, dtype=torch.float64, device="cpu")
        chunks = (s.length + CHUNK - 1) // CHUNK * ((s.step > 0) & (s.back > 0))
        tokens, maps = (zero.index_add(0, s.rank, each.double()) for each in (s.length, chunks))
        return tokens * self.layers.flops * self._alike, maps * self.layers.map_flops * self._alike

    def moved(self, backward: bool = True) -> int:
        """The most bytes of maps that arrive at a rank, for all layers."""
        most = max(sum(self.arriving(rank)[: 1 + backward]) for rank in range(self.ranks))
        return round(self.layers.count * most)

    @property
    def extra(self) -> float:
        """Work that maps add forward, as a part of what one device computes: of the rank that has most, times ranks.

        >>> from attnspan.layouts import Contiguous
        >>> from attnspan.masks import Causal
        >>> round(RecurrentLayers("GLA", heads=4, key_dim=64).over(Contiguous(8), Causal(), 8192).extra, 4)
        0.0039
        """
        tokens, maps = self._work
        return float(maps.max() * self.ranks / tokens.sum())

    def seconds(self, hardware: Hardware, backward: bool = True) -> float:
        """The predicted time of all layers, on the slowest rank."""
        compute = sum(self._work) / hardware.general * hardware.ranks_per_device * (1 + BACKWARD * backward)
        link, peers = hardware.inside if self.ranks <= hardware.ranks_per_node else hardware.between, self.ranks - 1
        exchanges = [
            sum(link.seconds(size, peers) for size in self.arriving(rank)[: 1 + backward]) for rank in range(self.ranks)
        ]
        return self.layers.count * float((compute + torch.tensor(exchanges, device="cpu")).max())


class RecurrentCost(NamedTuple):
    """Recurrent layers beside one attention layer: bytes of maps that arrive at a rank at most, the work that these
    add, as a part of one device's, and seconds."""

    moved: int
    extra: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{in_seconds(self.seconds)} predicted, {in_bytes(self.moved)} of maps at most, {self.extra:.1%} more work"
        )

    @staticmethod
    def of(found: Sequence[RecurrentForecast], hardware: Hardware, backward: bool) -> RecurrentCost | None:
        """All layers together; None where there are none."""
        if not found:
            return None
        times = [each.seconds(hardware, backward) for each in found]
        work = [each.layers.count * each.layers.batch * each.layers.flops for each in found]
        extra = sum(part * each.extra for part, each in zip(work, found, strict=True)) / sum(work)
        return RecurrentCost(sum(each.moved(backward) for each in found), extra, sum(times))
