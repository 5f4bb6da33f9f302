"""The reference kernel: the formulas as they stand, in plain torch, with every score in memory.

For tests, for float64, and for what nothing else can do. Half precision is computed in float32. The query heads of
one key head are stacked as further rows of it, so that keys are never repeated::

    (B, H, n, D) -> (B, Hk, G * n, D)       G = H / Hk query heads for each key head

Knows nothing of other kernels, and they nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.kernels.kernel import Spec, Traits
from attnspan.masks.tile import Tile

name = "reference"
traits = Traits(order=60, dropout=True, measured=False)


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Everything that floats."""
    return f"reference {reason}" if (reason := traits.misfit(q)) else None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse), both in float32, or float64 for float64."""
    q, k, v = map(_exact, (q, k, v))
    scores = _scores(spec, q, k, tile)
    lse = scores.logsumexp(-1)
    weighted = _shares(scores, lse) * _weights(spec, k)
    return _unstacked(weighted @ v, q), _unstacked(lse, q)


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). See [Note: final out and lse] in kernel.py, and [Note: backward of dropout] in dropout.py."""
    grad, q, k, v, out = map(_exact, (grad, q, k, v, out))
    shares = _shares(_scores(spec, q, k, tile), _stacked(lse, k))
    rows, correction, weights = _stacked(grad, k), _stacked((grad * out).sum(-1), k), _weights(spec, k)
    d_scores = shares * (rows @ v.mT * weights - correction.unsqueeze(-1)) * spec.scale
    return _unstacked(d_scores @ k, q), d_scores.mT @ _stacked(q, k), (shares * weights).mT @ rows


def _scores(spec: Spec, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """(B, Hk, G * n, m), -inf where the tile does not allow the pair."""
    n, m = q.shape[2], k.shape[2]
    distance = torch.arange(m, device=q.device) - torch.arange(n, device=q.device).unsqueeze(-1)
    hidden = (distance < tile.lo) | (distance > tile.hi)
    scores = _stacked(q, k) @ k.mT * spec.scale
    by_head: Tensor = scores.unflatten(2, (-1, n))
    return by_head.masked_fill(hidden, -torch.inf).flatten(2, 3)


def _weights(spec: Spec, k: Tensor) -> Tensor | float:
    """What dropout multiplies probabilities by, (B, Hk, G * n, m); 1 without it."""
    return 1.0 if spec.dropout is None else _stacked(spec.dropout.weights(k.dtype), k)


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), and 0 where there is no score to speak of, or no key in the whole row."""
    lse = lse.unsqueeze(-1)
    return (scores - lse).exp().masked_fill((scores == -torch.inf) | (lse == -torch.inf), 0.0)


def _stacked(x: Tensor, k: Tensor) -> Tensor:
    by_group: Tensor = x.unflatten(1, (k.shape[1], -1))
    return by_group.flatten(2, 3)


def _unstacked(x: Tensor, q: Tensor) -> Tensor:
    by_group: Tensor = x.unflatten(2, (-1, q.shape[2]))
    return by_group.flatten(1, 2)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
