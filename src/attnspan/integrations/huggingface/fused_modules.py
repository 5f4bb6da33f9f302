"""Modules of a model that run as one kernel each while it is served on CUDA: norms, rotary embeddings, gated MLPs, and
the sum before a layer's second norm.

A step of few tokens takes the time of reading the weights, and in eager torch as long again for the small functions
between them: a norm alone is ten kernels. So while a model is served, such modules have another forward, which calls
one kernel (fused_kernels.py). Weights, hooks and submodules are the model's own; nothing is copied.

[Note: recognised by what it computes] No class is known by name. A module gets another forward if three things hold:

    names    the code of its forward mentions nothing but what the formula needs
    bits     on random tokens of three magnitudes it returns the bits of the formula
    kernel   on the same tokens the kernel agrees with the formula (`agree`)

Any other module keeps its forward: a LayerNorm, an unknown activation, rotary embeddings of interleaved numbers. When
the model has changed, all its modules are compared again.

The module's own forward still answers calls that the kernel does not support, and calls under autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnspan.engine.fingerprint import ServingMethod
from attnspan.integrations.huggingface.classes import class_of, is_compiled
from attnspan.integrations.huggingface.fused_kernels import (
    ACTIVATIONS,
    DTYPES,
    NORMS,
    ROTARIES,
    agree,
    fused_add_norm,
    fused_gate,
    fused_norm,
    fused_rotary,
    gated,
    is_available,
    normed,
    rotated,
)
from attnspan.integrations.huggingface.linear_products import current_products, is_watched
from attnspan.integrations.huggingface.rebinding import can_be_rebound, names_in, rebound
from attnspan.integrations.huggingface.tensor_parallel import tensor_parallel_mesh

ROTARY = "apply_rotary_pos_emb"
"""The function that attention layers call by this name: (q, k, cos, sin)."""

EPSILONS = ("variance_epsilon", "eps", "epsilon")
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")
SEPARATE, MERGED = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}
"""Names of the submodules of a gated MLP; modules with others are not looked at."""

FIRST, ATTENTION, SECOND, MLP = LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""Parts of a decoder layer that is looked at: y = x + attention(first(x)), then y + mlp(second(y))."""

IN_NORMS = frozenset(
    (*EPSILONS, "weight", "_norm", "dtype", "to", "torch", "float32", "float", "pow", "mean", "rsqrt", "type_as")
)
IN_MLPS = frozenset((*ACTIVATION_NAMES, *SEPARATE, *MERGED, "chunk"))
"""All names that the code of norms and of gated MLPs may mention."""

SIZES = (1e-2, 1.0, 30.0)
"""Magnitudes of the tokens on which modules are compared; in float16 larger ones overflow."""

Method = Callable[..., object]


class FusedModule(NamedTuple):
    """A module, the formula that it was recognised as, and its forward while its model is served.

    `formula` names it with its variant and settings, such as ("norm", "rounded", "eps"). Modules of the same formulas
    as before need no new forward when a model is looked at again.
    """

    module: nn.Module
    formula: tuple[object, ...]
    forward: Method


def fused_modules(model: nn.Module, attention: Iterable[nn.Module]) -> list[FusedModule]:
    """The modules of a model that run as one kernel, and the `attention` layers whose rotary embeddings do.

    Parts that torch has compiled have kernels of their own.
    """
    weight = next(model.parameters())
    if not is_available(weight.device) or weight.dtype not in DTYPES or tensor_parallel_mesh(model) is not None:
        return []
    draw = _Draw(weight)
    attends, left_out = set(attention), _compiled_parts(model)
    found, layers = list[FusedModule](), list[nn.Module]()
    with torch.no_grad():
        norm_variant, rotary_variant = cache(partial(_norm_variant, draw)), cache(partial(_rotary_variant, draw))
        for module in dict.fromkeys(model.modules()):
            if module in left_out or type(module) is not class_of(module) or _own_forward(module):
                continue
            if module in attends:
                found += _with_rotary(module, rotary_variant)
            elif _is_norm_like(module):
                found += _norm(module, norm_variant)
            elif _is_mlp_like(module):
                found += _mlp(module, draw)
            elif module._modules.keys() == set(LAYER):
                layers.append(module)
        formulas = {each.module: each.formula for each in found}
        for layer in layers:
            found += _layer(layer, formulas, draw)
    return found


