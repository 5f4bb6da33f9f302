"""Recurrent mixers that compute their recurrence inline, and its replacement, as one row for each class.

A row has the functions of mixer_functions.py that the mixer then calls, and the methods that are replaced, in the
mixer or in its convolutions::

    MiniMaxLightningAttention     forward    lightning attention
    RecurrentGemmaRglru           its scan   a gate and an input for each channel
    RecurrentGemmaRecurrentBlock  its convolution, which it calls as a module
    ZayaCCAProjection             forward    two convolutions, of which the second mixes channels, and values delayed

A tiny module of the class is compared with its original before a model is enabled or served.

Shapes: B batch rows, S tokens, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnspan.integrations.huggingface.mixer_functions import PADDING, MixerFunctions, MixerTokens, agrees
from attnspan.integrations.huggingface.tiny_module import filled

Layer = Any
"""A mixer of transformers, with the attributes of its class."""

Replacement = tuple[nn.Module, str, Callable[..., object]]
"""A module, an attribute of it, and what is put there."""


class InlineMixer(NamedTuple):
    """One class. `what` it has, in the words of a refusal; a tiny module, and the arguments of a call of it."""

    what: str
    functions: tuple[str, ...]
    replacements: Callable[[Layer, MixerFunctions], Iterable[Replacement]]
    example: Callable[[Callable[..., nn.Module]], nn.Module]
    given: Callable[[Callable[..., Tensor]], dict[str, object]]
    outputs: int = 1


def unlike_inline(cls: type) -> str | None:
    """What a class has that is not what is known here; None if there is nothing."""
    row = INLINE[cls.__name__]
    return None if _agrees(cls) else f"{row.what} that is not the one known here (transformers 5.22)"


@functools.cache
def _agrees(cls: type) -> bool:
    """Whether a class computes what it does with the replacements of its row, on five tokens."""
    row, drawn = INLINE[cls.__name__], torch.Generator(device="cpu").manual_seed(0)

    def ours(tokens: MixerTokens) -> Tensor:
        made = list(row.replacements(module, MixerFunctions("compared", lambda: tokens)))
        for each, attribute, method in made:
            vars(each)[attribute] = method
        found = joined(module(**given))
        for each, attribute, _ in made:
            del vars(each)[attribute]
        return found

    def joined(result: Any) -> Tensor:  # without final states
        tensors = [result] if isinstance(result, Tensor) else list(result)[: row.outputs]
        return torch.cat([each.flatten(2) for each in tensors], dim=-1)

    try:
        with torch.no_grad():
            module = filled(functools.partial(row.example, cls), drawn)
            given = row.given(functools.partial(torch.randn, generator=drawn, device="cpu"))
            return agrees(ours, lambda: joined(module(**given)))
    except Exception:  # whatever a version that changed it may raise
        return False


# ---- MiniMax ---------------------------------------------------------------------------------------------------------


def _lightning(module: Layer, ours: MixerFunctions) -> list[Replacement]:
    attend, padded = ours.tensor_by_name("lightning_attention"), ours.tensor_by_name(PADDING)

    def forward(self: Layer, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        rows, tokens = hidden_states.shape[:2]
        mixed = padded(self.act_fn(self.qkv_proj(hidden_states)), None)
        query, key, value = mixed.view(rows, tokens, self.num_attention_heads, -1).split(self.head_dim, dim=3)
        out = self.norm(attend(query, key, value, self.slope_rate).reshape(rows, tokens, -1))
        result: Tensor = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out)
        return result, None

    return [(module, "forward", MethodType(forward, module))]


def _lightning_example(cls: Callable[..., nn.Module]) -> nn.Module:
    sizes = {"head_dim": 4, "hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 2, "block_size": 2}
    return cls(SimpleNamespace(hidden_act="silu", layer_types=["linear_attention"] * 2, **sizes), 0)


# ---- RecurrentGemma --------------------------------------------------------------------------------------------------


def _rg_lru(module: Layer, ours: MixerFunctions) -> list[Replacement]:
    scan = ours.tensor_by_name("rg_lru_scan")

    def _rnn_scan(
        self: Layer, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **kwargs: object
    ) -> tuple[Tensor, None]:
        return scan(hidden_states, recurrent_gate, reset), None

    return [(module, "_rnn_scan", MethodType(_rnn_scan, module))]


def _griffin_conv(module: Layer, ours: MixerFunctions) -> list[Replacement]:
    conv1d, held = ours.tensor_by_name("causal_conv1d_fn"), module.conv_1d

    def forward(channels_first: Tensor) -> Tensor:
        return conv1d(channels_first, held.weight.squeeze(1), held.bias)

    return [(held, "forward", forward)]


def _griffin(cls: Callable[..., nn.Module], *more: int) -> nn.Module:
    sizes = {"lru_width": 6, "hidden_size": 6, "num_attention_heads": 2, "conv1d_width": 3}
    return cls(SimpleNamespace(hidden_activation="gelu_pytorch_tanh", **sizes), *more)


def _positions() -> Tensor:
    return torch.arange(5, device="cpu").unsqueeze(0)


# ---- Zaya ------------------------------------------------------------------------------------------------------------


def _cca(module: Layer, ours: MixerFunctions) -> list[Replacement]:
    conv1d, padded = ours.tensor_by_name("causal_conv1d_fn"), ours.tensor_by_name(PADDING)

    def delayed(tokens: Tensor) -> Tensor:
        """(B, S, C), each token's the one before; zeros before the first."""
        last = torch.tensor([1.0, 0.0], dtype=tokens.dtype, device=tokens.device).expand(tokens.shape[-1], 2)
        return conv1d(tokens.mT, last).mT

    def convolved(self: Layer, mixed: Tensor) -> Tensor:
        """By a convolution of each channel, then by one of groups of channels, which sees the bias of the first before
        the first token."""
        first, second = self.conv_qk_depthwise, self.conv_qk_grouped
        taps = [conv1d(mixed.mT, first.weight.squeeze(1), first.bias).mT]
        while len(taps) < second.kernel_size[0]:
            taps.insert(0, delayed(taps[0] - first.bias) + first.bias)
        weight = second.weight.unflatten(0, (second.groups, -1))
        groups = [each.unflatten(-1, (second.groups, -1)) for each in taps]
        parts = [torch.einsum("bsgi,goi->bsgo", x, weight[..., tap]) for tap, x in enumerate(groups)]
        whole: Tensor = torch.stack(parts).sum(0).flatten(2) + second.bias
        return whole

    def forward(self: Layer, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        hidden = padded(hidden_states, None)
        query, key = self.q_proj(hidden), self.k_proj(hidden)
        mixed = convolved(self, torch.cat([query, key], dim=-1))
        heads = [each.unflatten(-1, (-1, self.head_dim)) for each in (query, key)]
        mean = (heads[0] + heads[1].repeat_interleave(self.num_key_value_groups, 2)) * 0.5
        means = mean, mean.unflatten(2, (-1, self.num_key_value_groups)).mean(3)
        parts = mixed.split([query.shape[-1], key.shape[-1]], dim=-1)
        query, key = (x.unflatten(-1, (-1, self.head_dim)) + y for x, y in zip(parts, means, strict=True))
        value = torch.cat([self.v_proj_current(hidden), self.v_proj_delayed(delayed(hidden))], dim=-1)
        return query, key, value.unflatten(-1, (-1, self.head_dim))

    return [(module, "forward", MethodType(forward, module))]


def _cca_example(cls: Callable[..., nn.Module]) -> nn.Module:
    sizes = {"hidden_size": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return cls(SimpleNamespace(attention_bias=True, cca_time0=3, cca_time1=3, **sizes), 0)


INLINE = {
    "MiniMaxLightningAttention": InlineMixer(
        "a lightning attention",
        ("lightning_attention",),
        _lightning,
        _lightning_example,
        lambda drawn: {"hidden_states": drawn(2, 5, 6), "position_embeddings": None, "attention_mask": None},
    ),
    "RecurrentGemmaRglru": InlineMixer(
        "a gated recurrence",
        ("rg_lru_scan",),
        _rg_lru,
        _griffin,
        lambda drawn: {"activations": drawn(2, 5, 6), "position_ids": _positions()},
    ),
    "RecurrentGemmaRecurrentBlock": InlineMixer(
        "a convolution",
        ("causal_conv1d_fn",),
        _griffin_conv,
        lambda cls: _griffin(cls, 0),
        lambda drawn: {
            "input_states": drawn(2, 5, 6),
            "position_ids": _positions(),
            "attention_mask": None,
            "use_cache": False,
        },
    ),
    "ZayaCCAProjection": InlineMixer(
        "a compressed convolutional attention",
        ("causal_conv1d_fn",),
        _cca,
        _cca_example,
        lambda drawn: {"hidden_states": drawn(2, 5, 6), "past_key_values": None},
        outputs=3,
    ),
}
"""By class."""
