"""The recurrent mixers of a transformers model, and their forward over ranks or in a step of an engine.

A mixer is a module whose forward calls, by name, a function that mixes tokens (mixer_functions.py). While its model
is enabled (binding.py) or served (serving_binding.py), its forward is a copy with other globals (rebinding.py)::

    forward = rebound(original, {"causal_conv1d_fn": ours, ...})

The modeling file and other models are not changed, and virtual ranks do not interfere. `unbind` removes it.

[Note: whole mixers] A mixer is supported if everything in it is known: it calls no other function of a modeling file
or a package, no convolution as a module, and nothing that moves tokens (token_mixing.py). Its methods must be
transformers' own, because subclasses and patches may mix tokens in ways that no check detects. Anything else is refused
with the names of the layer and the function. Every pass checks that all its functions ran (call_counts.py).

Mixers that compute their recurrence inline are rows of inline_mixers.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import NoReturn

from torch import nn

from attnspan.engine.fingerprint import ServingMethod
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.classes import class_of
from attnspan.integrations.huggingface.inline_mixers import INLINE, unlike_inline
from attnspan.integrations.huggingface.mixer_functions import (
    DECODING,
    KNOWN,
    SEQUENCE,
    MixerFunctions,
    MixerTokens,
    difference,
)
from attnspan.integrations.huggingface.rebinding import can_be_rebound, names_in, rebound
from attnspan.integrations.huggingface.token_mixing import MOVING, SUMMING, mixing_in

LIBRARIES = {"torch", "builtins", "math"}
"""Where functions come from that mix no tokens, except those that token_mixing.py knows."""

HOMES = {"transformers", "torch"}
"""Where the methods of a mixer come from. Others may mix tokens in ways that no check of names finds."""

UNCALLED = (nn.Conv1d, nn.RNNBase, nn.MultiheadAttention)
"""Modules in a mixer of which it may read the weights; called, they would see one rank's tokens."""

Method = Callable[..., object]


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """One module that mixes tokens by convolutions and recurrences: its path, and the functions that it calls."""

    name: str
    functions: tuple[str, ...]
    methods: Mapping[str, FunctionType] = field(repr=False, compare=False)  # those that call them
    module: nn.Module = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.functions)}"

    def bind(self, current: Callable[[], MixerTokens]) -> None:
        """Run over the ranks of the `current` call."""
        for module, attribute, method in self.replacements(current):
            vars(module)[attribute] = method

    def replacements(self, current: Callable[[], MixerTokens]) -> Iterator[tuple[nn.Module, str, Method]]:
        """What takes the place of methods, for the tokens of the `current` call: (module, attribute, method)."""
        ours, written = MixerFunctions(self.name, current), INLINE.get(class_of(self.module).__name__)
        functions = {name: ours.by_name(name) for name in KNOWN}
        for attribute, method in self.methods.items():
            yield self.module, attribute, MethodType(rebound(method, functions), self.module)
        for each in self._uncalled:
            yield each, "forward", functools.partial(_refuse_call, self.name, type(each).__name__)
        if written is not None:
            yield from written.replacements(self.module, ours)

    def unbind(self) -> None:
        """Run as before; what was replaced or taken away since has nothing of ours."""
        for module, attribute, _ in self.replacements(_nowhere):
            vars(module).pop(attribute, None)

    @property
    def _uncalled(self) -> list[nn.Module]:
        return [each for each in self.module.modules() if isinstance(each, UNCALLED)]


def _nowhere() -> NoReturn:
    raise AssertionError("no mixer runs while it is unbound")


