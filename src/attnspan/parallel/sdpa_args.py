"""The arguments of F.scaled_dot_product_attention, by name. Shapes: (..., H, S, D), S this rank's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class SdpaArgs(NamedTuple):
    """One call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


SDPA: Callable[..., SdpaArgs] = SdpaArgs
"""From the arguments of an intercepted call, which has whatever types the caller gave."""


def flat(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, head dim); a shard may have no tokens, so that -1 would not do."""
    return tensor.reshape(math.prod(tensor.shape[:-3]), *(1, *tensor.shape)[-3:])
