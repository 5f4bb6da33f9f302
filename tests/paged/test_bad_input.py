"""What is wrong is refused by name, and leaves the pages and the allocator as they were."""

import pytest
import torch

from attnspan.errors import AttnspanError, KernelError, MaskError, PageError, PoolExhausted, UnknownSequence
from attnspan.masks import Causal, Documents, KeyPadding, MaskMod, Tree
from attnspan.paged import AfterPrefix, PageAllocator, PageLayer, PagePool, StepPlan
from tests.paged.cases import Cache, agree


@pytest.fixture
def cache():
    cache = Cache(page_size=4, pages=12, max_sequences=3, max_tokens=30, max_length=40)
    cache.a, cache.b = cache.add(6), cache.add(9)
    cache.step([(cache.a, 1), (cache.b, 2)])
    return cache


def unchanged(cache):
    """Everything that an operation could have changed."""
    rows = {seq: (row.length, row.table.tolist()) for seq, row in cache.allocator._rows.items()}
    return rows, cache.allocator.free_pages, [pages.clone() for pages in (*cache.pool.keys, *cache.pool.values)]


def refused(cache, error, message, operation):
    rows, free, pages = unchanged(cache)
    with pytest.raises(error, match=message):
        operation()
    again = unchanged(cache)
    assert again[:2] == (rows, free)
    for before, after in zip(pages, again[2], strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))
    cache.allocator.check()


def tokens(n, heads=2, dim=8, dtype=torch.float64):
    return torch.zeros(n, heads, dim, dtype=dtype)