def may_be_fused(module: nn.Module) -> bool:
    """Whether the forward of a module may be ours while its model is served."""
    whole = module._modules.keys() == set(LAYER)
    return whole or _is_norm_like(module) or _is_mlp_like(module) or _rotary_of(module) is not None


class _Draw:
    """Random tokens of a model's dtype, on its device; the process's own random numbers stay as they are."""

    def __init__(self, like: Tensor) -> None:
        self.dtype, self.device, self._drawn = like.dtype, like.device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._drawn, device="cpu").to(self.device, self.dtype)

    def tokens(self, n: int) -> Tensor:
        """(1, tokens, n)."""
        sizes = torch.tensor(SIZES, device=self.device, dtype=self.dtype).repeat(2)
        return self(1, len(sizes), n) * sizes[:, None]


def _own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is neither its class's nor one that serving has set, which is removed after a step."""
    return not isinstance(vars(module).get("forward", ServingMethod(module)), ServingMethod)


def _compiled_parts(model: nn.Module) -> set[nn.Module]:
    return {part for each in filter(is_compiled, model.modules()) for part in each.modules()}


def _mentions_only(module: nn.Module, names: frozenset[str], *methods: str) -> bool:
    """Whether the code of a module's forward, and of those `methods` that it has, mentions only these names, and takes
    one argument."""
    functions = [getattr(type(module), name, None) for name in ("forward", *methods)]
    found = [each for each in functions if each is not None]
    plain = all(isinstance(each, FunctionType) and not hasattr(each, "__wrapped__") for each in found)
    return plain and all(
        names.issuperset(names_in(each.__code__)) and len(inspect.signature(each).parameters) == 2 for each in found
    )


# ---- norms -----------------------------------------------------------------------------------------------------------


def _is_norm_like(module: nn.Module) -> bool:
    """Whether a module has one weight vector and an epsilon, and nothing more."""
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules and not list(module.buffers(recurse=False))
    return alone and weight is not None and weight.dim() == 1 and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> str | None:
    return next((name for name in EPSILONS if isinstance(vars(module).get(name), float)), None)


def _norm(module: nn.Module, variant_of: Callable[[type, int, float, str], str | None]) -> Iterator[FusedModule]:
    name, weight = _epsilon(module), module._parameters["weight"]
    assert name is not None, "it is like a norm"
    assert weight is not None, "it is like a norm"
    if not _mentions_only(module, IN_NORMS, "_norm") or weight.dtype not in DTYPES:
        return
    variant = variant_of(type(module), len(weight), vars(module)[name], name)
    if variant is not None:
        yield FusedModule(module, ("norm", variant, name), partial(_norm_forward, module, variant, name))


def _norm_variant(draw: _Draw, cls: type[nn.Module], n: int, eps: float, name: str) -> str | None:
    """Which of `NORMS` a class computes, found on random weights; None if it is no such norm."""
    x, weight = draw.tokens(n), draw(n)
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    twin.weight = nn.Parameter(weight, requires_grad=False)
    setattr(twin, name, eps)
    try:
        expected = cls.forward(twin, x)
    except AttributeError:  # it has settings that are not known here
        return None
    for variant in NORMS:
        if torch.equal(expected, normed(x, weight, eps, variant)):
            found = fused_norm(x, weight, eps, variant)
            return variant if found is not None and agree(found, expected) else None
    return None


def _norm_forward(module: nn.Module, variant: str, name: str, *args: Tensor, **kwargs: Tensor) -> object:
    if len(args) == 1 and not kwargs and not torch.is_grad_enabled():
        weight = module._parameters["weight"]
        found = None if weight is None else fused_norm(args[0], weight, vars(module)[name], variant)
        if found is not None:
            return found
    return type(module).forward(module, *args, **kwargs)


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def _is_mlp_like(module: nn.Module) -> bool:
    """Whether it has the parts of a gated MLP, and nothing more."""
    parts = module._modules.keys() - ACTIVATION_NAMES
    return parts in (SEPARATE, MERGED) and not module._parameters and not list(module.buffers(recurse=False))


