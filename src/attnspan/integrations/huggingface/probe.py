"""A probe of a model before it is served: it is run on two tokens with attention that computes nothing.

What the layers of a model want is written in their source (layers.py); whether the model does so shows only when it
runs. A mask may have numbers of the model's own; a layer may attend twice, for which there is no place in a cache,
or not at all. An engine would not notice, and generate other tokens. So each call is compared here with its layer, and
a model that differs is refused by name, before any page is written. A window that is in a mask alone, and that no layer
mentions, is found here, and is the layer's from then on.

Recurrent mixers run as they are, from states of zeros. Which states they use, and in which order, is found here.

What holds for two tokens is taken to hold for any number.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnspan.engine.model import StateSpec, StepAttention
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.attention import check_arguments
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.masking import Pattern, requested_pattern
from attnspan.integrations.huggingface.own_attention import ASKED
from attnspan.integrations.huggingface.serving import (
    ProbeResult,
    ServedCall,
    ServedLayers,
    call_served,
    called_while_served,
    probed_once,
)
from attnspan.recurrence import PackedSequences, Rule

NAME = "attnspan_probe"


class Probe:
    """The layers as they were found so far, and how often each attended."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.calls: Counter[nn.Module] = Counter()


_PROBE: ContextVar[Probe | None] = ContextVar("the probe under way", default=None)


def probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **arguments: object
) -> tuple[Tensor, None]:
    """The attention function: compares, and returns zeros (B, S, H, Dv)."""
    probe = _PROBE.get()
    if probe is None:
        raise called_while_served(module)
    layer, window = probe.layers[module], getattr(attention_mask, "window", None)
    if layer.window is None and window is not None:
        probe.layers[module] = layer = replace(layer, window=window)
        arguments["sliding_window"] = window
    check_arguments(layer, attention_mask, arguments | {"s_aux": arguments.get("s_aux") is not None}, Pattern.of(layer))
    probe.calls[module] += 1
    batch, heads, length, _ = query.shape
    return value.new_zeros(batch, length, heads, value.shape[-1]), None


class ProbedStates(StepAttention):
    """Notes the states that are used, in the order of their use; all are zeros before two tokens."""

    def __init__(self) -> None:
        self.states: list[StateSpec] = []

    def recurrence(self, state: int, rule: Rule) -> Tensor:
        self.states.append(StateSpec(tuple(rule.state_shape), rule.dtype))
        first = next(iter(rule.tensors.values()))
        before = torch.zeros(1, *rule.state_shape, dtype=rule.dtype, device=first.device)
        return PackedSequences([2], first.device).run(rule, before)[0]

    def conv1d(self, state: int, tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.states.append(StateSpec.convolution(len(weight), weight.shape[1], tokens.dtype))
        before = tokens.new_zeros(1, weight.shape[1] - 1, weight.shape[0])
        return PackedSequences([2], tokens.device).conv1d(tokens, before, weight, bias)[0]


def probe_model(model: PreTrainedModel, layers: ServedLayers) -> ProbeResult:
    """The windows of layers, by their masks, and the states of mixers; ModelError for a model that asks for more, or
    less, than its layers do."""
    AttentionInterface.register(NAME, probe_attention)
    AttentionMaskInterface.register(NAME, requested_pattern)
    return probed_once(model, layers, NAME, lambda: _probed(layers, model))


def _probed(layers: ServedLayers, model: PreTrainedModel) -> ProbeResult:
    states = ProbedStates()
    call = ServedCall(states, {}, None)
    windows = call_served(call, partial(_windows, Probe(layers.attention), model, layers.arguments))
    unused = [mixer for mixer in layers.mixers if mixer.name not in call.used]
    if unused:
        raise ModelError(f"{unused[0].name} is not used in a pass of the model, and an engine serves layers that are")
    return ProbeResult(windows, list(zip(call.used, states.states, strict=True)))


def _windows(probe: Probe, model: PreTrainedModel, arguments: tuple[str, ...]) -> list[int | None]:
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    positions = torch.arange(2, device=tokens.device).unsqueeze(0)
    before, asked = _PROBE.set(probe), ASKED.set(probe_attention)
    try:
        with torch.no_grad():
            if model.config.is_encoder_decoder:  # of which no engine asks for some logits alone
                out, kept = model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False), 2
            else:
                row = dict(zip(arguments, (tokens, positions), strict=False))
                out, kept = model(**row, use_cache=False, logits_to_keep=positions[0, 1:]), 1
    finally:
        _PROBE.reset(before)
        ASKED.reset(asked)
    for module, layer in probe.layers.items():
        calls = probe.calls[module]
        if calls != 1:
            raise ModelError(
                f"{layer.name} attends {calls} times in one pass, and an engine serves layers that do once"
            )
    if out.logits.shape[1] != kept:
        raise ModelError(
            f"{type(model).__name__} gives logits of {out.logits.shape[1]} tokens where logits_to_keep asks for one, "
            "and an engine asks for those of last tokens alone"
        )
    return [layer.window for layer in probe.layers.values()]
