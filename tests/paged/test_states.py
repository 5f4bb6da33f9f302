"""States in pages: one for page_size tokens, of which the latest counts."""

import pytest
import torch

from attnspan.errors import PageError, PoolExhausted
from attnspan.paged import PageAllocator, StatePool


class Sums:
    """A pool with one state, the sum of a sequence's tokens, and the tokens beside it."""

    def __init__(self, pages=20, page_size=4, host_pages=8):
        self.allocator = PageAllocator(num_pages=pages, page_size=page_size, host_pages=host_pages)
        self.pool = StatePool(self.allocator, [((1,), torch.float64)])
        self.tokens = {}

    def add(self):
        seq = self.allocator.add()
        self.tokens[seq] = []
        return seq

    def fork(self, seq):
        [other] = self.allocator.fork(seq)
        self.tokens[other] = list(self.tokens[seq])
        return other

    def feed(self, **new):
        """New tokens of sequences, by `s<number>`."""
        batch = {int(name[1:]): tokens for name, tokens in new.items()}
        step = self.pool.step([(seq, len(tokens)) for seq, tokens in batch.items()])
        assert step.lengths == tuple(map(len, batch.values()))
        before = self.pool.read(0, step)
        assert before.flatten().tolist() == [sum(self.tokens[seq]) for seq in batch]
        self.pool.write(0, step, before + torch.tensor([[sum(tokens)] for tokens in batch.values()]))
        for seq, tokens in batch.items():
            self.tokens[seq] += tokens
        self.allocator.check()


def test_a_state_goes_on_through_pages_and_begins_with_zeros():
    sums = Sums()
    a, b = sums.add(), sums.add()
    sums.feed(s0=[1, 2, 3], s1=[7])
    sums.feed(s0=[4])  # the page is complete
    sums.feed(s0=[5], s1=[8, 9])
    assert [len(sums.allocator.table(seq)) for seq in (a, b)] == [2, 1]
    sums.allocator.release_window(a, 2)
    assert sums.allocator.table(a)[0] == 0
    sums.feed(s0=[6, 7, 8])
    assert sums.allocator.release_window(a, 2) == 0  # the next step begins from the complete page
    sums.feed(s0=[9])
    assert sums.allocator.release_window(a, 2) == 1
    c = sums.add()
    sums.feed(s2=[3])
    assert c == 2


@pytest.mark.parametrize("length", [3, 4, 5])
def test_forks_go_on_by_themselves(length):
    sums = Sums()
    sums.add()
    if length > 4:
        sums.feed(s0=[1, 1, 1, 1])
    sums.feed(s0=[2] * (length % 4 or 4))
    sums.fork(0)
    sums.fork(0)
    sums.feed(s1=[10], s0=[20], s2=[30])
    sums.feed(s2=[1], s0=[2], s1=[3])


def test_a_step_that_is_taken_back_leaves_the_state():
    sums = Sums()
    sums.add()
    sums.feed(s0=[1, 2, 3])
    for new in (1, 1, 5):
        sums.pool.step([(0, new)])
        sums.allocator.trim(0, 3)
    sums.feed(s0=[4])
    sums.pool.step([(0, 2)])
    sums.allocator.trim(0, 4)
    sums.feed(s0=[5])


def test_swaps_bring_a_state_back():
    sums = Sums(pages=4)
    sums.add()
    sums.feed(s0=[1, 2])
    sums.pool.swap_out(0)
    sums.add()
    sums.feed(s1=[5] * 4)
    sums.feed(s1=[5] * 4)
    sums.pool.swap_in(0)
    sums.feed(s0=[3])


def test_a_first_step_of_several_pages_takes_the_last_of_them():
    sums = Sums(pages=3)
    sums.add()
    sums.feed(s0=[1] * 11)
    assert sums.allocator.table(0) == [0, 0, 1]
    assert sums.allocator.free_pages == 1
    sums.fork(0)
    sums.feed(s0=[2], s1=[3])
    sums.allocator.free(1)
    sums.allocator.trim(0, 0)  # as if it had never been
    sums.tokens[0] = []
    sums.feed(s0=[5] * 8)
    assert sums.allocator.table(0)[0] == 0


def test_a_step_that_does_not_fit_changes_nothing():
    sums = Sums(pages=2)
    sums.add()
    sums.add()
    with pytest.raises(PoolExhausted):
        sums.pool.step([(0, 9), (1, 9)])
    sums.allocator.check()
    sums.feed(s0=[1] * 9)


def test_pages_are_skipped_by_sequences_without_tokens_alone():
    allocator = PageAllocator(num_pages=4, page_size=4)
    seq = allocator.add()
    with pytest.raises(PageError, match="length must be whole pages of 4 tokens, of a sequence without tokens, got 6"):
        allocator.skip(seq, 6)
    allocator.step([(seq, 1)])
    with pytest.raises(PageError, match=f"without tokens, got 8 for sequence {seq} of 1"):
        allocator.skip(seq, 8)
