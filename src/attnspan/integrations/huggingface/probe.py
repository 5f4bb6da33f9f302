"""Probes a model before it is served, by running it on two tokens with an attention that computes nothing.

The source of a model's layers says what attention they need (layers.py); only a run shows what the model does. A mask
may have numbers of its own; a layer may attend twice, or not at all. An engine would then silently generate other
tokens. So the probe compares each call with its layer, and refuses a model that differs, before any page is written. A
window that is only in a mask, and in no layer, is found here and becomes the layer's.

Pages belong to calls: a layer that attends several times in a pass, such as one shared between depths, has pages for
each time. The probe records the order of calls, which every step compares (`ModelCall.next_layer`).

Recurrent mixers run unchanged, from states of zeros. The probe records which states they use, and in which order.

It assumes that other numbers of tokens behave like two.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from attnspan.engine.model import StateSpec, StepAttention
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.attention import check_arguments
from attnspan.integrations.huggingface.binding import configs_of
from attnspan.integrations.huggingface.checking import check_output
from attnspan.integrations.huggingface.inline_attention import CURRENT_ATTENTION, dispatch_forward
from attnspan.integrations.huggingface.interface_calls import calls_of
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.masking import LayerMask, given_masks, requested_mask
from attnspan.integrations.huggingface.paged_attention import ModelCall, called_while_served, run_call
from attnspan.integrations.huggingface.served_layers import ServedLayers, head_of
from attnspan.integrations.huggingface.serving_binding import ProbedCall, ProbeResult, probed_once
from attnspan.integrations.huggingface.tensor_parallel import on_this_rank, tensor_parallel_mesh
from attnspan.integrations.huggingface.towers import OUTPUTS, decoder_of, layer_masks_of
from attnspan.recurrence import PackedSequences, Rule

NAME = "attnspan_probe"

TYPES = ("mm_token_type_ids",)
"""Arguments that tell text, 0, from images: some models must have them in training."""


class Probe:
    """The layers as they were found so far, and the order in which they attended."""

    def __init__(self, layers: Iterable[AttentionLayer], adopts: bool, given: bool = False) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.adopts = adopts  # a window that is in a mask alone
        self.given = given  # masks, by a model whose decoder this is: see layer_masks_of
        self.order: list[nn.Module] = []
        self.all_logits = False

    @property
    def calls(self) -> Counter[nn.Module]:
        """How often each attended."""
        return Counter(self.order)


_PROBE: ContextVar[Probe | None] = ContextVar("the probe under way", default=None)


def probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **arguments: object
) -> tuple[Tensor, None]:
    """The attention function: compares, and returns zeros (B, S, H, Dv)."""
    probe = _PROBE.get()
    if probe is None:
        raise called_while_served(module)
    if module not in probe.layers:
        raise ModelError(f"{type(module).__name__} attends to another sequence, and the model is a decoder without one")
    layer, window = probe.layers[module], getattr(attention_mask, "window", None)
    if probe.adopts and layer.window is None and window is not None:
        probe.layers[module] = layer = replace(layer, window=window)
        arguments["sliding_window"] = window
    own = LayerMask.of(layer)
    wanted = layer_masks_of(attention_mask, [own]).get(own, own) if probe.given else own
    check_arguments(layer, attention_mask, arguments | {"s_aux": arguments.get("s_aux") is not None}, wanted)
    if tensor_parallel_mesh(module) is not None:
        probe.layers[module] = on_this_rank(layer, query.shape[1], key.shape[1], not probe.adopts)
    probe.order.append(module)
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
    """The order of layers, their windows, by their masks, and the states of mixers; ModelError for a model that asks
    for more, or less, than its layers do."""
    AttentionInterface.register(NAME, probe_attention)
    AttentionMaskInterface.register(NAME, requested_mask)
    return probed_once(model, layers, NAME, lambda: _probed(layers, model))


def _probed(layers: ServedLayers, model: PreTrainedModel) -> ProbeResult:
    states = ProbedStates()
    call = ModelCall(states, (), None)
    probe = Probe(layers.attention, adopts=True)
    calls = run_call(call, _calls, probe, model, layers.arguments)
    unused = [mixer for mixer in layers.mixers if mixer.name not in call.used]
    if unused:
        raise ModelError(f"{unused[0].name} is not used in a pass of the model, and an engine serves layers that are")
    return ProbeResult(calls, list(zip(call.used, states.states, strict=True)), probe.all_logits)


def _calls(probe: Probe, model: PreTrainedModel, arguments: tuple[str, ...]) -> list[ProbedCall]:
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    positions = torch.arange(2, device=tokens.device).unsqueeze(0)
    given: dict[str, Tensor] = dict(zip(arguments, (tokens, positions), strict=False))
    if model.config.is_encoder_decoder:  # of which no engine asks for some logits alone
        given, kept = {"input_ids": tokens, "decoder_input_ids": tokens}, 2
    else:
        given, kept = given | {"logits_to_keep": positions[0, 1:]}, 1
    at_head: list[int] = []
    head = head_of(model)
    assert head is not None, "looked for before"
    noting = head.register_forward_pre_hook(lambda _, args: at_head.append(args[0].shape[1]) if args else None)
    try:
        out = run_probe(probe, model, **given)
    finally:
        noting.remove()
    idle = next((layer for module, layer in probe.layers.items() if module not in probe.order), None)
    if idle is not None:
        raise ModelError(f"{idle.name} attends in no pass of the model, and an engine serves layers that do")
    logits = out["logits"]
    probe.all_logits = logits.shape[1] != kept
    if probe.all_logits and at_head != [2]:
        raise ModelError(
            f"{type(model).__name__} gives logits of {logits.shape[1]} tokens where logits_to_keep asks for one, "
            "and an engine asks for those of last tokens alone"
        )
    _check_cache(model, probe.layers.values())
    places = {module: place for place, module in enumerate(probe.layers)}
    found = ((places[module], probe.layers[module]) for module in probe.order)
    return [ProbedCall(place, layer.window, layer.kv_heads) for place, layer in found]


def probe_pass(model: PreTrainedModel, layers: Iterable[AttentionLayer], **beside: Tensor) -> None:
    """Refuse a model whose pass over two tokens is not one that can be trained; without numbers, as it may be meta.

    Some models must be given more `beside` tokens.
    """
    AttentionInterface.register(NAME, probe_attention)
    AttentionMaskInterface.register(NAME, requested_mask)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    decoder = decoder_of(model)
    probe, inputs = Probe(layers, adopts=False, given=decoder is not model), {"input_ids": tokens} | beside
    inputs |= {name: tokens for name in TYPES if name in inspect.signature(type(model).forward).parameters}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    for config in configs_of(decoder):
        config._attn_implementation = NAME
    for layer in layers:
        dispatch_forward(layer.module)
    out = run_probe(probe, model, **inputs)
    _check_calls(probe)
    check_output(out, () if decoder is model else OUTPUTS, {2})


def _check_cache(model: PreTrainedModel, layers: Iterable[AttentionLayer]) -> None:
    """Refuse a layer for which transformers' cache keeps a window, and its mask has none: `generate` would differ."""
    if model.config.is_encoder_decoder:
        return
    kept = DynamicCache(config=model.config).layers
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for layer in layers:
        index = layer.index
        window = None if index is None or index >= len(kept) else getattr(kept[index], "sliding_window", None)
        if window is not None and layer.window is None and layer.chunk is None and (longest or window + 1) > window:
            raise ModelError(
                f"{layer.name} sees all keys, and the cache of {type(model).__name__} keeps a window of {window}; an "
                "engine cannot say which is meant"
            )


