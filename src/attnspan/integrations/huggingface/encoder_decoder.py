"""A transformers encoder-decoder as a `ServedModel`: its decoder runs over pages, its encoder once per request.

`encode` runs the whole model on a prompt and one token. The encoder uses plain SDPA; of the decoder only the keys and
values of cross-attention are kept, (1, H, S, D) for each layer. In a step cross-attention uses those, request by
request, and self-attention runs over pages.

[Note: caches] Layers read the encoder's keys and values from transformers' `EncoderDecoderCache`, or compute them and
store them there. `RecordingCache` records what is stored. `FilledCache` reports that all of it is present: layers then
compute no keys of the encoder, and the attention function supplies those of each request.

[Note: learned biases] The decoder of T5 has a learned bias. Its table is read from the layer at every step, and so
follows weights as other layers do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from attnspan.attention.score import ScoreFunction
from attnspan.engine.model import ModelInfo, PackedBatch, StepAttention
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.biases import COMPUTED, FIRST, ScoreBias, distance_table
from attnspan.integrations.huggingface.inline_attention import inline_attention
from attnspan.integrations.huggingface.layers import AttentionLayer, attention_layers
from attnspan.integrations.huggingface.paged_attention import ModelCall, ModuleAttention, run_call
from attnspan.integrations.huggingface.positions import call_at_positions, counts_by_itself, give_positions
from attnspan.integrations.huggingface.served_layers import ServedLayers
from attnspan.integrations.huggingface.serving_binding import ProbeResult, attention_over_pages
from attnspan.integrations.huggingface.transformers_model import TransformersModel, max_positions_of

OTHER_INPUTS = ("input_features", "pixel_values", "input_values", "bbox")
"""What encoders read that are not of texts."""

Keys = dict[int, tuple[Tensor, Tensor]]
"""What the encoder made of a prompt: keys and values (1, H, S, D), by the number of the decoder's layer."""


class EncoderDecoderModel(TransformersModel):
    """An encoder-decoder for one engine; ModelError, by name, for what it has that is not served."""

    def __init__(self, model: PreTrainedModel, stacklevel: int = 1) -> None:
        other = next((name for name in OTHER_INPUTS if name in inspect.signature(type(model).forward).parameters), None)
        if other is not None:
            raise ModelError(f"{type(model).__name__} has an encoder of {other}, and an engine encodes tokens")
        config = model.generation_config
        start = config.decoder_start_token_id
        start = config.bos_token_id if start is None else start
        if not isinstance(start, int):
            raise ModelError(
                f"{type(model).__name__} must have one decoder_start_token_id in its generation_config, got {start}"
            )
        self._start, self._tables = start, list[tuple[Tensor, nn.Module, int]]()
        self._encoder = set(model.get_encoder().modules())
        _check_plain(attention_layers(model), self._encoder)
        _count_positions(model, self._encoder)
        super().__init__(model, stacklevel + 1, latents=False)
        heads = next(layer for layer in attention_layers(model) if layer.cross)
        weight = next(heads.module.parameters())
        self._no_keys = weight.new_zeros(1, heads.kv_heads, 0, heads.head_dim)

    def info(self) -> ModelInfo:
        """As of any model, and what the decoder begins with."""
        return replace(super().info(), decoder_start=self._start, max_prompt=max_positions_of(self.model))

    def encode(self, tokens: Tensor) -> Keys:
        """The keys and values of a prompt, for every cross-attention."""
        keys: Keys = {}
        start = tokens.new_full((1, 1), self._start)
        given = {"input_ids": tokens.unsqueeze(0), "decoder_input_ids": start, "past_key_values": RecordingCache(keys)}
        call = partial(self.model, **given, use_cache=False)
        with attention_over_pages(self.model, self):
            run_call(_call_of(Encoding(self._encoder)), call_at_positions, torch.zeros_like(start), call)
        return keys

    def _call_model(self, batch: PackedBatch) -> Tensor:
        out = self.model(
            encoder_outputs=(self._no_keys.new_zeros(1, 1, 1),),
            decoder_input_ids=batch.tokens.unsqueeze(0),
            past_key_values=FilledCache(self._no_keys),
            use_cache=False,
        )
        logits: Tensor = out.logits[0] if batch.logits_to_keep is None else out.logits[0, batch.logits_to_keep]
        return logits

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """Call the decoder on one packed row; the model is served for as long as that takes."""
        for table, module, reach in self._tables:  # see [Note: learned biases]
            table.copy_(distance_table(getattr(module, COMPUTED), reach, table.device))
        with attention_over_pages(self.model, self):
            model_call, positions = _call_of(Decoding(attention, batch.encoded)), batch.positions.unsqueeze(0)
            return run_call(model_call, call_at_positions, positions, self._call_model, batch)

    def check_adapter(self, name: str) -> None:
        """Refused: the encoder computed a prompt with the adapters that are set."""
        raise EngineError(f"adapter={name!r}: an encoder-decoder is served as it is set; call model.set_adapter(...)")

    def _probed(self, layers: ServedLayers) -> ProbeResult:
        every = attention_layers(self.model)
        probed = super()._probed(replace(layers, attention=every))
        _check_plain([call.layer(every) for call in probed.calls], self._encoder)
        places = {layer.module: place for place, layer in enumerate(layers.attention)}
        decoding = [call for call in probed.calls if every[call.place].module in places]
        own = [call._replace(place=places[every[call.place].module]) for call in decoding]
        indices = [layers.attention[call.place].index for call in own]
        if indices != list(range(len(layers.attention))):
            raise ModelError(
                f"the layers of a decoder must attend once in a pass, by their index in a cache, got {indices}"
            )
        return probed._replace(calls=own)

    def _make_score_mods(self, layers: list[AttentionLayer]) -> Mapping[nn.Module, ScoreFunction]:
        """The learned biases; a layer that computes none has that of the last one before it that does."""
        found: dict[nn.Module, ScoreFunction] = {}
        latest: ScoreFunction | None = None
        for layer in layers:
            if layer.bias is not None and getattr(layer.module, FIRST):
                latest = self._learned(layer.bias, layer.module)
            if layer.bias is not None and latest is not None:
                found[layer.module] = latest
        return found

    def _learned(self, bias: ScoreBias, module: nn.Module) -> ScoreFunction:
        with torch.no_grad(), torch.inference_mode(False):
            table = distance_table(getattr(module, COMPUTED), bias.reach, next(module.parameters()).device).clone()
        self._tables.append((table, module, bias.reach))

        def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[h, (kv_idx - q_idx).clamp(-bias.reach, bias.reach) + bias.reach].to(score.dtype)

        return biased


