"""Transports: how shards move. See transport.py for the idea, loopback.py for virtual ranks."""

from attnspan.transports import consensus
from attnspan.transports.counting import Counting, Traffic
from attnspan.transports.delayed import Delayed
from attnspan.transports.distributed import Distributed
from attnspan.transports.group import transport_of
from attnspan.transports.loopback import Loopback, World
from attnspan.transports.transport import Pending, Transport
from attnspan.transports.wrapped import Wrapped

__all__ = [
    "Counting",
    "Delayed",
    "Distributed",
    "Loopback",
    "Pending",
    "Traffic",
    "Transport",
    "World",
    "Wrapped",
    "consensus",
    "transport_of",
]
