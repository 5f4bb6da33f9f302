"""What an engine needs of a model: four methods, and the data that they speak in.

    info()                   its layers, vocabulary, end tokens and positions, as data
    step(batch, attention)   one packed step: tokens of many sequences in one row -> logits
    fingerprint()            what notices that the model has changed (fingerprint.py)
    check_ready()            why it cannot compute now, if it cannot

Any object with these methods can be served. A plain PyTorch model computes keys and values as usual and leaves
attention to the engine, which keeps them in pages::

    def step(self, batch, attention):
        x = self.embed(batch.tokens) + self.positions(batch.positions)
        for number, layer in enumerate(self.layers):
            query, key, value = layer.project(x)  # (T, H, D), (T, Hk, D), (T, Hk, D)
            x = x + layer.out(attention.attend(number, query, key, value).flatten(1))
        return self.head(x if batch.keep is None else x[batch.keep])

examples/16_custom_model.py is a whole one; attnspan.integrations.huggingface serves transformers models.

Shapes: T tokens of the step, H query heads, Hk key heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from attnspan.engine.fingerprint import ModelFingerprint


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, all of it causal. `scale` multiplies scores, None for 1 / sqrt(head_dim).

    `window` w lets query q see keys k with q - k < w; `softcap` c makes scores c * tanh(score / c).

    >>> LayerSpec(kv_heads=2, head_dim=64).scale
    0.125
    """

    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model before it runs. `max_positions` None: it has no last position."""

    layers: tuple[LayerSpec, ...]
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    end_tokens: frozenset[int] = frozenset()
    max_positions: int | None = None


class PackedBatch(NamedTuple):
    """The new tokens of many sequences, one after another. `keep` are the rows whose logits are wanted; None: all."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, each in its own sequence
    keep: Tensor | None = None  # (rows,) int64


class StepAttention:
    """Attention for one step of a model. `calls` counts the layers that have attended."""

    calls = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Keep the new keys and values, and attend over all of each sequence. (T, H, D), (T, Hk, D) -> (T, H, Dv)."""
        self.calls += 1
        return self._attend(layer, query, key, value, sinks)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        raise NotImplementedError


@runtime_checkable
class ServedModel(Protocol):
    """A model that an engine can serve."""

    def info(self) -> ModelInfo:
        """Its layers and sizes, as they are now."""

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """The logits (rows, V) of a packed batch. Every layer calls `attention.attend` once, by its number."""

    def fingerprint(self) -> ModelFingerprint:
        """What notices that the model has changed: `ModelFingerprint(module)` for an nn.Module."""

    def check_ready(self) -> None:
        """Raise EngineError if the model cannot compute now, such as in training mode."""
