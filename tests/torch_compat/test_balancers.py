"""Load balancers give torch's indices where torch is right, and an order for everything that torch refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
from torch.nn.attention.flex_attention import create_block_mask

from attnspan import torch_compat as ours
from attnspan.errors import LayoutError
from attnspan.layouts import Contiguous
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.torch_compat.balancers import layout_of


def both_ways(balancer):
    return balancer._generate_indices(), balancer._generate_indices(restore=True)


def same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(both_ways(a), both_ways(b), strict=True))


def shares(balancer, ranks):
    """The positions on each rank."""
    layout, length = layout_of(balancer, ranks)
    return layout.positions(length)


def work(balancer, mask, ranks):
    layout, length = layout_of(balancer, ranks)
    return layout.work_per_rank(mask, length)


@given(st.integers(1, 8), st.integers(1, 20))
def test_head_tail_is_torchs_bit_by_bit(ranks, chunk):
    length = 2 * ranks * chunk
    assert same(ours._HeadTailLoadBalancer(length, ranks, "cpu"), theirs._HeadTailLoadBalancer(length, ranks, "cpu"))


MASKS = [Causal(), Causal() & Documents([100, 28, 300, 84]), SlidingWindow(70, 10)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_ptrr_is_torchs_bit_by_bit(mask, ranks):
    block_mask = create_block_mask(mask.mask_mod(), None, None, 512, 512, device="cpu", BLOCK_SIZE=16)
    assert same(ours._PTRRLoadBalancer(block_mask, ranks), theirs._PTRRLoadBalancer(block_mask, ranks))


def test_ptrr_deals_batch_rows_as_torch_does():
    lengths = torch.tensor([[40, 88], [100, 28]])

    def documents(b, h, q, k):
        border = lengths[b, 0]
        return (q >= k) & ((q < border) == (k < border))

    block_mask = create_block_mask(documents, 2, None, 128, 128, device="cpu", BLOCK_SIZE=8)
    assert same(ours._PTRRLoadBalancer(block_mask, 4), theirs._PTRRLoadBalancer(block_mask, 4))


@given(st.lists(st.floats(0, 9), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_ptrr_scheduling_is_torchs(times, groups):
    times = torch.tensor(times)
    found = ours._PTRRLoadBalancer.ptrr_scheduling(times, groups)
    assert torch.equal(found, theirs._PTRRLoadBalancer.ptrr_scheduling(times, groups))


def test_ptrr_serves_blocks_that_torch_refuses():
    """Seven blocks, the last one short, of unequal sizes, and heads that differ."""

    def per_head(b, h, q, k):
        return (q >= k) & (q - k < 20 * (h + 1))

    block_mask = create_block_mask(per_head, None, 2, 108, 108, device="cpu", BLOCK_SIZE=(16, 32))
    balancer = ours._PTRRLoadBalancer(block_mask, 2)
    found = shares(balancer, 2)
    assert sorted(found[0] + found[1]) == list(range(108))
    assert balancer._generate_indices().tolist() == [found[0] + found[1]]
    with pytest.raises(NotImplementedError):
        theirs._PTRRLoadBalancer(block_mask, 2)._generate_indices()


def test_per_document_is_what_torchs_documentation_draws():
    """Documents of 4, 8 and 4 on two ranks: rank 0 has heads and tails of all, then rank 1."""
    found = ours._PerDocumentHeadTailLoadBalancer([[4, 8, 4]], 2, "cpu")._generate_indices()
    assert found.tolist() == [[0, 3, 4, 5, 10, 11, 12, 15, 1, 2, 6, 7, 8, 9, 13, 14]]


@pytest.mark.parametrize(("lengths", "ranks"), [([4, 12], 2), ([1024] * 8 + [8192], 8)])
def test_per_document_balances_where_torchs_before_2_14_does_not(lengths, ranks):
    mask = Causal() & Documents(lengths)
    even = work(ours._PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu"), mask, ranks)
    torchs = work(theirs._PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu"), mask, ranks)
    assert max(even) * ranks / sum(even) == 1.0
    mended = torch.__version__ >= "2.14"  # as docs/comparison.md says
    assert (max(torchs) * ranks / sum(torchs) > 1.4) is not mended


def test_per_document_deals_each_batch_row_its_own_way():
    found = ours._PerDocumentHeadTailLoadBalancer([[4, 12], [8, 8]], 2, "cpu")._generate_indices()
    rows = [ours._PerDocumentHeadTailLoadBalancer([row], 2, "cpu")._generate_indices() for row in ([4, 12], [8, 8])]
    assert torch.equal(found, torch.cat(rows))


@given(st.integers(1, 8), st.integers(1, 60))
def test_head_tail_has_an_order_for_any_length(ranks, length):
    there, back = both_ways(ours._HeadTailLoadBalancer(length, ranks, "cpu"))
    assert torch.equal(there[0][back[0]], torch.arange(length, dtype=torch.int32))


def test_the_default_is_head_tail_for_any_length_unless_the_options_balance_nothing(monkeypatch):
    assert ours._create_default_load_balancer(7, 2, "cpu")._generate_indices().tolist() == [[0, 5, 6, 1, 2, 3, 4]]
    monkeypatch.setattr(ours._cp_options, "enable_load_balance", False)
    assert ours._create_default_load_balancer(8, 2, "cpu") is None


class Reversed(ours._LoadBalancer):
    """Somebody's own: the sequence backwards."""

    def __init__(self, length):
        self.length = length

    def _generate_indices(self, restore=False):
        return torch.arange(self.length).flip(0).unsqueeze(0)


