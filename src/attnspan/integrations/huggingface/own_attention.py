"""Families whose attention is written out in their forward: what it asks for, and a forward that asks for it.

Bloom, MPT and Falcon do not look their attention up by a name. While such a model is enabled or served, each of these
layers has a forward that is written here: the same projections, and between them one call of an attention function. The
modeling file and other models are not touched. Before that, a tiny layer of the class is compared with its original.

Their biases (ALiBi) are the model's own numbers: `build_alibi_tensor` of the modeling file is called for the positions
of a whole sequence, and rounds as it does there.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnspan.attention.score import ScoreFunction
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.biases import ScoreBias

Ask = Callable[..., tuple[Tensor, None]]
"""An attention function, by the signature of AttentionInterface."""


Added = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What is added to a score, of (head, query position, key position)."""


ASKED: ContextVar[Ask | None] = ContextVar("what such layers ask while an engine calls their model", default=None)

NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cpu")
"""What an engine gives MPT for a mask, which converts it and cannot convert None."""

SERVED = "attnspan_served"
"""The attribute of a layer whose model an engine was made for."""


class OwnAttention(NamedTuple):
    """One such family: what a layer asks for, its forward, and a tiny layer with the arguments of a call."""

    asked: Callable[[Any], Mapping[str, Any]]
    forward: Callable[[Ask], Callable[..., tuple[Tensor, None]]]
    built: Callable[[Any, int, torch.dtype], Tensor]  # the ALiBi (H, length) of a row, by the function of its file
    added: Callable[[Any, torch.dtype], Added]  # the same of any positions, written here
    example: Callable[[Any], nn.Module]
    given: Callable[[Any], dict[str, Any]]  # beside hidden states of five tokens
    scaled: bool = False  # ALiBi too, as scores are


def own_attention(module: nn.Module) -> OwnAttention | None:
    """The family of a layer whose attention is written out, if it is one of these."""
    cls = _class_of(module)
    known = FAMILIES.get(cls.__name__)
    return known if known is not None and cls.__module__.startswith("transformers.models.") else None


def agrees_with_original(module: nn.Module) -> bool:
    """Whether the forward that is written here computes what that of the module's class does, on a tiny layer."""
    return _agrees(_class_of(module))  # type: ignore[arg-type]


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module; not one that torch made of it, as FSDP2 does."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))


def adds_twice(module: Any) -> bool:
    """Whether a layer of Falcon adds its ALiBi twice, in its mask and by itself, as transformers 5.22 does if eager."""
    config = getattr(module, "config", None)
    return config is not None and getattr(config, "alibi", False) and config._attn_implementation == "eager"


def bind_forward(module: nn.Module, ask: Ask) -> None:
    """Let a layer ask for its attention, if it does not by itself."""
    family = own_attention(module)
    if family is not None:
        vars(module)["forward"] = MethodType(family.forward(ask), module)


def unbind_forward(module: nn.Module) -> None:
    """As before: its own, or that of an engine."""
    if own_attention(module) is not None:
        del vars(module)["forward"]
        if getattr(module, SERVED, False):
            dispatch_forward(module)


def dispatch_forward(module: nn.Module) -> None:
    """Let a layer ask for its attention while an engine calls its model. See [Note: in two ways]."""
    if own_attention(module) is not None:
        vars(module)[SERVED] = True
        vars(module)["forward"] = MethodType(_dispatched, module)


def _dispatched(self: nn.Module, *args: object, **kwargs: object) -> tuple[Tensor, None]:
    ask, family = ASKED.get(), own_attention(self)
    assert family is not None, "bound to such layers alone"
    forward = type(self).forward if ask is None else family.forward(ask)
    return forward(self, *args, **kwargs)


def position_bias(module: nn.Module, dtype: torch.dtype) -> ScoreFunction:
    """What a layer of a model of a dtype adds to scores, for positions in a sequence of its own."""
    added, divisor = _family(module).added(module, dtype), _divisor(module)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (added(h, q_idx, kv_idx) / divisor).to(score.dtype)

    return biased


def bias_table(module: nn.Module, bias: ScoreBias, length: int, dtype: torch.dtype) -> Tensor:
    """The same for keys at the positions below `length`, (H, length); or (H,) slopes."""
    heads, keys = (torch.arange(n, device=next(module.parameters()).device) for n in (bias.heads, length))
    added = _family(module).added(module, dtype)
    zero = torch.zeros_like(keys[:1])
    return added(heads[:, None], zero, keys) / _divisor(module) if bias.kind == "key" else -added(heads, zero + 1, zero)


def check_family_bias(name: str, module: nn.Module, bias: ScoreBias, given: Tensor) -> None:
    """ModelError unless what the model hands to a layer is what its family makes for these tokens, without padding."""
    if not _is_of_family(module, given.reshape(-1, bias.heads, given.shape[-1])[0]):
        raise ModelError(f"{name}: the model's ALiBi is not that of its family, which is not served")