STEPS = {
    "too many sequences": (PageError, "at most max_sequences=3, got 4", [(0, 1), (1, 1), (8, 1), (9, 1)]),
    "too many tokens": (PageError, "at most max_tokens=30 new tokens, got 31", [(0, 30), (1, 1)]),
    "too long": (PageError, "sequence 1 would hold 41 tokens, more than max_length=40", [(0, 1), (1, 29 + 1)][1:]),
    "twice": (PageError, "name each sequence once", [(0, 1), (0, 1)]),
    "unknown": (UnknownSequence, "sequence 77 is unknown", [(0, 1), (77, 1)]),
    "no pairs": (PageError, r"batch must be pairs of a sequence and its new tokens, got \[0, 1\]", [0, 1]),
    "triples": (PageError, "batch must be pairs", [(0, 1), (1, 1, 1)]),
    "a name that cannot be one": (PageError, "batch must be pairs", [(0, 1), ([], 1)]),
    "a number in words": (PageError, "new_tokens must be a whole number >= 0, got '3'", [(0, 1), (1, "3")]),
    "too large for the pool": (PoolExhausted, "8 pages needed, 6 free", [(0, 15), (1, 15)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_does_not_fit_changes_nothing(cache, name):
    error, message, batch = STEPS[name]
    refused(cache, error, message, lambda: cache.plan.step(batch))


def test_a_batch_that_is_no_batch_changes_nothing(cache):
    for batch in ([(0, 1), ([], 1)], [(0, 1), (1,)], [0], 7):
        refused(cache, PageError, "batch must be pairs", lambda batch=batch: cache.allocator.step(batch))


def test_a_row_without_new_tokens_has_no_last_one(cache):
    cache.plan.step([(cache.a, 0), (cache.b, 2)])
    refused(cache, PageError, "a new token in every row of the step, got none in row 0", lambda: cache.plan.last_tokens)


class Fails:
    """The n-th of some calls fails."""

    def __init__(self, function, n):
        self.function, self.left = function, n

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("planted")
        return self.function(*args)


@pytest.mark.parametrize("n", [1, 2])  # keys, and values
def test_a_swap_that_fails_leaves_a_sequence_where_it_is(monkeypatch, n):
    cache = Cache(page_size=4, host_pages=9)
    cache.add(3)
    seq = cache.add(6)
    for swap in (cache.pool.swap_out, cache.pool.swap_in):
        before, fails = unchanged(cache)[:2], Fails(torch.Tensor.index_copy_, n)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_copy_", lambda *args: fails(*args))  # noqa: B023
            with pytest.raises(MemoryError, match="planted"):
                swap(seq)
        assert unchanged(cache)[:2] == before
        cache.allocator.check()
        swap(seq)
    cache.poison()
    cache.step([(seq, 1)])
    agree(cache.attend(), cache.expected())


def test_a_shared_page_whose_copy_fails_stays_shared_and_the_step_can_be_tried_again(cache, monkeypatch):
    a = cache.add(6)
    b, c = cache.allocator.fork(a, 2)
    batch = [(a, 1), (b, 1), (c, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(cache.pool, "copy", Fails(cache.pool.copy, 1))
        refused(cache, MemoryError, "planted", lambda: cache.plan.step(batch))
    cache.plan.step(batch)
    before = cache.pool.keys[0][cache.allocator.table(a)[-1], :2]
    for seq in (b, c):
        assert cache.allocator.table(seq)[-1] != cache.allocator.table(a)[-1]
        assert torch.equal(cache.pool.keys[0][cache.allocator.table(seq)[-1], :2], before)
    cache.allocator.check()


WRITES = {
    "an unreserved position": ("as planned, got", tokens(4), tokens(4)),
    "fewer tokens than planned": (
        "key must be .* = \\(3, 2, 8\\), as planned, got \\(2, 2, 8\\)",
        tokens(2),
        tokens(2),
    ),
    "another head count": ("key must be", tokens(3, heads=4), tokens(3)),
    "another head dim": ("value must be", tokens(3), tokens(3, dim=9)),
    "another dtype": ("key must be torch.float64 on cpu, got torch.float32", tokens(3, dtype=torch.float32), tokens(3)),
    "a gradient": ("requires grad", tokens(3).requires_grad_(), tokens(3)),
    "nothing": ("value must be .* as planned, got <class 'NoneType'>", tokens(3), None),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_does_not_fit_overwrites_nothing(cache, name):
    message, key, value = WRITES[name]
    refused(cache, PageError, message, lambda: cache.pool.write(0, key, value, cache.plan))


READS = {
    "heads that no key heads serve": (PageError, "multiple of the layer's 2 key heads", tokens(3, heads=3), {}),
    "another number of queries": (PageError, "query must be", tokens(5, heads=4), {}),
    "another dtype": (PageError, "query must be torch.float64", tokens(3, heads=4, dtype=torch.float32), {}),
    "no mask": (PageError, "mask must be a mask such as Causal", None, {"mask": torch.ones(3, 3)}),
    "a mask of fewer rows": (MaskError, "3 batch rows, got 2", None, {"mask": KeyPadding([1, 2, 3])}),
    "a mask of shorter sequences": (
        MaskError,
        "for sequences of 9 tokens, got one of 11",
        None,
        {"mask": Documents([4, 5])},
    ),
    "a mask that is aligned at the bottom": (MaskError, "needs both lengths", None, {"mask": Causal(align="bottom")}),
    "a tree of another size": (
        MaskError,
        "row 0 is for 2 new tokens, got 1",
        None,
        {"mask": AfterPrefix(Tree([-1, 0]))},
    ),
    "trees for other rows": (MaskError, "each of the 2, got 3", None, {"mask": AfterPrefix([Tree([-1])] * 3)}),
    "a tree for some rows": (
        MaskError,
        "same for all batch rows and heads, got 2 rows and 1 heads",
        None,
        {"mask": lambda: AfterPrefix(Causal() & KeyPadding([1, 2]))},
    ),
    "a mask of fewer heads": (
        MaskError,
        "heads must be the mask's 2 heads, got 4",
        None,
        {"mask": MaskMod(lambda b, h, q, k: (k <= q) & (h == 0), heads=2)},
    ),
    "no tensor": (PageError, "query must be a tensor", [1.0], {}),
    "sinks that are no tensor": (PageError, "sinks must be a tensor with one logit per", None, {"sinks": [0.0] * 4}),
    "sinks that learn": (PageError, "sinks requires grad", None, {"sinks": torch.zeros(4, requires_grad=True)}),
    "sinks of another head count": (PageError, "one logit per query head, \\(4,\\)", None, {"sinks": torch.zeros(2)}),
    "an unknown kernel": (KernelError, "did you mean 'gather'", None, {"kernel": "gathr"}),
    "a kernel that cannot": (KernelError, "decode runs on cuda, got tensors on cpu", None, {"kernel": "decode"}),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_that_does_not_fit_is_refused(cache, name):
    error, message, query, options = READS[name]
    query = cache.query if query is None else query

    def attend():
        made = {name: value() if callable(value) else value for name, value in options.items()}
        cache.pool.attend(0, query, cache.plan, **made)

    refused(cache, error, message, attend)


CHANGES = {
    "grown": lambda cache: cache.allocator.step([(cache.a, 1)]),
    "trimmed": lambda cache: cache.allocator.trim(cache.a, 2),
    "freed": lambda cache: cache.allocator.free(cache.a),
    "swapped out": lambda cache: cache.allocator.swap_out(cache.a),
    "released": lambda cache: cache.allocator.release_window(cache.b, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_refused_when_its_sequences_have_changed(name):
    cache = Cache(page_size=4, host_pages=9)
    cache.a, cache.b = cache.add(6), cache.add(9)
    cache.step([(cache.a, 1), (cache.b, 2)])
    CHANGES[name](cache)
    refused(
        cache, PageError, "the plan is stale: sequence", lambda: cache.pool.write(0, tokens(3), tokens(3), cache.plan)
    )
    refused(cache, PageError, "the plan is stale: sequence", lambda: cache.attend())


def test_a_plan_is_good_while_only_others_change(cache):
    other = cache.allocator.add()
    cache.allocator.step([(other, 3)])
    cache.attend()
    cache.allocator.free(other)
    cache.attend()


def test_a_plan_whose_step_failed_still_describes_the_last_one(cache):
    before = cache.attend()[0]
    with pytest.raises(PoolExhausted):
        cache.plan.step([(cache.a, 15), (cache.b, 15)])
    assert torch.equal(cache.attend()[0], before)


def test_a_plan_without_a_step_and_one_of_another_pool_are_refused(cache):
    other = Cache(page_size=4)
    refused(
        cache,
        PageError,
        "must be one of this pool's",
        lambda: cache.pool.write(0, tokens(3), tokens(3), plan_of(other)),
    )
    empty = StepPlan(cache.pool, max_sequences=1, max_tokens=1, max_length=4)
    refused(cache, PageError, "describes no step", lambda: cache.pool.attend(0, cache.query, empty))


def plan_of(other):
    other.step([(other.add(), 3)])
    return other.plan


def test_a_layer_that_looks_behind_what_was_released_is_refused():
    cache = Cache(page_size=2, window=8)
    seq = cache.add(12)
    cache.allocator.release_window(seq, 3)
    cache.step([(seq, 1)])
    refused(cache, PageError, "a window of 8, but pages were released that leave a window of 3", lambda: cache.attend())
    full = Cache(page_size=2)
    seq = full.add(12)
    full.allocator.release_window(seq, 3)
    full.step([(seq, 1)])
    refused(full, PageError, "the layer sees everything", lambda: full.attend())


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("layers must hold at least one", lambda a: PagePool(a, [])),
        ("layers must hold at least one PageLayer, and nothing else", lambda a: PagePool(a, PageLayer(1, 8))),
        ("page_size must be a whole number >= 1, got -1", lambda a: PagePool(a, [PageLayer(1, 8)], page_size=-1)),
        ("dtype must be one of .*, got torch.int32", lambda a: PagePool(a, [PageLayer(1, 8)], dtype=torch.int32)),
        ("plan must be a StepPlan, got None", lambda a: PagePool(a, [PageLayer(1, 8)]).write(0, None, None, None)),
        (r"the allocator's page_size \(2\), got 1", lambda a: plan_for(PagePool(a, [PageLayer(1, 8)], page_size=1))),
        ("must be at most 2147483647, .*, got 1, 1 and 2147483648", lambda a: plan_for(
            PagePool(a, [PageLayer(1, 8)]), max_length=1 << 31)),
        ("kv_heads must be a whole number >= 1", lambda a: PageLayer(0, 8)),
        ("window must be a whole number >= 1", lambda a: PageLayer(1, 8, window=0)),
        ("layer must be below the pool's 1", lambda a: PagePool(a, [PageLayer(1, 8)]).write(1, None, None, None)),
        ("max_length must be a whole number", lambda a: plan_for(PagePool(a, [PageLayer(1, 8)]), max_length=0)),
        ("masks must be a mask", lambda a: AfterPrefix([])),
        ("reads its batch index", lambda a: MaskMod(lambda b, h, q, k: k <= q + b)),
    ],
)  # fmt: skip
def test_what_cannot_be_made_says_so(message, make):
    with pytest.raises(AttnspanError, match=message):
        make(PageAllocator(num_pages=4, page_size=2))


def plan_for(pool, max_length=8):
    return StepPlan(pool, max_sequences=1, max_tokens=1, max_length=max_length)
