"""Planning knows recurrent layers: their bytes (those on the wire: tests/recurrence/test_wire.py), work and time."""

import pytest
import torch

import attnspan as span
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents
from attnspan.plan import Hardware, Plan, RecurrentLayers, Shape, choose
from attnspan.testing import loopback

DELTA = RecurrentLayers("GatedDelta", heads=16, key_dim=128, count=3)
H200 = Hardware.of("h200-nvlink")


def test_maps_of_contiguous_shards_are_one_for_each_rank_before():
    found = DELTA.over(Contiguous(8), Causal(), 65536)
    state = 16 * 128 * 128 * 4
    assert [found.arriving(rank) for rank in (0, 1, 7)] == [(0, 13 * state), (state, 11 * state), (13 * state, 0)]
    assert found.moved() == 3 * 13 * state
    assert found.moved(backward=False) == 3 * 13 * state


def test_bytes_do_not_depend_on_tokens_and_time_does():
    short, long = (DELTA.over(Contiguous(8), Causal(), n) for n in (1 << 16, 1 << 18))
    assert short.moved() == long.moved()
    assert 2 < long.seconds(H200) / short.seconds(H200) < 4
    assert short.extra == pytest.approx(long.extra)


def test_documents_that_lie_whole_on_a_rank_move_nothing_and_add_no_work():
    lengths = [512] * 8
    found = DELTA.over(Contiguous(4), Causal() & Documents(lengths), 4096)
    assert (found.moved(), found.extra) == (0, 0.0)


def test_short_runs_cost_bytes_and_time():
    few, many = (DELTA.over(layout, Causal(), 65536) for layout in (HeadTail(8), Striped(8, chunk=128)))
    assert many.moved() > 10 * few.moved()
    assert many.seconds(H200) > few.seconds(H200)


def test_a_choice_counts_recurrent_layers_in_its_times():
    lengths = [9000, 3000, 17000, 1000, 12000, 6000, 14000, 3536]
    asked = {"seq_len": sum(lengths), "ranks": 8, "shape": Shape(16, 4), "hardware": H200}
    mask = Causal() & Documents(lengths)
    alone, beside = choose(mask, **asked), choose(mask, **asked, recurrent=[DELTA])
    for candidate in beside.candidates:
        twins = [c for c in alone.candidates if c.plan == candidate.plan]
        assert all(candidate.seconds == c.seconds + candidate.recurrent.seconds for c in twins)
    head, first = beside.explain().splitlines()[:2]
    assert "runs  maps/rank  map work  recurrent" in head
    assert "chosen" in first
    assert "recurrent" not in alone.explain()
    layouts = {c.plan.layout for c in beside.candidates}
    assert {layout.most_runs for layout in layouts if isinstance(layout, Balanced)} == {None, 2}
    assert {c.runs for c in beside.candidates if c.plan.layout == Contiguous(8)} == {1}


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_balanced_makes_no_more_runs_than_it_may(most):
    lengths = [700, 300, 1900, 100, 1203, 2000, 1400, 597]
    mask, length = Causal() & Documents(lengths), sum(lengths)
    free, few = Balanced(mask, ranks=4, chunk=16), Balanced(mask, ranks=4, chunk=16, most_runs=most)
    shards = few.shards(length)
    assert max(map(len, shards)) <= most
    assert sorted(p for runs in shards for run in runs for p in run.positions) == list(range(length))
    costs = [Plan(mask, layout, length, "needed").imbalance() for layout in (free, few, Contiguous(4))]
    assert costs[0] - 0.01 <= costs[1] <= costs[2]  # within what Balanced calls equal
    assert f"most_runs={most}" in repr(few)


def test_balanced_by_row_keeps_shards_of_equal_length():
    mask = Causal() & Documents([[700, 301], [1, 1000]])
    layout = Balanced(mask, ranks=3, chunk=8, most_runs=1, per_row=True)
    counts = [[sum(len(run.positions) for run in runs) for runs in layout.shards(1001, row)] for row in (0, 1)]
    assert counts[0] == counts[1]
    assert all(len(runs) == 1 for row in (0, 1) for runs in layout.shards(1001, row))


REFUSED = {
    "rule": ({"rule": "Mamba"}, "rule must be one of 'GatedDelta'|rule must be one of GatedDelta"),
    "heads": ({"heads": 0}, "heads must be at least 1|heads must be"),
    "value_dim": ({"value_dim": 1.5}, "value_dim must be"),
    "count": ({"count": 0}, "count must be a number of layers above 0, got 0"),
    "many": ({"count": float("inf")}, "count must be a number of layers above 0, got inf"),
    "dtype": ({"dtype": "bfloat16"}, "dtype must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_are_refused(name):
    wrong, words = REFUSED[name]
    with pytest.raises(span.PlanError, match=words):
        RecurrentLayers(**{"rule": "KDA", "heads": 2, "key_dim": 4} | wrong)


def test_what_is_no_layer_and_documents_that_cannot_be_read_are_refused():
    asked = {"seq_len": 64, "ranks": 2, "shape": Shape(4)}
    with pytest.raises(span.PlanError, match=r"recurrent must hold RecurrentLayers, as in .*, got \['KDA'\]"):
        choose(Causal(), **asked, recurrent=["KDA"])
    with pytest.raises(span.MaskError, match="joined by & only"):
        choose(Causal() | Documents([32, 32]), **asked, recurrent=[DELTA])
    with pytest.raises(span.LayoutError, match="most_runs must be"):
        Balanced(Causal(), ranks=2, most_runs=0)


def test_a_session_explains_with_the_layers_that_ran():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=64, mask=span.Causal(), layout=Contiguous(2))
        x = torch.ones(1, 32, 2, 16)
        for _ in range(3):
            cp.recurrence(span.Lightning(x, x, x))
        before = cp.explain()
        cp.attention(*[x.transpose(1, 2)] * 3)
        told = cp.explain()
        cp.reset()
        cp.attention(*[x.transpose(1, 2)] * 3)
        return before, told, cp.explain()

    for number, (before, told, after) in enumerate(loopback(2).run(rank)):
        assert before.startswith("attention has not run")
        assert "maps/rank" in told, number
        assert "6.1 KB" in told  # three states of 2 x 16 x 16 numbers of 4 bytes
        assert "maps/rank" not in after
