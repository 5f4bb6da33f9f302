"""``cp.attach(model)``: attention in a model's modules is context parallel, also when checkpointing recomputes them.

The forward of every chosen module runs in a scope of ``cp.sdpa()``, or of ``cp.flex()`` with `flex=True`. When backward
recomputes a checkpointed region, after a ``with`` around the training step has ended, the module's forward enters the
scope again. A region that calls SDPA or flex_attention outside of any attached module is refused when it first runs
(checkpoint_regions.py).

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

[Note: inputs] An input that comes directly from `shard` identifies its batch. The session in use must be the one that
sharded it: after a forgotten `use`, the model would attend under the documents of the previous batch. Inputs are
checked in the forward of the model and of every attached module; if the whole model is compiled, by an op.

[Note: after the end] Backward may run after the attachment has ended, and a region that first ran attached must be
recomputed attached. So when the attachment ends, it hooks every region that is still alive and used attention: the
recomputation attaches the modules while it runs, or refuses if they are attached to something else by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import nn

from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions, compiled_checkpoints, flex_dispatch
from attnspan.parallel.attached_forward import Attached, ForwardRunner, check_inputs, is_attached, unwrap, wrap
from attnspan.parallel.attached_modules import ModulePatterns, modules_to_attach
from attnspan.parallel.checkpoint_checks import regions_of
from attnspan.parallel.handler import AttentionHandler, UnnamedMask
from attnspan.parallel.sdpa import AttentionMode

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel

UNNAMED = UnnamedMask()


class Attachment:
    """A model attached to a session, until `detach` or the end of a ``with``. `use` is for the next batch."""

    def __init__(
        self,
        session: ContextParallel,
        model: nn.Module,
        masks: Mapping[nn.Module, str | None],
        flex: bool,
        run_forward: ForwardRunner | None = None,
    ):
        self.live, self.flex = False, flex
        self._several = False  # whether there was more than one session
        self.model, self._masks, self._run_forward = model, dict(masks), run_forward
        self._sessions: WeakSet[ContextParallel] = WeakSet({session})
        self._first: WeakKeyDictionary[object, ContextParallel] = WeakKeyDictionary()  # by region, of its first run
        self._notified: WeakSet[object] = WeakSet()  # regions that were hooked after the end
        self._lock, self._running = RLock(), 0  # recomputations after the end that are running
        self._names = sorted({name for name in masks.values() if name is not None})
        self.session = session
        self._handlers = self._handlers_of(session)
        self._begin()

    def use(self, session: ContextParallel) -> Attachment:
        """Use another session from now on, such as `cp.with_mask(...)` of the next batch.

        A region that ran before is recomputed with the session that it had then.
        """
        if session is not self.session:
            self._handlers = self._handlers_of(session)
            self.session, self._several = session, True
            self._sessions.add(session)
        return self

    def detach(self) -> None:
        """Restore the forward of the modules, and of all copies of them. See [Note: after the end]."""
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
        """The scope that a module's forward runs in; without a mask's name, one that refuses attention."""
        if name is None:
            return AttentionMode(UNNAMED, self.flex)
        if session is self.session:
            return AttentionMode(self._handlers[name], self.flex)
        return session.flex(mask=name) if self.flex else session.sdpa(mask=name)

    def session_of(self, given: object) -> ContextParallel:
        """The session of a module's forward in eager code, whose inputs must be shards of that session."""
        session = self._current_session()
        check_inputs(session, given)
        return session

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Before the forward of a model that is not attached itself. See [Note: inputs]."""
        if not torch.compiler.is_compiling():
            self.session_of((args, kwargs))

    def _handlers_of(self, session: ContextParallel) -> dict[str, AttentionHandler]:
        return {name: session.sdpa(mask=name).handler for name in self._names}

    def _current_session(self) -> ContextParallel:
        """The session in use; in the recomputation of a region, the session of its first run.

        Outer regions come first: a region that first runs inside a recomputation uses that one's session.
        """
        session = self.session
        for region in reversed(checkpoint_regions.regions()):
            if region.name is None:
                continue
            if not region.recomputing:
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
            module: wrap(module, Attached(self, module, mask, self._run_forward if module is self.model else None))
            for module, mask in self._masks.items()
        }
        self._hook = None
        if self.model not in self._masks:
            self._hook = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        if self.flex:  # while attached: torch.compile traces a scope without entering it
            flex_dispatch.install()
        compiled_checkpoints.install()
        self._installed = finalize(self, _uninstall, self.flex)
        self.live = True

    def _end(self) -> None:
        for module, ours in self._wrapped.items():
            if vars(module).get("forward") is not ours:
                raise AttentionError(
                    f"detach: the forward of {type(module).__name__} was wrapped again after attach; undo that first"
                )
        for module in self._wrapped:
            unwrap(module)
        if self._hook is not None:
            self._hook.remove()
        self._installed()
        self.live, self._wrapped = False, {}
        by_spec = {session.spec: session for session in self._sessions}
        for region, spec in regions_of(by_spec):
            self._first.setdefault(region, by_spec[spec])
            if region not in self._notified:
                self._notify(region)

    def _notify(self, region: object) -> None:
        """Have the region recomputed attached, or refused. See [Note: after the end]."""
        known = checkpoint_regions.rerun_through(region, self._run)
        if not known and hasattr(region, "register_prehook"):  # the node of an autograd function
            region.register_prehook(self._refuse)
        self._notified.add(region)

    def _run(self, again: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Recompute a region, attached as long as any autograd thread does so."""
        with self._lock:
            if not self._running:
                for module in self._masks:
                    check_free(module, f"a checkpointed region {LATE}, and needs the model attached")
                self._begin()
            self._running += 1
        try:
            return again(*args, **kwargs)
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._end()

    def _refuse(self, *grads: object) -> None:
        if not self.live:
            raise AttentionError(f"a checkpointed region of a kind that is not known {LATE}; run backward before that")


def _uninstall(flex: bool) -> None:
    compiled_checkpoints.uninstall()
    if flex:
        flex_dispatch.uninstall()


LATE = "runs backward after its attachment has ended"


def attach(
    session: ContextParallel,
    model: nn.Module,
    modules: ModulePatterns | None,
    mask: str | None,
    flex: bool = False,
    run_forward: ForwardRunner | None = None,
) -> Attachment:
    """See `ContextParallel.attach`; `run_forward` runs the forward of the model itself, inside its scope."""
    if not isinstance(model, nn.Module):
        raise AttentionError(f"model must be a module, got {type(model).__name__}")
    masks = modules_to_attach(session.spec, model, modules, mask)
    for module in masks:
        check_free(module)
    return Attachment(session, model, masks, flex, run_forward)


def check_free(module: nn.Module, why: str = "attach") -> None:
    """Refuse a module that cannot be attached, or is."""
    if isinstance(module, torch.jit.ScriptModule):
        raise AttentionError("attach: what TorchScript calls cannot be seen; attach the module it was made from")
    if is_attached(module):
        raise AttentionError(
            f"{why}: {type(module).__name__} is attached already; detach() it first, or use() another session"
        )
