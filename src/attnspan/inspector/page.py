"""A page to touch: one self-contained file with the mask in the colours of its owners and the timelines of all ranks.

The page holds data, bands, runs and events, and draws what is on the screen: a million tokens cost what a thousand do.
`page_data` says what it holds; page.html draws it. Needs a browser, and nothing from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnspan.errors import PlanError
from attnspan.layouts import Layout
from attnspan.layouts.layout import Shards, imbalance
from attnspan.masks import Mask
from attnspan.plan import Hardware, Plan, Shape
from attnspan.plan.timeline import predict

STRATEGIES = ("gather", "ring", "needed(1)", "needed(2)", "needed(4)", "ulysses")
MAX_EVENTS = 200_000
"""Of all timelines of a page; strategies that would exceed them are left out."""

MAX_PIECES = 8_000
"""Of bands and runs that meet; a layout of more, such as tokens dealt one by one, has no timelines."""


@dataclass(frozen=True)
class Drawn:
    """What a page shows: a batch row of a mask over `seq_len` tokens, layouts by name, and the machine that timelines
    are predicted for."""

    mask: Mask
    seq_len: int
    layouts: Mapping[str, Layout]
    row: int = 0
    shape: Shape = field(default_factory=lambda: Shape(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16"))
    hardware: Hardware = field(default_factory=lambda: Hardware.of("h100-nvlink"))


def write_page(drawn: Drawn, path: str | Path) -> Path:
    """Write the page."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(drawn), separators=(",", ":")).replace("<", "\\u003c")
    Path(path).write_text(template.replace('"DATA"', data), encoding="utf-8")
    return Path(path)


def page_data(drawn: Drawn) -> dict[str, Any]:
    """What the page holds: numbers and names alone."""
    labels: dict[str, int] = {}
    room = MAX_EVENTS
    layouts = []
    for name, layout in drawn.layouts.items():
        shards = layout.shards(drawn.seq_len, drawn.row)
        work = layout.works(drawn.mask.bands(drawn.seq_len, row=drawn.row), drawn.seq_len, drawn.row)
        strategies = []
        for strategy in STRATEGIES if _pieces(drawn, shards) <= MAX_PIECES else ():
            found = _timelines(drawn, layout, strategy, labels, room)
            if found is not None:
                strategies.append(found)
                room -= sum(map(len, found["ranks"]))
        layouts.append(
            {
                "name": name,
                "imbalance": imbalance(work),
                "work": work,
                "tokens": layout.tokens(drawn.seq_len, drawn.row),
                "runs": [[[run.start, run.stop, run.step] for run in runs] for runs in shards],
                "strategies": strategies,
            }
        )
    return {
        "mask": repr(drawn.mask)[:300],
        "seq_len": drawn.seq_len,
        "bands": [list(band) for band in drawn.mask.bands(drawn.seq_len, row=drawn.row)],
        "machine": _machine(drawn),
        "labels": list(labels),
        "layouts": layouts,
    }


def _machine(drawn: Drawn) -> str:
    """What timelines are predicted for, in words."""
    shape, hardware = drawn.shape, drawn.hardware
    heads = f"{shape.heads} heads" + ("" if shape.kv_heads == shape.heads else f" on {shape.kv_heads} key heads")
    measured = f", rates measured: {hardware.note}" if hardware.curves else ""
    return f"{heads}, head dim {shape.head_dim}, {shape.dtype}; {hardware.name}{measured}"


def _pieces(drawn: Drawn, shards: Shards) -> int:
    """About how many tiles all ranks compute: where runs have a step, every two of them meet in every band."""
    runs = [run for each in shards for run in each]
    bands = len(drawn.mask.bands(drawn.seq_len, row=drawn.row))
    return len(runs) * len(runs) * bands if any(run.step > 1 for run in runs) else len(runs) + bands


def _timelines(drawn: Drawn, layout: Layout, strategy: str, labels: dict[str, int], room: int) -> dict[str, Any] | None:
    """Forward and backward of every rank under a strategy: (lane, start, stop, label) in microseconds; None where it
    cannot be planned, or is too long to show."""
    try:
        plan = Plan(drawn.mask, layout, drawn.seq_len, strategy)
        first = _events(plan, 0, drawn, labels)
        if len(first) * plan.ranks > room:
            return None
        ranks = [first, *(_events(plan, rank, drawn, labels) for rank in range(1, plan.ranks))]
    except PlanError:
        return None
    return {"name": plan.strategy_name, "ranks": ranks, "end": max(e[2] for events in ranks for e in events)}


def _events(plan: Plan, rank: int, drawn: Drawn, labels: dict[str, int]) -> Sequence[tuple[int, float, float, int]]:
    return [
        (
            int(event.lane == "link"),
            round(event.start * 1e6, 2),
            round(event.stop * 1e6, 2),
            labels.setdefault(event.what, len(labels)),
        )
        for event in predict(plan, rank, drawn.shape, drawn.hardware, backward=True).events
    ]
