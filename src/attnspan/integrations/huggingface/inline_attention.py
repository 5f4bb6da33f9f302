"""Layers that compute attention inline, and replacement methods that call an attention function instead.

Some classes compute attention inline, without transformers' AttentionInterface. While such a model is enabled or
served, each of these layers has a replacement method, which calls an attention function instead. The modeling file and
other models are not changed. Before that, a tiny layer of the class is compared with its original. Most classes are
rows of a table in plain_attention.py.

Bloom, MPT and Falcon add biases (ALiBi); their forward is rewritten here. The biases are the model's own numbers:
`build_alibi_tensor` of the modeling file is called for the positions of a whole sequence, with its own rounding.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnspan.attention.score import ScoreFunction
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.biases import ScoreBias
from attnspan.integrations.huggingface.classes import class_of
from attnspan.integrations.huggingface.plain_attention import (
    CLASSES,
    AttentionFunction,
    InlineAttentionLayer,
    Kwargs,
    LayerArgs,
    LayerClass,
    Method,
    PlainAttention,
    causal_mask,
)
from attnspan.integrations.huggingface.tiny_module import filled

Added = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What is added to a score, of (head, query position, key position)."""


CURRENT_ATTENTION: ContextVar[AttentionFunction | None] = ContextVar(
    "what such layers ask while an engine calls their model", default=None
)

NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cpu")
"""What an engine gives MPT for a mask, which converts it and cannot convert None."""

SERVED = "attnspan_served"
"""The attribute of a layer whose model an engine was made for."""


L = TypeVar("L", bound=InlineAttentionLayer)


class Alibi(NamedTuple, Generic[L]):
    """The ALiBi of a class: (H, length) of a row, by the function of its file, and the same of any positions."""

    built: Callable[[L, int, torch.dtype], Tensor]
    added: Callable[[L, torch.dtype], Added]
    scaled: bool = False  # as scores are


class InlineAttention(NamedTuple, Generic[L]):
    """One such class: what a layer asks for, a method in place of one of its, and a tiny layer with calls of it."""

    layer_args: Callable[[L], LayerArgs]
    replacement: Callable[[AttentionFunction], Method]
    example: Callable[[LayerClass], nn.Module]
    given: Callable[[L], list[Kwargs]]  # beside hidden states of five tokens
    width: int = 12
    method: str = "forward"
    alibi: Alibi[L] | None = None

    @staticmethod
    def of(row: PlainAttention[L]) -> InlineAttention[L]:
        """One without biases."""
        return InlineAttention(row.layer_args, row.replacement, row.example, lambda module: row.given(), 16, row.method)


def inline_attention(module: nn.Module) -> InlineAttention[Any] | None:
    """The class of a layer whose attention is inline, if it is one of these."""
    return FAMILIES.get(_key_of(class_of(module)))


def _key_of(cls: type) -> str:
    """The folder of a class of transformers, and its name."""
    home, _, path = cls.__module__.partition(".models.")
    return f"{path.partition('.')[0]}.{cls.__name__}" if home == "transformers" else ""


def agrees_with_original(module: nn.Module) -> bool:
    """Whether what is written here computes what the method of the module's class does, on a tiny layer."""
    return _agrees(class_of(module))


