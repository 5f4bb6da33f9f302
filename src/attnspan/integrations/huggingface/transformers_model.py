"""A transformers model with the four methods of `attnspan.engine.ServedModel`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnspan.attention.score import ScoreFunction
from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.model import EmbeddedPrompt, LayerSpec, ModelInfo, PackedBatch, StepAttention
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.adapters import adapters_in_use
from attnspan.integrations.huggingface.embedding import (
    EmbeddingInsert,
    before_decoder,
    call_with_insert,
    decoder_arguments,
    embedded,
    one_prompt,
    tensor_in,
)
from attnspan.integrations.huggingface.fused_kernels import is_available
from attnspan.integrations.huggingface.fused_modules import may_be_fused
from attnspan.integrations.huggingface.generation_config import defaults_of
from attnspan.integrations.huggingface.inline_attention import NO_MASK, position_bias
from attnspan.integrations.huggingface.latents import latent_source
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.linear_products import LinearProducts
from attnspan.integrations.huggingface.lora import AdapterRows, check_adapter, is_lora_layer
from attnspan.integrations.huggingface.mixers import replaceable_methods
from attnspan.integrations.huggingface.paged_attention import ModelCall, call_wants_latents, keep_logits, run_call
from attnspan.integrations.huggingface.positions import call_at_positions
from attnspan.integrations.huggingface.probe import probe_model
from attnspan.integrations.huggingface.served_layers import ServedLayers, head_of, served_layers
from attnspan.integrations.huggingface.serving_binding import (
    WHILE_SERVED,
    ProbeResult,
    attention_over_pages,
    serve_latents,
    update_layers,
)
from attnspan.integrations.huggingface.tensor_parallel import check_tensor_parallel, naming_failures
from attnspan.integrations.huggingface.towers import decoder_of


class TransformersModel:
    """A decoder-only transformers model for one engine; ModelError, by name, for what it has that is not served."""

    def __init__(self, model: PreTrainedModel, stacklevel: int = 1, *, latents: bool = True) -> None:
        layers = served_layers(model)
        device = device_of(model)
        self.model = model
        self._decoder = decoder_of(model)
        _check_takes_tokens(model)
        self._described, self._arguments = layers.described, layers.arguments
        tp_ranks = check_tensor_parallel(model, layers)
        served = layers.attention if latents and not tp_ranks else ()
        sources = (latent_source(layer.module, call_wants_latents) for layer in served)
        # The layers whose pages hold latents. See [Note: known layers] in latents.py.
        self._latents = {each.module: each for each in sources if each and each.is_absorbable and each.agrees()}
        self._score_mods = self._make_score_mods(layers.attention)
        serve_latents(model, self._latents.values())
        with naming_failures(model, tp_ranks):
            probed = self._probed(layers)
        self._calls, self._all_logits = probed.calls, probed.all_logits
        self._update_layers(layers.attention)
        self._mixers = tuple(mixer for mixer, _ in probed.states)
        self._counts_past_tokens = any(layer.temperature is not None for layer in layers.attention)
        self._weights = _first_weights(model)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, Tensor), "embeddings have one row for each token"
        self._info = ModelInfo(
            self._spec_of(self._layers),
            vocabulary=weight.shape[0],
            dtype=next(model.parameters()).dtype,
            device=device,
            end_tokens=end_tokens_of(model),
            max_positions=max_positions_of(model),
            defaults=defaults_of(getattr(model, "generation_config", None), stacklevel + 1),
            states=tuple(spec for _, spec in probed.states),
            tp_ranks=tp_ranks,
        )
        self._extra_arguments = {"attention_mask": NO_MASK} if model.config.model_type == "mpt" else {}
        self._decoder_names = list(inspect.signature(type(self._decoder).forward).parameters)[1:]
        self._products = LinearProducts(model)
        self._position_offset = 0
        if self._all_logits and (head := head_of(model)) is not None:
            weakref.finalize(self, head.register_forward_pre_hook(keep_logits).remove)
        if self._decoder is not model:
            hook = self._decoder.register_forward_pre_hook(before_decoder, with_kwargs=True)
            weakref.finalize(self, hook.remove)
            self._position_offset = self._find_position_offset()

    def info(self) -> ModelInfo:
        """As when the engine was made, except for layers that have changed."""
        layers = served_layers(self.model)
        if layers.described == self._described:
            update_layers(self.model, layers)
            self._update_layers(layers.attention)
            return self._info
        return replace(self._info, layers=self._spec_of(layers.attention), states=())

    def _probed(self, layers: ServedLayers) -> ProbeResult:
        """What a probe of the model finds."""
        return probe_model(self.model, layers)

    def _update_layers(self, layers: list[AttentionLayer]) -> None:
        """The attention layers as they are now, once for each time that they attend in a pass."""
        self._adapters: set[str | None] = set()  # that were checked since the model last changed
        self._layers = [call.layer(layers) for call in self._calls]
        self._order = tuple(layer.module for layer in self._layers)

    def _spec_of(self, layers: Iterable[AttentionLayer]) -> tuple[LayerSpec, ...]:
        """The layers as an engine needs them; those that hand over latents have one key head."""

        def spec(each: AttentionLayer) -> LayerSpec:
            source, more = self._latents.get(each.module), (each.scale, each.window, each.softcap)
            mod = self._score_mods.get(each.module)
            if source is None:
                return LayerSpec(each.kv_heads, each.head_dim, each.value_dim, *more, score_mod=mod, chunk=each.chunk)
            return LayerSpec(1, source.width, source.rank, *more, latent=True, score_mod=mod, chunk=each.chunk)

        return tuple(spec(each) for each in layers)

    def _make_score_mods(self, layers: list[AttentionLayer]) -> Mapping[nn.Module, ScoreFunction]:
        """What changes the scores of layers: one function for all layers of a bias."""
        dtype = next(self.model.parameters()).dtype
        biased = {layer.bias: layer.module for layer in layers if layer.bias is not None}
        by_bias = {bias: position_bias(module, dtype) for bias, module in biased.items()}
        return {layer.module: by_bias[layer.bias] for layer in layers if layer.bias is not None}

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """Call the model on one packed row; it is served for as long as that takes."""
        for name in {name for _, name in batch.adapters} - self._adapters:
            if name is not None:
                self.check_adapter(name)
                self._adapters.add(name)
        batch = batch._replace(positions=batch.positions + self._position_offset) if self._position_offset else batch
        with attention_over_pages(self.model, self):
            kept = batch.logits_to_keep if self._all_logits else None
            rows = AdapterRows(batch) if batch.adapters else None
            order, mixers = self._order, self._mixers
            model_call = ModelCall(attention, order, mixers, self._latents, logits_to_keep=kept, adapters=rows)
            if _is_captured(batch):
                return run_call(model_call, self._products.run, self._run, batch)
            return run_call(model_call, self._run, batch)

    def _run(self, batch: PackedBatch) -> Tensor:
        """The logits of a batch, whose positions and images the model's hooks find while it runs."""
        if self._decoder is self.model:
            return call_at_positions(batch.positions.unsqueeze(0), self._call_model, batch)
        insert = EmbeddingInsert(self._decoder_names, batch)
        return call_with_insert(insert, call_at_positions, batch.positions.unsqueeze(0), self._call_model, batch)

    def _call_model(self, batch: PackedBatch) -> Tensor:
        """Call the model."""
        # Without an attention_mask, transformers would take the packed samples of a model with towers for documents.
        mask = {} if self._decoder is self.model else {"attention_mask": torch.ones_like(batch.tokens).unsqueeze(0)}
        before = {"past_key_values": PastLengths(batch.positions)} if self._counts_past_tokens else {}
        row = dict(zip(self._arguments, (batch.tokens.unsqueeze(0), batch.positions.unsqueeze(0)), strict=False))
        kept = 0 if batch.logits_to_keep is None else batch.logits_to_keep
        out = self.model(**before, **row, **self._extra_arguments, use_cache=False, logits_to_keep=kept, **mask)
        logits: Tensor = out.logits[0]
        return logits

    def embed(self, inputs: Mapping[str, object]) -> EmbeddedPrompt:
        """Run towers on a prompt, and all else that comes before the decoder."""
        if self._decoder is self.model:
            raise EngineError(
                f"prompt must be a text or tokens, got {type(inputs).__name__}: {type(self.model).__name__} takes "
                'tokens alone; of what a tokenizer returns, give its "input_ids"'
            )
        given = one_prompt(inputs, self._info.device)
        plain = {name: given[name] for name in ("input_ids", "attention_mask", "use_cache")}
        tokens: list[int] = tensor_in(given, "input_ids")[0].tolist()
        return embedded(
            tokens, self._decoder_arguments(given), self._decoder_arguments(plain), self._layers, self._position_offset
        )

    def _decoder_arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        with attention_over_pages(self.model, object()):
            return decoder_arguments(self.model, self._decoder, self._decoder_names, given)

    def _find_position_offset(self) -> int:
        """The position that the model gives the first token of a text; ModelError if it does not count on from it."""
        tokens = torch.zeros(1, 3, dtype=torch.int64, device=self._info.device)
        given = self._decoder_arguments({"input_ids": tokens, "use_cache": False})
        if given.get("inputs_embeds") is None:
            raise ModelError(
                f"{type(self.model).__name__} gives its decoder no embeddings, among which those of images would be, "
                "and an engine serves models with towers that do"
            )
        found = tensor_in(given, "position_ids") if "position_ids" in given else torch.arange(3, device=tokens.device)
        if bool((found == torch.arange(3, device=found.device)).all()):
            return 0
        first = int(found.flatten()[0])
        if not bool((found == first + torch.arange(3, device=found.device)).all()):
            raise ModelError(
                f"{type(self.model).__name__} gives the tokens of a text positions {found.tolist()}, and an engine "
                "serves models that count them one by one"
            )
        return first

    def check_adapter(self, name: str) -> None:
        """EngineError for an adapter that a request cannot name."""
        check_adapter(self.model, name)

    def fingerprint(self) -> ModelFingerprint:
        """Of all its modules; peft adapters are part of what ranks compare."""
        methods = partial(_served_methods, fused=is_available(self._info.device))
        return ModelFingerprint(self.model, WHILE_SERVED, adapters_in_use, methods)

    def check_ready(self) -> None:
        """EngineError in training mode, or when the dtype is no longer that of the pages."""
        check_evaluates(self.model)
        dtype = self._info.dtype
        found = next((each.dtype for each in self._weights.values() if each is not None), dtype)
        if found != dtype:
            raise EngineError(f"model is {found}, and its pages are {dtype}; make a new engine")


