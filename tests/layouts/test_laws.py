"""Laws that every layout keeps, whatever the length and the number of ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.layouts import Balanced, Contiguous, HeadTail, PerDocument, RoundRobinByWork, Striped, moved
from attnspan.masks import Causal, Documents, SlidingWindow
from tests.layouts.strategies import layouts, masks

lengths = st.one_of(st.integers(1, 40), st.integers(1, 4096))


@given(st.data(), lengths)
def test_the_ranks_share_every_position_once(data, seq_len):
    layout = data.draw(layouts(seq_len))
    positions = layout.positions(seq_len)
    assert len(positions) == layout.ranks
    assert sorted(p for share in positions for p in share) == list(range(seq_len))
    assert layout.tokens(seq_len) == [len(share) for share in positions]


@given(st.data(), lengths)
def test_runs_are_ordered_and_joined(data, seq_len):
    layout = data.draw(layouts(seq_len))
    for runs in layout.shards(seq_len):
        assert all(a.stop <= b.start for a, b in pairwise(runs))
        assert not any(a.stop == b.start and a.step == b.step == 1 for a, b in pairwise(runs))


@given(st.data(), lengths)
def test_inverse_undoes_the_permutation(data, seq_len):
    layout = data.draw(layouts(seq_len))
    order, back = layout.permutation(seq_len), layout.inverse(seq_len)
    x = torch.arange(seq_len) * 3
    assert torch.equal(x[order][back], x)
    assert order.tolist() == [p for share in layout.positions(seq_len) for p in share]


@given(st.data(), lengths)
def test_the_owner_of_a_position_holds_it(data, seq_len):
    layout = data.draw(layouts(seq_len))
    position = data.draw(st.integers(0, seq_len - 1))
    assert position in layout.positions(seq_len)[layout.owner(seq_len, position)]


@given(st.data(), st.integers(1, 96))
def test_work_per_rank_is_what_the_dense_mask_says(data, seq_len):
    layout, mask = data.draw(layouts(seq_len)), data.draw(masks(seq_len))
    rows = mask.dense(seq_len).sum(dim=1)
    work = [int(rows[share].sum()) for share in layout.positions(seq_len)]
    assert layout.work_per_rank(mask, seq_len) == work
    mean = sum(work) / layout.ranks
    assert layout.imbalance(mask, seq_len) == pytest.approx(max(work) / mean if mean else 1.0)


@given(st.data(), st.integers(1, 96))
def test_moved_keys_are_the_ones_the_dense_mask_says(data, seq_len):
    layout, mask = data.draw(layouts(seq_len)), data.draw(masks(seq_len))
    dense = mask.dense(seq_len)
    received = []
    for share in layout.positions(seq_len):
        seen = dense[share].any(dim=0)
        seen[share] = False
        received.append(int(seen.sum()))
    assert moved(mask, layout, seq_len) == received


@given(st.integers(1, 4096), st.integers(1, 16))
def test_striped_by_one_is_a_single_run_per_rank(seq_len, ranks):
    shards = Striped(ranks=ranks).shards(seq_len)
    assert [len(runs) for runs in shards] == [int(rank < seq_len) for rank in range(ranks)]


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(2, 64))
def test_striped_by_chunks_deals_chunks_in_turn(seq_len, ranks, chunk):
    layout = Striped(ranks=ranks, chunk=chunk)
    for position in {0, seq_len // 2, seq_len - 1}:
        assert layout.owner(seq_len, position) == position // chunk % ranks


@pytest.mark.parametrize(
    "build",
    [
        lambda: Contiguous(2),
        lambda: HeadTail(2),
        lambda: Striped(2, chunk=4),
        lambda: PerDocument([4, 4], ranks=2),
        lambda: RoundRobinByWork(Causal(), ranks=2, block=4),
        lambda: Balanced([Causal(), SlidingWindow(2)], ranks=2, weights=[1, 5]),
    ],
)
def test_equal_layouts_are_equal_values(build):
    assert build() == build()
    assert hash(build()) == hash(build())
    assert eval(repr(build()), {**globals(), "Documents": Documents}) == build()


def test_weights_are_a_ratio():
    masks = [Causal(), SlidingWindow(2)]
    assert Balanced(masks, ranks=2, weights=[2, 10]) == Balanced(masks, ranks=2, weights=[0.5, 2.5])
    assert Balanced([Causal()], ranks=2) == Balanced(Causal(), ranks=2, weights=[7])


def test_a_layout_of_one_mask_differs_from_that_of_another():
    assert Balanced(Causal(), ranks=2) != Balanced(SlidingWindow(2), ranks=2)
