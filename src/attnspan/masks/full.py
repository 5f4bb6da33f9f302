"""Every query sees every key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key.

    >>> Full().work(4, 6)
    24
    """

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        yield tight(0, q_len, 0, kv_len)

    def _rule(self, space: Space) -> Rule:
        # Written on the indices, so that it traces like every other rule.
        return lambda b, h, q, k: torch.ones_like(q + k, dtype=torch.bool)
