"""The attention layers of a transformers model, as data: heads, scale, window, soft-cap, sinks, direction.

>>> from transformers import MistralConfig, MistralForCausalLM
>>> sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
>>> model = MistralForCausalLM(MistralConfig(vocab_size=64, num_hidden_layers=2, sliding_window=5, **sizes))
>>> for layer in attention_layers(model):
...     print(layer)
model.layers.0.self_attn: 4 query heads, 2 key heads of 8, scale 0.354, causal, window 5
model.layers.1.self_attn: 4 query heads, 2 key heads of 8, scale 0.354, causal, window 5

transformers layers call a function that is looked up by the name of an implementation (`AttentionInterface`), with all
options as arguments. A module whose class does that is an attention layer.

The arguments are read from its source (interface_calls.py). An argument that cannot be evaluated, or is unknown, is an
unsupported feature, and refused by its name.

[Note: others that mix tokens] A module that mixes tokens in another way (attention without the interface, linear
attention, convolution, recurrence) would only see one rank's tokens, or no cache. It is refused by name, unless the
caller supports it, like the recurrent mixers of mixers.py. Such modules are recognised by class: classes with attention
in their name that neither use the interface nor contain a layer that does; torch's own modules of that kind; and layer
types in the config other than full or sliding attention.

The masks of a model are not read here, but compared when they are made (masking.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.biases import ScoreBias, relative_bias
from attnspan.integrations.huggingface.classes import class_of
from attnspan.integrations.huggingface.inline_attention import adds_twice, agrees_with_original, inline_attention
from attnspan.integrations.huggingface.interface_calls import Unclear, calls_of, evaluate, parse
from attnspan.integrations.huggingface.plain_attention import LayerArgs

SERVED = {"scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux"}
"""Arguments that describe the attention of a layer."""

BIAS = "position_bias"
"""An argument that is served if it goes by distance (biases.py)."""

IGNORED = {"attention_mask", "output_attentions", "position_ids", "deterministic", "training", "use_cache"}
"""Arguments that ask for nothing else than what is computed anyway, or are looked at when they come."""

WORDS = {
    "position_bias": "a relative position bias (position_bias)",
    "cu_seq_lens_q": "lengths of its own (cu_seq_lens_q)",
    "indices": "keys chosen by an index (indices)",
    "block_indices": "keys chosen by blocks (block_indices)",
}

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
WITHOUT_CACHE = {"reference_sliding_attention"}
"""Types of layers that see everything before a token in a pass without a cache, and less of it in generation."""

RECURRENT_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers that have a recurrent mixer."""

TYPES_BESIDE = {"mlp", "moe"}
"""Types of layers, in models with recurrent mixers, that compute each token by itself."""

OTHER_TOWERS = re.compile(r"vision|audio|image|video|speech|pixel")
MIXERS = (nn.Conv1d, nn.RNNBase, nn.MultiheadAttention)
NAMED_MIXERS = re.compile(
    r"Attention|Attn|Mamba|DeltaNet|Mixer|ShortConv|Rwkv|Recurrent(?!Gemma)|LinearAtt|RGLRU|Rglru|CCAProjection"
)
NO_MIXERS = re.compile(r"Output|Norm|Dropout|Embedding|Bias")
"""Parts of an attention block that are named after it."""


class Temperature(NamedTuple):
    """Queries at position p are multiplied by ``1 + scale * log(1 + floor((p + 1) / floor))``, as in Llama 4.

    >>> Temperature(scale=0.1, floor=4).of(torch.tensor([0, 3, 6, 7]))
    tensor([1.0000, 1.0693, 1.0693, 1.1099])
    """

    scale: float
    floor: int

    def of(self, positions: Tensor) -> Tensor:
        """The numbers of positions, in float32, as transformers rounds them."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0

    def __str__(self) -> str:
        return f"temperature {self.scale:g} for every {self.floor} positions"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer that attends.

    `name` is the module's path; `index` its place in a KV cache, None if it has none. `scale` multiplies scores;
    `softcap` c makes them c * tanh(score / c). With `window` w, query q sees keys k with q - k < w, and if it is not
    `causal` also k - q < w. With `chunk` c, it sees only keys of its own chunk of c tokens. `sinks`: one more learned
    score per head. `cross`: keys come from another sequence than queries. `dropout` applies to attention weights, in
    training. `bias` is added to scores. `temperature`: queries are multiplied by a number that grows with positions.
    `times`: how often it runs in a pass.
    """

    name: str
    index: int | None
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    causal: bool
    cross: bool
    dropout: float
    module: nn.Module = field(repr=False, compare=False)
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: ScoreBias | None = None
    temperature: Temperature | None = None
    times: int = 1

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        words = [f"{self.query_heads} query heads", f"{self.kv_heads} key heads of {dims}", f"scale {self.scale:.3g}"]
        words.append("cross" if self.cross else "causal" if self.causal else "both ways")
        words += [f"window {self.window}"] if self.window is not None else []
        words += [f"chunks of {self.chunk}"] if self.chunk is not None else []
        words += [f"soft-cap {self.softcap:g}"] if self.softcap is not None else []
        words += ["sinks"] if self.sinks else []
        words += [f"dropout {self.dropout:g}"] if self.dropout else []
        words += [str(self.bias)] if self.bias is not None else []
        words += [str(self.temperature)] if self.temperature is not None else []
        words += [f"{self.times} times in a pass"] if self.times > 1 else []
        return f"{self.name}: {', '.join(words)}"


