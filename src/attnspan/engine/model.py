"""The protocol of models that an engine can serve: four methods, and their data types.

    info()                   its layers, vocabulary, end tokens and positions, as data
    step(batch, attention)   one packed step: tokens of many sequences in one row -> logits
    fingerprint()            detects changes of the model (fingerprint.py)
    check_ready()            raises if the model cannot compute now

Any object with these methods can be served. A plain PyTorch model computes keys and values as usual and passes them to
the engine's attention, which keeps them in pages::

    def step(self, batch, attention):
        x = self.embed(batch.tokens) + self.positions(batch.positions)
        for number, layer in enumerate(self.layers):
            query, key, value = layer.project(x)  # (T, H, D), (T, Hk, D), (T, Hk, D)
            x = x + layer.out(attention.attend(number, query, key, value).flatten(1))
        return self.head(x if batch.logits_to_keep is None else x[batch.logits_to_keep])

The engine keeps the states of recurrent layers too. `ModelInfo.states` lists them, and each is used once in a step, by
its index::

    mixed = attention.conv1d(0, x @ w_in, self.filters)  # (T, C), (C, width)
    x = x + attention.recurrence(1, Lightning(query, key, value, decay)).flatten(2)[0]  # (1, T, H, D) each

examples/16_custom_model.py is a complete model; attnspan.integrations.huggingface serves transformers models.

[Note: latents] A layer of multi-head latent attention (MLA) computes keys and values from a latent by one matrix. Pages
keep the latent, ``LayerSpec(kv_heads=1, head_dim=R + P, value_dim=R, latent=True)``, and `attend_latent` attends over
it: since ``q @ (W c) == (W.T @ q) @ c``, the key matrix is absorbed into queries, and the value matrix is applied to
results (`LatentHeads`). A prompt that ranks compute together is expanded instead.

Shapes: T tokens of the step, H query heads, Hk key heads, D head dim, V vocabulary, C channels; a latent has R numbers
that are multiplied and P that are part of keys unchanged.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from attnspan.attention.score import ScoreFunction
from attnspan.dtypes import dtype_name
from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.params import SamplingParams
from attnspan.errors import ModelError
from attnspan.masks import TokenGroups
from attnspan.recurrence import Rule


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, all of it causal. `scale` multiplies scores, None for 1 / sqrt(head_dim).

    `window` w lets query q see keys k with q - k < w, `chunk` c those of its own chunk of c tokens; `softcap` c makes
    scores c * tanh(score / c). `score_mod` is any other change of scores: FlexAttention's, of positions in a sequence
    (batch rows mean nothing). Layers that have the same one share what is made of it. It may read tensors, as they are
    when it is called.

    >>> LayerSpec(kv_heads=2, head_dim=64).scale
    0.125
    """

    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    latent: bool = False  # keys are latents, whose first value_dim numbers are the values: see [Note: latents]
    score_mod: ScoreFunction | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """How many keys a query may see, its own and those just before it; None: all."""
        return self.window if self.chunk is None else min(self.chunk, self.window or self.chunk)

    def __post_init__(self) -> None:
        if self.softcap is not None and self.score_mod is not None:
            raise ModelError(
                "softcap and score_mod are given together; leave softcap out, and let score_mod cap scores"
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrence or a convolution keeps of each sequence: the `state_shape` of its rule, or its last tokens.

    >>> StateSpec.convolution(channels=64, width=4).shape
    (3, 64)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def convolution(cls, channels: int, width: int, dtype: torch.dtype = torch.float32) -> StateSpec:
        """Of a causal convolution of (channels, width) weights, over `width` tokens, its own among them."""
        return cls((width - 1, channels), dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model before it runs. `max_positions` None: it has no last position. `defaults` are taken
    where a request's params leave something to the model.

    A model with a `decoder_start` has an encoder, which reads prompts of at most `max_prompt` tokens; what is generated
    begins after that token.

    A tensor parallel model names its `tp_ranks`: the global ranks, in order, that compute it together. Each of them
    has all logits, and layers with the key heads of its own.
    """

    layers: tuple[LayerSpec, ...]
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    end_tokens: frozenset[int] = frozenset()
    max_positions: int | None = None
    defaults: SamplingParams = SamplingParams()  # noqa: RUF009  # frozen
    decoder_start: int | None = None
    max_prompt: int | None = None
    states: tuple[StateSpec, ...] = ()
    tp_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedPrompt:
    """A prompt that is more than its tokens, such as one with images; made by the model, which alone reads `content`.

    `content_ids` stand for the tokens in the prefix cache: numbers that are equal only where all that the model
    computes with is equal, up to there. `content` None: there is nothing but tokens. Tokens of one of the `groups` see
    each other in the `grouped_layers`; those between the first of a group and its last are computed in one step.
    """

    tokens: list[int]
    content_ids: array[int]
    content: object
    groups: TokenGroups | None = None
    grouped_layers: frozenset[int] = frozenset()

    @property
    def atomic_spans(self) -> list[tuple[int, int]]:
        """[start, stop) that are computed in one step."""
        return [] if self.groups is None else self.groups.spans


class PromptRows(NamedTuple):
    """Tokens [start, stop) of a packed batch: those of a sequence that begins with an `EmbeddedPrompt`, from its token
    number `first` on."""

    start: int
    stop: int
    first: int
    prompt: EmbeddedPrompt


class PackedBatch(NamedTuple):
    """The new tokens of many sequences, one after another: T tokens, one row of the model.

    `logits_to_keep` are the indices of the tokens whose logits are wanted; None: all. `encoded` and `adapters` have a
    pair for each sequence: its number of tokens here, and what `encode` made of its prompt (for a model with an
    encoder), or the adapter that its request names. `adapters` is () if no request names one.
    """

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, each in its own sequence
    logits_to_keep: Tensor | None = None  # (rows,) int64
    encoded: Sequence[tuple[int, object]] = ()
    embedded: tuple[PromptRows, ...] = ()
    adapters: Sequence[tuple[int, str | None]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The matrices that make keys of N + P numbers and values of latents (..., R + P): key (H, N, R), value (H, Dv, R).

    >>> heads = LatentHeads(torch.ones(2, 3, 4), torch.ones(2, 5, 4))
    >>> key, value = heads.expand(torch.ones(1, 7, 4 + 6))
    >>> tuple(key.shape), tuple(value.shape), tuple(heads.absorb(torch.ones(7, 2, 3 + 6)).shape)
    ((1, 2, 7, 9), (1, 2, 7, 5), (7, 2, 10))
    """

    key: Tensor
    value: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """Queries (T, H, N + P) as they attend over latents, (T, H, R + P)."""
        own, rest = query.split([self.key.shape[1], query.shape[2] - self.key.shape[1]], dim=-1)
        return torch.cat([torch.einsum("thn,hnr->thr", own, self.key), rest], dim=-1)

    def results(self, out: Tensor) -> Tensor:
        """What was summed of latents (T, H, R), as sums of values (T, H, Dv)."""
        return torch.einsum("thr,hvr->thv", out, self.value)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, T, R + P) as keys (B, H, T, N + P) and values (B, H, T, Dv)."""
        low, rest = latent.split([self.key.shape[2], latent.shape[2] - self.key.shape[2]], dim=-1)
        key, value = (torch.einsum("btr,hnr->bhtn", low, matrix) for matrix in (self.key, self.value))
        return torch.cat([key, rest.unsqueeze(1).expand(-1, len(self.key), -1, -1)], dim=-1), value


class StepAttention:
    """Attention and recurrent states for one step of a model. `calls` counts the layers that have attended."""

    calls = 0

    def recurrence(self, state: int, rule: Rule) -> Tensor:
        """Continue each sequence's recurrence from its state number `state`; the tensors of `rule` are (1, T, ...)."""
        raise NotImplementedError

    def conv1d(self, state: int, tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A depthwise causal convolution of each sequence's tokens (T, C) by (C, width)."""
        raise NotImplementedError

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Keep the new keys and values, and attend over all of each sequence. (T, H, D), (T, Hk, D) -> (T, H, Dv)."""
        self.calls += 1
        return self._attend(layer, query, key, value, sinks)

    def attend_latent(
        self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads, sinks: Tensor | None = None
    ) -> Tensor:
        """The same over latents: (T, H, N + P), (T, R + P) -> (T, H, Dv). See [Note: latents]."""
        self.calls += 1
        return self._attend_latent(layer, query, latent, heads, sinks)

    def _attend_latent(
        self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads, sinks: Tensor | None
    ) -> Tensor:
        key = latent.unsqueeze(1)
        return heads.results(self._attend(layer, heads.absorb(query), key, key[..., : heads.key.shape[2]], sinks))

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        raise NotImplementedError


@runtime_checkable
class EmbedsPrompts(Protocol):
    """A served model that takes more than tokens: what a processor makes of text, images and sounds."""

    def embed(self, inputs: Mapping[str, Any]) -> EmbeddedPrompt:
        """One prompt, ready to be computed."""


@runtime_checkable
class NamesAdapters(Protocol):
    """A served model whose requests may name an adapter, such as a LoRA: `PackedBatch.adapters` says whose rows are
    whose.

    ::

        class Adapted(ServedDecoder, NamesAdapters):
            def check_adapter(self, name):
                if name not in self.adapters:
                    raise span.EngineError(f"no adapter is named {name!r}")

            def step(self, batch, attention):
                for count, name in batch.adapters:  # so many tokens, and whose adapter; () for none
                    ...
    """

    def check_adapter(self, name: str) -> None:
        """Raise EngineError, which says why, unless a request may name it now."""


@runtime_checkable
class ServedModel(Protocol):
    """A model that an engine can serve."""

    def info(self) -> ModelInfo:
        """Its layers and sizes, as they are now."""

    def step(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        """The logits (rows, V) of a packed batch. Every layer calls `attention.attend` once, by its number, and uses
        each of its states once."""

    def fingerprint(self) -> ModelFingerprint:
        """What notices that the model has changed: `ModelFingerprint(module)` for an nn.Module."""

    def check_ready(self) -> None:
        """Raise EngineError if the model cannot compute now, such as in training mode."""


@runtime_checkable
class EncodingModel(ServedModel, Protocol):
    """A model with an encoder.

    ::

        class Translator(ServedDecoder, EncodingModel):
            def encode(self, tokens):
                return self.encoder(tokens.unsqueeze(0))

            def step(self, batch, attention):
                for count, encoded in batch.encoded:  # so many tokens, and what `encode` made of their prompt
                    ...
    """

    def encode(self, tokens: Tensor) -> object:
        """What the decoder reads of a prompt (S,). Kept until its request ends."""
