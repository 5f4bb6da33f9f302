"""A kernel of one tile, as a kernel of all tiles between two buffers: slicing, merging and adding are done here.

Each tile is computed on its own rows and columns, views of the buffers. Its (out, lse) is joined into the total, its
gradients are handed over one after another, and nothing of a tile is kept while the next one is computed.

[Note: gradients of lse] Where lse itself is used in a loss, d lse / d score is the probability p, so that dq gains
scale * grad_lse * (p @ k) and dk gains scale * p.T @ (grad_lse * q). The first is what a kernel computes forward with
keys in place of values, the second what it gives as dv for the gradient scale * grad_lse * q: no kernel needs to know
of it. lse is that of the softmax before dropout, and so is p.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.kernel import Gradients, MergedOutputs, Spec, StepTiles, TileKernel, Tiles
from attnspan.kernels.mods import as_slice
from attnspan.kernels.segments import joined_tiles
from attnspan.masks.tile import Tile


class PerTile:
    """`kernel` for every tile.

    >>> from attnspan.kernels import reference
    >>> PerTile(reference).name
    'reference'
    """

    def __init__(self, kernel: TileKernel):
        self.kernel, self.name, self.traits = kernel, kernel.name, kernel.traits

    def kernel_for(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> TileKernel:
        """What computes a tile."""
        return self.kernel

    def tiles(self, step: StepTiles) -> Tiles:
        """What is computed, each by a call."""
        return step.tiles

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
        """The first tile's reason, of those that have one."""
        for tile in tiles:
            if reason := self.kernel.supports(spec, q, k, v, tile):
                return reason
        return None

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
        """Tile by tile, into the total."""
        for tile in self.tiles(step):
            query, key, value = sliced(q, k, v, tile)
            kernel = self.kernel_for(spec, query, key, value, tile)
            total.add(tile.rows, *kernel.forward(placed(spec, step, tile.rows, tile.cols), query, key, value, tile))

    def backward(
        self, spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
    ) -> None:
        """Tile by tile, into the sums."""
        for tile in self.tiles(step):
            there = placed(spec, step, tile.rows, tile.cols)
            dq, dk, dv = self._differentiated(there, merged, *sliced(q, k, v, tile), tile)
            grads.add(tile.rows, tile.cols, dq, dk, dv)
            del dq, dk, dv  # or they would be there still while the next tile is computed

    def _differentiated(
        self, spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of one tile."""
        rows = as_slice(tile.rows)
        out, lse, grad = merged.out[:, :, rows], merged.lse[:, :, rows], merged.grad[:, :, rows]
        dq, dk, dv = self.kernel_for(spec, q, k, v, tile).backward(spec, grad, q, k, v, out, lse, tile)
        if merged.grad_lse is not None:
            more_dq, more_dk = self._through_lse(spec, merged.grad_lse[:, :, rows], q, k, lse, tile)
            dq, dk = dq.to(lse_dtype(dq.dtype)) + more_dq, dk.to(lse_dtype(dk.dtype)) + more_dk
        return dq, dk, dv

    def _through_lse(
        self, spec: Spec, grad_lse: Tensor, q: Tensor, k: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        """What a gradient of lse adds to dq and dk. See [Note: gradients of lse]."""
        spec = replace(spec, dropout=None)
        kernel = self.kernel_for(spec, q, k, k, tile)
        weight = (grad_lse * spec.scale).unsqueeze(-1)
        mean_key, part_lse = kernel.forward(spec, q, k, k, tile)
        share = (part_lse - lse).exp().unsqueeze(-1)
        seed = (weight * q).to(q.dtype)
        _, _, dk = kernel.backward(spec, seed, q, k, k, torch.zeros_like(q), lse, tile)
        return weight * share * mean_key, dk


class JoinedTiles(PerTile):
    """`kernel` for tiles that are joined where they are one band: a query chunk over its key prefix is one call, not a
    full tile and a causal one that are merged. For kernels that compute any band."""

    def tiles(self, step: StepTiles) -> Tiles:
        return joined_tiles(step.tiles)


def placed(spec: Spec, step: StepTiles, rows: range, cols: range) -> Spec:
    """What some rows and columns are computed by: dropout depends on where they lie."""
    if spec.dropout is None:
        return spec
    return replace(spec, dropout=spec.dropout.at(step.where.indices(rows, cols)))


def sliced(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's own rows and columns."""
    rows, cols = as_slice(tile.rows), as_slice(tile.cols)
    return q[:, :, rows], k[:, :, cols], v[:, :, cols]
