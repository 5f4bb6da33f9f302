"""What "auto" knows of the machine: a table of measured times and links, the same on every rank, or a preset.

Each process finds its own table (tuning/store.py), and files differ: one host was tuned, another not, or on another
day. Ranks that chose a strategy by tables of their own would run different plans. So when a group first runs "auto",
its ranks tell each other a hash of what they found. If all found the same, that is it; else all take rank 0's, which
it then sends. A table that cannot be read is refused on every rank. Links that are not in it are measured then
(links.py), unless a rank asks for none.

Kernels are chosen by each rank's own table: which one computes a tile does not concern the others, whose devices may
differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from attnspan.attention.links import HostAndDevice, Links, measured_links, place_if_measured
from attnspan.errors import AttnspanError, TransportError, TuningError
from attnspan.kernels import KERNELS, rounds
from attnspan.plan import Hardware, Shape
from attnspan.transports import Transport, World, consensus
from attnspan.transports.unbroken import unbroken
from attnspan.tuning import Table, table_for

SHARED = "a tuning table that all ranks share"


class GroupTuning(NamedTuple):
    """What all ranks of a group plan with."""

    table: Table | None = None
    links: Links = Links()


NO_TUNING = GroupTuning()

_AGREED: WeakKeyDictionary[object, dict[str, GroupTuning]] = WeakKeyDictionary()  # by group, and kind of device


def group_tuning(transport: Transport) -> GroupTuning:
    """What all ranks of a group know; the first call is a collective, in which links are measured."""
    known = known_tuning(transport)
    if known is None:
        with unbroken(transport, but=(TuningError,)):
            known = _agree(transport)
        _AGREED.setdefault(transport.group, {})[transport.device.type] = known
    return known


def known_tuning(transport: Transport) -> GroupTuning | None:
    """What all ranks of a group know, if they have agreed on it; asks nobody."""
    return _AGREED.get(transport.group, {}).get(transport.device.type)


def machine_here(transport: Transport, shape: Shape, kernel: str = "auto") -> Hardware | None:
    """What predictions go by, without asking other ranks: what they agreed on, or else this rank's own table and a
    preset's link. None on virtual ranks, of which one device does everybody's work, and once the group has ended."""
    try:
        virtual = isinstance(transport.group, World)
    except TransportError:
        return None
    if virtual:
        return None
    known = known_tuning(transport) or GroupTuning(_own_table(transport))
    return hardware_for(known, shape, transport.device, kernel)


def _own_table(transport: Transport) -> Table | None:
    try:
        return table_for(transport.device)
    except TuningError:  # raised where it matters, on all ranks
        return None


def hardware_for(known: GroupTuning, shape: Shape, device: torch.device, kernel: str = "auto") -> Hardware:
    """What the cost model predicts with."""
    table = known.table
    base = Hardware.of(_preset(table.device if table else "") if device.type == "cuda" else "cpu-gloo")
    if kernel == "auto":
        joins = base.joins if shape.width < 4 else 0.0
    else:
        joins = inf if kernel in KERNELS and KERNELS[kernel].traits.joins else 0.0
    base = replace(base, rounds=rounds(kernel, device), joins=joins)
    return known.links.on(base if table is None else table.hardware(shape, base, kernel))


def _preset(device: str) -> str:
    """The preset whose links a device is likely to have."""
    return next((f"{name}-nvlink" for name in ("h200", "a100") if name in device.lower()), "h100-nvlink")


def _agree(transport: Transport) -> GroupTuning:
    try:
        table, place = table_for(transport.device), place_if_measured(transport)
    except TuningError as refused:
        said: Sequence[tuple[str, HostAndDevice | None] | AttnspanError]
        said = consensus.all_gather_outcomes(transport, refused, SHARED)
    else:
        text = "" if table is None else json.dumps(table.data(), sort_keys=True)
        said = consensus.all_gather_outcomes(transport, (consensus.digest(text), place), SHARED)
    wrong = consensus.refusal(said)
    if wrong is not None:
        raise wrong
    digests, places = zip(*said, strict=True)
    if consensus.differing_ranks(digests):
        first = transport.agree(text.encode() if transport.rank == 0 else b"", "rank 0's tuning table")[0]
        table = Table.of(json.loads(first), "rank 0's tuning table") if first else None
    if None in places:
        return GroupTuning(table)
    known = Links() if table is None else Links(table.inside, table.between)
    return GroupTuning(table, measured_links(transport, [(host, device) for host, device in places], known))
