"""Linear recurrences chunk by chunk, in plain torch: every chunk as an affine map of the state before it.

The law of a token, with decays as logarithms g <= 0 and the delta rule where beta is given::

    S = exp(g) * S                      a decay for the whole state, or one for each row (K channels)
    S = S + k (beta * (v - k' S))'      the delta rule; without beta:  S = S + k v'
    out = q' S

Unrolled over a chunk of C tokens all of it is matrix products. With sums of g over the tokens up to i (prefix), after j
(suffix) and between (j, i], and P_ij = q_i (exp(between) k_j) for j <= i::

    out = P v + (q exp(prefix)) S         after = exp(total) S + (k exp(suffix))' v

and for the delta rule, v is replaced by u - W S, where (1 + L) [u W] = beta [v, k exp(prefix)] and L is P with k for q
below the diagonal. So a chunk is four tensors, which depend on the chunk alone: ``out = out0 + reads @ S`` and
``after = A S + B``, A a matrix for the delta rule, else a decay.

[Note: sums, not differences] Sums of g are added up, never subtracted from one another: after a strong decay, prefix
sums are large, and their difference would be rounded. It would also be NaN where a gate is shut, g = -inf. With a
decay per channel, P does not factor into q and k without exp(-g), which overflows; so the chunk is cut into blocks of
`BLOCK` tokens. Between blocks, both sides decay to the border between them; inside, pairs are written out.

Shapes: n chunks, H heads, C tokens, K and V head dims; g is (n, H, C, 1) or (n, H, C, K), beta (n, H, C, 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 8
"""Tokens of a chunk whose pairs are written out channel by channel: (n, H, C, BLOCK, K) numbers."""

LONGEST = 64
"""Tokens of a chunk, at most."""


class Terms(NamedTuple):
    """Tokens in the words of the law above; decay and beta may be missing."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None


class Chunk(NamedTuple):
    """Chunks as maps: ``out = out + reads @ state`` and ``after = a (@ or *) state + b``."""

    out: Tensor
    reads: Tensor
    a: Tensor
    b: Tensor


def chunk_size(lengths: Tensor, width: int) -> int:
    """How many tokens a chunk has, for stretches of some lengths and a head dim: the power of two with the least work.

    A chunk costs its pairs, its reads of a state and its change of one: (C + width)^2, filled or not.

    >>> chunk_size(torch.tensor([4096]), 128), chunk_size(torch.tensor([3, 4, 5]), 16)
    (64, 8)
    """
    sizes = [1 << power for power in range(LONGEST.bit_length())]
    return min(sizes, key=lambda size: (int(((lengths + size - 1) // size).sum()) * (size + width) ** 2, size))


def chunked(terms: Terms) -> Chunk:
    """The maps of chunks."""
    query, key, value, decay, beta = terms
    if decay is None:
        decay = key.new_zeros(*key.shape[:3], 1)
    prefix = decay.cumsum(2)
    suffix = torch.nn.functional.pad(decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    total = prefix[:, :, -1].exp()  # (n, H, K or 1)
    reads, kept = query * prefix.exp(), (key * suffix.exp()).mT
    if beta is None:
        (pairs,) = _pairs([query], key, decay)
        return Chunk(pairs @ value, reads, total.unsqueeze(-1), kept @ value)
    pairs, among = _pairs([query, key], key, decay)
    right = beta * torch.cat([value, key * prefix.exp()], -1)
    solved = torch.linalg.solve_triangular(beta * among.tril(-1), right, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], -1)
    a = torch.diag_embed(total.expand(*total.shape[:2], key.shape[-1])) - kept @ old
    return Chunk(pairs @ new, reads - pairs @ old, a, kept @ new)


def _pairs(rows: list[Tensor], key: Tensor, decay: Tensor) -> list[Tensor]:
    """P for each of some tensors in the place of q: (n, H, C, C), zero above the diagonal."""
    if decay.shape[-1] == 1:
        weights = _between(decay).squeeze(-1)
        return [(row @ key.mT) * weights for row in rows]
    return [_channel_pairs(row, key, decay) for row in rows]


def _between(decay: Tensor) -> Tensor:
    """exp of the sums over (j, i], (..., C, C, channels) for (..., C, channels); zero where j > i."""
    size = decay.shape[-2]
    place = torch.arange(size, device=decay.device)
    later = (place.unsqueeze(1) > place).unsqueeze(-1)
    sums = torch.where(later, decay.unsqueeze(-2), 0).cumsum(-3)
    return torch.where((place.unsqueeze(1) >= place).unsqueeze(-1), sums, -torch.inf).exp()


def _channel_pairs(row: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """See [Note: sums, not differences]."""
    size = key.shape[2]
    rows, keys, decays = (x.unflatten(2, (-1, min(BLOCK, size))) for x in (row, key, decay))
    inside = (rows.unsqueeze(-2) * keys.unsqueeze(-3) * _between(decays)).sum(-1)
    lines = []
    rest = decay[:, :, :0]  # of every key so far: the sum from there to the border
    for block in range(rows.shape[2]):
        arriving = rows[:, :, block] * decays[:, :, block].cumsum(2).exp()
        before = arriving @ (key[:, :, : rest.shape[2]] * rest.exp()).mT
        after = size - before.shape[-1] - inside.shape[-1]
        lines.append(torch.nn.functional.pad(torch.cat([before, inside[:, :, block]], -1), (0, after)))
        own = decays[:, :, block]
        suffix = torch.nn.functional.pad(own[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
        rest = torch.cat([rest + own.sum(2, keepdim=True), suffix], 2)
    return torch.cat(lines, 2)
