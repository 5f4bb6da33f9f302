"""Blocks by work, back and forth."""

from hypothesis import given
from hypothesis import strategies as st

from attnspan.layouts import RoundRobinByWork
from attnspan.masks import Causal, Documents
from tests.layouts.strategies import lengths_of, masks


@given(st.data(), st.integers(1, 600), st.integers(1, 16), st.sampled_from([1, 5, 16, 128]))
def test_every_rank_gets_as_many_blocks_give_or_take_one(data, seq_len, ranks, block):
    layout = RoundRobinByWork(data.draw(masks(seq_len)), ranks=ranks, block=block)
    blocks = [{p // block for p in share} for share in layout.positions(seq_len)]
    counts = [len(held) for held in blocks]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == -(-seq_len // block)  # no block is torn


@given(st.data(), st.integers(1, 300), st.integers(1, 8), st.sampled_from([1, 5, 16]))
def test_batch_rows_give_each_rank_the_same_number_of_tokens(data, seq_len, ranks, block):
    documents = Documents([data.draw(lengths_of(seq_len)) for _ in range(2)])
    layout = RoundRobinByWork(Causal() & documents, ranks=ranks, block=block, per_row=True)
    assert layout.rows == 2
    assert layout.tokens(seq_len, row=0) == layout.tokens(seq_len, row=1)


def test_the_heaviest_blocks_go_round_and_back():
    work = [9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10]  # the example of torch's PTRR
    mask = Documents([n for work_of_block in work for n in [work_of_block] + [1] * (20 - work_of_block)])
    # A block of 20 rows: one document of n rows (n * n pairs) and single tokens.
    layout = RoundRobinByWork(mask, ranks=4, block=20)
    blocks = [sorted({p // 20 for p in share}) for share in layout.positions(320)]
    assert blocks == [[3, 12, 13, 14], [2, 4, 7, 9], [1, 8, 11, 15], [0, 5, 6, 10]]


def test_rows_are_summed_unless_dealt_each_its_own_way():
    mask = Causal() & Documents([[4, 12], [12, 4]])
    assert RoundRobinByWork(mask, ranks=2, block=2).rows == 1
    per_row = RoundRobinByWork(mask, ranks=2, block=2, per_row=True)
    assert per_row.shards(16, row=0) != per_row.shards(16, row=1)


def test_masks_count_by_their_weights():
    masks = [Documents([1, 7]), Documents([7, 1])]  # the first token is light in one, the last in the other
    first, last = (RoundRobinByWork(masks, ranks=4, block=1, weights=weights) for weights in ([5, 1], [1, 5]))
    assert [first.owner(8, 0), first.owner(8, 7)] == [0, 1]  # dealt last and last but one, on the way back
    assert [last.owner(8, 0), last.owner(8, 7)] == [1, 0]
