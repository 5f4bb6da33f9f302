"""Dropout of attention probabilities, the same for any number of ranks.

After the softmax each probability is set to 0 with probability p, or else multiplied by 1 / (1 - p), as SDPA does; lse
is that of the softmax before it. Which ones are dropped is a pure function of (seed, batch row, query head, query
position, key position), so it does not depend on who computes a pair, in which tile, or whether it is the first time.

[Note: generator] Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which
passes BigCrush; torch on CUDA and Triton use it too. A counter gives 4 words of 32 bits, for 4 neighbouring keys::

    words = philox(counter=(key // 4, query, head, batch row), key=(low half of the seed, high half of the seed))
    kept  = words[key % 4] >= round(p * 2**32)

The kept share is 1 - p within 2**-33. All of it is integer arithmetic, bit by bit the same on every device.

[Note: backward of dropout] With W the weight of a pair, 0 or 1 / (1 - p), and P its probability: out = (W P) @ v, so
that dv = (W P).T @ grad, and the gradient of a score is P (W (grad @ v.T) - sum(grad * out)). The correction is that of
the final out, dropped as it is: sum(grad * out) = sum over keys of P W (grad @ v.T).

Knows nothing of tiles or ranks. Shapes: B batch rows, H query heads, n rows, m columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUNDS = 10
WORD = (1 << 32) - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Dropout:
    """The share that is dropped, the seed, and, once it is known, the place: b, h, q_idx and kv_idx of a tile.

    >>> half = Dropout(p=0.5, seed=7).at([torch.tensor([0]), torch.tensor([0]), torch.arange(2), torch.arange(8)])
    >>> half.weights(torch.float32)
    tensor([[[[2., 2., 0., 0., 0., 2., 0., 2.],
              [0., 0., 2., 2., 0., 0., 0., 0.]]]])
    """

    p: float
    seed: int
    place: Sequence[Tensor] = field(default=(), repr=False, compare=False)

    @property
    def least(self) -> int:
        """The least word that is kept."""
        return min(round(self.p * (1 << 32)), WORD)

    @property
    def scale(self) -> float:
        """The weight of what is kept."""
        return 1.0 / (1.0 - self.p)

    def at(self, place: Sequence[Tensor]) -> Dropout:
        """The same, of some batch rows, heads, queries and keys of the whole attention, (B,), (H,), (n,) and (m,)."""
        return Dropout(self.p, self.seed, place)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """What probabilities are multiplied by, (B, H, n, m). See [Note: generator]."""
        b, h, q_idx, kv_idx = self.place
        fours, where = torch.unique_consecutive(kv_idx >> 2, return_inverse=True)
        counter = (fours, q_idx[:, None], h[:, None, None], b[:, None, None, None])
        kept = torch.stack([word >= self.least for word in philox(counter, self.seed)], dim=-1).flatten(-2)
        return kept.index_select(-1, where * 4 + (kv_idx & 3)).to(dtype).mul_(self.scale)


def philox(counter: Words, seed: int) -> Words:
    """Philox 4x32-10 of counters that are broadcast against one another, int64 tensors that hold 32 bits each.

    >>> [hex(word.item()) for word in philox((torch.tensor(0),) * 4, seed=0)]  # as published with it
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        # A product of two words wraps around as int64, and its bits are right all the same.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = _high(second) ^ c1 ^ k0, second & WORD
        c2, c3 = _high(first) ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return product >> 32 & WORD
