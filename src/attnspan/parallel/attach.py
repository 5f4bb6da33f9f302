"""``cp.attach(model)``: attention in a model's modules is context parallel, also when checkpointing runs them again.

The forward of every chosen module runs in a block of ``cp.sdpa()``. A checkpointed region that calls such a module
enters that block again in backward, when a ``with`` around the training step has been left. A region that calls SDPA or
flex_attention outside of any attached module is refused when it first runs (checkpoint_regions.py).

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

`forward` is wrapped instead of hooked because a ``with`` is left on any exception, including an interrupt, and because
torch.compile follows it. Copies of a model stay attached, and follow `use` and `detach`. A shallow copy shares the
wrapper, which finds the called module on the stack; torch.compile cannot look there and needs a deep copy.

[Note: one graph] torch.compile guards on the identity of a `forward` that is set on a module, except a bound method,
where it guards on the code. So all modules have one function, bound to each, and what differs is kept beside it in an
`Attached`. Blocks that are compiled one by one then share a graph, if they are alike.

[Note: inputs] An input that comes straight from `shard` identifies its batch. The session in use must be the one that
sharded it: after a forgotten `use`, the model would attend under the documents of the previous batch. Inputs are
checked where the model is entered and in every attached module; by an op, where the whole model is compiled.

[Note: after the end] Backward may run after the attachment has ended, and a region that first ran attached must be
recomputed attached. When the attachment ends, it notifies every region that is still alive and used attention: its
recomputation attaches the modules for as long as it takes, or refuses if they are attached to something else by then.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from threading import RLock
from types import FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor, nn

from attnspan.assumptions import Assumption
from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions, compiled_checkpoints, flex_dispatch
from attnspan.parallel.compiled_inputs import checked_inputs
from attnspan.parallel.guards import regions_of
from attnspan.parallel.handler import Handler, UnnamedMask
from attnspan.parallel.sdpa import AttentionMode

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel

MODULES = nn.modules.module.__file__

Chosen = nn.Module | str | Iterable[nn.Module | str] | Mapping[str, str]
"""Modules, or patterns for their names; with masks, patterns to names of masks."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of module names that compiling and checkpointing add."""


UNNAMED = UnnamedMask()

