"""A family: the sessions made from one another by `with_mask`, cached by their masks, length and layout.

[Note: plans ahead] The session of the next batch may be made in another thread while this batch runs. So the cache has
a lock, and planning happens outside it: looking up a known session never waits. A new session is planned at once for
the shape that attention last ran on, including this rank's steps, so that its first call finds the plan. This needs no
communication; what ranks have to exchange waits for the first call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from attnspan.plan import Shape

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel

MAX_KEPT = 64
"""How many sessions a family caches."""


class Family:
    """An LRU cache of sessions."""

    def __init__(self, key: object, first: ContextParallel) -> None:
        self._sessions = OrderedDict({key: first})
        self._lock = Lock()
        self.compared_batch = False  # whether ranks were found to load the same batch: [Note: one batch] in batch.py

    def session(self, key: object, made: Callable[[], ContextParallel]) -> ContextParallel:
        """The cached session, or a new one, planned. See [Note: plans ahead]."""
        with self._lock:
            known = self._sessions.get(key)
        if known is None or not all(mask.is_current for mask in known.masks.values()):  # its functions moved
            found = made()
            found.attentions.plan_ahead(self._latest_shapes())
            return self._remember(key, found, known)
        return self._remember(key, known, known)

    def _remember(self, key: object, found: ContextParallel, before: ContextParallel | None) -> ContextParallel:
        """Cache a session, unless another thread cached one first; the cached one."""
        with self._lock:
            there = self._sessions.get(key)
            if there is None or there is before:
                self._sessions[key] = there = found
            self._sessions.move_to_end(key)
            if len(self._sessions) > MAX_KEPT:
                self._sessions.popitem(last=False)
            return there

    def _latest_shapes(self) -> dict[str, Shape]:
        """By the name of a mask, the shape of the tensors that attention under it last ran on."""
        with self._lock:
            sessions = list(self._sessions.values())
        shapes: dict[str, Shape] = {}
        for session in sessions:
            shapes.update(session.attentions.latest_shapes)
        return shapes