def _is_captured(batch: PackedBatch) -> bool:
    """Whether it is the batch of a call that a graph captures, or of one that warms it up."""
    return batch.logits_to_keep is None


def _served_methods(module: nn.Module, *, fused: bool) -> tuple[str, ...]:
    """The methods of a module that may be ours while its model is served."""
    forward = is_lora_layer(module) or (fused and may_be_fused(module))
    return ("forward",) if forward else replaceable_methods(module)


def _check_takes_tokens(model: nn.Module) -> None:
    """ModelError for a model that cannot be called with tokens alone."""
    named = inspect.signature(type(model).forward).parameters.values()
    needed = [each.name for each in named if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if set(needed) - {"self", "input_ids"}:
        raise ModelError(
            f"{type(model).__name__} must be given {', '.join(needed[1:])} in every call, and an engine feeds tokens"
        )


class PastLengths:
    """In the place of a cache, for layers that count positions from the number of tokens in it."""

    def __init__(self, positions: Tensor) -> None:
        self.tokens = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int) -> Tensor:
        """The tokens before a packed row, for each of its tokens as if it were the last."""
        return self.tokens

    def get_query_offset(self, layer: int) -> int:
        """0: a mask of a step is asked for as without a cache, and not read."""
        return 0

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """The keys of a step and where they begin."""
        return queries, 0

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Both as they are: pages hold what came before."""
        return key, value


def _first_weights(model: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of the first module that has any: asked in every step, where a walk over all modules costs 5 us.
    Modules that are exchanged are noticed by the fingerprint."""
    return next(
        module._parameters for module in model.modules() if any(x is not None for x in module._parameters.values())
    )


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


def end_tokens_of(model: nn.Module) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def max_positions_of(model: PreTrainedModel) -> int | None:
    """How many positions the model has, if its config has a limit.

    Rotary embeddings whose angles depend on the longest sample of a batch are exact only until they change: up to the
    length that the model was first trained for.
    """
    config = model.config.get_text_config(decoder=True)  # of a model with several, the text decoder's
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    for each in nested:
        if each.get("rope_type") in ("dynamic", "longrope"):
            limits.append(
                each.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or getattr(config, "max_position_embeddings", None)
            )
    found = [limit for limit in limits if limit]
    return min(found) if found else None
