"""A tile in parts: where one library call cannot do a whole tile, it is cut into bands of rows.

Each row lies in exactly one part, with all the keys it sees, so parts are exact without any merging: their outs lie
one below the other, and their key gradients add up::

    [ # # # . . . ]
    [ . # # # . . ]   part 0: rows 0-1, columns 0-3
    [ . . # # # . ]
    [ . . . # # # ]   part 1: rows 2-3, columns 2-5

Parts are tight (see [Note: tight bands] in masks/band.py): columns that no row of a part sees are left out of it,
and a row that sees nothing is in no part. Knows nothing of any particular kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.masks.tile import Tile

Forward = Callable[[Tensor, Tensor, Tensor, Tile], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tile], tuple[Tensor, Tensor, Tensor]]


class TilePart(NamedTuple):
    """Rows and columns of a tile's tensors, and the tile that they are."""

    rows: slice
    cols: slice
    tile: Tile


def cut_rows(tile: Tile, at: Iterable[int] = ()) -> list[TilePart]:
    """The tile cut before each row in `at`.

    >>> window = Tile(range(4), range(6), lo=0, hi=2)
    >>> for part in cut_rows(window, at=[2]):
    ...     print(part.rows, part.cols, part.tile)
    slice(0, 2, None) slice(0, 4, None) general [0, 2) x [0, 4) within 0..2
    slice(2, 4, None) slice(2, 6, None) general [2, 4) x [2, 6) within 0..2
    """
    band, height, width = tile.band, len(tile.rows), len(tile.cols)
    edges = sorted({0, height, *(row for row in at if 0 < row < height)})
    parts = []
    for top, bottom in pairwise(edges):
        if piece := band.cut(top, bottom, 0, width):
            q0, q1, k0, k1, lo, hi = piece
            inner = Tile(tile.rows[q0:q1], tile.cols[k0:k1], lo + q0 - k0, hi + q0 - k0)
            parts.append(TilePart(slice(q0, q1), slice(k0, k1), inner))
    return parts


def forward_by_parts(call: Forward, q: Tensor, k: Tensor, v: Tensor, parts: list[TilePart]) -> tuple[Tensor, Tensor]:
    """The outs and lses of all parts, in their rows. `call` is given tensors whose last dim is dense."""
    q, k, v = last_dim_dense(q, k, v)
    if _is_whole(parts, q, k):
        return call(q, k, v, parts[0].tile)
    shape = (*q.shape[:3], v.shape[3])
    covered = sum(part.rows.stop - part.rows.start for part in parts) == q.shape[2]
    out = q.new_empty(shape) if covered else q.new_zeros(shape)
    lse = torch.full(shape[:3], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
    for rows, cols, tile in parts:
        out[:, :, rows], lse[:, :, rows] = call(q[:, :, rows], k[:, :, cols], v[:, :, cols], tile)
    return out, lse


def backward_by_parts(
    call: Backward, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: list[TilePart]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of all parts, added up; dk and dv in the dtype of lse if there are several parts."""
    # Libraries read out and grad through raw pointers of q's dtype. A row that saw no key must get no gradient:
    # exp(score - inf) is 0, where exp(score + inf) would be NaN.
    grad, q, k, v, out = last_dim_dense(grad.to(q.dtype), q, k, v, out.to(q.dtype))
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    if _is_whole(parts, q, k):
        return call(grad, q, k, v, out, lse, parts[0].tile)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for rows, cols, tile in parts:
        grad_p, q_p, out_p, lse_p = (x[:, :, rows] for x in (grad, q, out, lse))
        dq_p, dk_p, dv_p = call(grad_p, q_p, k[:, :, cols], v[:, :, cols], out_p, lse_p, tile)
        dq[:, :, rows] = dq_p
        dk[:, :, cols] += dk_p
        dv[:, :, cols] += dv_p
    return dq, dk, dv


def last_dim_dense(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where neighbouring features are not neighbours in memory, which no library kernel takes.

    The gradient of a sum is such a tensor: one number, seen everywhere.
    """
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _is_whole(parts: list[TilePart], q: Tensor, k: Tensor) -> bool:
    return len(parts) == 1 and parts[0].rows == slice(0, q.shape[2]) and parts[0].cols == slice(0, k.shape[2])
