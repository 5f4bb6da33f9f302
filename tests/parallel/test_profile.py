"""A profile puts what every step of a pass took beside what the timeline predicts of it."""

import json

import pytest
import torch

import attnspan as span
from attnspan.attention.recording import Recorder
from attnspan.plan import predict
from attnspan.plan.strategy import strategy_name
from attnspan.testing import loopback
from attnspan.transports.delayed import Delayed
from tests.processes import spawn

LENGTH, HEADS, DIM = 96, 4, 8
STRATEGIES = ["gather", "needed(2)", "ring", "ulysses", "ulysses(2) x needed(2)"]
MASKS = [span.Causal(), span.Causal() & span.Documents([50, 46]), span.SlidingWindow(3), span.Documents([1] * LENGTH)]


def trained(cp, passes=1):
    for _ in range(passes):
        query, key, value = (torch.randn(1, HEADS, len(cp.positions), DIM, requires_grad=True) for _ in range(3))
        cp.attention(query, key, value).sum().backward()


def profiled(world, mask, strategy, passes=2):
    cp = span.ContextParallel(world, seq_len=LENGTH, mask=mask, strategy=strategy)
    with cp.profile() as profile:
        trained(cp, passes)
    return cp, profile


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_rows_sum_up_to_the_pass_and_predictions_to_the_timeline(mask, strategy):
    def rank(world):
        cp, profile = profiled(world, mask, strategy, passes=1)
        forward, backward = profile.passes
        assert (forward.direction, backward.direction, forward.passes) == ("forward", "backward", 1)
        assert strategy_name(forward.plan.strategy) == strategy_name(cp.plan.strategy)
        hardware = cp.attentions.hardware(forward.shape)
        both = predict(forward.plan, cp.rank, forward.shape, hardware, backward=True)
        assert forward.predicted + backward.predicted == pytest.approx(both.seconds)
        for kind, expected in (("compute", both.computing), ("wait", both.exposed)):
            found = sum(row.predicted[kind] for each in profile.passes for row in each.rows)
            assert found == pytest.approx(expected)
        travels = sum(event.stop - event.start for event in both.events if event.lane == "link")
        found = sum(row.predicted["transfer"] for each in profile.passes for row in each.rows)
        assert found == pytest.approx(travels)
        for each in profile.passes:
            spent = sum(row.measured["compute"] + row.measured["wait"] for row in each.rows)
            assert spent == pytest.approx(each.measured)
            assert all(seconds >= 0 for row in each.rows for seconds in row.measured.values())

    loopback(4).run(rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_computed_once_and_waits_only_for_what_the_plan_sends(strategy):
    def rank(world):
        cp, profile = profiled(world, span.Causal(), strategy, passes=1)
        [forward, _] = profile._recorder.passes.values()
        spans, steps = forward[0].spans, cp.plan.steps(cp.rank)
        computed = [each.what for each in spans if each.kind == "compute"]
        assert computed == [f"tiles of step {index}" for index in range(len(steps))]
        travelled = [each.what for each in spans if each.kind == "wait" and each.what != "heads"]
        moving = [index for index, step in enumerate(steps) if step.sends or step.receives]
        assert travelled == [f"keys of step {index}" for index in moving]
        assert [each.what for each in spans if each.kind == "transfer" and each.what != "heads"] == travelled
        assert any(each.what == "heads" for each in spans) == (cp.plan.degree > 1)

    loopback(4).run(rank)


def test_what_runs_outside_of_the_block_is_not_recorded():
    def rank(world):
        cp, profile = profiled(world, span.Causal(), "ring", passes=1)
        before = str(profile)
        trained(cp)
        assert str(profile) == before
        with pytest.raises(KeyError, match="mine"), cp.profile() as second:
            raise KeyError("mine")
        assert str(second) == "attention has not run since the block was opened"
        assert Recorder not in cp.transport.memo
        with cp.profile(), pytest.raises(span.AttentionError, match="being profiled already"):
            cp.profile().__enter__()

    loopback(2).run(rank)


def test_sessions_of_other_masks_on_the_same_ranks_are_in_it():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal(), strategy="ring")
        with cp.profile() as profile:
            trained(cp.with_mask(span.SlidingWindow(3)), passes=20)
        assert [each.plan.mask for each in profile.passes] == [span.SlidingWindow(3)] * 2
        assert [each.passes for each in profile.passes] == [16, 16]  # no more are kept

    loopback(2).run(rank)


def test_one_rank_has_a_profile_without_transfers():
    _, profile = profiled(torch.device("cpu"), span.Causal(), "auto")
    for each in profile.passes:
        assert all(times["transfer"] == 0 for row in each.rows for times in (row.predicted, row.measured))


def test_a_table_for_each_pass_is_printed():
    def rank(world):
        _, profile = profiled(world, span.Causal(), "ulysses")
        return str(profile)

    forward, backward = loopback(2).run(rank)[1].split("\n\n")
    title, times, head, *rows = forward.splitlines()
    assert title == "forward, Causal(), ulysses, rank 1 of 2"
    assert times.endswith("(median of 2)")
    assert head.split() == ["step", "compute", "measured", "transfer", "measured", "wait", "measured"]
    assert [row.split()[0] for row in rows] == ["0", "heads", "rest"]
    assert backward.startswith("backward, ")
    assert max(map(len, forward.splitlines())) <= 80


def test_a_trace_has_both_of_every_pass(tmp_path):
    def rank(world):
        cp, profile = profiled(world, span.Causal(), "ring")
        path = profile.trace(tmp_path / f"{cp.rank}.json")
        return json.loads(path.read_text())["traceEvents"], profile.passes

    for events, passes in loopback(2).run(rank):
        lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        shown = [each for each in events if each["ph"] == "X"]
        predicted = [each for each in shown if lanes[each["tid"]].endswith("predicted")]
        assert max(each["ts"] + each["dur"] for each in shown) >= 1e6 * sum(each.predicted for each in passes)
        spent = sum(each["dur"] for each in predicted if "transfer" not in lanes[each["tid"]])
        assert spent == pytest.approx(1e6 * sum(each.predicted for each in passes))
        assert {each["name"].split(":")[0] for each in shown} == {"forward", "backward"}
        assert len({lanes[each["tid"]] for each in shown}) >= 5


@pytest.mark.parametrize("strategy", ["needed(2)", "ring", "ulysses"])
def test_a_transfer_lasts_as_long_as_its_messages_take(strategy):
    def rank(world):
        _, profile = profiled(Delayed(world, 0.02), span.Causal(), strategy, passes=1)
        travelling = [row for each in profile.passes for row in each.rows if row.predicted["transfer"]]
        assert travelling
        # Recorded from after the post: a busy machine may take some of the 0.02 before that.
        assert all(row.measured["transfer"] >= 0.01 for row in travelling)

    loopback(4).run(rank)


def measured(world):
    _, profile = profiled(world, span.Causal(), "needed(2)")
    return [(each.direction, len(each.rows), each.measured > 0) for each in profile.passes]


def test_real_ranks_are_profiled():
    assert spawn(2, measured) == [[("forward", 3, True), ("backward", 3, True)]] * 2
