"""A transport around another, to count, time or hold up what passes: override `_post`, or a whole collective."""

from __future__ import annotations

from attnspan.transports.transport import Messages, Pending, Transport


class Wrapped(Transport):
    """The same end of the same group as the wrapped transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.ranks = transport.rank, transport.ranks
        self.device, self.name = transport.device, transport.name

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        return self.transport._post(sends, receives, what)

    def abort(self) -> None:
        """As the wrapped transport's."""
        self.transport.abort()

    @property
    def hosts(self) -> Transport:
        """As the wrapped transport's, or this one if it moves tensors of the host."""
        return self if self.device.type == "cpu" else self.transport.hosts

    @property
    def group(self) -> object:
        """As the wrapped transport's."""
        return self.transport.group
