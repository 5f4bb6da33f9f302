"""Plans one can check by eye, what they refuse, and what they print."""

from __future__ import annotations

from collections import Counter

import pytest

from attnspan.errors import MaskError, PlanError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Gather, Needed, Plan, Ring, Shape, Strategy, Ulysses
from attnspan.plan.heads import split_heads
from attnspan.plan.strategy import strategy_name


def kinds(plan: Plan, rank: int) -> Counter[str]:
    return Counter(tile.kind for step in plan.steps(rank) for tile in step.tiles)


def test_a_causal_head_tail_rank_under_gather_is_four_tiles():
    plan = Plan(Causal(), HeadTail(ranks=4), 1024, "gather")
    assert kinds(plan, 1) == {"full": 2, "causal": 2}
    assert kinds(plan, 0) == {"full": 1, "causal": 2}, "the first chunk has nothing before it"
    assert kinds(plan, 3) == {"full": 1, "causal": 1}, "its two chunks are neighbours, hence one"


def test_a_causal_head_tail_hop_of_a_ring_is_one_full_tile():
    plan = Plan(Causal(), HeadTail(ranks=4), 1024, "ring")
    for rank in range(4):
        for step in plan.steps(rank)[1:]:
            assert [tile.kind for tile in step.tiles] == ["full"]


def test_a_striped_layout_is_a_handful_of_tiles():
    plan = Plan(Causal(), Striped(ranks=4), 1 << 20, "ring")
    assert kinds(plan, 2) == {"causal": 4}
    assert sum(step.area for rank in range(4) for step in plan.steps(rank)) == Causal().work(1 << 20)


def test_a_sliding_window_ring_makes_only_the_hops_it_needs():
    plan = Plan(SlidingWindow(100), Contiguous(ranks=16), 16 * 64, "ring")
    assert len(plan.steps(5)) == 3, "own keys, and two shards before them"
    assert [step.receives[0].origin for step in plan.steps(5)[1:]] == [4, 3]


def test_a_ring_jumps_over_distances_that_nobody_needs():
    far = SlidingWindow(7, align="top") & ~SlidingWindow(5, align="top") | SlidingWindow(0)
    plan = Plan(far, Contiguous(ranks=8), 16, "ring")
    steps = plan.steps(7)
    assert [step.receives[0].origin for step in steps[1:]] == [4, 3]
    assert steps[1].receives[0].source == 4, "the first hop is three long"
    assert steps[2].receives[0].source == 6, "then one"


def test_stages_compute_own_keys_first():
    plan = Plan(Causal(), Contiguous(ranks=4), 64, "needed(3)")
    first, *later = plan.steps(3)
    assert not first.receives
    assert [[transfer.source for transfer in step.receives] for step in later] == [[2], [0, 1]]


def test_documents_that_fit_a_rank_need_no_keys_from_others():
    plan = Plan(Causal() & Documents([16] * 4), Contiguous(ranks=4), 64, "needed")
    assert all(not plan.received(rank) for rank in range(4))
    assert len(Plan(plan.mask, plan.layout, 64, "ring").steps(0)) == 1, "and a ring makes no hop"


def test_more_ranks_than_tokens_leaves_some_without_work():
    for strategy in ("ring", "gather", "needed(2)", "ulysses"):
        plan = Plan(Causal(), Contiguous(ranks=8), 3, strategy)
        assert sum(plan.work(rank) for rank in range(8)) == 6


def test_cross_attention_has_its_own_key_layout():
    plan = Plan(Full(), HeadTail(ranks=2), 8, "needed", kv_len=5, kv_layout=Contiguous(ranks=2))
    assert plan.received(0) == {1: 3}
    assert plan.received(1) == {0: 2}


def test_rows_that_differ_have_steps_of_their_own():
    mask = Causal() & Documents([[4, 4], [2, 6]])
    plan = Plan(mask, Contiguous(ranks=2), 8, "needed")
    assert plan.batch_rows == 2
    assert [transfer.tokens for transfer in plan.steps(1, batch_row=0)[0].receives] == []
    assert [transfer.tokens for transfer in plan.steps(1, batch_row=1)[0].receives] == [2]


