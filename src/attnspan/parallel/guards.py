"""Attention in checkpointed regions: the two rules of [Note: replays] in checkpoint_regions.py, for sessions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel

_USED: WeakKeyDictionary[object, WeakSet[ContextParallel]] = WeakKeyDictionary()  # sessions of each region's first run


def check_block(keeping: bool = True) -> None:
    """Refuse a call in a region that would run again without its block."""
    if checkpoint_regions.left_behind(keeping):
        raise AttentionError(
            "attention inside activation checkpointing would run again in backward without its `with cp.sdpa()`, on "
            "this rank's tokens alone; use cp.attach(model), or enter cp.sdpa() inside the checkpointed function"
        )


def check_session(session: ContextParallel) -> None:
    """Refuse a second run of a checkpointed region with another session than the first."""
    for region in checkpoint_regions.regions():
        if region.name is None:
            continue
        used = _USED.setdefault(region.name, WeakSet())
        if not region.again:
            used.add(session)
        elif session not in used:
            raise AttentionError(
                "a checkpointed region runs again with another session than the first time: run backward before "
                "the next batch's session is used"
            )


def regions_of(sessions: Collection[ContextParallel]) -> list[tuple[object, ContextParallel]]:
    """The regions that are alive and in which one of these sessions attended, each with that session."""
    alive = [(region, _USED.get(region)) for ref in _USED.keyrefs() if (region := ref()) is not None]
    return [(region, used) for region, all_used in alive for used in all_used or () if used in sessions]
