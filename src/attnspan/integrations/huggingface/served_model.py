"""A transformers model as an engine sees it: the four methods of `attnspan.engine.ServedModel`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.model import LayerSpec, ModelInfo, PackedBatch, StepAttention
from attnspan.errors import EngineError
from attnspan.integrations.huggingface.adapters import adapters_in_use
from attnspan.integrations.huggingface.latents import LatentSource, latent_source
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.mixers import may_be_replaced
from attnspan.integrations.huggingface.probe import probe_model
from attnspan.integrations.huggingface.serving import (
    WHILE_SERVED,
    ServedCall,
    call_served,
    serve_latents,
    served,
    served_layers,
    take_mixers,
    wants_latents,
)

UNUSED = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "begin_suppress_tokens": None,
    "bad_words_ids": None, "sequence_bias": None, "min_length": 0, "min_new_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "num_beams": 1, "guidance_scale": 1.0,
    "stop_strings": None,
}  # fmt: skip
"""Options of a generation_config that change even greedy tokens and that an engine ignores, with neutral values."""


class TransformersModel:
    """A decoder-only transformers model for one engine; ModelError, by name, for what it has that is not served."""

    def __init__(self, model: PreTrainedModel, stacklevel: int = 1, *, latents: bool = True) -> None:
        layers = served_layers(model)
        device = device_of(model)
        self.model = model
        self._described, self._numbers, self._arguments = layers.described, layers.numbers, layers.arguments
        self._latents = _latents_of(layers.attention) if latents else {}
        serve_latents(model, self._latents.values())
        windows, states = probe_model(model, layers)
        self._mixers = tuple(mixer for mixer, _ in states)
        attention = [replace(layer, window=window) for layer, window in zip(layers.attention, windows, strict=True)]
        self._weights = _first_weights(model)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, Tensor), "embeddings have one row for each token"
        self._info = ModelInfo(
            layer_specs(attention, self._latents),
            vocabulary=weight.shape[0],
            dtype=next(model.parameters()).dtype,
            device=device,
            end_tokens=end_tokens_of(model),
            max_positions=positions_of(model),
            states=tuple(spec for _, spec in states),
        )
        warn_of_unused(model, stacklevel + 1)

    def info(self) -> ModelInfo:
        """As when the engine was made, except for layers that have changed."""
        layers = served_layers(self.model)
        if layers.described == self._described:
            take_mixers(self.model, layers.mixers)
            return self._info
        return replace(self._info, layers=layer_specs(layers.attention, self._latents), states=())

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """Call the model on one packed row; it is served for as long as that takes."""
        with served(self.model, self):
            call = ServedCall(attention, self._numbers, self._mixers, self._latents)
            return call_served(call, partial(self._logits, batch))

    def _logits(self, batch: PackedBatch) -> Tensor:
        row = dict(zip(self._arguments, (batch.tokens.unsqueeze(0), batch.positions.unsqueeze(0)), strict=False))
        out = self.model(**row, use_cache=False, logits_to_keep=0 if batch.keep is None else batch.keep)
        logits: Tensor = out.logits[0]
        return logits

    def fingerprint(self) -> ModelFingerprint:
        """Of all its modules; peft adapters are part of what ranks compare."""
        return ModelFingerprint(self.model, WHILE_SERVED, adapters_in_use, may_be_replaced)

    def check_ready(self) -> None:
        """EngineError in training mode, or when the dtype is no longer that of the pages."""
        check_evaluates(self.model)
        dtype = self._info.dtype
        found = next((each.dtype for each in self._weights.values() if each is not None), dtype)
        if found != dtype:
            raise EngineError(f"model is {found}, and its pages are {dtype}; make a new engine")


def _first_weights(model: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of the first module that has any: asked in every step, where a walk over all modules costs 5 us.
    Modules that are exchanged are noticed by the fingerprint."""
    return next(
        module._parameters for module in model.modules() if any(x is not None for x in module._parameters.values())
    )


def layer_specs(layers: Iterable[AttentionLayer], latents: Mapping[nn.Module, LatentSource]) -> tuple[LayerSpec, ...]:
    """The layers as an engine needs them; those that hand over latents have one key head."""

    def spec(each: AttentionLayer) -> LayerSpec:
        source, more = latents.get(each.module), (each.scale, each.window, each.softcap)
        if source is None:
            return LayerSpec(each.kv_heads, each.head_dim, each.value_dim, *more)
        return LayerSpec(1, source.width, source.rank, *more, latent=True)

    return tuple(spec(each) for each in layers)


def _latents_of(layers: Iterable[AttentionLayer]) -> dict[nn.Module, LatentSource]:
    """The layers whose pages hold latents. See [Note: known layers] in latents.py."""
    sources = (latent_source(layer.module, wants_latents) for layer in layers)
    return {each.module: each for each in sources if each is not None and each.is_absorbable and each.agrees()}


def check_evaluates(model: nn.Module) -> None:
    """EngineError in training mode."""
    if model.training:
        raise EngineError("model is in training mode, in which dropout may change its tokens; call model.eval()")


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model that is ready to generate."""
    check_evaluates(model)
    first, *others = dict.fromkeys(parameter.device for parameter in model.parameters())
    if others:
        raise EngineError(f"model must be on one device, got parameters on {first} and {', '.join(map(str, others))}")
    return first


def warn_of_unused(model: nn.Module, stacklevel: int) -> None:
    """Warn of options in a model's generation_config that change even greedy tokens and that an engine ignores."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in UNUSED}
    unused = [f"{name}={value}" for name, value in found.items() if value not in (None, UNUSED[name])]
    if unused:
        warnings.warn(
            f"an engine ignores these options of generation_config: {', '.join(unused)}; tokens will differ from "
            "those of model.generate()",
            stacklevel=stacklevel + 1,
        )


def end_tokens_of(model: nn.Module) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def positions_of(model: PreTrainedModel) -> int | None:
    """How many positions the model has, if its config has a limit.

    Rotary embeddings whose angles depend on the longest sample of a batch are exact only until they change: up to the
    length that the model was first trained for.
    """
    config = model.config.get_text_config(decoder=True)  # of a model with several, the text decoder's
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    limits = [getattr(config, "max_position_embeddings", None)]
    for each in nested:
        if each.get("rope_type") in ("dynamic", "longrope"):
            limits.append(
                each.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or getattr(config, "max_position_embeddings", None)
            )
    found = [limit for limit in limits if limit]
    return min(found) if found else None
