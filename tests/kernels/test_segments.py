"""Tiles as segments of few calls: the same pairs, each once, under the rules of a call, and no more calls than said."""

from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnspan.kernels import KERNELS, PerTile, StepTiles, cuda_flash, reference
from attnspan.kernels.per_tile import JoinedTiles
from attnspan.kernels.segments import Segment, SegmentCall, joined_tiles, packed_calls
from attnspan.layouts import Balanced, Contiguous, HeadTail
from attnspan.masks import Causal, Documents, Full, PrefixLM, SlidingWindow
from attnspan.masks.tile import Tile
from attnspan.plan import Plan
from tests.attention.harness import Problem
from tests.attention.harness import check as check_attention
from tests.plan.strategies import plans


def pairs(tile):
    """(row, column) of the buffers."""
    return [
        (row, col) for i, row in enumerate(tile.rows) for j, col in enumerate(tile.cols) if tile.lo <= j - i <= tile.hi
    ]


def seen(call):
    """The pairs of a call, by the formula of FlashAttention."""
    left, right = call.window
    found = []
    for rows, cols, *_ in call.segments:
        n, m = len(rows), len(cols)
        for i, row in enumerate(rows):
            low = 0 if left is None else max(0, i + m - n - left)
            high = m if right is None else min(m, i + m - n + right + 1)
            assert low < high, "a row of a segment that sees nothing"
            found += [(row, col) for col in cols[low:high]]
    return found


def steps(plan):
    return [
        step
        for rank in range(0, plan.ranks, plan.degree)
        for row in range(plan.batch_rows)
        for step in plan.steps(rank, row)
    ]


@st.composite
def tiles_of_a_step(draw):
    """Those of any step of any plan."""
    found = [step.tiles for step in steps(draw(plans(max_len=24, max_ranks=4))) if step.tiles]
    return draw(st.sampled_from(found)) if found else (Tile(range(2), range(2), -1, 0),)


def check(tiles):
    true = sorted(pair for tile in tiles for pair in pairs(tile))
    assert sorted(pair for tile in joined_tiles(tiles) for pair in pairs(tile)) == true
    calls = packed_calls(tiles)
    forward = [call for layer in calls.forward for call in layer.calls]
    backward = [turn.call for turn in calls.backward]
    for side in (forward, backward):
        assert sorted(pair for call in side for pair in seen(call)) == true
    for layer in calls.forward:
        rows = [row for call in layer.calls for segment in call.segments for row in segment.rows]
        assert sorted(rows) == sorted(row for span in layer.spans for row in span)
        assert len(rows) == len(set(rows))
        assert {layer.rows[0], layer.rows[-1]} <= set(rows)
    for call in backward:
        for a, b in pairwise(call.segments):
            assert a.rows[-1] < b.rows[0]
            assert a.cols[-1] < b.cols[0]
    assert {row for span in calls.rows.spans for row in span} == {row for row, _ in true}
    assert {col for span in calls.cols.spans for col in span} == {col for _, col in true}
    earlier = set(), set()
    for turn in calls.backward:
        own = {row for row, _ in seen(turn.call)}, {col for _, col in seen(turn.call)}
        flags = (turn.rows_again, calls.rows.mixed), (turn.cols_again, calls.cols.mixed)
        for (again, mixed), before, now in zip(flags, earlier, own, strict=True):
            assert again or not before & now
            assert mixed or not again or now <= before
            before |= now
    return calls


@given(tiles_of_a_step())
def test_calls_hold_the_pairs_of_the_tiles_each_once_and_keep_the_rules(tiles):
    check(tiles)


def test_the_check_can_fail():
    (layer,) = packed_calls((Tile(range(4), range(4), -3, 0),)).forward
    with pytest.raises(AssertionError, match="sees nothing"):
        seen(SegmentCall((None, 0), (Segment(range(4), range(3), None, 0),)))
    assert seen(layer.calls[0]) != seen(SegmentCall((1, 0), layer.calls[0].segments))


# ---- how many ------------------------------------------------------------------------------------------------------