def _mlp(module: nn.Module, draw: _Draw) -> Iterator[FusedModule]:
    first = module._modules.get("gate_proj") or module._modules.get("gate_up_proj")
    width = getattr(first, "in_features", None)
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    if not isinstance(width, int) or hooked or not _mentions_only(module, IN_MLPS):
        return
    activation = _activation(module, draw)
    if activation is None:
        return
    x = draw.tokens(width)
    gate, up = _gate_and_up(module, x)
    found, expected = fused_gate(gate, up, activation), gated(gate, up, activation)
    same = torch.equal(type(module).forward(module, x), _part(module, "down_proj")(expected))
    if same and found is not None and agree(found, expected):
        yield FusedModule(module, ("mlp", activation), partial(_mlp_forward, module, activation))


def _activation(module: nn.Module, draw: _Draw) -> str | None:
    """The name of its activation, if it is one of ours."""
    own = next((getattr(module, name) for name in ACTIVATION_NAMES if hasattr(module, name)), None)
    if not callable(own):
        return None
    x = draw.tokens(64)
    expected = own(x)
    return next((name for name, each in ACTIVATIONS.items() if torch.equal(expected, each(x))), None)


def _part(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    part = module._modules[name]
    assert part is not None, "it is like an MLP"
    return part


def _gate_and_up(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    if "gate_up_proj" in module._modules:
        gate, up = _part(module, "gate_up_proj")(x).chunk(2, dim=-1)
        return gate, up
    return _part(module, "gate_proj")(x), _part(module, "up_proj")(x)


def _mlp_forward(module: nn.Module, activation: str, *args: Tensor, **kwargs: Tensor) -> object:
    if len(args) != 1 or kwargs or torch.is_grad_enabled():
        return type(module).forward(module, *args, **kwargs)
    return _part(module, "down_proj")(_gated(module, activation, args[0]))


def _gated(module: nn.Module, activation: str, x: Tensor) -> Tensor:
    """What an MLP gives to its last matrix."""
    products = current_products()
    found = None if products is None else products.gated(module, activation, x)
    if found is not None:
        return found
    gate, up = _gate_and_up(module, x)
    found = fused_gate(gate, up, activation)
    return gated(gate, up, activation) if found is None else found


def _mlp_and_sum(mlp: nn.Module, activation: str | None, x: Tensor, total: Tensor) -> object:
    """total + mlp(x); the sum in the kernel of the MLP's last matrix, if nothing but that kernel would see it."""
    products = current_products()
    served = isinstance(vars(mlp).get("forward"), ServingMethod) and not is_watched(mlp)
    if products is None or activation is None or not served:
        return total + mlp(x)
    given = _gated(mlp, activation, x)
    found = products.down(mlp._modules["down_proj"], given, total)
    return total + _part(mlp, "down_proj")(given) if found is None else found


# ---- layers: a sum and the norm after it -----------------------------------------------------------------------------


class _Part(nn.Module):
    """Stands in for a part of a layer: computes some function, and records its other arguments."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function, self.given = function, dict[str, object]()

    def forward(self, hidden_states: Tensor, **given: object) -> object:
        self.given = given
        return self.function(hidden_states)


def _layer(layer: nn.Module, formulas: Mapping[nn.Module, tuple[object, ...]], draw: _Draw) -> Iterator[FusedModule]:
    """A layer whose second norm was recognised, if its forward is the formula of `LAYER` and passes its other arguments
    to attention alone."""
    forward, formula = type(layer).forward, formulas.get(layer._modules[SECOND] or layer)
    if formula is None or formula[0] != "norm" or not isinstance(forward, FunctionType):
        return
    if not set(LAYER).issuperset(names_in(forward.__code__)):
        return
    named = list(inspect.signature(forward).parameters.values())[2:]
    defaults = {each.name: each.default for each in named if each.kind is not each.VAR_KEYWORD}
    if any(default is inspect.Parameter.empty for default in defaults.values()):
        return
    (_, variant, name), norm = map(str, formula), layer._modules[SECOND]
    assert norm is not None, "its formula is known"
    n = len(next(norm.parameters()))
    x, weight, eps = draw.tokens(n), draw(n), 1e-5
    twin, marks = type(layer).__new__(type(layer)), {each: object() for each in [*defaults, "other"][: len(named)]}
    nn.Module.__init__(twin)
    parts = {
        FIRST: _Part(torch.sin), ATTENTION: _Part(lambda y: (torch.cos(y), None)),
        SECOND: _Part(lambda y: normed(y, weight, eps, variant)), MLP: _Part(torch.tanh),
    }  # fmt: skip
    for place, part in parts.items():
        setattr(twin, place, part)
    attended = torch.cos(torch.sin(x))
    total, found = x + attended, fused_add_norm(x, attended, weight, eps, variant)
    second = normed(total, weight, eps, variant)
    try:
        given = forward(twin, x, **marks)
    except (TypeError, ValueError):  # its parts return something else
        return
    same = isinstance(given, Tensor) and torch.equal(given, total + torch.tanh(second))
    handed = parts[ATTENTION].given == marks and not any(parts[place].given for place in (FIRST, SECOND, MLP))
    if same and handed and found is not None and torch.equal(found[0], total) and agree(found[1], second):
        kind, *of_mlp = formulas.get(layer._modules[MLP] or layer, ("other",))
        activation = str(of_mlp[0]) if kind == "mlp" else None
        ours = partial(_layer_forward, layer, variant, name, activation, defaults)
        yield FusedModule(layer, ("layer", variant, name, activation), ours)


def _layer_forward(
    layer: nn.Module, variant: str, name: str, activation: str | None, defaults: Mapping[str, object],
    *args: Tensor, **kwargs: object,
) -> object:  # fmt: skip
    parts: dict[str, Any] = layer._modules
    norm = parts[SECOND]
    if len(args) != 1 or torch.is_grad_enabled() or norm._forward_hooks or norm._forward_pre_hooks:
        return type(layer).forward(layer, *args, **kwargs)
    [x] = args
    attended, _ = parts[ATTENTION](hidden_states=parts[FIRST](x), **{**defaults, **kwargs})
    found = fused_add_norm(x, attended, norm.weight, vars(norm)[name], variant)
    total, second = found or (x + attended, None)
    return _mlp_and_sum(parts[MLP], activation, norm(total) if second is None else second, total)


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def _rotary_of(module: nn.Module) -> FunctionType | None:
    """The function that an attention layer calls by the name `ROTARY`; None if there is none that can be replaced."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not can_be_rebound(forward):
        return None
    inner = inspect.unwrap(forward)
    found = inner.__globals__.get(ROTARY) if ROTARY in names_in(inner.__code__) else None
    return found if isinstance(found, FunctionType) else None


def _with_rotary(module: nn.Module, variant_of: Callable[[FunctionType], str | None]) -> Iterator[FusedModule]:
    own, forward = _rotary_of(module), type(module).forward
    variant = None if own is None else variant_of(own)
    if own is not None and variant is not None:
        assert isinstance(forward, FunctionType), "it was looked at"
        ours = rebound(forward, {ROTARY: partial(_rotate, own, variant)})
        yield FusedModule(module, ("rotary", own, variant), partial(ours, module))


def _rotary_variant(draw: _Draw, own: FunctionType) -> str | None:
    """Which of `ROTARIES` a function computes; None if it is no rotary embedding by halves."""
    (q, k), (cos, sin) = (draw(1, heads, 3, 16) for heads in (4, 2)), (draw(1, 3, 16) for _ in range(2))
    try:
        expected = own(q, k, cos, sin)
    except Exception:  # it takes other arguments, or wants other shapes
        return None
    if not isinstance(expected, tuple) or len(expected) != 2:
        return None
    for variant in ROTARIES:
        if all(map(torch.equal, expected, (rotated(q, cos, sin, variant), rotated(k, cos, sin, variant)))):
            found = fused_rotary(q, k, cos, sin, variant)
            return variant if found is not None and all(map(agree, found, expected)) else None
    return None


def _rotate(own: FunctionType, variant: str, *args: Tensor, **kwargs: Tensor) -> object:
    found = None if kwargs or len(args) != 4 or torch.is_grad_enabled() else fused_rotary(*args, variant)
    return own(*args, **kwargs) if found is None else found
