"""The arguments and results of flex_attention, by name.

Shapes: query (B, H, S, D), key (B, Hk, S, D), value (B, Hk, S, Dv), S this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from attnspan.attention.score import ScoreFunction
from attnspan.masks import Mask

if TYPE_CHECKING:
    from attnspan.parallel.attentions import BoundAttention

FlexResult = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]


class FlexArgs(NamedTuple):
    """One call."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreFunction | None = None
    block_mask: BlockMask | Mask | BoundAttention | str | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Mapping[str, object] | None = None
    return_aux: AuxRequest | None = None

    @property
    def wants_lse(self) -> bool:
        """Whether lse is returned to the model."""
        return self.return_lse or (self.return_aux is not None and self.return_aux.lse)


FLEX: Callable[..., FlexArgs] = FlexArgs
"""From the arguments of an intercepted call, which has whatever types the caller gave."""
