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
decay per channel, P does not factor into q and k without exp(-g), which overflows. So P is put together by halves:
between a block of tokens and the next, queries decay from the border and keys to it, both by sums <= 0. Two blocks and
what is between them are a block of twice the size. The sums grow with them, and in the end are those of the chunk.

Shapes: n chunks, H heads, C tokens, K and V head dims; g is (n, H, C, 1) or (n, H, C, K), beta (n, H, C, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST = 64
"""Tokens of a chunk, at most."""


class Terms(NamedTuple):
    """Tokens in the words of the law above; decay and beta may be missing."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None

    def each(self, do: Callable[[Tensor], Tensor]) -> Terms:
        """The same, with something done to every tensor."""
        decay, beta = (None if x is None else do(x) for x in (self.decay, self.beta))
        return Terms(do(self.query), do(self.key), do(self.value), decay, beta)


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
    """The maps of chunks, whose size is a power of two."""
    query, key, value, decay, beta = terms
    if decay is None:
        decay = key.new_zeros(*key.shape[:3], 1)
    pairs, prefix, suffix, total = _pairs([query] if beta is None else [query, key], key, decay)
    reads, kept = query * prefix.exp(), (key * suffix.exp()).mT
    if beta is None:
        return Chunk(pairs[0] @ value, reads, total.exp().mT, kept @ value)
    right = beta * torch.cat([value, key * prefix.exp()], -1)
    solved = torch.linalg.solve_triangular(beta * pairs[1].tril(-1), right, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], -1)
    a = torch.diag_embed(total.exp().squeeze(2).expand(*key.shape[:2], key.shape[-1])) - kept @ old
    return Chunk(pairs[0] @ new, reads - pairs[0] @ old, a, kept @ new)


class Pairs(NamedTuple):
    """P (n, H, C, C) for each of some tensors in the place of q, zero above the diagonal; and the sums of g."""

    pairs: list[Tensor]
    prefix: Tensor
    suffix: Tensor
    total: Tensor


def _pairs(rows: list[Tensor], key: Tensor, decay: Tensor) -> Pairs:
    if decay.shape[-1] > 1 or key.shape[-1] == 1:
        return _by_halves(rows, key, decay)
    one = torch.ones_like(decay)
    weights = _by_halves([one], one, decay)
    return weights._replace(pairs=[(row @ key.mT) * weights.pairs[0] for row in rows])


def _by_halves(rows: list[Tensor], key: Tensor, decay: Tensor) -> Pairs:
    """See [Note: sums, not differences]."""
    pairs = [(row * key).sum(-1)[..., None, None] for row in rows]  # (n, H, blocks, tokens, tokens)
    prefix, suffix, total = decay.unsqueeze(3), torch.zeros_like(decay).unsqueeze(3), decay.unsqueeze(3)
    while total.shape[2] > 1:
        early, late = slice(0, None, 2), slice(1, None, 2)
        arriving, leaving = prefix[:, :, late].exp(), suffix[:, :, early].exp()
        keys = key.unflatten(2, prefix.shape[2:4])[:, :, early] * leaving
        between = [(row.unflatten(2, prefix.shape[2:4])[:, :, late] * arriving) @ keys.mT for row in rows]
        pairs = [_joined(each[:, :, early], part, each[:, :, late]) for each, part in zip(pairs, between, strict=True)]
        first, second = total[:, :, early], total[:, :, late]
        prefix = torch.cat([prefix[:, :, early], prefix[:, :, late] + first], 3)
        suffix = torch.cat([suffix[:, :, early] + second, suffix[:, :, late]], 3)
        total = first + second
    return Pairs([each.squeeze(2) for each in pairs], prefix.squeeze(2), suffix.squeeze(2), total.squeeze(2))


def _joined(first: Tensor, between: Tensor, second: Tensor) -> Tensor:
    """A lower triangle of two, and what is between them."""
    upper = torch.cat([first, torch.zeros_like(between)], -1)
    return torch.cat([upper, torch.cat([between, second], -1)], -2)