def test_a_plan_prints_who_does_what():
    assert str(Plan(Causal(), HeadTail(ranks=2), 8, "gather")) == "\n".join(
        [
            "Causal(), 8 tokens, HeadTail(ranks=2), gather",
            "rank  tokens  runs  steps  full  causal  general  share  receives  peak keys",
            "0          4     2      1     1       2        0  50.0%         4          8",
            "1          4     1      1     1       1        0  50.0%         4          8",
            "imbalance 1.000; 8 keys move (100% of an all-gather's)",
        ]
    )


def test_a_plan_explains_itself():
    assert Plan(Causal(), HeadTail(ranks=2), 8, "ring").explain() == "\n".join(
        [
            "Causal(), 8 tokens, HeadTail(ranks=2), ring",
            "imbalance 1.000; 8 keys move (100% of an all-gather's)",
            "2 steps: each exchange travels under the step before",
            "a rank holds at most 8 keys at once, of 8",
        ]
    )


def test_many_ranks_print_as_first_and_last():
    lines = str(Plan(Causal(), HeadTail(ranks=100), 10_000, "needed")).splitlines()
    assert "... 84 more ranks" in lines
    assert len(lines) < 25


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ring", Ring()),
        ("Gather", Gather()),
        ("needed", Needed()),
        ("needed(stages=4)", Needed(4)),
        ("ulysses", Ulysses()),
        ("ulysses(2)", Ulysses(2)),
        ("ulysses(2) x needed(3)", Ulysses(2, Needed(3))),
    ],
)
def test_strategies_have_names(name: str, strategy: Strategy):
    assert Strategy.of(name) == strategy
    assert Strategy.of(strategy_name(strategy)) == strategy


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree"),
    [(32, 8, 8), (32, 8, 16), (6, 2, 4), (7, 7, 3), (8, 1, 8), (3, 3, 5), (40, 8, 3)],
)
def test_heads_are_dealt_once_and_bring_their_key_heads(heads: int, kv_heads: int, degree: int):
    shares = split_heads(heads, kv_heads, degree)
    assert [head for share in shares for head in share.query] == list(range(heads))
    for share in shares:
        assert set(share.key) == {head * kv_heads // heads for head in share.query}
    if kv_heads >= degree:
        assert [head for share in shares for head in share.key] == list(range(kv_heads)), "none is sent twice"


REFUSALS = {
    "strategy must be one of ring, gather, needed, ulysses, got 'rng'; did you mean 'ring'?": lambda: Plan(
        Causal(), HeadTail(2), 8, "rng"
    ),
    "strategy: only ulysses stands before x, got 'ring x gather'": lambda: Plan(
        Causal(), HeadTail(2), 8, "ring x gather"
    ),
    "strategy: ring takes no number, got 'ring(2)'": lambda: Plan(Causal(), HeadTail(2), 8, "ring(2)"),
    "strategy must be a name or a Strategy, got 3": lambda: Plan(Causal(), HeadTail(2), 8, 3),
    "stages must be a whole number >= 1, got 0": lambda: Plan(Causal(), HeadTail(2), 8, "needed(0)"),
    "inner must be ring, gather or needed, got ulysses inside ulysses": lambda: Strategy.of("ulysses(2) x ulysses"),
    "the degree of ulysses(3) x ring must divide the 4 ranks, got 3": lambda: Plan(
        Causal(), HeadTail(4), 8, "ulysses(3) x ring"
    ),
    "seq_len must be a whole number >= 1, got 0": lambda: Plan(Causal(), HeadTail(2), 0),
    "kv_layout must be given when kv_len (9) is not seq_len (8)": lambda: Plan(Full(), HeadTail(2), 8, kv_len=9),
    "kv_layout must have the layout's 2 ranks, got 3": lambda: Plan(Full(), HeadTail(2), 8, kv_layout=HeadTail(3)),
    "strategy: needed takes stages, got 'degree' in 'needed(degree=2)'; write needed(stages=2)": lambda: Strategy.of(
        "needed(degree=2)"
    ),
    "strategy: ulysses takes degree, got 'stages' in 'ulysses(stages=2)'; write ulysses(degree=2)": lambda: Strategy.of(
        "ulysses(stages=2)"
    ),
    "strategy must name ring, gather or needed after x, got 'ulysses(2) x '": lambda: Strategy.of("ulysses(2) x "),
    "strategy must name ring, gather or needed after x, got 'ulysses(2) x'": lambda: Strategy.of("ulysses(2) x"),
    "rank must be below the plan's 2 ranks, got 2": lambda: Plan(Causal(), HeadTail(2), 8).steps(2),
    "mask must be a mask such as Causal(), got 'causal'": lambda: Plan("causal", HeadTail(2), 8),
    "layout must be a layout such as HeadTail(ranks=4), got 4": lambda: Plan(Causal(), 4, 8),
    "mask and layouts must tell apart the same batch rows, got [2, 3]": lambda: Plan(
        KeyPadding([1, 2, 3]), Balanced(KeyPadding([4, 8]), ranks=2, per_row=True), 8
    ),
    "heads must be a multiple of kv_heads, got 6 and 4": lambda: Shape(6, 4),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_input_is_refused_with_its_reason(message: str):
    with pytest.raises(PlanError) as refused:
        REFUSALS[message]()
    assert str(refused.value) == message


ASKED = {
    "steps": lambda plan, rank, row: plan.steps(rank, row),
    "queries": lambda plan, rank, row: plan.queries(rank, row),
    "keys": lambda plan, rank, row: plan.keys(rank, row),
    "work": lambda plan, rank, row: plan.work(rank),
    "received": lambda plan, rank, row: plan.received(rank),
    "peak_keys": lambda plan, rank, row: plan.peak_keys(rank),
}
PER_ROW = Causal() & Documents([[4, 4], [2, 6]])


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("strategy", ["needed", "ulysses(2) x gather"])
def test_a_rank_that_the_plan_has_not_is_refused_by_everyone(ask: str, strategy: str):
    plan = Plan(Causal(), HeadTail(ranks=4), 8, strategy)
    ASKED[ask](plan, 3, 7)  # rows that are alike: any row
    for rank in (-1, 1.5, "0", True, None):
        with pytest.raises(PlanError, match="rank must be a whole number >= 0, got"):
            ASKED[ask](plan, rank, 0)
    with pytest.raises(PlanError, match="rank must be below the plan's 4 ranks, got 4"):
        ASKED[ask](plan, 4, 0)


@pytest.mark.parametrize("ask", ["steps", "queries", "keys"])
def test_a_row_that_the_plan_has_not_is_refused_by_everyone(ask: str):
    for mask in (Causal(), PER_ROW):
        for row in (-1, 0.5):
            with pytest.raises(PlanError, match="row must be a whole number >= 0, got"):
                ASKED[ask](Plan(mask, HeadTail(ranks=2), 8), 0, row)
    with pytest.raises(PlanError, match="row must be below the plan's 2 batch rows, got 2"):
        ASKED[ask](Plan(PER_ROW, HeadTail(ranks=2), 8), 0, 2)


def test_long_expressions_keep_both_ends_in_a_title():
    title = str(Plan(Documents([2] * 100), HeadTail(ranks=2), 200)).splitlines()[0]
    assert (
        title
        == "Documents([2, 2, 2, 2, 2, 2, 2, 2,  ... , 2, 2, 2, 2, 2, 2]), 200 tokens, HeadTail(ranks=2), needed(1)"
    )


def test_a_mask_of_another_length_is_refused_when_its_steps_are_asked_for():
    with pytest.raises(MaskError, match="lengths must sum to q_len"):
        Plan(Documents([3, 4]), HeadTail(2), 8).steps(0)
