"""Kernels on tiles: the times that a tuning table is made of.

Every kind of tile, at several sizes, by every kernel that computes it here; those that refuse are left out. Keys and
values lie packed, as they do in an arena (attention/wire.py). Kernels that run programs, such as `flex`, are given the
tile's own mask_mod.

A general tile of size n is a window of n keys over 2 n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels import (
    KERNELS,
    Accumulator,
    GlobalPositions,
    GradientBuffers,
    MergedOutputs,
    Mods,
    RowSums,
    Spec,
    StepTiles,
    needs_mask_program,
    refusal,
)
from attnspan.masks import Causal, Full, Mask, SlidingWindow
from attnspan.masks.tile import Kind, Tile
from attnspan.masks.tracing import traced
from attnspan.measure.stopwatch import seconds
from attnspan.tuning import Rate

SIZES = {"cpu": (64, 256, 1024, 4096), "cuda": (256, 1024, 4096, 16384)}


@dataclass(frozen=True, slots=True)
class Case:
    """One tile for one kernel."""

    kernel: str
    kind: Kind
    size: int
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int

    @property
    def tile(self) -> Tile:
        rows = 2 * self.size if self.kind == "general" else self.size
        lo = 1 - self.size if self.kind == "general" else 1 - rows
        return Tile(range(rows), range(rows), lo, rows - 1 if self.kind == "full" else 0)

    @property
    def mask(self) -> Mask:
        """The same as a mask."""
        if self.kind == "general":
            return Causal() & SlidingWindow(self.size - 1)
        return Full() if self.kind == "full" else Causal()

    def rate(self, device: torch.device) -> Rate | None:
        """What it takes; None if the kernel refuses."""
        tile, kernel, (q, k, v, grad) = self.tile, KERNELS[self.kernel], self._tensors(device)
        spec = self._spec(device)
        if refusal(self.kernel, spec, q, k, v, (tile,)) is not None:
            return None
        positions = torch.arange(len(tile.rows), device=device)
        where = range(1), range(self.heads), ((tile.rows,), (tile.cols,))
        step = StepTiles((tile,), lambda: GlobalPositions(positions, positions, *where))

        def forward() -> Accumulator:
            total = Accumulator((*q.shape[:3], v.shape[3]), torch.float32, device)
            kernel.forward(spec, q, k, v, step, total)
            return total

        merged = MergedOutputs(grad, None, *forward().result(q.dtype))
        of_keys = q.dtype if kernel.traits.rounds_gradients else lse_dtype(q.dtype)

        def backward() -> None:
            kernel.backward(spec, merged, q, k, v, step, DroppedGradients((q, k, v), of_keys))

        times = seconds(forward, device), seconds(backward, device)
        return Rate(self.kernel, self.dtype, self.head_dim, self.heads, self.kind, len(tile.rows), tile.area, *times)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v of the tile, and the gradient of its output."""
        rows, dim, dtype = len(self.tile.rows), self.head_dim, getattr(torch, self.dtype)
        q, grad = (torch.randn(1, self.heads, rows, dim, dtype=dtype, device=device) for _ in range(2))
        both = torch.randn(rows, 1, self.kv_heads, 2 * dim, dtype=dtype, device=device).permute(1, 2, 0, 3)
        return q, both[..., :dim], both[..., dim:], grad

    def _spec(self, device: torch.device) -> Spec:
        mods = None
        if needs_mask_program(self.kernel):
            length = len(self.tile.rows)
            mods = Mods(None, traced(self.mask.mask_mod(length, length)).on(device))
        return Spec(self.head_dim**-0.5, mods)


class DroppedGradients:
    """Takes gradients as a step does that is alone in its plan, and keeps none."""

    captured: tuple[()] = ()

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor], of_keys: torch.dtype):
        self.tensors, self.of_keys, self.row_sums = tensors, of_keys, RowSums()

    def add(self, rows: range, cols: range, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        pass

    def open(self) -> GradientBuffers:
        q, *keys = self.tensors
        dk, dv = (torch.empty(x.shape, dtype=self.of_keys, device=x.device) for x in keys)
        return GradientBuffers(torch.empty(q.shape, dtype=q.dtype, device=q.device), dk, dv)

    def close(self, into: GradientBuffers) -> None:
        pass


def launch(kernel: str, case: Case, device: torch.device) -> tuple[float, float]:
    """Seconds of a tile of 16 tokens, forward and backward: the fixed cost of a call."""
    tiny = Case(kernel, "full", 16, case.dtype, case.head_dim, case.heads, case.kv_heads)
    rate = tiny.rate(device)
    return (1e-5, 2e-5) if rate is None else (rate.forward, rate.backward)
