"""Plain attention that layers compute inline, as data: where its parts are, and what takes its place.

A row describes a class of layers by the names of its parts: heads, scale, window. There are two kinds of classes::

    ScoringMethod   forward calls `_attn(query, key, value, mask)` for scores, softmax and sums: that is replaced
    WholeForward    forward does all by itself, projections too: it is replaced by one that is written here, for all

What stands in for a method asks an attention function instead. That a class computes what its row says is tried on the
tiny layer that comes with the row (inline_attention.py).

Shapes: B batch rows, S tokens, H heads, D head dim; query (B, H, S, D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.biases import ScoreBias

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""An attention function, by the signature of AttentionInterface."""

Method = Callable[..., object]

Kwargs = Mapping[str, object]
"""Arguments by name."""

LayerClass = Callable[..., nn.Module]
"""A class of layers, called."""


class InlineAttentionLayer(Protocol):
    """A layer with inline attention. What more there is of one is said where its class is known."""

    training: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of its projections."""


L = TypeVar("L", bound=InlineAttentionLayer, contravariant=True)


@dataclass(frozen=True, kw_only=True)
class LayerArgs:
    """What such a layer asks for: fields of an `AttentionLayer`. Keys are as wide as values."""

    heads: int
    kv_heads: int
    head_dim: int
    index: int | None
    scale: float
    dropout: float
    window: int | None = None
    causal: bool = True
    bias: ScoreBias | None = None


class OwnMask:
    """Stands for the mask of a layer that hides by itself what its mask hides."""


OWN_MASK = OwnMask()


@dataclass(frozen=True, kw_only=True)
class PlainAttention(Generic[L]):
    """One class of layers. `hides`: by itself, whatever mask it is given, with the window of `window`."""

    method: ClassVar[str]

    sizes: Callable[[L], tuple[int, int]]  # heads, head dim
    scale: Callable[[L], float]
    dropout: str  # the attribute, a number or a Dropout
    index: str = "layer_idx"
    window: Callable[[L], int | None] = lambda module: None
    causal: Callable[[L], bool] = lambda module: True
    hides: bool = False
    example: Callable[[LayerClass], nn.Module]  # of a class: layers of width 16
    given: Callable[[], list[Kwargs]]  # cases, beside hidden states of five tokens

    def layer_args(self, module: L) -> LayerArgs:
        """What a layer asks for."""
        heads, head_dim = self.sizes(module)
        return LayerArgs(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            index=getattr(module, self.index, None),
            scale=float(self.scale(module)),
            dropout=self._dropout(module),
            window=self.window(module),
            causal=self.causal(module),
        )

    def _dropout(self, module: L) -> float:
        found = getattr(module, self.dropout)
        return float(found.p if isinstance(found, nn.Dropout) else found)

    def _options(self, module: L) -> Kwargs:
        dropout = self._dropout(module) if module.training else 0.0
        return {"scaling": self.scale(module), "dropout": dropout, "sliding_window": self.window(module)}

    def replacement(self, attend: AttentionFunction) -> Method:
        """What takes the place of the method."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ScoringMethod(PlainAttention[L]):
    """`keys_first`: keys are (B, H, D, S). `listed`: the result is a list of one."""

    method = "_attn"

    keys_first: bool = False
    listed: bool = False

    def replacement(self, attend: AttentionFunction) -> Method:
        def _attn(
            module: L, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, *more: object
        ) -> object:
            key = key.mT if self.keys_first else key
            given = query.to(value.dtype), key.to(value.dtype), value
            mask = OWN_MASK if self.hides else attention_mask
            out = attend(module, *given, mask, **self._options(module))[0].transpose(1, 2)
            return [out] if self.listed else (out, None)

        return _attn


