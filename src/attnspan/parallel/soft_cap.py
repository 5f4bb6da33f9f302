"""Soft-caps of scores, as models of the Gemma family have them: a score_mod.

>>> import torch
>>> soft_cap(2.0)(torch.tensor([-9.0, 0.1, 9.0]), 0, 0, 0, 0).mul(100).round().tolist()
[-200.0, 10.0, 200.0]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def soft_cap(cap: float) -> Callable[..., Tensor]:
    """A score_mod that keeps scores between -cap and cap."""

    def capped(score: Tensor, b: object, h: object, q_idx: object, kv_idx: object) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
