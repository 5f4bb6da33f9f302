"""Guards: checks of attention in checkpointed regions, by the two rules of [Note: replays] in checkpoint_regions.py.

[Note: ways of entry] A call of attention comes in one of three ways::

    eager                  from eager code: both rules are checked before the call
    compiled_with_block    from compiled code that enters the block itself, also when it runs again: only the second
                           rule, that the session is the same
    compiled_in_block      from compiled code inside a block that eager code entered: both rules

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

Entry = Literal["eager", "compiled_with_block", "compiled_in_block"]

Guards = Mapping[Entry, Callable[[], None]]
"""The check before a call, by its way of entry."""

_USED: WeakKeyDictionary[object, WeakSet[SessionSpec]] = WeakKeyDictionary()  # of each region's first run


def guards_of(spec: SessionSpec) -> Guards:
    """The checks of a session. See [Note: ways of entry]."""

    def both(grad_enabled: bool = True) -> None:
        check_block(grad_enabled)
        check_session(spec)

    return {
        "eager": lambda: both(torch.is_grad_enabled()),
        "compiled_with_block": lambda: check_session(spec),
        "compiled_in_block": both,
    }


def guarded(attend: Attention, guards: Guards) -> dict[Entry, Attention]:
    """An attention for each way of entry; in eager code the caller checks."""
    return {entry: attend if entry == "eager" else attend.variant(guard=guard) for entry, guard in guards.items()}


def check_block(grad_enabled: bool = True) -> None:
    """Refuse a call in a region that would run again without its block."""
    if checkpoint_regions.recomputes_outside_block(grad_enabled):
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