def _is_of_family(module: nn.Module, found: Tensor) -> bool:
    """Whether ALiBi, (H, S), is what is written here for a row of positions."""
    heads, keys = (torch.arange(n, device=found.device) for n in found.shape)
    return torch.equal(found, _family(module).added(module, found.dtype)(heads[:, None], keys[-1], keys))


def _divisor(module: nn.Module) -> float:
    return math.sqrt(module.head_dim) if _family(module).scaled else 1.0  # type: ignore[arg-type]


def _family(module: nn.Module) -> OwnAttention:
    family = own_attention(module)
    assert family is not None, "asked of layers of these families alone"
    return family


def _file_of(module: nn.Module) -> Any:
    return sys.modules[_class_of(module).__module__]


def _built(module: Any, length: int, dtype: torch.dtype) -> Tensor:
    """The ALiBi (H, length) of a row without padding, by the `build_alibi_tensor` of its file."""
    ones = torch.ones(1, length, dtype=torch.int64, device=next(module.parameters()).device)
    built: Tensor = _file_of(module).build_alibi_tensor(ones, module.num_heads, dtype)
    return built.view(module.num_heads, length)


# ---- Bloom -----------------------------------------------------------------------------------------------------------


def _bloom(ask: Ask) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: object, **more: object
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        dropout = self.attention_dropout.p if self.training else 0.0
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "position_bias": alibi}
        out = self.dense(ask(self, query, key, value, attention_mask, **options)[0].flatten(2))
        return residual + F.dropout(out, self.hidden_dropout, self.training), None

    return forward


def _bloom_asks(module: Any) -> Mapping[str, Any]:
    heads = module.num_heads
    return _described(module, heads, heads, module.inv_norm_factor, module.attention_dropout.p, ScoreBias("key", heads))


def _bloom_adds(module: Any, dtype: torch.dtype) -> Added:
    slopes = _built(module, 2, torch.float32)[:, 1]
    return lambda h, q, k: (slopes[h] * k).to(dtype)


def _bloom_example(cls: Any) -> nn.Module:
    sizes = {"n_head": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pretraining_tp": 1, "slow_but_exact": False}
    return cls(SimpleNamespace(hidden_size=12, **sizes), 0)  # type: ignore[no-any-return]


def _bloom_given(module: Any) -> dict[str, Any]:
    alibi = _built(module, 5, torch.float32)[:, None]
    return {"residual": torch.ones(1, 5, 12, device="cpu"), "alibi": alibi, "attention_mask": _hidden()}


# ---- MPT -------------------------------------------------------------------------------------------------------------


def _mpt(ask: Ask) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Any, hidden_states: Tensor, position_bias: Tensor, attention_mask: object = None, **more: object
    ) -> tuple[Tensor, None]:  # fmt: skip
        mixed = self.Wqkv(hidden_states)
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv) if self.clip_qkv else mixed
        heads = (each.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for each in mixed.chunk(3, dim=2))
        dropout = self.attn_dropout_p if self.training else 0.0
        options = {"scaling": self.softmax_scale, "dropout": dropout, "position_bias": position_bias}
        mask = None if attention_mask is NO_MASK else attention_mask
        return self.out_proj(ask(self, *heads, mask, **options)[0].flatten(2)), None

    return forward


def _mpt_asks(module: Any) -> Mapping[str, Any]:
    heads = module.n_heads
    return _described(module, heads, heads, module.softmax_scale, module.attn_dropout_p, ScoreBias("slope", heads))


def _mpt_built(module: Any, length: int, dtype: torch.dtype) -> Tensor:
    built: Tensor = _file_of(module).build_mpt_alibi_tensor(
        module.n_heads, length, device=next(module.parameters()).device
    )
    return built[:, 0]


def _mpt_adds(module: Any, dtype: torch.dtype) -> Added:
    slopes = -_mpt_built(module, 2, dtype)[:, 0]
    return lambda h, q, k: slopes[h] * (k - q)


def _mpt_example(cls: Any) -> nn.Module:
    inner = SimpleNamespace(softmax_scale=None, attn_pdrop=0.0, clip_qkv=0.5)
    return cls(SimpleNamespace(hidden_size=12, n_heads=3, max_seq_len=8, attn_config=inner), 0)  # type: ignore[no-any-return]


def _mpt_given(module: Any) -> dict[str, Any]:
    return {
        "position_bias": _file_of(module).build_mpt_alibi_tensor(3, 8, device="cpu"),
        "attention_mask": _hidden() < 0,
    }


# ---- Falcon ----------------------------------------------------------------------------------------------------------


