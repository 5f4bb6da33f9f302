"""``cp.attach(model)``: attention in a model's modules is context parallel, also when checkpointing runs them again.

The forward of every chosen module runs in a block of ``cp.sdpa()``. A checkpointed region that calls such a module
passes that block again in backward, where a ``with`` around the training step would long be left; a region that calls
SDPA outside of any such module is refused when it first runs (replays.py). flex_attention likewise.

>>> import torch
>>> import attnspan as span
>>> def rank(world):
...     cp = span.ContextParallel(world, seq_len=8, mask=span.Full())
...     layer = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
...     with cp.attach(layer):
...         layer(cp.shard(torch.randn(1, 8, 16)))
...     cp.assert_used(layers=1)
...     return cp.report().calls
>>> span.testing.loopback(ranks=2).run(rank)
[1, 1]

Why `forward` is wrapped and no hooks are used: a ``with`` is left on any exception, an interrupt too, and torch.compile
follows it. Copies of a model stay attached, and follow `use` and `detach`. A shallow copy shares the wrapper, which
finds on the stack for whom it is called; torch.compile does not look there, and wants a deep copy.

[Note: after the end] Backward may come when the attachment has ended, and a region that first ran attached must run
again so. When it ends, every region that is still alive and attended is told: its second run attaches the modules
anew, for as long as that takes, and refuses if they are attached to something else by then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from threading import RLock
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import nn

from attnspan.errors import AttentionError
from attnspan.parallel import replays, seen
from attnspan.parallel.guards import regions_of
from attnspan.parallel.sdpa import UNSERVED, Scope, Served

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel

MODULES = nn.modules.module.__file__

Chosen = nn.Module | str | Iterable[nn.Module | str] | Mapping[str, str]
"""Modules, or patterns for their names; with masks, patterns to names of masks."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of module names that compiling and checkpointing add."""


