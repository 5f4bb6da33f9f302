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

[Note: no division] Between tokens there is a product of factors exp(g) <= 1, and it is multiplied up, never divided
out: prefix sums become large after a strong decay, their differences are rounded, and where a gate is shut (g = -inf)
they are NaN. With a decay per channel, P does not factor into q and k without exp(-g), which overflows. So P is put
together by halves: between a block of tokens and the next, queries decay from the border and keys to it. Two blocks and
what is between them are a block of twice the size, in which the later queries have decayed by the earlier block, and
the earlier keys by the later one. In the end these are the q exp(prefix) and k exp(suffix) of the chunk.

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


class ChunkMaps(NamedTuple):
    """Chunks as maps: ``out = out + reads @ state`` and ``after = a (@ or *) state + b``."""

    out: Tensor
    reads: Tensor
    a: Tensor
    b: Tensor


def chunk_size(lengths: Tensor, width: int) -> int:
    """How many tokens a chunk has, for stretches of some lengths and a head dim: the power of two with the least work.

    A chunk costs its pairs, its reads of a state and its change of one: (C + width)^2, filled or not.

    >>> chunk_size(torch.tensor([4096]), 128), chunk_size(torch.tensor([3, 4, 5]), 16)
    (64, 4)
    """
    sizes = [1 << power for power in range(LONGEST.bit_length())]
    return min(sizes, key=lambda size: (int(((lengths + size - 1) // size).sum()) * (size + width) ** 2, size))


def chunked(terms: Terms) -> ChunkMaps:
    """The maps of chunks, whose size is a power of two."""
    query, key, value, decay, beta = terms
    factor = key.new_ones(*key.shape[:3], 1) if decay is None else decay.exp()
    if beta is None:
        (pairs,), (reads,), kept, total = _decayed([query], key, factor)
        return ChunkMaps(pairs @ value, reads, total.mT, kept.mT @ value)
    (pairs, among), (reads, known), kept, total = _decayed([query, key], key, factor)
    right = beta * torch.cat([value, known], -1)
    solved = torch.linalg.solve_triangular(beta * among.tril(-1), right, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], -1)
    diagonal = torch.diag_embed(total.squeeze(2).expand(*key.shape[:2], key.shape[-1]))
    return ChunkMaps(pairs @ new, reads - pairs @ old, diagonal - kept.mT @ old, kept.mT @ new)


class Decayed(NamedTuple):
    """For each of some tensors in the place of q: P (n, H, C, C), and the tensor decayed from the beginning of the
    chunk. Then keys decayed to its end, and the factor of the whole chunk, (n, H, 1, K or 1).
    """

    pairs: list[Tensor]
    rows: list[Tensor]
    key: Tensor
    total: Tensor


def _decayed(rows: list[Tensor], key: Tensor, factor: Tensor) -> Decayed:
    if factor.shape[-1] > 1 or key.shape[-1] == 1:
        return _by_halves(rows, key, factor)
    one = torch.ones_like(factor)  # what is alike for all channels is worked out for one
    (weights,), (arriving,), leaving, total = _by_halves([one], one, factor)
    pairs = [(row @ key.mT) * weights for row in rows]
    return Decayed(pairs, [row * arriving for row in rows], key * leaving, total)


def _by_halves(rows: list[Tensor], key: Tensor, factor: Tensor) -> Decayed:
    """See [Note: no division]. Blocks of tokens are (n, H, blocks, tokens, K)."""
    pairs = [(row * key).sum(-1)[..., None, None] for row in rows]
    rows, key, total = [(row * factor).unsqueeze(3) for row in rows], key.unsqueeze(3), factor.unsqueeze(3)
    while total.shape[2] > 1:
        early, late = slice(0, None, 2), slice(1, None, 2)
        leaving = key[:, :, early].mT
        between = [row[:, :, late] @ leaving for row in rows]
        pairs = [_joined(each[:, :, early], part, each[:, :, late]) for each, part in zip(pairs, between, strict=True)]
        first, second = total[:, :, early], total[:, :, late]
        rows = [torch.cat([row[:, :, early], row[:, :, late] * first], 3) for row in rows]
        key, total = torch.cat([key[:, :, early] * second, key[:, :, late]], 3), first * second
    return Decayed(
        [each.squeeze(2) for each in pairs], [row.squeeze(2) for row in rows], key.squeeze(2), total.squeeze(2)
    )


def _joined(first: Tensor, between: Tensor, second: Tensor) -> Tensor:
    """A lower triangle of two, and what is between them."""
    upper = torch.cat([first, torch.zeros_like(between)], -1)
    return torch.cat([upper, torch.cat([between, second], -1)], -2)