def attention_layers(
    model: PreTrainedModel,
    mixers: Collection[nn.Module] = (),
    outside: Collection[nn.Module] = (),
    more_types: Collection[str] = (),
) -> list[AttentionLayer]:
    """The attention layers of a transformers model, in the order of its modules; refuses a model that has others.

    `mixers` are modules beside them that the caller serves; those `outside` the decoder run as they are (towers.py).
    `more_types` are types of layers that the caller serves beside those of everyone.
    """
    check_is_model(model)
    _check_types(model, set(mixers), more_types)
    found = [(name, module) for name, module in model.named_modules() if module not in outside]
    times = dict(_repeated(found))
    layers = [
        replace(_layer(model, name, module), times=times.get(module, 1)) for name, module in found if attends(module)
    ]
    _check_mixers(found, {layer.module for layer in layers}, set(mixers))
    if not layers and not mixers:
        raise ModelError(
            f"{type(model).__name__} has no layer that asks transformers' AttentionInterface for attention"
        )
    return layers


REPEATED = {"HrmTextModel": {"L_module": ("H_cycles", "L_cycles"), "H_module": ("H_cycles",)}}
"""Models that run stacks of layers several times in a pass: by class, its stacks, and the entries of its config whose
product says how often. That layers run so often is counted in every pass."""


def _repeated(found: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[nn.Module, int]]:
    """Modules of such stacks, and how often they run."""
    for _, module in found:
        for name, cycles in REPEATED.get(class_of(module).__name__, {}).items():
            times = math.prod(getattr(module.config, each) for each in cycles)
            yield from ((each, times) for each in getattr(module, name).modules())


def attends(module: nn.Module) -> bool:
    """Whether a module is a layer that asks for attention, by itself or by a method of ours (inline_attention.py)."""
    return inline_attention(module) is not None or bool(calls_of(module))


def split_idle(
    model: PreTrainedModel, layers: Iterable[AttentionLayer]
) -> tuple[list[AttentionLayer], list[AttentionLayer]]:
    """The layers that attend in a pass, and those that do not: cross-attention in a decoder without its encoder."""
    found = list(layers)
    if model.config.is_encoder_decoder:
        return found, []
    return [layer for layer in found if not layer.cross], [layer for layer in found if layer.cross]


def is_left_out(module: nn.Module, idle: Collection[nn.Module]) -> bool:
    """Whether all attention in a module is `idle`, as in a layer that attends to images that are not there."""
    inside = [each for each in module.modules() if attends(each)]
    return bool(inside) and all(each in idle for each in inside)


def check_is_model(model: object) -> None:
    """ModelError unless it is a model of transformers."""
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise ModelError(f"model must be a transformers model, with a config, got {type(model).__name__}")


def check_decodes(layers: Iterable[AttentionLayer], user: str) -> None:
    """ModelError unless all layers are a decoder's: `user` serves no others."""
    for layer in layers:
        if layer.cross or not layer.causal:
            what = "cross-attention" if layer.cross else "attention that looks ahead"
            raise ModelError(f"{layer.name} has {what}; {user} serves decoder-only models")


def decoder_layers(layers: list[AttentionLayer], user: str) -> list[AttentionLayer]:
    """The layers of a decoder by their index in a cache; ModelError unless each has one of its own."""
    check_decodes(layers, user)
    by_index = {layer.index: layer for layer in layers}
    if None in by_index:
        raise ModelError(f"{by_index[None].name} has no index, and so no place in a cache; {user} needs one")
    if set(by_index) != set(range(len(layers))):
        indices = [layer.index for layer in layers]
        raise ModelError(f"layers must be numbered 0 to {len(layers) - 1}, each once, got {indices}")
    return [layer for _, layer in sorted(by_index.items(), key=operator.itemgetter(0))]


