"""torch's flash attention for CPUs: full and causal tiles in one call, general ones by rows with a mask of one line.

aten takes an additive mask, but not the band that it stands for. Handing it n x m numbers would cost more memory than
the attention. [Note: a band is one line] But a band's mask depends only on the distance k - q, so all its rows
are one line of n + m - 1 numbers, read from a different start::

    line  [ -inf  -inf   0   0   0  -inf ]     row 2 starts at 0
                                               row 1 starts at 1
                                               row 0 starts at 2

Each row starts one to the left of the row above it. torch knows no negative strides, so the rows are turned upside
down; then they start one to the RIGHT, and the mask is a view of the line with strides (1, 1).

Scores outside the band are still computed, so a tile is cut into blocks of rows whose keys reach little further.
Knows grouped key heads by itself. Shapes: kernel.py.

[Note: half precision] aten rounds a tile's results to half precision before they can be merged or summed, and that
costs as much as the rounding at the end: an out merged from two tiles was off by 1.25 times what it is from one. So
half precision is computed in float32, one key head at a time, so that the copies stay small. That is the price of
accuracy: on a CPU with bfloat16 instructions a causal forward and backward takes 1.3 times as long as SDPA's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attnspan.kernels.aten import CPU_FLASH, CPU_FLASH_BACKWARD
from attnspan.kernels.kernel import Spec, Traits
from attnspan.kernels.parts import TilePart, backward_by_parts, cut_rows, forward_by_parts
from attnspan.masks.tile import Tile

BLOCK = 256
"""Rows in one call of a general tile: more waste scores outside the band, fewer waste calls."""

_HALVES = (torch.bfloat16, torch.float16)

name = "cpu_flash"
traits = Traits(devices=("cpu",), dtypes=(torch.float32, torch.float64, *_HALVES), order=50)


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Every tile on a CPU whose keys and values have the same head dim."""
    if reason := traits.misfit(q):
        return f"cpu_flash {reason}"
    if len(tile.cols) == 0:
        return "cpu_flash needs a key, got none"
    if q.shape[3] != v.shape[3]:
        return f"cpu_flash needs one head dim for keys and values, got {q.shape[3]} and {v.shape[3]}"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse), both in float32, or float64 for float64."""
    if q.dtype in _HALVES:
        each = _by_key_head(k.shape[1], q, k, v)
        out, lse = _joined([forward(spec, q, k, v, tile) for q, k, v in each])
        return out, lse

    def call(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        flash: Callable[..., tuple[Tensor, Tensor]] = CPU_FLASH
        if tile.kind != "general":
            return flash(q, k, v, 0.0, tile.kind == "causal", scale=spec.scale)
        out, lse = flash(q.flip(2), k, v, attn_mask=_upside_down(tile, q), scale=spec.scale)
        return out.flip(2), lse.flip(2)

    return forward_by_parts(call, q, k, v, _parts(tile))


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in the dtypes of `forward`."""
    if q.dtype in _HALVES:
        each = _by_key_head(k.shape[1], grad, q, k, v, out, lse)
        dq, dk, dv = _joined([backward(spec, grad, q, k, v, out, lse, tile) for grad, q, k, v, out, lse in each])
        return dq, dk, dv

    def call(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        flash: Callable[..., tuple[Tensor, Tensor, Tensor]] = CPU_FLASH_BACKWARD
        if tile.kind != "general":
            return flash(grad, q, k, v, out, lse, 0.0, tile.kind == "causal", scale=spec.scale)
        mask = _upside_down(tile, q)
        grad, q, out, lse = (x.flip(2) for x in (grad, q, out, lse))
        dq, dk, dv = flash(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=spec.scale)
        return dq.flip(2), dk, dv

    return backward_by_parts(call, grad, q, k, v, out, lse, _parts(tile))


def _by_key_head(key_heads: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors of one key head after another, in float32. See [Note: half precision]."""
    for heads in zip(*(x.tensor_split(key_heads, dim=1) for x in tensors), strict=True):
        yield [x.float() for x in heads]


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))


def _parts(tile: Tile) -> list[TilePart]:
    return cut_rows(tile, at=range(BLOCK, len(tile.rows), BLOCK) if tile.kind == "general" else ())


def _upside_down(tile: Tile, q: Tensor) -> Tensor:
    """The additive mask of a tile whose rows are upside down. See [Note: a band is one line].

    >>> _upside_down(Tile(range(2), range(3), lo=0, hi=1), torch.empty(0))
    tensor([[-inf, 0., 0.],
            [0., 0., -inf]])
    """
    n, m = len(tile.rows), len(tile.cols)
    line = torch.full((n + m - 1,), -torch.inf, dtype=q.dtype, device=q.device)
    line[tile.lo + n - 1 : tile.hi + n] = 0.0
    return line.as_strided((n, m), (1, 1))
