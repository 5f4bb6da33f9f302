"""The cost model ranks strategies as it should, and says why."""

from __future__ import annotations

from itertools import pairwise

import pytest

from attnspan.errors import MaskError, PlanError
from attnspan.layouts import Balanced, Contiguous, HeadTail
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Hardware, Link, Needed, Plan, Shape, choose, predict
from attnspan.plan.choose import EQUAL, SAMPLED, sampled_ranks
from attnspan.plan.cost import PRESETS

SHAPE = Shape(heads=32, kv_heads=8, head_dim=128)
H100 = Hardware.of("h100-nvlink")


def slow_link(hardware: Hardware, factor: float) -> Hardware:
    fields = {name: getattr(hardware, name) for name in hardware.__slots__}
    link = Link(hardware.inside.bandwidth / factor, hardware.inside.latency)
    return Hardware(**{**fields, "inside": link, "between": link})


def test_short_documents_choose_to_move_little():
    choice = choose(Causal() & Documents([1024] * 256), seq_len=1 << 18, ranks=16, shape=SHAPE, hardware=H100)
    assert isinstance(choice.plan.strategy, Needed)
    assert choice.candidates[0].moved < 0.05 * SHAPE.kv_bytes * (1 << 18)


def test_a_memory_limit_refuses_what_does_not_fit_and_says_so():
    free = choose(Causal(), seq_len=1 << 18, ranks=8, shape=SHAPE, hardware=H100)
    gather = next(c for c in free.candidates if repr(c.plan.strategy) == "Gather()")
    tight = choose(Causal(), seq_len=1 << 18, ranks=8, shape=SHAPE, hardware=H100, memory=gather.peak - 1)
    refused = next(c for c in tight.candidates if c.plan == gather.plan)
    assert refused.refused == "needs 1.1 GB, the limit is 1.1 GB"
    assert tight.candidates[0].peak < gather.peak
    assert "chosen" in tight.explain().splitlines()[1]


def test_no_plan_that_fits_is_an_error_that_names_the_least():
    with pytest.raises(PlanError, match=r"memory: no plan fits into 1.0 KB of keys per rank; the least, .* needs"):
        choose(Causal(), seq_len=1 << 16, ranks=4, shape=SHAPE, memory=1000)


def test_every_loser_has_a_reason():
    choice = choose(SlidingWindow(1023), seq_len=1 << 16, ranks=8, shape=SHAPE, hardware=H100)
    reasons = [line.split()[-1] for line in choice.explain().splitlines()[1:]]
    assert len(reasons) == len(choice.candidates)
    assert all(reasons)


def test_the_fewest_exchanges_of_the_fastest_plans_are_taken_and_the_others_ordered_by_predicted_time():
    for mask in (Causal(), SlidingWindow(1023), Causal() & Documents([5000, 30000, 536, 30000])):
        taken, *others = choose(mask, seq_len=1 << 16, ranks=8, shape=SHAPE).candidates
        seconds = [c.seconds for c in others]
        assert seconds == sorted(seconds)
        as_fast = [c for c in others if c.seconds <= (1 + EQUAL) * min(taken.seconds, *seconds)]
        assert taken.seconds <= (1 + EQUAL) * min(seconds)
        assert all(taken.exchanges <= c.exchanges for c in as_fast)


def test_twin_the_fastest_plan_is_not_always_the_one_with_the_fewest_exchanges():
    choice = choose(Causal(), seq_len=1 << 16, ranks=8, shape=SHAPE)
    assert choice.candidates[0].seconds > min(c.seconds for c in choice.candidates)


def test_overlap_hides_transfers_that_are_shorter_than_compute():
    plan = Plan(Causal(), HeadTail(ranks=8), 1 << 18, "ring")
    fast, slow = (predict(plan, 3, SHAPE, machine) for machine in (H100, slow_link(H100, 1000)))
    assert fast.exposed < 0.02 * fast.seconds
    assert slow.exposed > 0.5 * slow.seconds
    assert fast.computing == pytest.approx(slow.computing)


def test_gather_waits_for_everything_and_needed_in_stages_does_not():
    gather, staged = (
        predict(Plan(Causal(), HeadTail(ranks=8), 1 << 16, strategy), 3, SHAPE, slow_link(H100, 4))
        for strategy in ("gather", "needed(3)")
    )
    assert gather.exposed > staged.exposed


def test_lanes_never_overlap_themselves():
    for strategy in ("ring", "gather", "needed(4)", "ulysses", "ulysses(2) x needed(2)"):
        timeline = predict(Plan(Causal(), HeadTail(ranks=8), 1 << 14, strategy), 5, SHAPE, H100, backward=True)
        for lane in ("compute", "link"):
            events = [event for event in timeline.events if event.lane == lane]
            assert all(a.stop <= b.start + 1e-12 for a, b in pairwise(events))


def test_twice_the_batch_is_twice_the_compute():
    plan = Plan(Causal(), HeadTail(ranks=4), 1 << 18, "gather")
    one, two = (predict(plan, 0, Shape(32, 8, batch=batch), H100).computing for batch in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)