def adds_twice(module: nn.Module) -> bool:
    """Whether a layer of Falcon adds its ALiBi twice, in its mask and by itself, as transformers 5.22 does if eager."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "alibi", False)) and getattr(config, "_attn_implementation", None) == "eager"


def bind_forward(module: nn.Module, attend: AttentionFunction) -> None:
    """Let a layer ask for its attention, if it does not by itself."""
    family = inline_attention(module)
    if family is not None:
        vars(module)[family.method] = MethodType(family.replacement(attend), module)


def unbind_forward(module: nn.Module) -> None:
    """As before: its own, or that of an engine."""
    family = inline_attention(module)
    if family is not None:
        del vars(module)[family.method]
        if getattr(module, SERVED, False):
            dispatch_forward(module)


def dispatch_forward(module: nn.Module) -> None:
    """Let a layer ask for its attention while an engine calls its model, and compute its own otherwise."""
    family = inline_attention(module)
    if family is not None:
        vars(module)[SERVED] = True
        vars(module)[family.method] = MethodType(_dispatched, module)


def _dispatched(self: nn.Module, *args: object, **kwargs: object) -> object:
    attend, family = CURRENT_ATTENTION.get(), inline_attention(self)
    assert family is not None, "bound to such layers alone"
    method = getattr(type(self), family.method) if attend is None else family.replacement(attend)
    return method(self, *args, **kwargs)


def position_bias(module: nn.Module, dtype: torch.dtype) -> ScoreFunction:
    """What a layer of a model of a dtype adds to scores, for positions in a sequence of its own."""
    added, divisor = _alibi(module).added(module, dtype), _divisor(module)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (added(h, q_idx, kv_idx) / divisor).to(score.dtype)

    return biased


def bias_table(module: nn.Module, bias: ScoreBias, length: int, dtype: torch.dtype) -> Tensor:
    """The same for keys at the positions below `length`, (H, length); or (H,) slopes."""
    heads, keys = (torch.arange(n, device=next(module.parameters()).device) for n in (bias.heads, length))
    added = _alibi(module).added(module, dtype)
    zero = torch.zeros_like(keys[:1])
    return added(heads[:, None], zero, keys) / _divisor(module) if bias.kind == "key" else -added(heads, zero + 1, zero)


def check_family_bias(name: str, module: nn.Module, bias: ScoreBias, given: Tensor) -> None:
    """ModelError unless what the model hands to a layer is what its family makes for these tokens, without padding."""
    if not _is_of_family(module, given.reshape(-1, bias.heads, given.shape[-1])[0]):
        raise ModelError(f"{name}: the model's ALiBi is not that of its family, which is not served")


def _is_of_family(module: nn.Module, found: Tensor) -> bool:
    """Whether ALiBi, (H, S), is what is written here for a row of positions."""
    heads, keys = (torch.arange(n, device=found.device) for n in found.shape)
    return torch.equal(found, _alibi(module).added(module, found.dtype)(heads[:, None], keys[-1], keys))


def _divisor(module: nn.Module) -> float:
    if not _alibi(module).scaled:
        return 1.0
    head_dim = module.head_dim
    assert isinstance(head_dim, int), "scores of such layers are divided by its root"
    return math.sqrt(head_dim)


def _alibi(module: nn.Module) -> Alibi[Any]:
    family = inline_attention(module)
    assert family is not None, "asked of layers of these families alone"
    assert family.alibi is not None, "asked of those with ALiBi"
    return family.alibi


class HasAlibi(InlineAttentionLayer, Protocol):
    """A layer whose ALiBi `build_alibi_tensor` makes."""

    num_heads: int
    head_dim: int


def _file_of(module: object) -> ModuleType:
    return sys.modules[class_of(module).__module__]


def _built(module: HasAlibi, length: int, dtype: torch.dtype) -> Tensor:
    """The ALiBi (H, length) of a row without padding, by the `build_alibi_tensor` of its file."""
    ones = torch.ones(1, length, dtype=torch.int64, device=next(module.parameters()).device)
    built: Tensor = _file_of(module).build_alibi_tensor(ones, module.num_heads, dtype)
    return built.view(module.num_heads, length)


# ---- Bloom -----------------------------------------------------------------------------------------------------------


class Bloom(HasAlibi, Protocol):
    layer_idx: int | None
    inv_norm_factor: float
    attention_dropout: nn.Dropout
    hidden_dropout: float
    query_key_value: Callable[[Tensor], Tensor]
    dense: Callable[[Tensor], Tensor]
    _reshape: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _bloom(attend: AttentionFunction) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Bloom, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: object, **more: object
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        dropout = self.attention_dropout.p if self.training else 0.0
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "position_bias": alibi}
        out = self.dense(attend(self, query, key, value, attention_mask, **options)[0].flatten(2))
        return residual + F.dropout(out, self.hidden_dropout, self.training), None

    return forward


def _bloom_args(module: Bloom) -> LayerArgs:
    return LayerArgs(
        heads=module.num_heads,
        kv_heads=module.num_heads,
        head_dim=module.head_dim,
        index=module.layer_idx,
        scale=float(module.inv_norm_factor),
        dropout=float(module.attention_dropout.p),
        bias=ScoreBias("key", module.num_heads),
    )


def _bloom_adds(module: Bloom, dtype: torch.dtype) -> Added:
    slopes = _built(module, 2, torch.float32)[:, 1]
    return lambda h, q, k: (slopes[h] * k).to(dtype)


def _bloom_example(cls: LayerClass) -> nn.Module:
    sizes = {"n_head": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pretraining_tp": 1, "slow_but_exact": False}
    return cls(SimpleNamespace(hidden_size=12, **sizes), 0)


def _bloom_given(module: Bloom) -> list[Kwargs]:
    alibi = _built(module, 5, torch.float32)[:, None]
    return [{"residual": torch.ones(1, 5, 12, device="cpu"), "alibi": alibi, "attention_mask": causal_mask()}]


# ---- MPT -------------------------------------------------------------------------------------------------------------


class Mpt(InlineAttentionLayer, Protocol):
    n_heads: int
    head_dim: int
    layer_idx: int | None
    softmax_scale: float
    attn_dropout_p: float
    clip_qkv: float | None
    Wqkv: Callable[[Tensor], Tensor]
    out_proj: Callable[[Tensor], Tensor]


def _mpt(attend: AttentionFunction) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Mpt, hidden_states: Tensor, position_bias: Tensor, attention_mask: object = None, **more: object
    ) -> tuple[Tensor, None]:  # fmt: skip
        mixed = self.Wqkv(hidden_states)
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else mixed
        heads = (each.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for each in mixed.chunk(3, dim=2))
        dropout = self.attn_dropout_p if self.training else 0.0
        options = {"scaling": self.softmax_scale, "dropout": dropout, "position_bias": position_bias}
        mask = None if attention_mask is NO_MASK else attention_mask
        return self.out_proj(attend(self, *heads, mask, **options)[0].flatten(2)), None

    return forward


def _mpt_args(module: Mpt) -> LayerArgs:
    return LayerArgs(
        heads=module.n_heads,
        kv_heads=module.n_heads,
        head_dim=module.head_dim,
        index=module.layer_idx,
        scale=float(module.softmax_scale),
        dropout=float(module.attn_dropout_p),
        bias=ScoreBias("slope", module.n_heads),
    )


def _mpt_built(module: Mpt, length: int, dtype: torch.dtype) -> Tensor:
    built: Tensor = _file_of(module).build_mpt_alibi_tensor(
        module.n_heads, length, device=next(module.parameters()).device
    )
    return built[:, 0]


def _mpt_adds(module: Mpt, dtype: torch.dtype) -> Added:
    slopes = -_mpt_built(module, 2, dtype)[:, 0]
    return lambda h, q, k: slopes[h] * (k - q)


def _mpt_example(cls: LayerClass) -> nn.Module:
    inner = SimpleNamespace(softmax_scale=None, attn_pdrop=0.0, clip_qkv=0.5)
    return cls(SimpleNamespace(hidden_size=12, n_heads=3, max_seq_len=8, attn_config=inner), 0)


def _mpt_given(module: Mpt) -> list[Kwargs]:
    alibi = _file_of(module).build_mpt_alibi_tensor(3, 8, device="cpu")
    return [{"position_bias": alibi, "attention_mask": causal_mask() < 0}]


# ---- Falcon ----------------------------------------------------------------------------------------------------------


class FalconConfig(Protocol):
    alibi: bool


class Falcon(HasAlibi, Protocol):
    num_kv_heads: int
    layer_idx: int | None
    config: FalconConfig
    new_decoder_architecture: bool
    inv_norm_factor: float
    attention_dropout: nn.Dropout
    query_key_value: Callable[[Tensor], Tensor]
    dense: Callable[[Tensor], Tensor]
    _split_heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _falcon(attend: AttentionFunction) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Falcon, hidden_states: Tensor, alibi: Tensor | None, attention_mask: object, *more: object,
        position_embeddings: tuple[Tensor, Tensor] | None = None, **others: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        query, key, value = (each.transpose(1, 2) for each in self._split_heads(self.query_key_value(hidden_states)))
        groups = self.num_heads // self.num_kv_heads if self.new_decoder_architecture else 1
        key, value = key[:, ::groups], value[:, ::groups]  # repeated there, for each query head of a group
        if alibi is None:
            assert position_embeddings is not None, "a layer without ALiBi has rotary embeddings"
            query, key = _file_of(self).apply_rotary_pos_emb(query, key, *position_embeddings)
        dropout = self.attention_dropout.p if self.training and alibi is not None else 0.0
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "position_bias": alibi}
        return self.dense(attend(self, query, key, value, attention_mask, **options)[0].flatten(2)), None

    return forward


def _falcon_args(module: Falcon) -> LayerArgs:
    return LayerArgs(
        heads=module.num_heads,
        kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        index=module.layer_idx,
        scale=float(module.inv_norm_factor),
        dropout=float(module.attention_dropout.p if module.config.alibi else 0.0),
        bias=ScoreBias("key", module.num_heads) if module.config.alibi else None,
    )


def _falcon_adds(module: Falcon, dtype: torch.dtype) -> Added:
    """Slopes are bfloat16. (With "eager" the bias is added twice: see layers.py.)"""
    slopes = _built(module, 2, torch.bfloat16)[:, 1]
    return lambda h, q, k: (slopes[h] * k).to(dtype)


def _falcon_example(cls: LayerClass) -> nn.Module:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_kv_heads": 1, "multi_query": True, "bias": False}
    sizes |= {"hidden_dropout": 0, "attention_dropout": 0, "max_position_embeddings": 8, "alibi": True}
    return cls(SimpleNamespace(new_decoder_architecture=False, _attn_implementation="sdpa", **sizes), 0)


def _falcon_given(module: Falcon) -> list[Kwargs]:
    alibi = _built(module, 5, torch.float32)[:, None]
    return [{"alibi": alibi, "attention_mask": causal_mask() + alibi / math.sqrt(module.head_dim)}]


# ---- what they have in common ----------------------------------------------------------------------------------------


FAMILIES: dict[str, InlineAttention[Any]] = {name: InlineAttention.of(row) for name, row in CLASSES.items()} | {
    "bloom.BloomAttention": InlineAttention(
        _bloom_args, _bloom, _bloom_example, _bloom_given, alibi=Alibi(_built, _bloom_adds)
    ),
    "mpt.MptAttention": InlineAttention(_mpt_args, _mpt, _mpt_example, _mpt_given, alibi=Alibi(_mpt_built, _mpt_adds)),
    "falcon.FalconAttention": InlineAttention(
        _falcon_args, _falcon, _falcon_example, _falcon_given, alibi=Alibi(_built, _falcon_adds, scaled=True)
    ),
}
"""By the folder of a class, and its name."""


# ---- compared --------------------------------------------------------------------------------------------------------


@functools.cache
def _agrees(cls: type) -> bool:
    """Whether a class computes what is written here in its place."""
    family, drawn = FAMILIES[_key_of(cls)], torch.Generator(device="cpu").manual_seed(0)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            module = filled(functools.partial(family.example, cls), drawn)
            hidden = torch.randn(1, 5, family.width, generator=drawn, device="cpu", dtype=torch.float32)
            for given in family.given(module):
                true = module(hidden, **given)[0]
                vars(module)[family.method] = MethodType(family.replacement(_dense(module, family)), module)
                found = module(hidden, **given)[0]
                del vars(module)[family.method]
                if not torch.allclose(found, true, rtol=1e-4, atol=1e-5):
                    return False
            if family.alibi is None:
                return True
            far = [family.alibi.built(module, 3000, dtype) for dtype in (torch.float32, torch.bfloat16)]
            return all(_is_of_family(module, each) for each in far)
    except Exception:  # whatever a version that changed it may raise
        return False


def _dense(module: nn.Module, family: InlineAttention[Any]) -> AttentionFunction:
    """Attention of five tokens, causal where there is a mask."""
    biased = None if family.alibi is None else position_bias(module, torch.float32)

    def attend(
        self: object, query: Tensor, key: Tensor, value: Tensor, mask: object, *,
        scaling: float, sliding_window: int | None = None, **others: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        heads = torch.arange(query.shape[1], device="cpu")[:, None, None]
        q, k = torch.arange(5, device="cpu")[:, None], torch.arange(5, device="cpu")
        scores = query @ key.transpose(-1, -2) * scaling
        scores = scores if biased is None else biased(scores, q, heads, q, k)
        if mask is not None:
            window = sliding_window or 5
            scores = scores.masked_fill((k > q) | (q - k >= window), -math.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    return attend
