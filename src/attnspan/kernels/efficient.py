"""torch's memory-efficient attention: float32 on CUDA, and head dims that differ for keys and values.

It knows full and causal (top left) tiles. A general one is cut into blocks of rows, and each block given a bias of
0 and -inf, so that no more than about `BIAS` numbers are in memory for it.

It wants as many key heads as query heads. Keys are not repeated: the query heads of a key head are stacked as further
rows where the tile is full, and else computed one after another, each with views of the same keys.

Backward reads what it is given by stricter rules than it checks: out dense as (B, n, H, Dv), lse padded to
a multiple of 32 rows. Shapes: kernel.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspan.kernels.aten import EFFICIENT, EFFICIENT_BACKWARD
from attnspan.kernels.kernel import Spec, Traits
from attnspan.kernels.parts import TilePart, backward_by_parts, cut_rows, forward_by_parts
from attnspan.masks.tile import Tile

name = "efficient"
traits = Traits(
    devices=("cuda",),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    order=40,
    order_float32=5,
    rounds_gradients=True,
)

BIAS = 1 << 25
"""Numbers in the bias of one block of a general tile, about; a block has 128 to 4096 rows."""


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Every tile whose head dims fill whole 16-byte words."""
    if reason := traits.misfit(q):
        return f"efficient {reason}"
    whole = 16 // q.element_size()
    for head_dim in (q.shape[3], v.shape[3]):
        if head_dim % whole:
            return f"efficient needs head dims that are multiples of {whole}, got {head_dim}"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        bias = _bias(tile, k)
        per_group = []
        for rows in _groups(q, k, tile):
            expanded = None if bias is None else bias.expand(*rows.shape[:2], -1, -1)
            out, lse, *_ = EFFICIENT(rows, k, v, expanded, True, 0.0, tile.kind == "causal", scale=spec.scale)
            per_group.append((out, lse[:, :, : rows.shape[2]]))  # the rest is padding
        outs, lses = zip(*per_group, strict=True)
        return _ungrouped(outs, q), _ungrouped(lses, q)

    return forward_by_parts(call, q, k, v, _parts(tile))


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device="cpu")  # the random state, without dropout

    def call(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = _bias(tile, k)
        per_group = []
        for grad_g, q_g, out_g, lse_g in zip(*(_groups(x, k, tile) for x in (grad, q, out, lse)), strict=True):
            expanded = None if bias is None else bias.expand(*q_g.shape[:2], -1, -1)
            out_g = out_g.transpose(1, 2).contiguous().transpose(1, 2)
            lse_g = pad(lse_g, (0, -lse_g.shape[2] % 32), value=torch.inf).contiguous()
            state = (unused, unused, 0.0, [True, True, True, False], tile.kind == "causal")
            *grads, _ = EFFICIENT_BACKWARD(grad_g, q_g, k, v, expanded, out_g, lse_g, *state, scale=spec.scale)
            per_group.append(grads)
        dq, dk, dv = zip(*per_group, strict=True)
        return _ungrouped(dq, q), _total(dk), _total(dv)

    return backward_by_parts(call, grad, q, k, v, out, lse, _parts(tile))


def _parts(tile: Tile) -> list[TilePart]:
    if tile.kind != "general":
        return cut_rows(tile)
    reach = min(len(tile.cols), tile.hi - tile.lo + 1)
    block = min(max(BIAS // reach, 128), 4096)
    return cut_rows(tile, at=range(block, len(tile.rows), block))


def _bias(tile: Tile, k: Tensor) -> Tensor | None:
    """(n, m) of 0 and -inf, or None where the kernel needs none; rows start at multiples of 16 numbers, as it wants.

    >>> _bias(Tile(range(2), range(3), lo=0, hi=1), torch.empty(1, 1, 3, 8))
    tensor([[0., 0., -inf],
            [-inf, 0., 0.]])
    """
    if tile.kind != "general":
        return None
    n, m = len(tile.rows), len(tile.cols)
    distance = torch.arange(m + -m % 16, device=k.device) - torch.arange(n, device=k.device).unsqueeze(-1)
    hidden = (distance < tile.lo) | (distance > tile.hi)
    return k.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, :m]


def _groups(x: Tensor, k: Tensor, tile: Tile) -> list[Tensor]:
    """(B, H, n, ...) as tensors with as many heads as k: one with all rows stacked, or one for each head of a group."""
    apart: Tensor = x.unflatten(1, (k.shape[1], -1))
    return [apart.flatten(2, 3)] if tile.kind == "full" else list(apart.unbind(2))


def _ungrouped(parts: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """What `_groups` took apart, together again."""
    if len(parts) > 1:
        return torch.stack(parts, 2).flatten(1, 2)
    apart: Tensor = parts[0].unflatten(2, (-1, q.shape[2]))
    return apart.flatten(1, 2)


def _total(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum over groups, in float32: they are many, and rounded each."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float32)