Around = Callable[["ContextParallel", Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""What runs a module's forward, given a session, that forward, its args and its kwargs."""


class Attached:
    """What the forward of one module has to know; kept on the module. See [Note: one graph]."""

    def __init__(self, attachment: Attachment, module: nn.Module, around: Around | None):
        self.attachment, self.around = attachment, around
        self.name = attachment._masks[module]
        self.is_entry = module is attachment._model
        self.theirs: Callable[..., object] | None = vars(module).get("forward")  # None: that of its class


class Attachment:
    """A model attached to a session; `detach` it, or leave its ``with``, to end that. `use` is for the next batch."""

    def __init__(
        self,
        session: ContextParallel,
        model: nn.Module,
        masks: Mapping[nn.Module, str | None],
        around: Around | None = None,
    ):
        self.live = False
        self._several = False  # whether there was more than one session
        self._model, self._masks, self._around = model, dict(masks), around
        self._sessions: WeakSet[ContextParallel] = WeakSet({session})
        self._first: WeakKeyDictionary[object, ContextParallel] = WeakKeyDictionary()  # of each region's first run
        self._notified: WeakSet[object] = WeakSet()  # regions that know that it has ended
        self._lock, self._running = RLock(), 0  # second runs after the end, at present
        self._names = sorted({name for name in masks.values() if name is not None})
        self.session = session
        self._handlers = self._handlers_of(session)
        self._begin()

    def use(self, session: ContextParallel) -> Attachment:
        """From here on attention is that of another session, such as `cp.with_mask(...)` of the next batch.

        A region that ran before is run again with the session it had then.
        """
        if session is not self.session:
            self._handlers = self._handlers_of(session)
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

    def __deepcopy__(self, memo: object) -> Attachment:
        return self

    def __reduce__(self) -> NoReturn:
        raise AttentionError("an attached model cannot be saved whole: detach it first, or save its state_dict()")

    # ---- what a forward asks -------------------------------------------------------------------------------------

    def mode(self, name: str | None, session: ContextParallel) -> AttentionMode:
        """The block that a module's forward runs in; without a mask's name, one that refuses attention."""
        if name is None:
            return AttentionMode(UNNAMED)
        return AttentionMode(self._handlers[name]) if session is self.session else session.sdpa(mask=name)

    def session_of(self, given: object) -> ContextParallel:
        """The session that a module attends by, in eager code; what it is given must be a batch of that."""
        session = self._session_here()
        _compare(session, given)
        return session

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Before the forward of a model that is not attached itself. See [Note: inputs]."""
        if not torch.compiler.is_compiling():
            self.session_of((args, kwargs))

    def _handlers_of(self, session: ContextParallel) -> dict[str, Handler]:
        return {name: session.sdpa(mask=name).handler for name in self._names}

    def _session_here(self) -> ContextParallel:
        """The session in use; in a region's second run, that of the first.

        Outermost first: what first runs inside a second run does so with the session of that.
        """
        session = self.session
        for region in reversed(checkpoint_regions.regions()):
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
        self._wrapped = {
            module: _wrap(module, Attached(self, module, self._around if module is self._model else None))
            for module in self._masks
        }
        self._hook = None
        if self._model not in self._masks:
            self._hook = self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        flex_dispatch.install()  # for as long as it is attached: torch.compile follows a block without entering it
        compiled_checkpoints.install()
        self._installed = finalize(self, _uninstall)
        self.live = True

    def _end(self) -> None:
        for module, ours in self._wrapped.items():
            if vars(module).get("forward") is not ours:
                raise AttentionError(
                    f"detach: the forward of {type(module).__name__} was wrapped again after attach; undo that first"
                )
        for module in self._wrapped:
            _unwrap(module)
        if self._hook is not None:
            self._hook.remove()
        self._installed()
        self.live, self._wrapped = False, {}
        by_core = {session.core: session for session in self._sessions}
        for region, core in regions_of(by_core):
            self._first.setdefault(region, by_core[core])
            if region not in self._notified:
                self._notify(region)

    def _notify(self, region: object) -> None:
        """From here on the region runs again attached, or not at all. See [Note: after the end]."""
        again = checkpoint_regions.rerun_of(region)
        if again is not None:
            setattr(region, again, functools.partial(self._run, getattr(region, again)))
        elif hasattr(region, "register_prehook"):  # the node of an autograd function
            region.register_prehook(self._refuse)
        self._notified.add(region)

    def _run(self, again: Callable[..., object], *args: object, **kwargs: object) -> object:
        with self._reattached():
            return again(*args, **kwargs)

    @contextmanager
    def _reattached(self) -> Iterator[None]:
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


def _uninstall() -> None:
    compiled_checkpoints.uninstall()
    flex_dispatch.uninstall()


LATE = "runs backward after its attachment has ended"


def attach(
    session: ContextParallel,
    model: nn.Module,
    modules: Chosen | None,
    mask: str | None,
    around: Around | None = None,
) -> Attachment:
    """See `ContextParallel.attach`; `around` runs the forward of the model itself, inside its block."""
    if not isinstance(model, nn.Module):
        raise AttentionError(f"model must be a module, got {type(model).__name__}")
    masks = _chosen(session, model, modules, mask)
    for module in masks:
        check_free(module)
    return Attachment(session, model, masks, around)


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
    own = vars(module).get(OWN)
    return isinstance(own, Attached) and own.attachment.live


# ---- which modules -------------------------------------------------------------------------------------------------


def _chosen(
    session: ContextParallel, model: nn.Module, modules: Chosen | None, mask: str | None
) -> dict[nn.Module, str | None]:
    """The modules to attach, each with the name of its mask; None where attention is refused."""
    if modules is None or isinstance(modules, Mapping):
        several = mask is None and len(session.masks) > 1
        if modules is None and several:
            session.core.mask_name(mask)  # raises: there is no telling which
        rest = None if several else session.core.mask_name(mask)
        return dict(_inherited(model, rest, _claimed(session, model, modules or {})))
    wanted = [modules] if isinstance(modules, nn.Module | str) else list(modules)
    return dict.fromkeys(_found(model, wanted), session.core.mask_name(mask))


def _claimed(session: ContextParallel, model: nn.Module, patterns: Mapping[str, str]) -> dict[nn.Module, str]:
    """The outermost modules that each pattern fits, with the name of its mask; a plain name goes before a pattern."""
    by_kind: tuple[dict[nn.Module, str], dict[nn.Module, str]] = {}, {}
    for pattern, mask in patterns.items():
        name, claims = session.core.mask_name(mask), by_kind[not WILD.intersection(pattern)]
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

OWN = "_attnspan"
"""The attribute in which a module keeps its `Attached`."""


def _forward(self: Any, *args: object, **kwargs: object) -> object:
    """The forward of every attached module. See [Note: one graph]."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        self = _caller(self, sys._getframe(1))
    own = self._attnspan
    attachment = own.attachment
    theirs = _own_forward(self, own) if own.theirs is not None else functools.partial(type(self).forward, self)
    if not attachment.live:  # a copy of a model that was attached
        return theirs(*args, **kwargs)
    if compiling:
        session = attachment.session
        if own.is_entry:
            args, kwargs = checked_inputs(session.sharding, (args, kwargs))
    else:
        session = attachment.session_of((args, kwargs))
    with attachment.mode(own.name, session):
        if own.around is not None:
            return own.around(session, theirs, args, kwargs)
        return theirs(*args, **kwargs)


def _own_forward(module: nn.Module, own: Attached) -> Callable[..., object]:
    """The forward that lay on a module when it was attached; on a shallow copy of it, bound to the copy."""
    theirs = own.theirs
    assert theirs is not None, "asked only where there is one"
    if isinstance(theirs, MethodType) and isinstance(theirs.__self__, nn.Module) and theirs.__self__ is not module:
        bound: Callable[..., object] = theirs.__func__.__get__(module)
        return bound
    return theirs


def _caller(module: nn.Module, frame: FrameType) -> nn.Module:
    """The module whose forward is called: a shallow copy has the bound method of the original."""
    _CALLER.hold()
    return _caller_in(module, frame)


def _caller_in(module: nn.Module, frame: FrameType) -> nn.Module:
    if frame.f_code.co_filename != MODULES:
        return module
    caller = frame.f_locals.get("self")
    if caller is module or not isinstance(caller, nn.Module):
        return module
    ours = vars(caller).get("forward")
    return caller if isinstance(ours, MethodType) and ours.__self__ is module else module


def _wrap(module: nn.Module, own: Attached) -> object:
    theirs = module.forward
    ours = FunctionType(_forward.__code__, _forward.__globals__, "forward")
    functools.update_wrapper(ours, getattr(theirs, "__func__", theirs))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:  # Trainers read signatures
        named = inspect.signature(theirs)
        vars(ours)["__signature__"] = named.replace(parameters=[first, *(each for each in named.parameters.values())])
    except ValueError:  # of a builtin, or with a first parameter that cannot follow another
        pass
    setattr(module, OWN, own)
    module.forward = MethodType(ours, module)
    return module.forward


def _unwrap(module: nn.Module) -> None:
    own: Attached = vars(module).pop(OWN)
    del vars(module)["forward"]
    if own.theirs is not None:
        module.forward = own.theirs


def _compare(session: ContextParallel, given: object) -> None:
    """Refuse shards of another batch, among what a module is given. See [Note: inputs]."""
    if isinstance(given, Tensor):
        session.sharding.check_batch(given)
    elif isinstance(given, Mapping):
        for each in given.values():
            _compare(session, each)
    elif isinstance(given, list | tuple):
        for each in given:
            _compare(session, each)


def _finds_caller() -> bool:
    """A shallow copy of a module is found as the caller of its original's bound method, and the original as its own."""

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
    "parallel/attach.py",
    "`self` in the frame of `nn.Module._call_impl`, and its file",
    _finds_caller,
)