def _refuse_call(mixer: str, kind: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(f"{mixer} calls its {kind} by itself, on the tokens that it has alone, which is not served")


def recurrent_mixers(model: nn.Module, outside: Collection[nn.Module] = ()) -> list[RecurrentMixer]:
    """The recurrent mixers of a model, in the order of its modules; refuses one in which something is not known.

    Modules `outside` its decoder are left out.
    """
    found = [(name, module) for name, module in model.named_modules() if module not in outside]
    return [_mixer(name, module) for name, module in found if is_mixer(module)]


def is_mixer(module: nn.Module) -> bool:
    """Whether a module calls functions that mix tokens."""
    cls = class_of(module)
    return cls.__name__ in INLINE or any(SEQUENCE & called.keys() for _, _, called in _methods(cls))


def replaceable_methods(module: nn.Module) -> tuple[str, ...]:
    """The methods of a module that may be replaced: a mixer's, and those of modules in it that are not called."""
    if is_mixer(module):
        return ("forward", *(name for name, _ in _attributes(type(module)) if name != "forward"))
    return ("forward",) if isinstance(module, UNCALLED) else ()


def _mixer(name: str, module: nn.Module) -> RecurrentMixer:
    """See [Note: whole mixers]."""
    cls = class_of(module)
    unknown_in = unlike_inline if cls.__name__ in INLINE else _unknown
    unknown = _held_unknown(module) or unknown_in(cls) or _elsewhere(cls)
    if unknown is not None:
        raise ModelError(f"{name} ({cls.__name__}) has {unknown}, which is not served")
    if cls.__name__ in INLINE:
        return RecurrentMixer(name, INLINE[cls.__name__].functions, {}, module)
    found = list(_methods(cls))
    functions = dict.fromkeys(each for _, _, called in found for each in called if each in SEQUENCE)
    return RecurrentMixer(name, tuple(functions), {attribute: method for attribute, method, _ in found}, module)


def _held_unknown(module: nn.Module) -> str | None:
    """What a module calls that is not its class's."""
    for attribute, value in list(vars(module).items()):  # another thread may begin to serve it
        if not isinstance(value, nn.Module | ServingMethod) and _is_foreign(value):
            return f"{attribute}, a function of its own beside its class's (as kernels and hooks of accelerate are)"
    return None


def _unknown(cls: type[nn.Module]) -> str | None:
    """The first thing in a class of mixers that is not known."""
    for attribute, function in _bare_functions(cls):
        for each in _called(function):
            return f"{attribute}, which is no method and calls {each}"
    for attribute, method, called in _methods(cls):
        for each, theirs in called.items():
            if each not in KNOWN:
                return f"{each}, a function that is not known here"
            differs = difference(each, theirs)
            if differs is not None:
                return f"{each}, which {differs} in this version of transformers"
        if not can_be_rebound(method):
            return f"{attribute}(), decorated in a way that is not known here"
    mixing = next(filter(None, map(_mixing, _own_methods(cls))), None)
    return None if mixing is None else f"a way of its own to mix tokens, {mixing}"


def _elsewhere(cls: type[nn.Module]) -> str | None:
    """The first method of a class that is not transformers' own."""
    for attribute, method in _functions_of(cls):
        if not _is_of_transformers(method):
            return f"{attribute}(), which is not code of transformers"
    return None


def _is_of_transformers(function: FunctionType) -> bool:
    """Whether a function, and what it is decorated with, is written in transformers or torch."""
    home, inner = function.__globals__["__name__"], getattr(function, "__wrapped__", None)
    return home.partition(".")[0] in HOMES and (inner is None or _is_of_transformers(inner))


def _mixing(function: FunctionType) -> str | None:
    try:
        return mixing_in(function, MOVING | SUMMING, frozenset(DECODING))
    except (OSError, TypeError):
        return f"{function.__name__}() without source"


def _own_methods(cls: type[nn.Module]) -> list[FunctionType]:
    """The forward of a class, and the functions in the class that it mentions."""
    forward = inspect.unwrap(cls.forward)
    own = dict([*_functions_of(cls), *_bare_functions(cls)])
    return [forward, *(inspect.unwrap(own[name]) for name in names_in(forward.__code__) if name in own)]


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType, dict[str, Method]]]:
    """The methods of a class that call functions of files or packages, and those functions as they are now."""
    for attribute, method in _functions_of(cls):
        called = _called(inspect.unwrap(method))
        if called:
            yield attribute, method, called


def _functions_of(cls: type[nn.Module]) -> list[tuple[str, FunctionType]]:
    return [(name, each) for name, each in _attributes(cls) if inspect.isfunction(each)]


def _bare_functions(cls: type[nn.Module]) -> list[tuple[str, FunctionType]]:
    """What a class has of functions that are no methods: static ones, those of the class, properties."""
    inside = [(name, getattr(each, "fget", None) or getattr(each, "__func__", None)) for name, each in _attributes(cls)]
    return [(name, inspect.unwrap(each)) for name, each in inside if inspect.isfunction(each)]


def _attributes(cls: type[nn.Module]) -> list[tuple[str, object]]:
    """The attributes of a class and its bases below nn.Module."""
    if not issubclass(cls, nn.Module):  # of torch's own modules
        return []
    names = dict.fromkeys(name for base in cls.__mro__[: cls.__mro__.index(nn.Module)] for name in vars(base))
    return [(name, inspect.getattr_static(cls, name)) for name in names if name != "__init__"]


def _called(function: FunctionType) -> dict[str, Method]:
    """Functions that another calls by global names, without those of torch."""
    scope = function.__globals__
    named = {name: scope[name] for name in names_in(function.__code__) if name in scope}
    return {name: value for name, value in named.items() if _is_foreign(value)}


def _is_foreign(value: object) -> bool:
    """Whether something is called, is no class, and comes from elsewhere than torch and Python."""
    home = getattr(value, "__module__", None) or type(value).__module__
    return callable(value) and not isinstance(value, type) and str(home).partition(".")[0] not in LIBRARIES
