"""Detects changes of a model by a fingerprint: its modules, their settings, and the bits of its weights.

Later prompts must not find keys that another version of the model computed, and a CUDA graph replays the model that it
was captured from. A model may change at any time: by training, loading weights, switching an adapter, or adding a hook.
A fingerprint has two parts.

**Parts** (`Parts`): the modules and their classes, everything that is set on them (numbers, switches, replaced methods,
active adapters), hooks, configs, and where each parameter and buffer lies and how often torch saw it written. Comparing
them is host work of microseconds, done at every step. A captured graph depends on these alone: it reads weights where
they lie.

**Content**: the checksum of all parameters and buffers (parallel/checksum.py). It reads every weight once, on its
device, and notices what leaves no trace: fused optimizers, writes through `.data`, foreign kernels. It is compared when
a request begins that was added since the last comparison, and whenever one begins on found pages, at most once a step.
Both are needed: content so that no page of another model is ever served; parts so that pages of different versions stay
apart even if the weights return to what they were.

Not detected: weights that are changed without a new version, and restored bit by bit, between two steps without new
requests.

[Note: what a model writes itself] Some models set attributes while they run. Differences right after a step were made
by the model itself, and are accepted; they are looked for after the first steps, and then as long as there are any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, call, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnspan.masks.versions import VERSIONS
from attnspan.parallel.checksum import Weights

FIRST_STEPS = 2
"""See [Note: what a model writes itself]."""

COMPARED = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""What torch keeps in every module and forward depends on."""

_OF_TORCH = frozenset(vars(nn.Module())) - {*COMPARED, "training"}


class ServingMethod(partial[Any]):
    """A method that overrides a module's own while its model is served: no part of the model."""


_VERSION, _FORWARD = attrgetter("_version"), attrgetter("forward")


class Parts:
    """All of a model that the host can see, when this is made; `unchanged` tells whether it still is so.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> parts = Parts(model)
    >>> parts.unchanged()
    True
    >>> model[1] = nn.SiLU()
    >>> parts.unchanged()
    False
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: Container[str] = (),
        rebound: Callable[[nn.Module], Collection[str]] = lambda module: (),
    ) -> None:
        VERSIONS.verify()
        self._ignored = ignored  # entries of configs, and methods that modules override while they are served
        self._modules = list(model.modules())
        self._dicts = [vars(each) for each in self._modules]
        overridden = [[name for name in dir(type(each)) if name in ignored] for each in self._modules]
        self._overridden = [(at, vars(self._modules[at]), names) for at, names in enumerate(overridden) if names]
        rebound_methods = map(rebound, self._modules)
        self._rebound = [(at, self._dicts[at], names) for at, names in enumerate(rebound_methods) if names]
        configs = [each["config"] for each in self._dicts if hasattr(each.get("config"), "__dict__")]
        self._configs = [vars(each) for each in {id(config): config for config in configs}.values()]
        own = [
            [name for name, value in list(each.items()) if name not in ignored and _is_part(name, value)]
            for each in self._dicts
        ]
        self._settings = [itemgetter(*names) for names in own]
        hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
        self._containers = [*self._mutable(), *hooks]
        self.weights = Weights(model)
        self._tensors = [each for each in chain(self.weights, self._attributes()) if _has_address(each)]
        self._versioned = [each for each in self._tensors if not each.is_inference()]
        self._classes = list(dict.fromkeys(map(type, self._modules)))
        self._snapshot = self._take_snapshot()
        self._copies = [_copied(each) for each in self._containers]

    def _take_snapshot(self) -> tuple[list[Any], ...]:
        """Lists that are made by few calls, for they are made at every step."""
        return (
            list(map(type, self._modules)),
            list(map(_FORWARD, self._classes)),
            self._sizes(),
            list(map(call, self._settings, self._dicts)),
            [value for each in self._configs for key, value in each.items() if key not in self._ignored],
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(_VERSION, self._versioned)),
        )

    def unchanged(self) -> bool:
        """Whether nothing was replaced, set or written since."""
        try:
            return self._take_snapshot() == self._snapshot and self._containers == self._copies
        except Exception:  # what was replaced cannot even be compared, as tensors of several numbers
            return False

    def _sizes(self) -> list[int]:
        """How many attributes each module has, without those that override a method while the model is served."""
        sizes = list(map(len, self._dicts))
        for at, attributes, names in self._overridden:
            sizes[at] -= sum(map(attributes.__contains__, names))
        for at, attributes, methods in self._rebound:
            sizes[at] -= sum([isinstance(attributes.get(name), ServingMethod) for name in methods])
        return sizes

    def _attributes(self) -> Iterator[Tensor]:
        return (value for each in self._dicts for value in list(each.values()) if isinstance(value, Tensor))

    def _mutable(self) -> Iterator[Any]:
        """Dicts, lists and sets: another one in its place is seen by identity, what is done to it is not."""
        for each in chain(self._dicts, self._configs):
            for name, value in list(each.items()):
                if isinstance(value, dict | list | set) and name not in _OF_TORCH:
                    yield value


def _is_part(name: str, value: object) -> bool:
    """Whether an entry of a module is part of the model: torch's other dicts in a module change nothing."""
    return name not in _OF_TORCH and not isinstance(value, ServingMethod)


