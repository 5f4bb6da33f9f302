"""Peak memory: cases added up by hand, laws that any plan keeps, and on CUDA the allocator's own figure."""

import pytest
from hypothesis import given, settings

from attnspan.errors import PlanError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Full
from attnspan.plan import Plan, Shape
from benchmarks import memory
from tests.plan.strategies import plans

# One position, bf16, 2 heads on 1 key head of dim 8: 32 bytes of q, 32 of out, 32 of K and V, 8 of lse.
SHAPE = Shape(heads=2, kv_heads=1, head_dim=8)


def terms(plan, rank=0, **how):
    return {name: size for name, size in plan.memory(rank, SHAPE, **how).terms.items() if size}


def test_one_rank_needs_no_more_than_its_tensors_and_the_result():
    """One causal tile is the result itself, whether it is computed as a tile or as all tiles of a step."""
    alone = Plan(Causal(), Contiguous(1), 10, "gather")
    assert terms(alone) == {"given": 640, "tile": 400}
    assert terms(alone, joint=True) == {"given": 640, "tile": 400}


def test_backward_of_one_rank_has_the_gradients_of_its_tile_and_no_sum():
    alone = Plan(Causal(), Contiguous(1), 10, "gather")
    # dq, dk and dv in bf16; besides, dq in float32, and dk and dv of both query heads.
    assert terms(alone, backward=True) == {"given": 1360, "tile": 640 + 640 + 640}
    # In one call dq is written as it is returned; dk and dv are rounded from float32.
    assert terms(alone, backward=True, joint=True) == {"given": 1360, "sums": 320 + 640, "result": 320}


def test_a_gather_holds_all_keys_and_a_ring_two_shards():
    gather, ring = (Plan(Full(), Contiguous(4), 40, strategy) for strategy in ("gather", "ring"))
    assert terms(gather) == {"given": 640, "arenas": 1280, "tile": 400}
    # Two tiles wait, a third comes, and their float32 sum is begun.
    assert terms(ring) == {"given": 640, "arenas": 640, "tile": 400, "parts": 800 + 720}
    assert terms(ring, joint=True) == {"given": 640, "arenas": 640, "tile": 720, "parts": 2 * 720 + 720}


def test_ulysses_holds_what_changes_hands():
    plan = Plan(Full(), Contiguous(2), 20, "ulysses")
    # Its share of 1 head and 1 key head of 20 positions is 640 of K and V and 320 of q: as it arrived, and by position.
    assert terms(plan) == {"given": 640, "heads": 2 * 960 + 640 / 2}


def test_the_terms_of_a_moment_are_its_total_and_the_largest_come_first():
    found = Plan(Full(), Contiguous(4), 40, "gather").memory(0, SHAPE)
    assert found.total == 640 + 1280 + 400
    assert found.largest == "arenas, given, tile"


@given(plans(max_len=24, max_ranks=5))
@settings(max_examples=50)
def test_backward_takes_more_than_forward_and_both_more_than_the_tensors(plan):
    for rank in range(plan.ranks):
        forward, backward = (plan.memory(rank, SHAPE, backward=each) for each in (False, True))
        assert backward.total >= forward.terms["given"]
        assert backward.terms["given"] >= forward.terms["given"]
        assert all(size >= 0 for each in (forward, backward) for size in each.terms.values())
        twice = plan.memory(rank, Shape(heads=2, kv_heads=1, head_dim=16))
        assert twice.total <= 2 * forward.total  # lse has no head dim


def test_a_rank_that_is_not_in_the_plan_is_refused():
    with pytest.raises(PlanError, match="rank must be below the plan's 4 ranks, got 4"):
        Plan(Full(), Contiguous(4), 40).memory(4, SHAPE)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["auto", "band"])
@pytest.mark.parametrize("strategy", memory.STRATEGIES)
def test_the_allocator_says_the_same(strategy, kernel):
    """Within 10 %, of which 3 were found to be needed: benchmarks/results/memory.md."""
    plan, shape, how = Plan(Causal(), HeadTail(8), 32768, strategy), Shape(32, 8), {"joint": kernel == "band"}
    rank = max(range(8), key=lambda each: plan.memory(each, shape, backward=True, **how).total)
    for found, backward in zip(memory.measured(plan, rank, shape, kernel), (False, True), strict=True):
        predicted = plan.memory(rank, shape, backward=backward, **how).total
        assert 0.9 * predicted <= found <= 1.1 * predicted, f"rank {rank}, backward {backward}"
