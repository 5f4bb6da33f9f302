"""Attention in checkpointed regions: the two rules of [Note: replays] in checkpoint_regions.py, for sessions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions

if TYPE_CHECKING:
    from attnspan.parallel.core import Core

_USED: WeakKeyDictionary[object, WeakSet[Core]] = WeakKeyDictionary()  # of each region's first run


def check_block(keeping: bool = True) -> None:
    """Refuse a call in a region that would run again without its block."""
    if checkpoint_regions.left_behind(keeping):
        raise AttentionError(
            "attention inside activation checkpointing would run again in backward without its `with cp.sdpa()`, on "
            "this rank's tokens alone; use cp.attach(model), or enter cp.sdpa() inside the checkpointed function"
        )


def check_session(core: Core) -> None:
    """Refuse a second run of a checkpointed region with another session than the first."""
    for region in checkpoint_regions.regions():
        if region.name is None:
            continue
        used = _USED.setdefault(region.name, WeakSet())
        if not region.again:
            used.add(core)
        elif core not in used:
            raise AttentionError(
                "a checkpointed region runs again with another session than the first time: run backward before "
                "the next batch's session is used"
            )


def regions_of(cores: Collection[Core]) -> list[tuple[object, Core]]:
    """The regions that are alive and in which one of these sessions attended, each with that session's core."""
    alive = [(region, _USED.get(region)) for ref in _USED.keyrefs() if (region := ref()) is not None]
    return [(region, used) for region, all_used in alive for used in all_used or () if used in cores]
