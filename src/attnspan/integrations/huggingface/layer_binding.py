"""What is set on the attention layers and recurrent mixers of an enabled model, by which their functions find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import nn

from attnspan.integrations.huggingface.layers import AttentionLayer

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.enabling import Enabled

BINDING = "attnspan_binding"
"""The attribute of a module that holds its binding."""


@dataclass(frozen=True, eq=False)
class ModuleBinding:
    """Set on the attention layers and recurrent mixers of an enabled model."""

    enabled: Enabled

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a model is enabled as the model is


@dataclass(frozen=True, eq=False)
class LayerBinding(ModuleBinding):
    """The binding of an attention layer: also its data, and the index of its kind in `Enabled.kinds`."""

    layer: AttentionLayer
    kind_index: int | None  # None: cross-attention in a decoder without its encoder


def is_bound(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is enabled."""
    return any(hasattr(module, BINDING) for module in model.modules())