PACK = Documents([40, 3, 17, 1, 60, 7, 29, 35])
COUNTED = {
    "causal, head-tail, gather": (Plan(Causal(), HeadTail(4), 64, "gather"), 1, 2),
    "causal, head-tail, needed(1)": (Plan(Causal(), HeadTail(4), 64, "needed"), 1, 2),
    "causal, contiguous, gather": (Plan(Causal(), Contiguous(4), 64, "gather"), 1, 1),
    "full, gather": (Plan(Full(), HeadTail(4), 64, "gather"), 1, 1),
    "window, contiguous, needed(1)": (Plan(SlidingWindow(9), Contiguous(4), 64, "needed"), 1, 1),
    "window, head-tail, gather": (Plan(SlidingWindow(9), HeadTail(4), 64, "gather"), 1, 1),
    "documents, contiguous, needed(1)": (Plan(Causal() & PACK, Contiguous(4), 192, "needed"), 1, 1),
    "documents, balanced, needed(1)": (
        Plan(Causal() & PACK, Balanced(Causal() & PACK, ranks=4), 192, "needed"), 1, 1,
    ),
    "documents, balanced, gather": (Plan(Causal() & PACK, Balanced(Causal() & PACK, ranks=4), 192, "gather"), 1, 1),
    "documents of windows": (Plan(SlidingWindow(9) & PACK, Contiguous(4), 192, "needed"), 1, 1),
    "full documents": (Plan(PACK, Contiguous(4), 192, "needed"), 1, 1),
    "prefix, head-tail, gather": (Plan(PrefixLM(10), HeadTail(4), 64, "gather"), 2, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_known_cases_need_no_more_calls_than_this_and_merge_nothing(case):
    plan, forward, backward = COUNTED[case]
    found = [check(step.tiles) for step in steps(plan)]
    assert [len(calls.forward) for calls in found] == [1] * len(found)  # one layer: nothing is merged
    assert max(len(calls.forward[0].calls) for calls in found) == forward
    assert max(len(calls.backward) for calls in found) == backward


def test_only_key_ranges_that_are_apart_need_a_merge():
    """Sinks and a window: two ranges of keys for the same rows."""
    sinks, window = Tile(range(8), range(2), -7, 1), Tile(range(8), range(10, 18), -3, 0)
    assert len(check((sinks, window)).forward) == 2
    beside = Tile(range(8), range(2, 10), -7, 0)
    assert len(check((sinks, beside)).forward) == 1


def test_a_bound_that_does_not_bite_joins_the_window_that_is_there():
    short, long = Tile(range(4), range(4), -3, 0), Tile(range(4, 20), range(4, 20), -5, 0)
    calls = check((short, long))
    assert [call.window for layer in calls.forward for call in layer.calls] == [(5, 0)]
    assert len(check((Tile(range(7), range(7), -6, 0), Tile(range(7, 20), range(7, 20), -5, 0))).backward) == 2


def test_tiles_of_every_nth_row_are_calls_of_their_own():
    odd, even = (Tile(range(first, 8, 2), range(4), -3, 0) for first in (0, 1))
    calls = check((odd, even))
    assert [call.rows for layer in calls.forward for call in layer.calls] == [range(0, 8, 2), range(1, 8, 2)]


# ---- kernels of one tile -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["gather", "needed(2)", "ring"])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Documents([40, 3, 17, 4]), PrefixLM(10), SlidingWindow(9)])
def test_a_kernel_of_any_band_computes_joined_tiles(mask, strategy):
    """As `cuda_flash` does on a GPU: a query chunk over its key prefix is one tile."""
    with patch.dict(KERNELS, {"reference": JoinedTiles(reference)}):
        check_attention(Problem(mask, HeadTail(3), 64, strategy, kernel="reference", through_lse=True))


def test_joined_tiles_are_fewer():
    (step,) = Plan(Causal(), HeadTail(4), 64, "gather").steps(0)
    step = StepTiles(step.tiles, lambda: None)
    assert [tile.kind for tile in PerTile(cuda_flash).tiles(step)] == ["full", "causal", "causal"]
    assert [tile.kind for tile in KERNELS["cuda_flash"].tiles(step)] == ["causal", "general"]