def _falcon(ask: Ask) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Any, hidden_states: Tensor, alibi: Tensor | None, attention_mask: object, *more: object,
        position_embeddings: Any = None, **others: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        query, key, value = (each.transpose(1, 2) for each in self._split_heads(self.query_key_value(hidden_states)))
        groups = self.num_heads // self.num_kv_heads if self.new_decoder_architecture else 1
        key, value = key[:, ::groups], value[:, ::groups]  # repeated there, for each query head of a group
        if alibi is None:
            query, key = _file_of(self).apply_rotary_pos_emb(query, key, *position_embeddings)
        dropout = self.attention_dropout.p if self.training and alibi is not None else 0.0
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "position_bias": alibi}
        return self.dense(ask(self, query, key, value, attention_mask, **options)[0].flatten(2)), None

    return forward


def _falcon_asks(module: Any) -> Mapping[str, Any]:
    bias = ScoreBias("key", module.num_heads) if module.config.alibi else None
    dropout = module.attention_dropout.p if module.config.alibi else 0.0
    return _described(module, module.num_heads, module.num_kv_heads, module.inv_norm_factor, dropout, bias)


def _falcon_adds(module: Any, dtype: torch.dtype) -> Added:
    """Slopes are bfloat16. (With "eager" the bias is added twice: see layers.py.)"""
    slopes = _built(module, 2, torch.bfloat16)[:, 1]
    return lambda h, q, k: (slopes[h] * k).to(dtype)


def _falcon_example(cls: Any) -> nn.Module:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_kv_heads": 1, "multi_query": True, "bias": False}
    sizes |= {"hidden_dropout": 0, "attention_dropout": 0, "max_position_embeddings": 8, "alibi": True}
    return cls(SimpleNamespace(new_decoder_architecture=False, _attn_implementation="sdpa", **sizes), 0)  # type: ignore[no-any-return]


def _falcon_given(module: Any) -> dict[str, Any]:
    alibi = _built(module, 5, torch.float32)[:, None]
    return {"alibi": alibi, "attention_mask": _hidden() + alibi / math.sqrt(module.head_dim)}


# ---- what they have in common ----------------------------------------------------------------------------------------


def _described(
    module: Any, heads: int, kv_heads: int, scale: float, dropout: float, bias: ScoreBias | None
) -> Mapping[str, Any]:
    """The fields of an `AttentionLayer`."""
    dims = {"query_heads": heads, "kv_heads": kv_heads, "head_dim": module.head_dim, "value_dim": module.head_dim}
    return dims | {"index": module.layer_idx, "scale": float(scale), "dropout": float(dropout), "bias": bias}


FAMILIES = {
    "BloomAttention": OwnAttention(_bloom_asks, _bloom, _built, _bloom_adds, _bloom_example, _bloom_given),
    "MptAttention": OwnAttention(_mpt_asks, _mpt, _mpt_built, _mpt_adds, _mpt_example, _mpt_given),
    "FalconAttention": OwnAttention(
        _falcon_asks, _falcon, _built, _falcon_adds, _falcon_example, _falcon_given, scaled=True
    ),
}
"""By the name of the class of their layers."""


def _hidden() -> Tensor:
    """A causal mask of five tokens, as numbers to add."""
    return torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min, device="cpu").triu(1)


@functools.cache
def _agrees(cls: Any) -> bool:
    """Whether a class computes what the forward written here does."""
    family = FAMILIES[cls.__name__]
    try:
        with torch.device("meta"):  # which draws no random numbers
            module = family.example(cls)
        module = module.to_empty(device="cpu").float().eval()
        generator = torch.Generator(device="cpu").manual_seed(0)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for parameter in module.parameters():
                parameter.normal_(generator=generator)
            hidden = torch.randn(1, 5, 12, generator=generator, device="cpu", dtype=torch.float32)
            given = family.given(module)
            biased = position_bias(module, torch.float32)

            def ask(
                self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
            ) -> tuple[Tensor, None]:
                key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
                q, k = torch.arange(5, device="cpu")[:, None], torch.arange(5, device="cpu")
                scores = query @ key.transpose(-1, -2) * options["scaling"]
                scores = biased(scores, q, torch.arange(3, device="cpu")[:, None, None], q, k).masked_fill(
                    k > q, -math.inf
                )
                return (scores.softmax(-1) @ value).transpose(1, 2), None

            far = [family.built(module, 3000, dtype) for dtype in (torch.float32, torch.bfloat16)]
            found = MethodType(family.forward(ask), module)(hidden, **given)[0]
            true = module(hidden, **given)[0]
        return torch.allclose(found, true, rtol=1e-4, atol=1e-5) and all(_is_of_family(module, each) for each in far)
    except Exception:  # whatever a version that changed it may raise
        return False