def _copied(value: Any) -> Any:
    """A deep copy of containers; what they hold in the end is shared."""
    if isinstance(value, dict):
        return type(value)((key, _copied(each)) for key, each in value.items()) if type(value) is dict else value.copy()
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return set(value) if isinstance(value, set) else value


def _has_address(tensor: Tensor) -> bool:
    """Not one that wraps others, nor one without numbers."""
    hollow = tensor.is_meta or is_traceable_wrapper_subclass(tensor)
    return type(tensor).data_ptr is Tensor.data_ptr and tensor.layout == torch.strided and not hollow


class ModelFingerprint:
    """A model, how often it was found changed (`version`), and how often its parts were (`changes`).

    `ignored` are entries of configs that change while the model is served, `rebound` names the attributes of a module
    that may be a `ServingMethod`. `details` returns what must be alike on every rank of a module beside its class,
    such as its adapters.

    A change is counted before it is accepted, so that an interrupt in between makes a version too many and never one
    too few.
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: Container[str] = (),
        details: Callable[[nn.Module], object] = lambda module: (),
        rebound: Callable[[nn.Module], Collection[str]] = lambda module: (),
    ) -> None:
        self.model, self.version, self.changes = model, 0, 0
        self._details, self._parts_of = details, partial(Parts, ignored=ignored, rebound=rebound)
        self._parts = self._parts_of(model)
        self.content = self._parts.weights.content()
        self._compared = True  # the content, since parts were last compared
        self._watched = FIRST_STEPS

    def compare_parts(self) -> None:
        """Compare what the host can see of the model, as every step does."""
        self._compared = False
        if not self._parts.unchanged():
            self.version += 1
            self.changes += 1
            self._parts = self._parts_of(self.model)

    def compare_content(self) -> bool:
        """Compare the weights, unless that was done since parts were last compared; whether it was done now."""
        if self._compared:
            return False
        found = self._parts.weights.content()
        if found != self.content:
            self.version += 1
            self.content = found
        self._compared = True
        return True

    def accept_own_writes(self) -> None:
        """Call it when the model has run. See [Note: what a model writes itself]."""
        if not self._watched:
            return
        if self._parts.unchanged():
            self._watched -= 1
        else:
            self._parts, self._watched = self._parts_of(self.model), FIRST_STEPS

    def description(self) -> str:
        """A digest of what must be alike on every rank beside the weights: classes of modules, and their details.

        Hooks are not part of it: one rank may watch what the others do not. One that changes tokens shows in the next
        step's record.
        """
        digest = hashlib.sha256()
        for name, module in self.model.named_modules():
            digest.update(repr((name, type(module).__qualname__, self._details(module))).encode())
        return digest.hexdigest()