class Attachment:
    """A model attached to a session; `detach` it, or leave its ``with``, to end that. `use` is for the next batch."""

    def __init__(self, session: ContextParallel, masks: Mapping[nn.Module, str | None]):
        self.live = False
        self._several = False  # whether there was more than one session
        self._masks = dict(masks)
        self._sessions: WeakSet[ContextParallel] = WeakSet({session})
        self._first: WeakKeyDictionary[object, ContextParallel] = WeakKeyDictionary()  # of each region's first run
        self._told: WeakSet[Any] = WeakSet()  # regions that know that it has ended
        self._lock, self._running = RLock(), 0  # second runs after the end, at present
        self._names = sorted({name for name in masks.values() if name is not None})
        self.session = session
        self.served = self._served(session)
        self._begin()

    def use(self, session: ContextParallel) -> Attachment:
        """From here on attention is that of another session, such as `cp.with_mask(...)` of the next batch.

        A region that ran before is run again with the session it had then.
        """
        if session is not self.session:
            self.served = self._served(session)
            self.session, self._several = session, True
            self._sessions.add(session)
        return self

    def detach(self) -> None:
        """Give the modules, and all copies of them, their own forward back. See [Note: after the end]."""
        if self.live:
            self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *raised: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: Any) -> Attachment:
        return self

    def __reduce__(self) -> Any:
        raise AttentionError("an attached model cannot be saved whole: detach it first, or save its state_dict()")

    # ---- what a forward asks -------------------------------------------------------------------------------------

    def scope(self, name: str | None) -> Scope:
        """The block that a module's forward runs in; without a mask's name, one that refuses attention."""
        if name is None:
            return Scope(UNSERVED)
        if torch.compiler.is_compiling():
            return Scope(self.served[name])
        session = self._session_here()
        return Scope(self.served[name] if session is self.session else session._serve(name))

    def _served(self, session: ContextParallel) -> dict[str, Served]:
        return {name: session._serve(name) for name in self._names}

    def _session_here(self) -> ContextParallel:
        """The session in use; in a region's second run, that of the first.

        Outermost first: what first runs inside a second run does so with the session of that.
        """
        session = self.session
        for region in reversed(replays.regions()):
            if region.name is None:
                continue
            if not region.again:
                self._first[region.name] = session
            elif region.name in self._first:
                session = self._first[region.name]
            elif self._several:
                raise AttentionError(
                    "a checkpointed region runs again, and it is not known with which session it first ran: run "
                    "backward before `use`"
                )
        return session

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._wrapped = {module: _wrap(self, module, name) for module, name in self._masks.items()}
        seen.watch()  # for as long as it is attached: torch.compile follows a block without entering it
        self._watching = finalize(self, seen.unwatch)
        self.live = True

    def _end(self) -> None:
        for module, ours in self._wrapped.items():
            if vars(module).get("forward") is not ours:
                raise AttentionError(
                    f"detach: the forward of {type(module).__name__} was wrapped again after attach; undo that first"
                )
        for module in self._wrapped:
            _unwrap(module)
        self._watching()
        self.live, self._wrapped = False, {}
        for region, session in regions_of(self._sessions):
            self._first.setdefault(region, session)
            if region not in self._told:
                self._tell(region)

    def _tell(self, region: Any) -> None:
        """From here on the region runs again attached, or not at all. See [Note: after the end]."""
        again = replays.rerun_of(region)
        if again is not None:
            setattr(region, again, functools.partial(self._run, getattr(region, again)))
        elif hasattr(region, "register_prehook"):  # the node of an autograd function
            region.register_prehook(self._refuse)
        self._told.add(region)

    def _run(self, again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._anew():
            return again(*args, **kwargs)

    @contextmanager
    def _anew(self) -> Iterator[None]:
        """Attached again, for all threads of autograd that ask at once."""
        with self._lock:
            if not self._running:
                for module in self._masks:
                    check_free(module, f"a checkpointed region {LATE}, and the model is attached anew")
                self._begin()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._end()

    def _refuse(self, *grads: object) -> None:
        if not self.live:
            raise AttentionError(f"a checkpointed region of a kind that is not known {LATE}; run backward before that")


LATE = "runs backward after its attachment has ended"


def attach(session: ContextParallel, model: nn.Module, modules: Chosen | None, mask: str | None) -> Attachment:
    """See `ContextParallel.attach`."""
    if not isinstance(model, nn.Module):
        raise AttentionError(f"model must be a module, got {type(model).__name__}")
    masks = _chosen(session, model, modules, mask)
    for module in masks:
        check_free(module)
    return Attachment(session, masks)


def check_free(module: nn.Module, why: str = "attach") -> None:
    """Refuse a module that cannot be attached, or is."""
    if isinstance(module, torch.jit.ScriptModule):
        raise AttentionError("attach: what TorchScript calls cannot be seen; attach the module it was made from")
    if is_attached(module):
        raise AttentionError(
            f"{why}: {type(module).__name__} is attached already; detach() it first, or use() another session"
        )


def is_attached(module: nn.Module) -> bool:
    """Whether a module is attached at present."""
    ours = vars(module).get("forward")
    return isinstance(ours, functools.partial) and ours.func is _forward and ours.args[0].live


# ---- which modules -------------------------------------------------------------------------------------------------


def _chosen(
    session: ContextParallel, model: nn.Module, modules: Chosen | None, mask: str | None
) -> dict[nn.Module, str | None]:
    """The modules to attach, each with the name of its mask; None where attention is refused."""
    if modules is None or isinstance(modules, Mapping):
        several = mask is None and len(session.masks) > 1
        if modules is None and several:
            session._name(mask)  # raises: there is no telling which
        rest = None if several else session._name(mask)
        return dict(_inherited(model, rest, _claimed(session, model, modules or {})))
    wanted = [modules] if isinstance(modules, nn.Module | str) else list(modules)
    return dict.fromkeys(_found(model, wanted), session._name(mask))


def _claimed(session: ContextParallel, model: nn.Module, patterns: Mapping[str, str]) -> dict[nn.Module, str]:
    """The outermost modules that each pattern fits, with the name of its mask; a plain name goes before a pattern."""
    by_kind: tuple[dict[nn.Module, str], dict[nn.Module, str]] = {}, {}
    for pattern, mask in patterns.items():
        name, claims = session._name(mask), by_kind[not WILD.intersection(pattern)]
        for module in _outermost(_found(model, [pattern])):
            if claims.setdefault(module, name) != name:
                raise AttentionError(
                    f"modules: {pattern!r} gives {_name_in(model, module)} the mask {name!r}, and another pattern "
                    f"{claims[module]!r}; let one pattern fit it"
                )
    return by_kind[0] | by_kind[1]


WILD = frozenset("*?[")


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that are not part of others: "layers.*" fits all that is in a layer, too."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


def _inherited(
    model: nn.Module, rest: str | None, claims: Mapping[nn.Module, str]
) -> Iterator[tuple[nn.Module, str | None]]:
    """Every module that may attend, with the mask of the innermost claim around it, its own first."""
    found: dict[nn.Module, str | None] = {}

    def walk(module: nn.Module, mask: str | None) -> None:
        mask = claims.get(module, mask)
        before = found.get(module, mask)
        if None not in (before, mask) and before != mask:
            raise AttentionError(
                f"modules: {_name_in(model, module)} is part of two modules, one with the mask {before!r} and one with "
                f"{mask!r}; name one for it"
            )
        found[module] = before if mask is None else mask
        for child in module.children():
            walk(child, mask)

    walk(model, rest)
    for module, mask in found.items():
        if module is model or module in claims or _may_attend(module):
            yield module, mask


def _name_in(model: nn.Module, module: nn.Module) -> str:
    return next(
        (_plain(name) for name, each in model.named_modules() if each is module and name), type(module).__name__
    )


def _found(model: nn.Module, wanted: Iterable[nn.Module | str]) -> list[nn.Module]:
    """The modules that are meant; a pattern must fit at least one."""
    by_name = {_plain(name): module for name, module in model.named_modules()}
    found: list[nn.Module] = []
    for one in wanted:
        fitting = [one] if isinstance(one, nn.Module) else [m for name, m in by_name.items() if fnmatchcase(name, one)]
        if not fitting:
            raise AttentionError(
                f"modules: no module's name fits {one!r}; they are {', '.join(list(by_name)[1:9])} ..."
            )
        found += fitting
    return found


def _plain(name: str) -> str:
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def _may_attend(module: nn.Module) -> bool:
    """Whether a module's own forward may call SDPA: torch's small ones, such as Linear, do not."""
    if type(module).forward is nn.Module.forward:  # a list of modules: it is not called
        return False
    theirs = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")]
    return theirs != [object] or bool(list(module.children()))


# ---- the wrapping --------------------------------------------------------------------------------------------------


def _forward(attachment: Attachment, name: str | None, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        theirs = _of_caller(theirs, sys._getframe(1))
    if not attachment.live:  # a copy of a model that was attached
        return theirs(*args, **kwargs)
    with attachment.scope(name):
        return theirs(*args, **kwargs)


def _of_caller(theirs: Callable[..., Any], frame: FrameType) -> Callable[..., Any]:
    """A module's own forward; that of a shallow copy, where this is the wrapper that it shares."""
    if frame.f_code.co_filename != MODULES:
        return theirs
    caller, original = frame.f_locals.get("self"), getattr(theirs, "__self__", None)
    if caller is original or not isinstance(caller, nn.Module) or not isinstance(original, nn.Module):
        return theirs
    ours = vars(caller).get("forward")
    shared = isinstance(ours, functools.partial) and ours.func is _forward and ours.args[2] is theirs
    return theirs.__func__.__get__(caller) if shared else theirs  # type: ignore[attr-defined]


def _wrap(attachment: Attachment, module: nn.Module, name: str | None) -> object:
    ours = functools.partial(_forward, attachment, name, module.forward)
    module.forward = functools.update_wrapper(ours, module.forward)
    return ours


def _unwrap(module: nn.Module) -> None:
    theirs = vars(module).pop("forward").args[2]
    if getattr(theirs, "__func__", None) is not type(module).forward:  # it was the instance's own
        module.forward = theirs
