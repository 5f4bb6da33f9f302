"""Every document on every rank, and the same number of tokens on each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.layouts import PerDocument
from attnspan.masks import Causal, Documents
from attnspan.masks.profile import RowWork
from tests.layouts.strategies import lengths_of

# Documents, ranks, and how many times more the busiest rank works than the idlest in torch's document-major order.
DEFECTS = [([4, 12], 2, 62 / 26), ([1024] * 8 + [8192], 8, 8)]


@given(st.data(), st.integers(1, 600), st.integers(1, 16))
def test_token_counts_differ_by_one_at_most(data, seq_len, ranks):
    tokens = PerDocument(data.draw(lengths_of(seq_len, most=40)), ranks=ranks).tokens(seq_len)
    assert tokens == [seq_len // ranks + (rank < seq_len % ranks) for rank in range(ranks)]


@given(st.data(), st.integers(1, 200), st.integers(1, 8))
def test_batch_rows_give_each_rank_the_same_number_of_tokens(data, seq_len, ranks):
    layout = PerDocument([data.draw(lengths_of(seq_len)) for _ in range(3)], ranks=ranks)
    assert layout.rows == 3
    assert layout.tokens(seq_len, 0) == layout.tokens(seq_len, 1) == layout.tokens(seq_len, 2)


@given(st.data(), st.integers(1, 600), st.integers(1, 8))
def test_every_document_is_spread_evenly(data, seq_len, ranks):
    lengths = data.draw(lengths_of(seq_len, most=20))
    positions = PerDocument(lengths, ranks=ranks).positions(seq_len)
    start = 0
    for length in lengths:
        held = [sum(start <= p < start + length for p in share) for share in positions]
        assert max(held) - min(held) <= 2
        start += length


@pytest.mark.parametrize(("lengths", "ranks", "torchs"), DEFECTS)
def test_work_is_equal_where_torchs_order_is_not(lengths, ranks, torchs):
    mask, seq_len = Causal() & Documents(lengths), sum(lengths)
    assert PerDocument(lengths, ranks=ranks).imbalance(mask, seq_len) == 1.0


@pytest.mark.parametrize(("lengths", "ranks", "torchs"), DEFECTS)
def test_twin_torchs_document_major_order_is_unbalanced(lengths, ranks, torchs):
    module = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = module._PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")._generate_indices()[0]
    rows = RowWork((Causal() & Documents(lengths)).bands(sum(lengths)))
    work = [sum(rows.at(p) for p in shard.tolist()) for shard in order.chunk(ranks)]
    mended = torch.__version__ >= "2.14"
    assert max(work) / min(work) == pytest.approx(1.0 if mended else torchs, rel=0.01)


def test_many_short_documents_are_balanced_too():
    lengths = [1 + (i * 7) % 13 for i in range(400)]
    mask, seq_len = Causal() & Documents(lengths), sum(lengths)
    assert PerDocument(lengths, ranks=8).imbalance(mask, seq_len) < 1.01


def test_lengths_belong_to_batch_rows():
    layout = PerDocument([[4, 4], [8]], ranks=2)
    assert layout.positions(8, row=0) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert layout.positions(8, row=1) == [[0, 1, 6, 7], [2, 3, 4, 5]]
