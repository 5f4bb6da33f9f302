"""The forward of an attached module: its own, in a scope of the session in use.

`forward` is wrapped, not hooked, because a ``with`` ends on any exception, including an interrupt, and because
torch.compile traces it. Copies of a model stay attached, and follow `use` and `detach`. A shallow copy shares the
wrapper, which finds the called module on the stack; torch.compile cannot inspect the stack and needs a deep copy.

[Note: one graph] torch.compile guards on the identity of a `forward` that is set on a module, except for a bound
method, where it guards on the code. So all modules are bound to one function, and their differences are kept in an
`Attached`. Equal blocks that are compiled one by one then share a graph.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnspan.assumptions import Assumption
from attnspan.parallel.compiled_inputs import checked_inputs

if TYPE_CHECKING:
    from attnspan.parallel.attach import Attachment
    from attnspan.parallel.session import ContextParallel

MODULES = nn.modules.module.__file__

ForwardRunner = Callable[["ContextParallel", Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Runs a module's forward: called with the session, that forward, its args and its kwargs."""

OWN = "_attnspan"
"""The attribute in which a module keeps its `Attached`."""


class Attached:
    """The state of one attached module, kept on the module. See [Note: one graph]."""

    def __init__(self, attachment: Attachment, module: nn.Module, mask: str | None, run_forward: ForwardRunner | None):
        self.attachment, self.mask, self.run_forward = attachment, mask, run_forward
        self.is_entry = module is attachment.model
        self.original: Callable[..., object] | None = vars(module).get("forward")  # None: that of its class


def is_attached(module: nn.Module) -> bool:
    """Whether a module is attached now."""
    own = vars(module).get(OWN)
    return isinstance(own, Attached) and own.attachment.live


def _forward(self: Any, *args: object, **kwargs: object) -> object:
    """The forward of every attached module. See [Note: one graph]."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        self = _caller(self, sys._getframe(1))
    own = self._attnspan
    attachment = own.attachment
    original = _own_forward(self, own) if own.original is not None else functools.partial(type(self).forward, self)
    if not attachment.live:  # a copy of a model that was attached
        return original(*args, **kwargs)
    if compiling:
        session = attachment.session
        if own.is_entry:
            args, kwargs = checked_inputs(session.sharding, (args, kwargs))
    else:
        session = attachment.session_of((args, kwargs))
    with attachment.mode(own.mask, session):
        if own.run_forward is not None:
            return own.run_forward(session, original, args, kwargs)
        return original(*args, **kwargs)


def _own_forward(module: nn.Module, own: Attached) -> Callable[..., object]:
    """The `forward` attribute that a module had when it was attached; of a shallow copy, bound to the copy."""
    original = own.original
    assert original is not None, "asked only where there is one"
    if (
        isinstance(original, MethodType)
        and isinstance(original.__self__, nn.Module)
        and original.__self__ is not module
    ):
        bound: Callable[..., object] = original.__func__.__get__(module)
        return bound
    return original


def _caller(module: nn.Module, frame: FrameType) -> nn.Module:
    """The module whose forward is called: a shallow copy has the bound method of the original."""
    _CALLER.verify()
    return _caller_in(module, frame)


def _caller_in(module: nn.Module, frame: FrameType) -> nn.Module:
    if frame.f_code.co_filename != MODULES:
        return module
    caller = frame.f_locals.get("self")
    if caller is module or not isinstance(caller, nn.Module):
        return module
    ours = vars(caller).get("forward")
    return caller if isinstance(ours, MethodType) and ours.__self__ is module else module


def wrap(module: nn.Module, own: Attached) -> object:
    """Give a module the forward above; it is returned."""
    original = module.forward
    ours = FunctionType(_forward.__code__, _forward.__globals__, "forward")
    functools.update_wrapper(ours, getattr(original, "__func__", original))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:  # Trainers read signatures
        named = inspect.signature(original)
        vars(ours)["__signature__"] = named.replace(parameters=[first, *(each for each in named.parameters.values())])
    except ValueError:  # of a builtin, or with a first parameter that cannot follow another
        pass
    setattr(module, OWN, own)
    module.forward = MethodType(ours, module)
    return module.forward


def unwrap(module: nn.Module) -> None:
    """Restore a module's own forward."""
    own: Attached = vars(module).pop(OWN)
    del vars(module)["forward"]
    if own.original is not None:
        module.forward = own.original


def check_inputs(session: ContextParallel, given: object) -> None:
    """Refuse shards of another batch among the inputs of a module. See [Note: inputs] in attach.py."""
    if isinstance(given, Tensor):
        session.sharding.check_batch(given)
    elif isinstance(given, Mapping):
        for each in given.values():
            check_inputs(session, each)
    elif isinstance(given, list | tuple):
        for each in given:
            check_inputs(session, each)


def _finds_caller() -> bool:
    """Whether the caller is found: a shallow copy that shares its original's bound method, and the original."""

    class Probed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    found: list[nn.Module] = []

    def probe(self: nn.Module, x: Tensor) -> Tensor:
        found.append(_caller_in(self, sys._getframe(1)))
        return x

    original = Probed()
    vars(original)["forward"] = MethodType(probe, original)
    other = copy.copy(original)
    for module in (original, other):
        module(torch.ones(1, device="cpu"))
    return [id(each) for each in found] == [id(original), id(other)]


_CALLER = Assumption(
    "the module that is called is found on the stack",
    "parallel/attached_forward.py",
    "`self` in the frame of `nn.Module._call_impl`, and its file",
    _finds_caller,
)
