"""The predicted timelines of all ranks as a Chrome trace, for Perfetto and chrome://tracing.

A rank is a process of the trace, with two threads: compute, and transfers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.plan import Plan
from attnspan.plan.timeline import predict

LANES = ("compute", "link")


def write_trace(plan: Plan, path: str | Path, shape: Shape, hardware: Hardware) -> Path:
    """Write forward and backward of every rank."""
    Path(path).write_text(json.dumps({"traceEvents": list(_events(plan, shape, hardware))}), encoding="utf-8")
    return Path(path)


def _events(plan: Plan, shape: Shape, hardware: Hardware) -> Iterator[dict[str, object]]:
    for rank in range(plan.ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for lane, name in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        for event in predict(plan, rank, shape, hardware, backward=True).events:
            lane, took = LANES.index(event.lane), event.stop - event.start
            yield {"ph": "X", "name": event.what, "pid": rank, "tid": lane, "ts": event.start * 1e6, "dur": took * 1e6}