class Plain(ours._LoadBalancer):
    def _generate_indices(self, restore=False):
        return None


class Broken(ours._LoadBalancer):
    def __init__(self, indices):
        self.indices = torch.tensor(indices)

    def _generate_indices(self, restore=False):
        return self.indices


def test_somebodys_own_load_balancer_is_cut_as_dtensor_cuts():
    assert shares(Reversed(7), 2) == [[6, 5, 4, 3], [2, 1, 0]]
    assert shares(Reversed(3), 4) == [[2], [1], [0], []]
    assert layout_of(Plain(), 3) == layout_of(None, 3) == (Contiguous(3), None)


def test_torchs_own_load_balancers_are_understood():
    assert shares(theirs._HeadTailLoadBalancer(8, 2, "cpu"), 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: ours._HeadTailLoadBalancer(0, 2, "cpu"), "seq_length must be a whole number >= 1, got 0"),
        (lambda: ours._HeadTailLoadBalancer(8, 0, "cpu"), "ranks must be a whole number >= 1, got 0"),
        (lambda: ours._PTRRLoadBalancer(None, 2), "block_mask must be a BlockMask, got NoneType"),
        (
            lambda: ours._PTRRLoadBalancer.ptrr_scheduling(torch.ones(5), 2),
            "process_time must have a multiple of group_size (2) tasks, got 5",
        ),
        (
            lambda: layout_of(ours._HeadTailLoadBalancer(8, 4, "cpu"), 2),
            "load_balancer must be for the mesh's 2 ranks, got one for 4",
        ),
        (lambda: layout_of("head-tail", 2), "load_balancer must have _generate_indices, got str"),
        (
            lambda: layout_of(Broken([0, 1]), 2),
            "load_balancer: indices must be (1, S) or (B, S), got shape (2,)",
        ),
        (
            lambda: layout_of(Broken([[0, 1, 1]]), 2),
            "load_balancer: indices must hold each of 3 positions once, in every row",
        ),
    ],
)
def test_what_is_no_order_is_refused(ask, says):
    with pytest.raises(LayoutError) as refused:
        ask()
    assert str(refused.value).startswith(says)
