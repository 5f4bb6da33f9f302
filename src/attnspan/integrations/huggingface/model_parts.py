"""The parts of a model that is enabled, read once; unsupported parts are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from attnspan.integrations.huggingface.adapters import adapted, check_adapters
from attnspan.integrations.huggingface.checking import check_can_be_enabled, check_not_enabled
from attnspan.integrations.huggingface.layers import WITHOUT_CACHE, AttentionLayer, attention_layers, split_idle
from attnspan.integrations.huggingface.mixers import RecurrentMixer, recurrent_mixers
from attnspan.integrations.huggingface.towers import check_merges_before, decoder_of, modules_outside, towers_of


@dataclass(frozen=True, eq=False)
class ModelParts:
    """What `enable` binds, and what it leaves as it is. `idle` is cross-attention in a decoder without its encoder."""

    called: nn.Module  # the model, or the `PeftModel` around it
    model: PreTrainedModel
    decoder: PreTrainedModel  # whose tokens are sharded: the model, or of one with towers its decoder
    encoder: set[nn.Module]  # the modules of the first of two sequences
    layers: tuple[AttentionLayer, ...]
    idle: tuple[AttentionLayer, ...]
    mixers: tuple[RecurrentMixer, ...]
    towers: Mapping[str, nn.Module]

    @classmethod
    def of(cls, called: nn.Module) -> ModelParts:
        """The parts of a model, or of the one in a `PeftModel`."""
        model = adapted(called)
        check_adapters(called)
        check_not_enabled(model)
        decoder = decoder_of(model)
        outside = modules_outside(model, decoder)
        mixers = recurrent_mixers(model, outside)
        mixing = {mixer.module for mixer in mixers}
        layers, idle = split_idle(model, attention_layers(model, mixing, outside, WITHOUT_CACHE))
        check_can_be_enabled(model, decoder, idle, mixing)
        check_merges_before(model, decoder)
        towers = towers_of(model, decoder)
        first = model.get_encoder() if model.config.is_encoder_decoder else model
        encoder = set() if first is model else set(first.modules())
        return cls(called, model, decoder, encoder, tuple(layers), tuple(idle), tuple(mixers), towers)
