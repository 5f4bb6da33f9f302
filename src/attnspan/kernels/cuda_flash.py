"""torch's FlashAttention-2 for CUDA: every tile is a window, exactly, with grouped key heads.

FA2 has a window (left, right) counted from the bottom right corner: key j is seen by row i if::

    i + (m - n) - left <= j <= i + (m - n) + right

so the tile lo <= j - i <= hi is left = (m - n) - lo and right = hi - (m - n). In a tight tile the last row and
the last column hold a pair, so neither is negative, which FA2 would take for "no bound".

[Note: windows wider than the keys] FA2 also takes a bound >= m for "no bound". For left that is true. For right it is
not, where there are many more rows than keys: right counts from the last row, and the first row may lie further than
m above it. Such a tile has rows that see every key; cut off the rows above and below them, and each part has no more
rows than keys, hence right < n <= m.

The op is the one below SDPA: layout (B, S, H, D), no padding of head dims, lse (B, H, n) read without strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.kernels.aten import CUDA_FLASH, CUDA_FLASH_BACKWARD
from attnspan.kernels.kernel import Spec, Traits
from attnspan.kernels.parts import TilePart, backward_by_parts, cut_rows, forward_by_parts
from attnspan.masks.tile import Tile

name = "cuda_flash"
traits = Traits(devices=("cuda",), dtypes=(torch.float16, torch.bfloat16), order=30, rounds_gradients=True)


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Every tile in half precision whose head dim is a multiple of 8 up to 256."""
    if reason := traits.misfit(q):
        return f"cuda_flash {reason}"
    if q.shape[3] != v.shape[3]:
        return f"cuda_flash needs one head dim for keys and values, got {q.shape[3]} and {v.shape[3]}"
    if q.shape[3] % 8 or q.shape[3] > 256:
        return f"cuda_flash needs a head dim that is a multiple of 8 up to 256, got {q.shape[3]}"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        n, m = q.shape[2], k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = CUDA_FLASH(q, k, v, None, None, n, m, 0.0, False, False, scale=spec.scale, **_window(tile))
        return out.transpose(1, 2), lse

    return forward_by_parts(call, q, k, v, _parts(tile))


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state, without dropout

    def call(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, m = q.shape[2], k.shape[2]
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        sizes = (None, None, n, m, 0.0, False, unused, unused)
        grads = CUDA_FLASH_BACKWARD(grad, q, k, v, out, lse.contiguous(), *sizes, scale=spec.scale, **_window(tile))
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    return backward_by_parts(call, grad, q, k, v, out, lse, _parts(tile))


def _parts(tile: Tile) -> list[TilePart]:
    """The tile, tightened, and cut where FA2 would drop its right bound.

    >>> [str(part.tile) for part in _parts(Tile(range(9), range(2), lo=-8, hi=0))]  # causal, far more rows than keys
    ['full [0, 1) x [0, 1)', 'full [1, 9) x [0, 2)']
    """
    _, q1, k0, k1, lo, hi = tile.band
    right = hi - (k1 - q1)
    if right < k1 - k0:
        return cut_rows(tile)
    return cut_rows(tile, at=[k1 - 1 - hi, k0 + 1 - lo])  # the first row that sees the last key, and no more the first


def _window(tile: Tile) -> dict[str, int]:
    """The tile as FA2's window; a bound that does not bite is left out, which is the faster kernel.

    >>> _window(Tile(range(4), range(4), lo=-3, hi=0))  # causal
    {'window_size_right': 0}
    >>> _window(Tile(range(4), range(6), lo=1, hi=3))
    {'window_size_left': 1, 'window_size_right': 1}
    """
    n, m = len(tile.rows), len(tile.cols)
    window = {}
    if tile.lo > 1 - n:
        window["window_size_left"] = m - n - tile.lo
    if tile.hi < m - 1:
        window["window_size_right"] = tile.hi - (m - n)
    return window
