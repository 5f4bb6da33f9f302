"""A look at what a model asks of its attention before it is served: two tokens, and attention that computes nothing.

The layers of a model say what they want in their source (integrations/huggingface/layers.py); whether a model does as
they say shows only when it runs. A mask may have numbers of the model's own; a layer may attend twice, for which there
is no place in a cache, or not at all. An engine would not notice, and say other tokens. So each call is compared here
with its layer, and the model is refused by name: no page is touched, nothing travels. A window that is in a mask alone,
and that no layer speaks of, is found here, and is the layer's from then on.

What is seen with two tokens is taken to hold for any number.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnspan.engine.served import Layers, called_meanwhile, seen_once
from attnspan.errors import ModelError

NAME = "attnspan_look"


class Look:
    """What was asked so far: how often each layer attended."""

    def __init__(self, layers: Layers) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.calls: Counter[Any] = Counter()


_LOOKING: ContextVar[Look | None] = ContextVar("the look that is being taken", default=None)


def looked_at(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **asked: Any
) -> tuple[Tensor, None]:
    """The attention function: compares, and returns zeros (B, S, H, Dv)."""
    from attnspan.integrations.huggingface.attending import check_asked

    look = _LOOKING.get()
    if look is None:
        raise called_meanwhile(module)
    layer, window = look.layers[module], getattr(attention_mask, "window", None)
    if layer.window is None and window is not None:
        look.layers[module] = layer = replace(layer, window=window)
        asked["sliding_window"] = window
    check_asked(layer, attention_mask, asked | {"s_aux": asked.get("s_aux") is not None})
    look.calls[module] += 1
    batch, heads, length, _ = query.shape
    return value.new_zeros(batch, length, heads, value.shape[-1]), None


def looked_over(model: Any, layers: Layers) -> Layers:
    """The layers with the windows of their masks; ModelError for a model that asks for more, or less, than they say."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from attnspan.integrations.huggingface.masking import asked_mask

    AttentionInterface.register(NAME, looked_at)
    AttentionMaskInterface.register(NAME, asked_mask)
    windows = seen_once(model, layers, NAME, lambda: _windows(Look(layers), model))
    return [replace(layer, window=window) for layer, window in zip(layers, windows, strict=True)]


def _windows(look: Look, model: Any) -> list[int | None]:
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    positions = torch.arange(2, device=tokens.device).unsqueeze(0)
    before = _LOOKING.set(look)
    try:
        with torch.no_grad():
            out = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=positions[0, 1:])
    finally:
        _LOOKING.reset(before)
    for module, layer in look.layers.items():
        calls = look.calls[module]
        if calls != 1:
            raise ModelError(
                f"{layer.name} attends {calls} times in one pass, and an engine serves layers that do once"
            )
    if out.logits.shape[1] != 1:
        raise ModelError(
            f"{type(model).__name__} gives logits of {out.logits.shape[1]} tokens where logits_to_keep asks for one, "
            "and an engine asks for those of last tokens alone"
        )
    return [layer.window for layer in look.layers.values()]
