"""The links of a group: latency and bandwidth, measured when "auto" first runs on the group.

Each rank reports its host, and its device if that is a GPU. Consecutive ranks on one host are a node of the cost model
(plan/cost.py). The link inside a host is measured with all of its ranks sending at once, the link between hosts with
all ranks of all hosts (transports/probe.py). Numbers are rounded to two digits, beyond which they are noise; so groups
with similar links share cached choices. All ranks get the same numbers.

Not measured are links that a table of `attnspan tune` has, groups of one rank, and virtual ranks. Nothing is measured
if any rank sets ``ATTNSPAN_LINK=none`` or ``ATTNSPAN_TUNING=none``, or asks for deterministic algorithms
(torch.use_deterministic_algorithms): another run could measure another link, choose another strategy, and round
differently. The table's or the preset's figures are used then.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from attnspan.errors import TuningError
from attnspan.plan import Hardware, Link
from attnspan.transports import Transport, World
from attnspan.transports.consensus import all_gather_object
from attnspan.transports.probe import ENOUGH, speed
from attnspan.tuning import is_disabled

VARIABLE = "ATTNSPAN_LINK"

HostAndDevice = tuple[str, str]  # a host, and a device if that is a GPU


@dataclass(frozen=True, slots=True)
class Links:
    """The measured links of a group; None where nothing was measured."""

    inside: Link | None = None
    between: Link | None = None
    ranks_per_node: int | None = None
    ranks_per_device: int = 1

    def on(self, machine: Hardware) -> Hardware:
        """A copy of the machine with these links."""
        if self.ranks_per_node is None:
            return machine
        measured = {name: link for name in ("inside", "between") if (link := getattr(self, name)) is not None}
        told = "measured when auto first ran on the group"
        return replace(
            machine,
            **measured,
            ranks_per_node=self.ranks_per_node,
            ranks_per_device=self.ranks_per_device,
            links=told if measured else machine.links,
        )


def place_if_measured(transport: Transport) -> HostAndDevice | None:
    """The host and device of this rank; None if no link is to be measured."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "none"):
        raise TuningError(f"{VARIABLE} must be 'none' or unset, got {asked!r}")
    unwanted = asked or is_disabled() or torch.are_deterministic_algorithms_enabled()
    virtual = isinstance(transport.group, World)
    return None if unwanted or virtual or transport.ranks == 1 else host_and_device(transport.device)


def host_and_device(device: torch.device) -> HostAndDevice:
    """This host, and the uuid of the device if it is a GPU."""
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def group_links(transport: Transport, enough: float = ENOUGH) -> Links:
    """Measure all links of a group, with messages of `enough` seconds; a collective."""
    here = all_gather_object(transport, host_and_device(transport.device), "where ranks are")
    return measured_links(transport, [(host, device) for host, device in here], enough=enough)


def measured_links(
    transport: Transport, places: Sequence[HostAndDevice], known: Links | None = None, enough: float = ENOUGH
) -> Links:
    """Measure the links between ranks at these places, except those that are known; a collective."""
    known, local = known or Links(), node_size([host for host, _ in places])
    rank, ranks = transport.rank, transport.ranks
    first = rank - rank % local
    inside = between = None
    if local > 1 and known.inside is None:
        inside = _link(transport, range(first, first + local), enough)
    if ranks > local and known.between is None:
        between = _link(transport, range(rank % local, ranks, local), enough)
    shared = Counter(each for each in places if each[1])
    return Links(inside, between, local, max(shared.values(), default=1))


def node_size(hosts: Sequence[str]) -> int:
    """How many consecutive ranks share a host; 1 if the number varies, or a host appears twice.

    >>> node_size(["a", "a", "b", "b"]), node_size(["a", "a", "b"]), node_size(["a", "b", "a", "b"])
    (2, 1, 1)
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    regular = len({size for _, size in runs}) == 1 and len({host for host, _ in runs}) == len(runs)
    return runs[0][1] if regular else 1


MAX_PEERS = 8
"""The most peers that messages are sent to at once: more would measure the same, and need more connections."""


def _link(transport: Transport, members: range, enough: float) -> Link:
    """The link among some ranks, including this one; other groups of ranks measure theirs at the same time."""
    here, hops = members.index(transport.rank), range(1, min(len(members), MAX_PEERS + 1))
    targets, sources = ([members[(here + way * hop) % len(members)] for hop in hops] for way in (1, -1))
    latency, bandwidth, spread = (float(f"{each:.2g}") for each in speed(transport, targets, sources, enough))
    return Link(bandwidth, latency, spread if len(hops) > 1 else None)