def _call_of(modules: ModuleAttention) -> ModelCall:
    """A call in which modules attend as these say."""
    return ModelCall(StepAttention(), (), (), modules=modules)


def _check_plain(layers: Iterable[AttentionLayer], encoder: set[nn.Module]) -> None:
    """Refuse attention of an encoder, or to it, that is more than that of all tokens to all, and sinks of a decoder."""
    for layer in layers:
        decodes = not layer.cross and layer.module not in encoder
        for wrong, what in (
            (
                layer.cross and inline_attention(layer.module) is not None,
                "cross-attention that it writes out by itself",
            ),
            (layer.sinks, "sinks"),
            (layer.module in encoder and layer.causal, "attention that does not look ahead"),
            (layer.window is not None and not decodes, "a window"),
            (layer.softcap is not None and not decodes, "a soft-cap"),
        ):
            if wrong:
                raise ModelError(f"{layer.name} has {what}; an engine serves encoders whose tokens all see each other")


# ---- positions -------------------------------------------------------------------------------------------------------


def _count_positions(model: PreTrainedModel, encoder: set[nn.Module]) -> None:
    """Let the decoder's embedding take the positions of an engine's step; ModelError if they come otherwise."""
    counting = [module for module in model.modules() if counts_by_itself(module) and module not in encoder]
    biased = all(layer.bias for layer in attention_layers(model) if not layer.cross and layer.module not in encoder)
    if not counting and not biased:
        raise ModelError(
            f"{type(model).__name__} counts positions of its decoder by itself, in a way that an engine does not serve"
        )
    give_positions(counting)


# ---- caches ----------------------------------------------------------------------------------------------------------


class _PassThroughCache(Cache):
    """A cache that keeps nothing: keys are in pages."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def is_sliding(self) -> list[bool]:
        """Asked by mask functions."""
        return []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: object, **others: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _DictCache(_PassThroughCache):
    """One that keeps keys and values in a dict."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self.keys = keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: object, **others: object
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx] = key_states, value_states
        return key_states, value_states


class RecordingCache(EncoderDecoderCache):
    """See [Note: caches]."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(_PassThroughCache(), _DictCache(keys))


class _AnyLayer:
    """The keys and values of every layer, which are not looked at."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = self.values = keys

    def __getitem__(self, layer: int) -> _AnyLayer:
        return self

    def get(self, layer: int) -> bool:
        """Whether a layer's keys are there."""
        return True


class FilledCache(EncoderDecoderCache):
    """See [Note: caches]."""

    def __init__(self, no_keys: Tensor) -> None:
        super().__init__(_PassThroughCache(), _PassThroughCache())
        vars(self)["is_updated"] = vars(self.cross_attention_cache)["layers"] = _AnyLayer(no_keys)


# ---- attention -------------------------------------------------------------------------------------------------------


class Encoding(ModuleAttention):
    """Attention while a prompt is encoded: all tokens of the encoder see each other, and the decoder's see nothing."""

    def __init__(self, encoder: set[nn.Module]) -> None:
        self.encoder = encoder

    def of(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None
    ) -> Tensor:
        if module not in self.encoder:
            return torch.zeros_like(query[..., : value.shape[-1]])
        return _plain(query, key, value, scale, bias)


class Decoding(ModuleAttention):
    """Attention of a step of the decoder: over pages, and over the keys of each sequence's prompt."""

    def __init__(self, paged: StepAttention, encoded: Sequence[tuple[int, object]]) -> None:
        self.paged, self.encoded = paged, [(count, _made(keys)) for count, keys in encoded]

    def of(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None
    ) -> Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int), "its place in a cache"
        if key.shape[2]:
            row = (each[0].transpose(0, 1) for each in (query, key, value))
            return self.paged.attend(layer, *row).transpose(0, 1).unsqueeze(0)
        parts = query.split([count for count, _ in self.encoded], dim=2)
        keys = (each[layer] for _, each in self.encoded)
        outs = [_plain(part, *each, scale) for part, each in zip(parts, keys, strict=True)]
        return torch.cat(outs, dim=2)


def _made(keys: object) -> Keys:
    assert isinstance(keys, dict), "an engine keeps what encode returned"
    return keys


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None = None) -> Tensor:
    """Attention of all to all, (1, H, S, Dv)."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
