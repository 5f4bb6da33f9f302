"""Layouts draw themselves."""

import pytest

from attnspan.layouts import Balanced, Contiguous, HeadTail, PerDocument, RoundRobinByWork, Striped
from attnspan.layouts.grouped import Grouped
from attnspan.masks import Causal, Documents, KeyPadding, PrefixLM


def test_each_token_shows_its_owner():
    assert str(PerDocument([4, 4], ranks=2)).splitlines() == [
        "PerDocument([4, 4], ranks=2) on 8 tokens",
        "0 1 1 0 0 1 1 0",
        "rank 0: [0, 1) [3, 5) [7, 8)",
        "rank 1: [1, 3) [5, 7)",
    ]


def test_a_step_is_shown():
    assert "rank 1: [1, 8) step 2" in str(Striped(2))


def test_a_rank_may_hold_nothing():
    assert "rank 0: nothing" in str(PerDocument([2], ranks=3)) or "rank 2: nothing" in str(PerDocument([2], ranks=3))


def test_batch_rows_say_which_is_drawn():
    assert str(PerDocument([[4, 4], [8]], ranks=2)).startswith(
        "PerDocument([[4, 4], [8]], ranks=2) on 8 tokens, row 0 of 2\n"
    )


@pytest.mark.parametrize("ranks", [1, 2, 10, 11, 64, 1000])
@pytest.mark.parametrize("build", [Contiguous, HeadTail, Striped, lambda n: Balanced(Causal(), ranks=n)])
def test_no_drawing_is_large(build, ranks):
    lines = str(build(ranks)).splitlines()
    assert len(lines) <= 2 + 16 + 1
    assert max(map(len, lines)) <= 110
    if ranks > 16:
        assert lines[-1] == f"... {ranks - 16} more ranks"


def test_cells_that_several_ranks_share_are_starred():
    assert str(Striped(100)).splitlines()[1].split()[:3] == ["*", "*", "*"]


def test_long_lists_are_shortened():
    drawn = str(PerDocument([5] * 1000, ranks=2))
    assert max(map(len, drawn.splitlines())) < 400
    assert "more runs" in drawn


@pytest.mark.parametrize("build", [Balanced, RoundRobinByWork])
@pytest.mark.parametrize("mask", [KeyPadding(1000), PrefixLM(100) & Causal(), KeyPadding([5, 300])], ids=repr)
def test_a_layout_is_drawn_at_a_length_that_its_mask_accepts(build, mask):
    assert f"on {mask.least_len} tokens" in str(build(mask, ranks=2)).splitlines()[0]


def test_a_layout_of_masks_that_contradict_each_other_says_that_it_cannot_be_drawn():
    lines = str(Balanced([Documents([3, 4]), Documents([5])], ranks=2)).splitlines()
    assert lines[0] == "Balanced([Documents([3, 4]), Documents([5])], ranks=2) on 7 tokens"
    assert lines[1].startswith("(cannot be drawn: lengths must sum to q_len (7)")


def test_a_grouped_layout_is_drawn_at_the_length_of_what_it_groups():
    assert "on 7 tokens" in str(Grouped(PerDocument([3, 4], ranks=4), size=2))