def _layer(model: PreTrainedModel, name: str, module: nn.Module) -> AttentionLayer:
    family = inline_attention(module)
    if family is not None:
        if not agrees_with_original(module):
            refuse(name, module, "an attention of its own that is not the one known here (transformers 5.22)")
        if adds_twice(module):
            refuse(name, module, 'an ALiBi that transformers adds twice with attn_implementation="eager" (take "sdpa")')
        return _inline_layer(name, module, family.layer_args(module))
    passed = _arguments(name, module)
    cross, bias = _is_cross(name, module), relative_bias(module) if BIAS in passed else None
    if bias is not None:
        del passed[BIAS]
    _check_served(model, name, module, passed)
    heads = _number(module, HEADS, ("num_attention_heads", "num_heads", "n_head", "n_heads"))
    head_dim = _number(module, HEAD_DIMS, ("head_dim", "d_kv"))
    if heads is None or head_dim is None:
        refuse(name, module, f"a {'number of heads' if heads is None else 'head dim'} that is not known")
    scale, softcap, window = passed.get("scaling"), passed.get("softcap"), passed.get("sliding_window")
    causal = passed.get("is_causal")
    decodes = not cross and getattr(module, "is_decoder", False) is True  # that its mask is causal is compared
    return AttentionLayer(
        name=name,
        index=getattr(module, "layer_idx", None),
        query_heads=heads,
        kv_heads=_kv_heads(module, heads),
        head_dim=head_dim,
        value_dim=getattr(module, "v_head_dim", None) or head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=None if window is None else int(window),
        chunk=_chunk(module),
        softcap=None if softcap is None else float(softcap),
        sinks=passed.get("s_aux") is not None,
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal) or decodes,
        cross=cross,
        dropout=float(passed.get("dropout") or 0.0),
        temperature=_temperature(name, module),
        module=module,
        bias=None if cross else bias,
    )


def _check_served(model: PreTrainedModel, name: str, module: nn.Module, passed: Iterable[str]) -> None:
    """Refuse a layer that passes unknown arguments, or is not one of the text's."""
    unknown = [each for each in passed if each not in SERVED | IGNORED]
    if unknown:
        refuse(name, module, WORDS.get(unknown[0], f"{unknown[0]!r}, an argument that is not known here"))
    tower = _tower(model, module)
    if tower:
        refuse(name, module, f"another sequence than the text's: it is part of the {tower}")
    if getattr(module, "num_key_value_groups", 1) is None:
        refuse(name, module, "an unknown number of key heads")


def _inline_layer(name: str, module: nn.Module, args: LayerArgs) -> AttentionLayer:
    """A layer with inline attention (inline_attention.py)."""
    cross = _is_cross(name, module)
    return AttentionLayer(
        name=name,
        index=args.index,
        query_heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        value_dim=args.head_dim,
        scale=args.scale,
        window=args.window,
        causal=args.causal and not cross,
        cross=cross,
        dropout=args.dropout,
        module=module,
        bias=args.bias,
    )


def _chunk(module: nn.Module) -> int | None:
    """The chunks of a layer, which are in its config; that its mask has them too is compared in every pass."""
    config = getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or index is None or kinds[index] != "chunked_attention":
        return None
    return int(getattr(config, "attention_chunk_size", 0))


TUNED = (
    "if self.attn_temperature_tuning and (not self.use_rope):",
    "positions = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_seen_tokens",
    "torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0",
    "query_states = (query_states * attn_scales).to(query_states.dtype)",
)
"""The lines of Llama 4 that tune the temperature, by positions that a layer counts by itself."""


def _temperature(name: str, module: nn.Module) -> Temperature | None:
    """The temperature of a layer; refuses one that counts positions for anything else."""
    cls: type = type(module)
    counts = _counting(cls)
    if counts is None:
        return None
    if any(line not in counts for line in TUNED):
        refuse(name, module, "positions that it counts by itself (torch.arange)")
    names = ("attn_temperature_tuning", "use_rope", "attn_scale", "floor_scale")
    tunes, rotates, scale, floor = (getattr(module, each) for each in names)
    return Temperature(float(scale), int(floor)) if tunes and not rotates else None


@functools.cache
def _counting(cls: type[nn.Module]) -> str | None:
    """The source of a forward that counts positions; None if it does not."""
    forward = inspect.unwrap(cls.forward)
    if "arange" not in forward.__code__.co_names:
        return None
    return ast.unparse(parse(inspect.getsource(forward)))


def refuse(name: str, module: nn.Module, feature: str) -> NoReturn:
    raise ModelError(f"{name} ({type(module).__name__}) has {feature}, which is not served")