def test_rows_that_differ_share_the_batch():
    same = Plan(KeyPadding(4096), Contiguous(ranks=2), 4096, "gather")
    rows = Plan(KeyPadding([4096, 4096]), Contiguous(ranks=2), 4096, "gather")
    one, two = (predict(plan, 0, Shape(32, 8, batch=2), H100).computing for plan in (same, rows))
    assert two == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_found_by_name(name: str):
    assert Hardware.of(name).name == name


def test_unknown_hardware_names_the_nearest():
    with pytest.raises(PlanError, match=r"hardware must be one of .*, got 'h100-nvlnk'; did you mean 'h100-nvlink'\?"):
        Hardware.of("h100-nvlnk")


def test_layouts_of_other_ranks_are_refused():
    with pytest.raises(PlanError, match=r"layouts must have 4 ranks, got \[2\]"):
        choose(Causal(), seq_len=64, ranks=4, shape=SHAPE, layouts=[HeadTail(2)])


def test_a_batch_that_contradicts_the_mask_is_refused():
    rows = KeyPadding([64, 32])
    assert choose(rows, seq_len=64, ranks=2, shape=Shape(4, batch=2)).plan.batch_rows == 2
    for batch in (1, 3):
        with pytest.raises(MaskError, match=f"batch must be the mask's 2 batch rows, got {batch}"):
            choose(rows, seq_len=64, ranks=2, shape=Shape(4, batch=batch))
    assert choose(KeyPadding(64), seq_len=64, ranks=2, shape=Shape(4, batch=3)).plan.batch_rows == 1


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), "80GB", True])
def test_memory_is_a_positive_number(memory: object):
    with pytest.raises(PlanError, match=r"memory must be a positive number of bytes, got"):
        choose(Causal(), seq_len=64, ranks=2, shape=SHAPE, memory=memory)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mask": "causal"}, r"mask must be a mask such as Causal\(\), got 'causal'"),
        ({"shape": 32}, r"shape must be a Shape such as Shape\(heads=32, kv_heads=8\), got 32"),
        ({"layouts": ["balanced"]}, r"layouts must hold layouts such as HeadTail\(ranks=2\), got 'balanced'"),
        ({"seq_len": "64"}, r"seq_len must be a whole number >= 1, got '64'"),
    ],
)
def test_what_choose_is_given_is_checked(wrong: dict[str, object], message: str):
    asked = {"mask": Causal(), "seq_len": 64, "ranks": 2, "shape": SHAPE, **wrong}
    with pytest.raises(PlanError, match=message):
        choose(asked.pop("mask"), **asked)


@pytest.mark.parametrize("mask", [~Full(), KeyPadding(0)], ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 40])
def test_a_mask_that_allows_nothing_is_planned_all_the_same(mask, ranks: int):
    choice = choose(mask, seq_len=256, ranks=ranks, shape=SHAPE)
    assert choice.candidates[0].seconds == 0
    assert "chosen" in choice.explain()
    assert "imbalance 1.000" in choice.plan.explain()
    assert str(choice.plan)


def test_what_is_as_fast_says_so():
    choice = choose(Causal() & Documents([1024] * 16), seq_len=1 << 14, ranks=4, shape=SHAPE)
    first = choice.candidates[0].seconds
    for candidate, line in zip(choice.candidates, choice.explain().splitlines()[1:], strict=True):
        close = candidate.seconds <= first * 1.005
        assert close == (line.endswith("as fast") or line.endswith("chosen"))
        assert "1.00x" not in line
    assert "as fast" in choice.explain(), "needed in one stage or in two: nothing moves"


def test_balanced_is_tried_with_the_chunk_that_fits():
    choice = choose(Causal(), seq_len=4096, ranks=4, shape=SHAPE)
    assert {c.plan.layout for c in choice.candidates if isinstance(c.plan.layout, Balanced)} == {
        Balanced(Causal(), ranks=4, chunk=fitting_chunk(4096, 4))
    }


def test_the_busiest_of_many_ranks_is_looked_at():
    plan = Plan(Causal(), Contiguous(ranks=100), 1000, "needed")
    for most in (7, SAMPLED):
        assert len(sampled_ranks(plan, most)) <= most + 1
        assert 99 in sampled_ranks(plan, most)


def test_the_rank_that_moves_most_keys_is_looked_at():
    lengths = [*[64] * 37, 4000, *[64] * 40]
    mask = Causal() & Documents(lengths)
    plan = Plan(mask, Contiguous(ranks=50), sum(lengths), "needed")
    moving = [sum(plan.received(rank).values()) for rank in range(50)]
    assert moving.index(max(moving)) in sampled_ranks(plan, 4)


@pytest.mark.parametrize("most", [8, 9, SAMPLED])
def test_ranks_are_looked_at_in_several_places_of_a_node(most: int):
    plan = Plan(Causal(), Contiguous(ranks=64), 6400, "needed")
    assert len({rank % 8 for rank in sampled_ranks(plan, most)}) >= 3
