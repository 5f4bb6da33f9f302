"""A transport on which every message takes a while: a slow link, for showing what overlaps with it.

Wraps any transport. A message is not there before ``seconds`` have passed since it was posted, however fast the wire;
compute done meanwhile is free, and a `wait` right after the post costs it all. The host sleeps, so this is for the CPU.
"""

from __future__ import annotations

from time import monotonic, sleep

from attnspan.transports.transport import Messages, Pending, Transport
from attnspan.transports.wrapped import Wrapped


class Delayed(Wrapped):
    """A transport whose messages take ``seconds`` or longer."""

    def __init__(self, transport: Transport, seconds: float) -> None:
        super().__init__(transport)
        self.seconds = seconds

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        due = monotonic() + self.seconds
        return super()._post(sends, receives, what).then(lambda: sleep(max(0.0, due - monotonic())))
