"""Checks of attention in checkpointed regions, by the two rules of [Note: recomputation] in checkpoint_regions.py.

[Note: call contexts] A call of attention comes from one of three contexts. A scope is `with cp.sdpa()` or its like::

    eager             the call is in eager code: both rules are checked before it
    compiled_scope    the `with` is compiled too, and entered again by the recomputation: only the second rule is
                      checked, that the session is the same
    compiled_call     only the call is compiled, inside a scope that eager code entered: both rules

For compiled code the op checks them when it runs, since only then there is a stack to inspect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch

from attnspan.attention import Attention
from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions

if TYPE_CHECKING:
    from attnspan.parallel.session_spec import SessionSpec

CallContext = Literal["eager", "compiled_scope", "compiled_call"]

CheckpointChecks = Mapping[CallContext, Callable[[], None]]
"""The check before a call, by its context."""

_USED: WeakKeyDictionary[object, WeakSet[SessionSpec]] = WeakKeyDictionary()  # of each region's first run


def checks_of(spec: SessionSpec) -> CheckpointChecks:
    """The checks of a session. See [Note: call contexts]."""

    def both(grad_enabled: bool = True) -> None:
        check_scope(grad_enabled)
        check_session(spec)

    return {
        "eager": lambda: both(torch.is_grad_enabled()),
        "compiled_scope": lambda: check_session(spec),
        "compiled_call": both,
    }


def attention_by_context(attend: Attention, checks: CheckpointChecks) -> dict[CallContext, Attention]:
    """An attention for each context; in eager code the caller checks."""
    return {
        context: attend if context == "eager" else attend.variant(check_before_forward=check)
        for context, check in checks.items()
    }


def check_scope(grad_enabled: bool = True) -> None:
    """Refuse a call in a region that would run again without its scope."""
    if checkpoint_regions.recomputes_outside_scope(grad_enabled):
        raise AttentionError(
            "attention inside activation checkpointing would run again in backward without its `with cp.sdpa()`, on "
            "this rank's tokens alone; use cp.attach(model), or enter cp.sdpa() inside the checkpointed function"
        )


def check_session(spec: SessionSpec) -> None:
    """Refuse a second run of a checkpointed region with another session than the first."""
    for region in checkpoint_regions.regions():
        if region.name is None:
            continue
        used = _USED.setdefault(region.name, WeakSet())
        if not region.recomputing:
            used.add(spec)
        elif spec not in used:
            raise AttentionError(
                "a checkpointed region runs again with another session than the first time: run backward before "
                "the next batch's session is used"
            )


def regions_of(specs: Collection[SessionSpec]) -> list[tuple[object, SessionSpec]]:
    """The regions that are alive and in which one of these sessions attended, each with that session's spec."""
    alive = [(region, _USED.get(region)) for ref in _USED.keyrefs() if (region := ref()) is not None]
    return [(region, used) for region, all_used in alive for used in all_used or () if used in specs]
