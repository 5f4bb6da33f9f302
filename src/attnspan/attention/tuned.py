"""What "auto" knows of the machine: a table of measured times, the same on every rank, or a preset.

Each process finds its own table (tuning/store.py), and files differ: one host was tuned, another not, or on another
day. Ranks that chose a strategy by tables of their own would run different plans. So when a group first runs "auto",
its ranks tell each other a hash of what they found. If all found the same, that is it; else all take rank 0's, which
it then sends. A table that cannot be read is refused on every rank.

Kernels are chosen by each rank's own table: which one computes a tile does not concern the others, whose devices may
differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from weakref import WeakKeyDictionary

import torch

from attnspan.errors import AttnspanError, TuningError
from attnspan.kernels import KERNELS, rounds
from attnspan.plan import Hardware, Shape
from attnspan.transports import Transport, consensus
from attnspan.transports.operations import group_of
from attnspan.transports.unbroken import unbroken
from attnspan.tuning import Table, table_for

SHARED = "a tuning table that all ranks share"

_AGREED: WeakKeyDictionary[object, Table | None] = WeakKeyDictionary()  # by group, for as long as it lives


def agreed_table(transport: Transport) -> Table | None:
    """The table that all ranks of a group share; None if rank 0 has none. The first call is a collective."""
    group = group_of(transport)
    if group not in _AGREED:
        with unbroken(transport, but=(TuningError,)):
            _AGREED[group] = _agree(transport)
    return _AGREED[group]


def hardware_for(table: Table | None, shape: Shape, device: torch.device, kernel: str = "auto") -> Hardware:
    """What the cost model predicts with."""
    base = Hardware.of(_preset(table.device if table else "") if device.type == "cuda" else "cpu-gloo")
    if kernel == "auto":
        joins = base.joins if shape.width < 4 else 0.0
    else:
        joins = inf if kernel in KERNELS and KERNELS[kernel].traits.joins else 0.0
    base = replace(base, rounds=rounds(kernel, device), joins=joins)
    return base if table is None else table.hardware(shape, base, kernel)


def _preset(device: str) -> str:
    """The preset whose links a device is likely to have."""
    return next((f"{name}-nvlink" for name in ("h200", "a100") if name in device.lower()), "h100-nvlink")


def _agree(transport: Transport) -> Table | None:
    try:
        table = table_for(transport.device)
    except TuningError as refused:
        said: Sequence[str | AttnspanError] = consensus.poll(transport, refused, SHARED)
    else:
        text = "" if table is None else json.dumps(table.data(), sort_keys=True)
        said = consensus.poll(transport, consensus.digest(text), SHARED)
    wrong = consensus.refusal(said)
    if wrong is not None:
        raise wrong
    if not consensus.odd(said):
        return table
    first = transport.agree(text.encode() if transport.rank == 0 else b"", "rank 0's tuning table")[0]
    return Table.of(json.loads(first), "rank 0's tuning table") if first else None