@dataclass(frozen=True, kw_only=True)
class WholeForward(PlainAttention[L]):
    """`names` are those of the projections of queries, keys and values, `out` that of the result.

    `crossing` is the argument with another sequence, and `refused` one that is not served.
    """

    method = "forward"

    names: tuple[str, str, str]
    out: str = ""
    crossing: str
    refused: str = ""
    rotate: Callable[[L, Kwargs, list[Tensor]], list[Tensor]] = lambda module, given, heads: heads

    def replacement(self, attend: AttentionFunction) -> Method:
        def forward(module: L, hidden_states: Tensor, **given: object) -> tuple[Tensor, None]:
            if self.refused and given.get(self.refused) is not None:
                raise ModelError(f"{type(module).__name__} is given {self.refused}, which is not served")
            other = given.get(self.crossing)
            states = hidden_states if other is None else other
            inputs = zip(self.names, (hidden_states, states, states), strict=True)
            heads = [getattr(module, name)(x).unflatten(-1, self.sizes(module)).transpose(1, 2) for name, x in inputs]
            heads = heads if other is not None else self.rotate(module, given, heads)
            mask = OWN_MASK if self.hides else given.get("attention_mask")
            out = attend(module, *heads, mask, **self._options(module))[0].flatten(2)
            return (getattr(module, self.out)(out) if self.out else out), None

        return forward


# ---- classes ---------------------------------------------------------------------------------------------------------


def causal_mask() -> Tensor:
    """A causal mask of five tokens, as numbers to add."""
    return torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min, device="cpu").triu(1)


def _numbers(*shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.arange(count, dtype=torch.float32, device="cpu").mul(0.7).sin().view(shape)


def _masked(**more: object) -> list[Kwargs]:
    return [{"attention_mask": causal_mask(), **more}]


def _crossing(name: str) -> Callable[[], list[Kwargs]]:
    return lambda: [*_masked(), {name: _numbers(1, 5, 16)}]


class Gpt(InlineAttentionLayer, Protocol):
    """GPT-J and CodeGen."""

    num_attention_heads: int
    head_dim: int
    scale_attn: float


class GptNeoConfig(Protocol):
    window_size: int


class GptNeo(InlineAttentionLayer, Protocol):
    num_heads: int
    head_dim: int
    attention_type: str
    config: GptNeoConfig
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class HeldWindow(ScoringMethod[GptNeo]):
    """A layer that hides by what it was made with, whatever its config says since."""

    def layer_args(self, module: GptNeo) -> LayerArgs:
        """What a layer asks for; refuses a window that is not the one it holds."""
        found, held = super().layer_args(module), module.bias
        if found.window is None or held.is_meta:
            return found
        seen = int(held[0, 0, -1].sum())  # by the last position
        if seen != min(found.window, held.shape[-1]):
            raise ModelError(
                f"{type(module).__name__} was made with a window of {seen}, and config.window_size is {found.window} "
                "since, which it does not follow; make the model anew, or set the config back"
            )
        return found


class GptNeoXJapanese(InlineAttentionLayer, Protocol):
    num_attention_heads: int
    head_size: int
    norm_factor: float


class OpenAI(InlineAttentionLayer, Protocol):
    """The first GPT."""

    n_head: int
    split_size: int
    scale: bool


class Bert(InlineAttentionLayer, Protocol):
    num_attention_heads: int
    attention_head_size: int
    is_decoder: bool


class RoFormer(Bert, Protocol):
    rotary_value: bool
    apply_rotary_position_embeddings: Callable[..., tuple[Tensor, ...]]


class Bart(InlineAttentionLayer, Protocol):
    num_heads: int
    head_dim: int
    scaling: float
    is_decoder: bool


def _rotated(module: RoFormer, given: Kwargs, heads: list[Tensor]) -> list[Tensor]:
    """RoFormer's rotary embeddings, of values too if it is asked for that."""
    positions = given.get("sinusoidal_pos")
    if positions is None:
        return heads
    rotate = module.apply_rotary_position_embeddings
    return [*rotate(positions, *heads)] if module.rotary_value else [*rotate(positions, *heads[:2]), heads[2]]


def _gpt(cls: LayerClass) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "rotary_dim": 2, "max_position_embeddings": 8}
    return cls(SimpleNamespace(attn_pdrop=0.0, resid_pdrop=0.0, **sizes), 0)


