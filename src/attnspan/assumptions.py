"""Assumptions about the internals of other libraries, each with a self-test that runs before its first use.

torch, transformers and Triton only promise what they document. This library also reads undocumented state: which
activation checkpoint is running, which functions a mask was composed of. A later version may move that state, and a
guard that looks in the wrong place lets everything pass. So each such place declares an `Assumption`, which tests
itself once on the smallest possible example and raises if that fails::

    REGIONS_SEEN = Assumption(
        "checkpointed regions are seen", "parallel/checkpoint_regions.py", "names in torch.utils.checkpoint", _sees
    )
    ...
    REGIONS_SEEN.verify()  # in the first line of every function that relies on it

[Note: fail closed] An assumption holds only if its check returns True. An exception in the check counts as a failure,
and failures are not cached: the check runs again next time. Nothing runs at import. Each check runs in a new thread, so
that the caller's modes, transforms, streams and grad settings are off.

ARCHITECTURE.md lists every assumption, and a test compares the list.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from attnspan.errors import AttnspanError

T = TypeVar("T")

ALL: dict[str, Assumption] = {}
"""Every assumption of the modules that are imported, by its claim."""


def in_new_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread, in which none of the caller's modes and hooks is active."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="attnspan self-test") as executor:
        return executor.submit(function).result()


class Assumption:
    """A claim about another library's internals: the file that relies on it, those internals, and a check."""

    def __init__(self, claim: str, place: str, leans_on: str, check: Callable[[], bool], library: str = "torch"):
        self.claim, self.place, self.leans_on, self.library = claim, place, leans_on, library
        self.check, self.verified = check, False
        self._lock = Lock()
        assert claim not in ALL, f"two assumptions claim that {claim}"
        ALL[claim] = self

    def verify(self) -> None:
        """Raise unless the claim is true of the installed version. See [Note: fail closed]."""
        if not self.verified:
            self._prove()

    def _prove(self) -> None:
        with self._lock:
            if self.verified:
                return
            reason = None
            try:
                self.verified = in_new_thread(self.check) is True
            except Exception as raised:  # whatever a version that moved things may raise
                reason = raised
            if not self.verified:
                raise AttnspanError(
                    f"{self.place}: with this version of {self.library} it does not hold that {self.claim} "
                    f"({self.leans_on}), and results could be wrong without a word; use a version that attnspan was "
                    f"tested with{'' if reason is None else f' ({type(reason).__name__}: {reason})'}"
                ) from reason

    def __repr__(self) -> str:
        return f"Assumption({self.claim!r}, verified={self.verified})"
