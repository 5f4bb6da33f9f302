"""What is taken for granted of other libraries' insides, each with a proof that runs before it is first leant on.

torch, transformers and Triton promise what they document. Some of what this library must know they do not tell: which
activation checkpoint is running, what a mask was put together from. It is read from where it lies, and a later version
may put it elsewhere. A guard that looks in the wrong place sees nothing, and lets everything pass. So every such place
is an `Assumption`, which tries itself on the smallest example there is, once, and refuses to go on if it fails::

    SEEN = Assumption(
        "checkpointed regions are seen", "parallel/checkpoint_regions.py", "names in torch.utils.checkpoint", _sees
    )
    ...
    SEEN.hold()  # at the first line of whatever leans on it

[Note: closed] A check returns True, or the assumption does not hold: an exception inside of it counts as a no, and a no
is asked again next time, never remembered as a yes. Nothing runs at import. A check runs in a thread of its own, where
none of the caller's modes, transforms, streams or grad settings is on.

ARCHITECTURE.md lists them all, and a test compares. Knows nothing of what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread

from attnspan.errors import AttnspanError

ALL: dict[str, Assumption] = {}
"""Every assumption of the modules that are imported, by its claim."""


class Assumption:
    """A claim about another library's insides: where it is used, what it leans on, and the check that proves it."""

    def __init__(self, claim: str, place: str, leans_on: str, check: Callable[[], bool], library: str = "torch"):
        self.claim, self.place, self.leans_on, self.library = claim, place, leans_on, library
        self.check, self.held = check, False
        self._lock = Lock()
        assert claim not in ALL, f"two assumptions claim that {claim}"
        ALL[claim] = self

    def hold(self) -> None:
        """Go on if the claim is true here. See [Note: closed]."""
        if not self.held:
            self._prove()

    def _prove(self) -> None:
        with self._lock:
            if self.held:
                return
            answers: list[object] = []
            thread = Thread(target=lambda: answers.append(self._answer()), name="attnspan checks an assumption")
            thread.start()
            thread.join()
            (answer,) = answers or [None]
            if answer is not True:
                reason = answer if isinstance(answer, Exception) else None
                raise AttnspanError(
                    f"{self.place}: with this version of {self.library} it does not hold that {self.claim} "
                    f"({self.leans_on}), and results could be wrong without a word; use a version that attnspan was "
                    f"tested with{'' if reason is None else f' ({type(reason).__name__}: {reason})'}"
                ) from reason
            self.held = True

    def _answer(self) -> object:
        try:
            return self.check()
        except Exception as raised:  # whatever a version that moved things may raise
            return raised

    def __repr__(self) -> str:
        return f"Assumption({self.claim!r}, held={self.held})"
