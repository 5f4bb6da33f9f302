"""A transformers model as an engine sees it: the four methods of `attnspan.engine.ServedModel`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.model import ModelInfo, PackedBatch, StepAttention
from attnspan.integrations.huggingface.adapters import adapters_in_use
from attnspan.integrations.huggingface.model_info import (
    check_dtype,
    check_evaluates,
    device_of,
    layer_specs,
    model_info,
    warn_of_unused,
)
from attnspan.integrations.huggingface.probe import probe_model
from attnspan.integrations.huggingface.serving import WHILE_SERVED, attending, served, served_layers


class TransformersModel:
    """A decoder-only transformers model for one engine; ModelError, by name, for what it has that is not served."""

    def __init__(self, model: PreTrainedModel, stacklevel: int = 1) -> None:
        layers = served_layers(model)
        device_of(model)
        self.model = model
        self._described = [str(layer) for layer in layers]
        self._info = model_info(model, probe_model(model, layers))
        warn_of_unused(model, stacklevel + 1)

    def info(self) -> ModelInfo:
        """As when the engine was made, except for layers that are others by now."""
        layers = served_layers(self.model)
        if [str(layer) for layer in layers] == self._described:
            return self._info
        return replace(self._info, layers=layer_specs(layers))

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """Call the model on one packed row; it is served for as long as that takes."""
        with served(self.model, self):
            return attending(attention, partial(self._logits, batch))

    def _logits(self, batch: PackedBatch) -> Tensor:
        out = self.model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if batch.keep is None else batch.keep,
        )
        logits: Tensor = out.logits[0]
        return logits

    def fingerprint(self) -> ModelFingerprint:
        """Of all its modules; peft adapters are part of what ranks compare."""
        return ModelFingerprint(self.model, ignored=WHILE_SERVED, details=adapters_in_use)

    def check_ready(self) -> None:
        """EngineError in training mode, or when the dtype is no longer that of the pages."""
        check_evaluates(self.model)
        check_dtype(self.model, self._info.dtype)
