"""Our own kernel for CUDA, in Triton: every tile, exactly, and nothing rounded before it is merged.

Library kernels round a tile's out and gradients to half precision. Merged, such parts are off by about 1.2 times as
much as one attention over the whole sequence. This kernel returns float32, whatever its inputs: what is merged or
summed is rounded once, at the end, so that the error does not depend on the number of tiles or ranks.

One tile is computed as many are: see bands.py. Shapes: kernel.py; any strides with the last dim dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.kernels import bands
from attnspan.kernels.kernel import GradientBuffers, MergedOutputs, Spec, Tiles, Traits
from attnspan.masks.tile import Tile
from attnspan.packages import has_triton

name = "band"

SMALL = 1.5e11
"""Floating-point operations of a tile's forward pass below which a tile is small; measured on an H200."""

traits = Traits(
    devices=("cuda",),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    order=20,
    dropout=True,
    programs=True,
    joins_below=SMALL,
)

MAX_DIM = 256


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Every tile, with head dims up to 256."""
    if reason := traits.misfit(q):
        return f"band {reason}"
    if not has_triton():
        return "band needs the package triton, which is not installed"
    if (most := max(q.shape[3], v.shape[3])) > MAX_DIM:
        return f"band needs head dims up to {MAX_DIM}, got {most}"
    if spec.scale == 0:  # the largest score is found before scaling: see `attend`
        return "band needs a scale other than 0"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse), both in float32."""
    return bands.forward(spec, q, k, v, _whole(tile), torch.float32)


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), all in float32."""
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    bands.backward(spec, MergedOutputs(grad, None, out, lse), q, k, v, _whole(tile), GradientBuffers(dq, dk, dv))
    return dq, dk, dv


def _whole(tile: Tile) -> Tiles:
    """The tile as it lies in tensors that were sliced for it."""
    return (Tile(range(len(tile.rows)), range(len(tile.cols)), tile.lo, tile.hi),)
