"""The arguments of intercepted calls, by name: of F.scaled_dot_product_attention and of flex_attention.

Shapes: query (B, H, S, D), key (B, Hk, S, D), value (B, Hk, S, Dv), S this rank's tokens; SDPA takes (..., H, S, D).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from attnspan.attention.score import ScoreFunction
from attnspan.masks import Mask

if TYPE_CHECKING:
    from attnspan.parallel.attentions import SessionAttention


class SdpaArgs(NamedTuple):
    """One call of F.scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class FlexArgs(NamedTuple):
    """One call of flex_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreFunction | None = None
    block_mask: BlockMask | Mask | SessionAttention | str | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Mapping[str, object] | None = None
    return_aux: AuxRequest | None = None

    @property
    def wants_lse(self) -> bool:
        """Whether lse is returned to the model."""
        return self.return_lse or (self.return_aux is not None and self.return_aux.lse)


FlexResult = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]


def as_4d(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, head dim); a shard may have no tokens, so that -1 would not do."""
    if tensor.dim() == 4:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-3]), *(1, *tensor.shape)[-3:])
