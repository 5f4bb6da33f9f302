"""The tuning of a group: the table of measured times, and the links, that "auto" plans with on every rank.

Each process loads its own table (tuning/store.py), and hosts may have different ones. Ranks that chose a strategy by
different tables would run different plans. So when a group first runs "auto", its ranks compare hashes of their
tables. If they differ, all use rank 0's, which it sends. A table that cannot be read is refused on every rank. Links
that the table lacks are then measured (links.py), unless a rank opts out. Without a table, a preset is used.

Kernels are chosen by each rank's own table: they do not have to be the same on all ranks, whose devices may differ.
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
from attnspan.kernels import KERNELS, rounds_gradients
from attnspan.plan import Hardware, Shape
from attnspan.transports import Transport, World, consensus
from attnspan.transports.abort import abort_on_error
from attnspan.tuning import Table, table_for

SHARED = "a tuning table that all ranks share"


class GroupTuning(NamedTuple):
    """The table and links that all ranks of a group plan with."""

    table: Table | None = None
    links: Links = Links()


NO_TUNING = GroupTuning()

_AGREED: WeakKeyDictionary[object, dict[str, GroupTuning]] = WeakKeyDictionary()  # by group, and kind of device


def group_tuning(transport: Transport) -> GroupTuning:
    """The tuning of a group; the first call is a collective, which measures links."""
    known = known_tuning(transport)
    if known is None:
        with abort_on_error(transport, except_for=(TuningError,)):
            known = _share_tuning(transport)
        _AGREED.setdefault(transport.group, {})[transport.device.type] = known
    return known


def known_tuning(transport: Transport) -> GroupTuning | None:
    """The tuning of a group if its ranks have agreed on one already; no communication."""
    return _AGREED.get(transport.group, {}).get(transport.device.type)


def machine_here(transport: Transport, shape: Shape, kernel: str = "auto") -> Hardware | None:
    """The hardware that predictions use, without communication: the group's tuning, or else this rank's own table with
    a preset's links. None on virtual ranks, which share one device, and once the group has ended."""
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
    """The hardware of the cost model, for tensors of some shape."""
    table = known.table
    gpu = table.device.lower() if table else ""
    preset = next((f"{name}-nvlink" for name in ("h200", "a100") if name in gpu), "h100-nvlink")  # the likeliest links
    base = Hardware.of(preset if device.type == "cuda" else "cpu-gloo")
    if kernel == "auto":
        joins_below = base.joins_below if shape.width < 4 else 0.0
    else:
        joins_below = inf if kernel in KERNELS and KERNELS[kernel].traits.joins_below else 0.0
    base = replace(base, rounds=rounds_gradients(kernel, device), joins_below=joins_below)
    return known.links.on(base if table is None else table.hardware(shape, base, kernel))


def _share_tuning(transport: Transport) -> GroupTuning:
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
        first = transport.all_gather_bytes(text.encode() if transport.rank == 0 else b"", "rank 0's tuning table")[0]
        table = Table.of(json.loads(first), "rank 0's tuning table") if first else None
    if None in places:
        return GroupTuning(table)
    known = Links() if table is None else Links(table.inside, table.between)
    return GroupTuning(table, measured_links(transport, [(host, device) for host, device in places], known))
