"""A trace has every event of every rank's timeline, at its time."""

import json

import pytest

from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.plan import Hardware, Plan, Shape
from attnspan.plan.timeline import predict


@pytest.mark.parametrize("strategy", ["needed(2)", "ulysses"])
def test_a_trace_is_the_timelines(tmp_path, strategy):
    plan, shape, hardware = Plan(Causal(), HeadTail(4), 4096, strategy), Shape(8), Hardware.of("h100-nvlink")
    events = json.loads(plan.trace(tmp_path / "trace.json", shape, hardware).read_text())["traceEvents"]
    for rank in range(4):
        found = [
            (event["name"], event["tid"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and event["pid"] == rank
        ]
        expected = predict(plan, rank, shape, hardware, backward=True).events
        assert [each[:2] for each in found] == [(event.what, int(event.lane == "link")) for event in expected]
        assert [each[2:] for each in found] == [
            (pytest.approx(event.start * 1e6), pytest.approx(event.stop * 1e6)) for event in expected
        ]
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"rank 0", "rank 1", "rank 2", "rank 3", "compute", "link"}