def run_probe(probe: Probe, model: PreTrainedModel, **inputs: Tensor) -> ModelOutput:
    """Call a model whose layers ask for the attention of this name."""
    before, attention, decoder = _PROBE.set(probe), CURRENT_ATTENTION.set(probe_attention), decoder_of(model)
    hooks = [] if decoder is model else [decoder.register_forward_pre_hook(_give_masks, with_kwargs=True)]
    try:
        with torch.no_grad():
            out: ModelOutput = model(**inputs, use_cache=False)
            return out
    finally:
        for hook in hooks:
            hook.remove()
        _PROBE.reset(before)
        CURRENT_ATTENTION.reset(attention)


def _give_masks(
    decoder: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The hook before a decoder: its masks are those that its model asked for, as in training (enabling.py)."""
    return args, kwargs | {name: given_masks(mask) for name, mask in kwargs.items() if name == "attention_mask"}


def _check_calls(probe: Probe) -> None:
    """Refuse a layer that did not attend once, or as often as its class asks for attention."""
    for module, layer in probe.layers.items():
        calls = probe.calls[module]
        if calls not in (layer.times, layer.times * len(calls_of(module))):
            raise ModelError(
                f"{layer.name} attends {calls} times in one pass, and layers that run several times in a pass, or in "
                "none, are not served"
            )
