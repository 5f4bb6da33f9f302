"""The timeline of cases that can be followed by hand: who waits for what.

On this machine a pair takes a second, a key takes a second to travel, and nothing else takes any time. Two ranks hold
2 tokens each; the mask is full, so that a step is one tile of 2 x 2 pairs, 4 seconds, and 10 in backward. The gradient
of a key is as wide as the key (float32).
"""

from dataclasses import replace

import pytest

from attnspan.layouts import Contiguous
from attnspan.masks import Causal, Full
from attnspan.masks.tile import Tile
from attnspan.plan import Hardware, Link, Plan, Shape, predict
from attnspan.plan.cost import Curve

SHAPE = Shape(heads=1, head_dim=1, dtype="float32")
INSTANT = 1e-12


def machine(key=1.0, pair=1.0, rounds=False):
    link = Link(SHAPE.kv_bytes / key, INSTANT)
    curves = tuple(
        Curve(kind, (1.0,), (SHAPE.flops / pair,), (SHAPE.flops / pair / 2.5,))
        for kind in ("full", "causal", "general")
    )
    return Hardware(
        "slow", 1, 1, 1, 1e9, 1e15, link, link, launch=INSTANT, curves=curves, rounds=rounds, joins_below=0.0
    )  # fmt: skip


def plan(strategy, ranks=2):
    return Plan(Full(), Contiguous(ranks), 2 * ranks, strategy)


def seconds(strategy, ranks=2, backward=False, **how):
    return predict(plan(strategy, ranks), 0, SHAPE, machine(**how), backward=backward).seconds


def about(value):
    return pytest.approx(value, abs=1e-6)


def test_a_gather_waits_and_then_computes():
    assert seconds("gather") == about(2 + 8)


def test_a_ring_computes_while_keys_travel():
    assert seconds("ring") == about(4 + 4)
    assert seconds("ring", ranks=4) == about(4 * 4)


def test_what_takes_longer_than_the_step_before_is_waited_for():
    assert seconds("ring", key=3.0) == about(6 + 4)
    # Three exchanges of 6 s one after another, each posted when the step before begins; then the last step.
    assert seconds("ring", ranks=4, key=3.0) == about(3 * 6 + 4)


def test_stages_hide_all_but_what_own_keys_cannot_cover():
    assert seconds("needed(2)", ranks=4, key=1.0) == about(6 + 12)
    assert seconds("needed(4)", ranks=4, key=1.0) == about(16)


def test_the_last_gradients_travel_under_nothing():
    forward = seconds("ring")
    assert seconds("ring", backward=True) - forward == about(10 + 10 + 2)
    assert seconds("gather", backward=True) - seconds("gather") == about(2 + 20 + 2)


def test_earlier_gradients_travel_under_the_next_step():
    forward = seconds("ring", ranks=4)
    assert seconds("ring", ranks=4, backward=True) - forward == about(4 * 10 + 2)


def test_gradients_and_keys_share_the_link():
    """Keys and gradients of 8 s each: after the first two steps the link is the bottleneck."""
    timeline = predict(plan("ring", 4), 0, SHAPE, machine(key=4.0), backward=True)
    busy = sum(event.stop - event.start for event in timeline.events if event.lane == "link")
    assert busy == about(3 * 8 + 6 * 8)
    assert timeline.seconds > busy
    assert timeline.exposed == about(timeline.seconds - timeline.computing)


def test_heads_are_exchanged_before_and_after_and_hide_under_nothing():
    """Each rank holds 4 tokens of one of two heads and gets half of them: q, k and v, then out and lse."""
    shape = Shape(heads=2, head_dim=1, dtype="float32")
    link = Link(4.0, INSTANT)  # a float a second
    found = predict(plan("ulysses"), 0, shape, Hardware("", 1, 1, 1, 1e9, 1e15, link, link, curves=machine().curves))
    floats = 2 * (1 + 2) + 2 * 1 + 2 * 1
    assert found.exposed == pytest.approx(floats, abs=1e-3)


@pytest.mark.parametrize(("rounds", "home"), [(False, 2.0), (True, 1.0)])
def test_gradients_of_half_precision_are_twice_as_wide_unless_kernels_round_them(rounds, home):
    half = Shape(heads=1, head_dim=1, dtype="bfloat16")
    events = predict(plan("ring"), 0, half, machine(rounds=rounds), backward=True).events
    busy = {
        what: sum(event.stop - event.start for event in events if event.lane == "link" and what in event.what)
        for what in ("keys", "gradients")
    }
    assert busy == {"keys": about(2.0), "gradients": about(home)}, "keys of 2 bytes twice, gradients once"


def test_small_tiles_of_a_step_are_one_launch_where_they_are_joined():
    tiles = [Tile(range(i, i + 2), range(2), -1, 1) for i in (0, 2, 4)]
    link = Link(1.0, 1.0)
    apart, joint = (
        Hardware("", 1, 1, 1, 1, 1, link, link, half_rows=0, launch=100.0, joins_below=j) for j in (0.0, 1e6)
    )
    assert apart.compute(tiles, flops=1) == 3 * 100 + 12
    assert joint.compute(tiles, flops=1) == pytest.approx(100 + 12)
    assert joint.compute(tiles[:1], flops=1) == 100 + 4
    assert joint.compute(tiles, flops=1e7) == pytest.approx(3 * 100 + 12e7)


def test_nothing_travels_under_tiles_of_ranks_that_take_turns():
    """Two ranks on one device: each tile takes both of them 8 s, and the 2 keys come before or between."""
    shared = replace(machine(), ranks_per_device=2)
    for strategy in ("gather", "ring", "needed(2)"):
        timeline = predict(plan(strategy), 0, SHAPE, shared)
        assert timeline.seconds == about(2 + 16)
        assert timeline.exposed == about(timeline.travelling)


def test_ranks_that_take_turns_share_the_link_too():
    """Rank 1 needs the 2 keys of rank 0, which needs none: a message of an average rank takes a second for both."""
    shared = replace(machine(), ranks_per_device=2)
    causal = Plan(Causal(), Contiguous(2), 4, "needed(1)")
    for rank in (0, 1):
        assert predict(causal, rank, SHAPE, shared).travelling == about(1)
        assert predict(causal, rank, SHAPE, machine()).travelling == about(2)  # sent, and received