def _gpt_neo(cls: LayerClass) -> nn.Module:
    sizes = {"hidden_size": 16, "num_heads": 4, "max_position_embeddings": 8, "window_size": 3}
    return cls(SimpleNamespace(attention_dropout=0.0, resid_dropout=0.0, **sizes), "local", 0)


def _japanese(cls: LayerClass) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "rope_parameters": {"partial_rotary_factor": 0.5}}
    return cls(SimpleNamespace(attention_dropout=0.0, **sizes), use_bias=True, layer_idx=0)


def _bert(cls: LayerClass) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "is_decoder": True, "rotary_value": True}
    return cls(SimpleNamespace(attention_probs_dropout_prob=0.0, **sizes), 0)


_GPT = ScoringMethod[Gpt](
    sizes=lambda module: (module.num_attention_heads, module.head_dim),
    scale=lambda module: 1 / module.scale_attn,
    dropout="attn_dropout",
    example=_gpt,
    given=lambda: _masked(position_ids=torch.arange(5, device="cpu").unsqueeze(0)),
)
_BERT = WholeForward[Bert](
    names=("query", "key", "value"),
    sizes=lambda module: (module.num_attention_heads, module.attention_head_size),
    scale=lambda module: 1 / math.sqrt(module.attention_head_size),
    dropout="dropout",
    causal=lambda module: module.is_decoder,
    crossing="encoder_hidden_states",
    example=_bert,
    given=_crossing("encoder_hidden_states"),
)
_ROFORMER: WholeForward[RoFormer] = _BERT
_BART = WholeForward[Bart](
    names=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    sizes=lambda module: (module.num_heads, module.head_dim),
    scale=lambda module: module.scaling,
    dropout="dropout",
    causal=lambda module: module.is_decoder,
    crossing="key_value_states",
    example=lambda cls: cls(embed_dim=16, num_heads=4, is_decoder=True, layer_idx=0),
    given=_crossing("key_value_states"),
)

CLASSES: dict[str, PlainAttention[Any]] = {  # of layers that are known by their names
    "codegen.CodeGenAttention": _GPT,
    "gptj.GPTJAttention": _GPT,
    "gpt_neo.GPTNeoSelfAttention": HeldWindow(
        sizes=lambda module: (module.num_heads, module.head_dim),
        scale=lambda module: 1.0,
        dropout="attn_dropout",
        index="layer_id",
        window=lambda module: module.config.window_size if module.attention_type == "local" else None,
        hides=True,
        example=_gpt_neo,
        given=_masked,
    ),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": ScoringMethod[GptNeoXJapanese](
        sizes=lambda module: (module.num_attention_heads, module.head_size),
        scale=lambda module: 1 / module.norm_factor,
        dropout="attention_dropout",
        example=_japanese,
        given=lambda: _masked(position_ids=None, position_embeddings=(_numbers(1, 5, 2), _numbers(1, 5, 2) + 0.3)),
    ),
    "openai.Attention": ScoringMethod[OpenAI](
        sizes=lambda module: (module.n_head, module.split_size // module.n_head),
        scale=lambda module: float((module.split_size // module.n_head) ** -0.5) if module.scale else 1.0,
        dropout="attn_dropout",
        hides=True,
        keys_first=True,
        listed=True,
        example=lambda cls: cls(16, 8, SimpleNamespace(n_head=4, attn_pdrop=0.0, resid_pdrop=0.0), scale=True),
        given=_masked,
    ),
    "megatron_bert.MegatronBertSelfAttention": _BERT,
    "rembert.RemBertSelfAttention": _BERT,
    "roformer.RoFormerSelfAttention": replace(
        _ROFORMER,
        rotate=_rotated,
        given=lambda: [*_crossing("encoder_hidden_states")(), *_masked(sinusoidal_pos=_numbers(1, 1, 5, 4))],
    ),
    "mvp.MvpAttention": replace(_BART, refused="attn_prompt"),
    "trocr.TrOCRAttention": replace(_BART, example=lambda cls: cls(None, 16, 4, is_decoder=True)),
    "xglm.XGLMAttention": _BART,
}
"""By the folder in transformers.models, and the name."""