def _arguments(name: str, module: nn.Module) -> dict[str, Any]:
    """The arguments of a layer's call, evaluated; refuses what cannot be."""
    found: dict[str, Any] = {}
    for call in calls_of(module):
        for argument, expression in call.items():
            if argument in SERVED:
                try:
                    value = evaluate(expression, module)
                except Unclear as unclear:
                    if argument == "is_causal":  # a local variable: the module's attribute
                        continue
                    refuse(name, module, f"{argument}={ast.unparse(expression)} ({unclear})")
                if argument in found and not _same(found[argument], value):
                    refuse(name, module, f"several kinds of {argument}")
                found[argument] = value
            else:
                found.setdefault(argument, True)
    return found


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, int | float) and isinstance(other, int | float) and one == other)


# ---- sizes -----------------------------------------------------------------------------------------------------------


HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


def _number(module: nn.Module, names: tuple[str, ...], in_config: tuple[str, ...]) -> int | None:
    """The first whole number that a module, or its config, has by one of some names."""
    for holder, wanted in ((module, names), (getattr(module, "config", None), in_config)):
        for each in wanted:
            found = getattr(holder, each, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return None


def _kv_heads(module: nn.Module, heads: int) -> int:
    groups = getattr(module, "num_key_value_groups", None)
    if isinstance(groups, int) and groups > 0:
        return heads // groups
    return _number(module, ("num_key_value_heads", "num_kv_heads"), ()) or heads


def _is_cross(name: str, module: nn.Module) -> bool:
    """Whether keys come from another sequence, by the attributes, the class or the place of the layer."""
    if getattr(module, "is_cross_attention", False):
        return True
    last = name.rpartition(".")[2]
    cross = re.compile(r"cross|enc_?dec|encoder_attn|encoder_attention", re.IGNORECASE)
    by_name = cross.search(last) or cross.search(name.split(".")[-2:][0])
    return bool(by_name or re.search(r"Cross", type(module).__name__))


# ---- what is refused -------------------------------------------------------------------------------------------------


def configs(config: PreTrainedConfig, key: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and all that are in it, with their names."""
    yield key, config
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig) and inner is not config:
            yield from configs(inner, f"{key}.{name}".strip("."))


def _tower(model: PreTrainedModel, module: nn.Module) -> str | None:
    """The name of the config of a layer of images or sounds."""
    theirs = getattr(module, "config", None)
    for key, config in configs(model.config):
        if config is theirs:
            return key if OTHER_TOWERS.search(key) else None
    return None


def _check_types(model: PreTrainedModel, mixers: set[nn.Module], more: Collection[str]) -> None:
    """Refuse types of layers that are not served; a recurrent one must have one of the mixers."""
    served = LAYER_TYPES.union(more, RECURRENT_TYPES | TYPES_BESIDE if mixers else ())
    paths = [name.split(".") for name, module in model.named_modules() if module in mixers]
    known = {int(part) for path in paths for part in path if part.isdigit()}
    for key, config in configs(model.config):
        if OTHER_TOWERS.search(key):
            continue
        for place, kind in enumerate(getattr(config, "layer_types", None) or ()):
            of = f" of {key}" if key else ""
            if kind in served & RECURRENT_TYPES and place not in known:
                raise ModelError(
                    f"{type(model).__name__}: layer {place}{of} is of the type {kind!r}, and has no recurrent mixer "
                    "that is known, which is not served"
                )
            if kind not in served:
                raise ModelError(
                    f"{type(model).__name__}: layer {place}{of} is of the type {kind!r}, which is not served; those "
                    f"that are: {', '.join(sorted(served))}"
                )


def _check_mixers(found: list[tuple[str, nn.Module]], layers: set[nn.Module], mixers: set[nn.Module]) -> None:
    """See [Note: others that mix tokens]."""
    known = layers | mixers
    inside = {inner for layer in layers for inner in layer.modules()}
    inside |= {inner for mixer in mixers for inner in mixer.modules() if isinstance(inner, MIXERS)}  # never called
    for name, module in found:
        if module in inside or not _is_innermost(module) or NO_MIXERS.search(type(module).__name__):
            continue
        if known.isdisjoint(module.modules()):
            refuse(
                name or "the model", module, "a way of its own to mix tokens (it does not ask the AttentionInterface)"
            )


def is_mixing(module: nn.Module) -> bool:
    """Whether a module asks for attention, or mixes tokens by its class."""
    return bool(calls_of(module)) or (_is_innermost(module) and not NO_MIXERS.search(type(module).__name__))


def _is_innermost(module: nn.Module) -> bool:
    return isinstance(module, MIXERS) or bool(NAMED_MIXERS.search(type(module).__name__))
