"""The allocator and the prefix cache against an oracle that knows contents instead of pages.

The oracle is a dict: for each sequence the list of its tokens, each a number that was never used before. Pages are
simulated as a dict from (page, slot) to token, written and copied exactly as the allocator says. Whatever happens, in
whatever order, reading a sequence through its table must give its tokens, every refused operation must leave the
allocator as it was, and `check` must hold.
"""

import contextlib
import copy
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from attnspan.errors import PageError, PoolExhausted, UnknownSequence
from attnspan.paged import PageAllocator, PrefixCache

LONG_RUN = 1_000_000


class Operations:
    """Every operation on an allocator, done to it and to the oracle."""

    def __init__(self, pages, size, host, cached):
        self.allocator = PageAllocator(num_pages=pages + 1, page_size=size, host_pages=host)
        self.cache = PrefixCache(self.allocator) if cached else None
        self.size = size
        self.slots, self.host_slots = {}, {}
        self.tokens, self.released, self.out = {}, {}, set()
        self.done = 0

    def sequences(self):
        return list(self.tokens)

    def add(self, tokens, salt=0):
        self.done += 1
        if self.cache is None:
            seq, length = self.allocator.add(), 0
        else:
            seq, length = self.cache.add(tokens, salt=salt)
            assert length < len(tokens)
        self.tokens[seq], self.released[seq] = list(tokens[:length]), 0
        self.read(seq)
        return seq

    def step(self, batch):
        """`batch` is [(seq, new tokens)]."""
        self.done += 1
        before = self.state()
        elsewhere = [seq for seq, _ in batch if seq in self.out]
        try:
            given = self.allocator.step([(seq, len(new)) for seq, new in batch])
        except PageError as error:
            refused = error
        else:
            refused = None
        if refused is not None:
            short = isinstance(refused, PoolExhausted) and refused.needed > refused.free
            assert short or elsewhere
            assert self.state() == before
            return False
        assert not elsewhere
        for source, target in given.copies:
            self.copy(source, target)
        for seq, new in batch:
            for token in new:
                position = len(self.tokens[seq])
                page = self.allocator.table(seq)[position // self.size]
                self.slots[page, position % self.size] = token
                self.tokens[seq].append(token)
        return True

    def copy(self, source, target):
        for slot in range(self.size):
            self.slots.pop((target, slot), None)
            if (source, slot) in self.slots:
                self.slots[target, slot] = self.slots[source, slot]

    def fork(self, seq, n):
        self.done += 1
        if seq in self.out:
            return self.refused(lambda: self.allocator.fork(seq, n))
        for fork in self.allocator.fork(seq, n):
            self.tokens[fork], self.released[fork] = list(self.tokens[seq]), self.released[seq]
        return None

    def trim(self, seq, length):
        self.done += 1
        if seq in self.out or not (length == 0 or self.released[seq] <= length <= len(self.tokens[seq])):
            return self.refused(lambda: self.allocator.trim(seq, length))
        self.allocator.trim(seq, length)
        del self.tokens[seq][length:]
        self.released[seq] = min(self.released[seq], length)
        return None

    def skip(self, seq, pages):
        self.done += 1
        length = pages * self.size
        if seq in self.out or self.tokens[seq]:
            return self.refused(lambda: self.allocator.skip(seq, length))
        self.allocator.skip(seq, length)
        self.tokens[seq], self.released[seq] = [0] * length, length
        return None

    def release(self, seq, window):
        self.done += 1
        if seq in self.out:
            return self.refused(lambda: self.allocator.release_window(seq, window))
        self.allocator.release_window(seq, window)
        unseen = max(0, len(self.tokens[seq]) - window + 1)  # the next token sees itself and window - 1 before it
        self.released[seq] = max(self.released[seq], unseen // self.size * self.size)
        return None

    def free(self, seq):
        self.done += 1
        self.allocator.free(seq)
        del self.tokens[seq], self.released[seq]
        self.out.discard(seq)
        self.refused(lambda: self.allocator.free(seq), UnknownSequence)

    def swap(self, seq):
        self.done += 1
        before = self.state()
        try:
            if seq in self.out:
                moves = self.allocator.swap_in(seq)
                moved = [(self.host_slots, there, self.slots, page) for there, page in moves]
            else:
                moves = self.allocator.swap_out(seq)
                moved = [(self.slots, page, self.host_slots, there) for page, there in moves]
        except PoolExhausted:
            assert self.state() == before
            return
        for source, a, target, b in moved:
            for slot in range(self.size):
                target[b, slot] = source.get((a, slot))
        self.out ^= {seq}

    def insert(self, seq, salt=0):
        self.done += 1
        if self.cache is None or seq in self.out:
            return
        with contextlib.suppress(PageError):  # pages that came under another salt
            self.cache.insert(seq, self.tokens[seq], salt=salt)

    def refused(self, operation, error=PageError):
        before = self.state()
        with pytest.raises(error):
            operation()
        assert self.state() == before

    def state(self):
        a = self.allocator
        rows = {seq: (row.length, row.limit, row.table.tolist(), row.stamp, row.first, row.host and row.host.tolist())
                for seq, row in a._rows.items()}  # fmt: skip
        kept = a._kept
        return copy.deepcopy((rows, a._free, a._host_free, a._readers, kept))

    def read(self, seq):
        if seq in self.out:
            return
        table, kept = self.allocator.table(seq), range(self.released[seq], len(self.tokens[seq]))
        assert self.allocator.length(seq) == len(self.tokens[seq])
        assert [self.slots[table[p // self.size], p % self.size] for p in kept] == self.tokens[seq][kept.start :]

    def read_all(self):
        for seq in self.tokens:
            self.read(seq)

    def check(self):
        (self.cache or self.allocator).check()


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class Machine(RuleBasedStateMachine):
    """All operations in random order. Few tokens, so that prompts often agree."""

    def __init__(self):
        super().__init__()
        self.ops = Operations(pages=9, size=3, host=4, cached=True)

    def some(self, data):
        return data.draw(st.sampled_from(self.ops.sequences()))

    @rule(tokens=TOKENS, salt=st.integers(0, 1))
    def add(self, tokens, salt):
        seq = self.ops.add(tokens, salt)
        if self.ops.step([(seq, tokens[len(self.ops.tokens[seq]) :])]):
            self.ops.insert(seq, salt)

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data())
    def step(self, data):
        batch = data.draw(st.lists(st.tuples(st.sampled_from(self.ops.sequences()), TOKENS | st.just([])), max_size=4))
        self.ops.step(batch)

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data, n):
        self.ops.fork(self.some(data), n)

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data(), length=st.integers(0, 12))
    def trim(self, data, length):
        self.ops.trim(self.some(data), length)

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data(), window=st.integers(1, 8))
    def release(self, data, window):
        self.ops.release(self.some(data), window)

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.ops.free(self.some(data))

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data())
    def swap(self, data):
        self.ops.swap(self.some(data))

    @precondition(lambda self: self.ops.tokens)
    @rule(data=st.data(), salt=st.integers(0, 1))
    def keep(self, data, salt):
        self.ops.insert(self.some(data), salt)

    @rule()
    def clear(self):
        self.ops.cache.clear()

    @invariant()
    def all_is_as_the_oracle_says(self):
        self.ops.check()
        self.ops.read_all()


def test_operations_in_any_order_keep_every_sequence_whole():
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=40))


def random_run(operations, seed, check_every):
    """A long walk by Python's own generator, over many small worlds: hypothesis shrinks, this one covers ground."""
    import random

    rng = random.Random(seed)
    done = 0
    while done < operations:
        ops = Operations(rng.randint(1, 24), rng.choice([1, 2, 3, 5, 16]), rng.randint(0, 6), rng.random() < 0.7)
        for _ in range(400):
            some = rng.choice(ops.sequences()) if ops.tokens else None
            kind = rng.randrange(13) if some is not None else 0
            new = [rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 1, 2, 7, 20]))]
            if kind == 0:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
                seq = ops.add(prompt, salt=rng.randrange(2))
                ops.step([(seq, prompt[len(ops.tokens[seq]) :])])
            elif kind <= 4:
                ops.step([(seq, new) for seq in ops.sequences() if rng.random() < 0.5])
            elif kind == 5:
                ops.fork(some, rng.randint(1, 3))
            elif kind == 6:
                ops.trim(some, rng.randint(0, len(ops.tokens[some]) + 1))
            elif kind == 7:
                ops.release(some, rng.randint(1, 12))
            elif kind <= 9:
                ops.free(some)
            elif kind == 10:
                ops.swap(some)
            elif kind == 11:
                if rng.random() < 0.5:
                    ops.trim(some, 0)
                ops.skip(some, rng.randint(0, 3))
            else:
                ops.insert(some, salt=rng.randrange(2))
            if ops.done % check_every == 0:
                ops.check()
                ops.read_all()
        for seq in ops.sequences():
            ops.free(seq)
        if ops.cache:
            ops.cache.clear()
        ops.check()
        assert ops.allocator.free_pages == ops.allocator.num_pages - 1
        done += ops.done
    return done


def test_a_walk_over_many_small_pools_keeps_every_sequence_whole():
    assert random_run(3_000, seed=int(os.environ.get("PYTEST_SEED", 6)), check_every=1) >= 3_000


@pytest.mark.slow
def test_a_million_operations_keep_every_sequence_whole():
    assert random_run(LONG_RUN, seed=7, check_every=7) >= LONG_RUN


def test_twin_a_page_given_back_once_too_often_is_noticed():
    ops = Operations(pages=4, size=2, host=0, cached=False)
    seq = ops.add([1])
    ops.step([(seq, [1, 2, 3])])
    ops.fork(seq, 1)
    ops.allocator._drop(ops.allocator.table(seq)[:1])
    ops.allocator._drop(ops.allocator.table(seq)[:1])
    with pytest.raises(AssertionError):
        ops.check()


def test_twin_a_missing_copy_on_write_is_noticed():
    ops = Operations(pages=4, size=4, host=0, cached=False)
    seq = ops.add([1])
    ops.step([(seq, [1, 2])])
    ops.fork(seq, 1)
    fork = ops.sequences()[-1]
    ops.allocator._rows[seq].limit = ops.allocator._rows[fork].limit = 4  # as if the page were each one's own
    with pytest.raises(AssertionError):
        ops.check()
    ops.step([(seq, [5])])
    ops.step([(fork, [6])])
    with pytest.raises(AssertionError):
        ops.read_all()


# ---- single laws, by name ------------------------------------------------------------------------------------------


def filled(size=4, pages=8, tokens=6, **more):
    allocator = PageAllocator(num_pages=pages, page_size=size, **more)
    seq = allocator.add()
    allocator.step([(seq, tokens)])
    return allocator, seq


def test_the_last_of_the_readers_writes_without_a_copy():
    allocator, a = filled()
    b, c = allocator.fork(a, 2)
    assert len(allocator.step([(a, 1), (b, 1), (c, 1)]).copies) == 2
    assert len({allocator.table(seq)[-1] for seq in (a, b, c)}) == 3
    assert {allocator.table(seq)[0] for seq in (a, b, c)} == {1}


def test_a_full_last_page_is_shared_and_never_copied():
    allocator, a = filled(tokens=8)
    [b] = allocator.fork(a, 1)
    assert allocator.step([(a, 1), (b, 1)]).copies == []


def test_a_step_that_cannot_be_met_says_what_it_needed_and_changes_nothing():
    allocator, a = filled(size=4, pages=5, tokens=6)
    [b] = allocator.fork(a, 1)
    before = allocator.table(a), allocator.table(b), allocator.free_pages
    with pytest.raises(PoolExhausted, match="4 pages needed, 2 free") as told:
        allocator.step([(a, 1), (b, 11)])
    assert (told.value.needed, told.value.free) == (4, 2)
    assert (allocator.table(a), allocator.table(b), allocator.free_pages) == before
    allocator.check()


def test_page_zero_is_never_given_out():
    allocator, _ = filled(size=1, pages=8, tokens=7)
    assert allocator.free_pages == 0
    assert all(0 not in allocator.table(seq) for seq in range(1))


def test_releasing_a_window_keeps_what_the_next_token_sees():
    allocator, a = filled(size=2, pages=8, tokens=9)  # the next token, 9, sees 6 to 9 through a window of 4
    assert allocator.release_window(a, 4) == 3
    assert allocator.table(a)[:4] == [0, 0, 0, allocator.table(a)[3]]
    assert allocator.table(a)[3] != 0
    assert allocator.release_window(a, 4) == 0


def test_swapping_frees_the_pages_and_brings_the_sequence_back():
    allocator, a = filled(host_pages=2)
    assert allocator.swap_out(a) == [(1, 0), (2, 1)]
    assert allocator.stats().swapped == 1
    assert allocator.free_pages == 7
    assert [host for host, _ in allocator.swap_in(a)] == [0, 1]
    assert allocator.length(a) == 6
    allocator.check()


def test_stats_count_pages_by_what_they_are():
    allocator, a = filled(size=4, pages=9, tokens=6)
    [b] = allocator.fork(a, 1)
    allocator.step([(b, 1)])
    stats = allocator.stats()
    assert (stats.pages, stats.free, stats.used, stats.shared, stats.tokens) == (8, 5, 3, 1, 13)
    assert stats.waste == pytest.approx(1 - (4 + 2 + 3) / 12)


def test_a_hit_is_counted_and_idle_pages_go_least_recently_used_first():
    allocator = PageAllocator(num_pages=7, page_size=2)
    cache = PrefixCache(allocator)
    prompts = [[1, 1, 2, 2, 9], [1, 1, 3, 3, 9], [4, 4, 9]]
    for prompt in prompts:
        seq, length = cache.add(prompt)
        allocator.step([(seq, len(prompt) - length)])
        cache.insert(seq, prompt)
        allocator.free(seq)
    assert [cache.peek(prompt) for prompt in prompts] == [4, 4, 2]
    assert (cache.metrics.tokens, cache.metrics.hit_tokens, cache.metrics.lookups) == (13, 2, 3)
    whole = allocator.add(6)  # three pages: two are free, and of the kept [2, 2] is the oldest that none comes after
    assert [cache.peek(prompt) for prompt in prompts] == [2, 4, 2]
    allocator.step([(whole, 2)])
    assert [cache.peek(prompt) for prompt in prompts] == [2, 2, 2]
    assert cache.metrics.evicted_pages == 2
    cache.check()


def test_a_step_that_fails_evicts_nothing():
    allocator = PageAllocator(num_pages=5, page_size=2)
    cache = PrefixCache(allocator)
    seq, _ = cache.add([1, 2, 3])
    allocator.step([(seq, 3)])
    cache.insert(seq, [1, 2, 3])
    allocator.free(seq)
    other = allocator.add()
    with pytest.raises(PoolExhausted):
        allocator.step([(other, 10)])
    assert cache.peek([1, 2, 3]) == 2
    cache.check()
    allocator.step([(other, 8)])  # and one that can be met takes it
    assert cache.peek([1, 2, 3]) == 0


def test_pages_that_a_cache_keeps_are_idle_once_no_sequence_reads_them_and_free_once_given_up():
    allocator, idle = PageAllocator(num_pages=8, page_size=4), []
    allocator.attach_cache(on_idle=idle.extend, reclaim=lambda short: False)
    seq = allocator.add(12)
    pages = allocator.table(seq)
    allocator.keep(pages)
    assert [page for page, kept in enumerate(allocator.kept) if kept] == pages
    assert allocator.idle_tail(pages) == 0
    allocator.trim(seq, 4)
    assert (sorted(idle), allocator.idle_tail(pages)) == (pages[1:], 2)
    assert [allocator.is_idle(page) for page in pages] == [False, True, True]
    allocator.evict(pages[1:])
    assert (allocator.free_pages, list(allocator.sequences)) == (6, [seq])
    other = allocator.adopt(pages[:1], 3)
    assert (allocator.table(other), allocator.length(other)) == (pages[:1], 3)
    allocator.check()
    with pytest.raises(TypeError):
        allocator.kept[0] = 1
    with pytest.raises(TypeError):
        allocator.sequences[seq] = None


def test_one_tenant_never_finds_what_another_kept():
    allocator = PageAllocator(num_pages=8, page_size=2)
    cache = PrefixCache(allocator)
    seq, _ = cache.add([1, 2, 3], salt="a")
    allocator.step([(seq, 3)])
    cache.insert(seq, [1, 2, 3], salt="a")
    assert (cache.peek([1, 2, 3], salt="a"), cache.peek([1, 2, 3], salt="b"), cache.peek([1, 2, 3])) == (2, 0, 0)
    with pytest.raises(PageError, match="another salt"):
        cache.insert(seq, [1, 2, 3], salt="b")


def test_pages_behind_a_window_can_be_found_after_their_sequence_released_them():
    allocator = PageAllocator(num_pages=12, page_size=2)
    cache = PrefixCache(allocator)
    prompt = list(range(9))
    seq, _ = cache.add(prompt)
    allocator.step([(seq, 9)])
    cache.insert(seq, prompt)
    allocator.release_window(seq, 2)
    assert cache.add(prompt).length == 8
    cache.check()


def test_pages_that_nothing_parts_are_kept_as_one():
    allocator = PageAllocator(num_pages=64, page_size=2)
    cache = PrefixCache(allocator)
    long = list(range(41))
    for prompt, runs in ((long[:9], 1), (long, 1), ([*long[:20], 7, 7, 7], 3), ([8, *long], 4)):
        seq, length = cache.add(prompt)
        allocator.step([(seq, len(prompt) - length)])
        cache.insert(seq, prompt)
        assert len(cache._tails) == runs
        cache.check()
    assert cache.peek(long) == 40
    assert cache.peek(long[:30]) == 29  # the last token is left to compute: fourteen pages, and half of one


def asked_often(cache, prompt, salt=None):
    seq, length = cache.add(prompt, salt=salt)
    cache.allocator.step([(seq, len(prompt) - length)])
    cache.insert(seq, prompt, salt=salt)
    cache.allocator.free(seq)


def test_a_cache_that_never_gives_up_a_page_does_not_grow():
    cache = PrefixCache(PageAllocator(num_pages=64, page_size=2))
    for _ in range(500):
        asked_often(cache, [1, 2, 3, 4, 5])
    assert len(cache._idle) < 100
    cache.check()


def test_a_salt_whose_pages_are_gone_is_forgotten():
    cache = PrefixCache(PageAllocator(num_pages=8, page_size=2))
    for tenant in range(50):
        asked_often(cache, [1, 2, 3], salt=tenant)
    assert len(cache._roots) == len(cache) <= 7
    asked_often(cache, [1], salt="nothing to keep")
    assert "nothing to keep" not in cache._roots
    cache.clear()
    assert cache._roots == {}
    cache.check()


def test_a_partial_hit_shares_the_page_and_gets_a_copy_when_it_writes():
    allocator = PageAllocator(num_pages=8, page_size=4)
    cache = PrefixCache(allocator)
    seq, _ = cache.add([1, 2, 3, 4, 5])
    allocator.step([(seq, 5)])
    cache.insert(seq, [1, 2, 3, 4, 5])
    hit = cache.add([1, 2, 7, 8])
    assert hit.length == 2
    assert allocator.table(hit.seq) == allocator.table(seq)[:1]
    [(source, target)] = allocator.step([(hit.seq, 2)]).copies
    assert source == allocator.table(seq)[0]
    assert allocator.table(hit.seq) == [target]
    cache.check()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda a, s: a.free(99), "sequence 99 is unknown"),
        (lambda a, s: (a.free(a.add()), a.free(s + 1)), "sequence 1 was freed"),
        (lambda a, s: a.step([(s, 1), (99, 1)]), "sequence 99 is unknown"),
        (lambda a, s: a.step([(s, 1), (s, -1)]), "new_tokens must be a whole number >= 0, got -1"),
        (lambda a, s: a.step([(s, 1), (s, 1.5)]), "new_tokens must be a whole number >= 0, got 1.5"),
        (lambda a, s: a.trim(s, 7), "length must be at most the 6 tokens"),
        (lambda a, s: a.trim(s, -1), "length must be a whole number >= 0"),
        (lambda a, s: a.fork(s, 0), "n must be a whole number >= 1"),
        (lambda a, s: a.release_window(s, 0), "window must be a whole number >= 1"),
        (lambda a, s: a.swap_in(s), "not swapped out"),
        (lambda a, s: a.swap_out(s), "2 host pages needed, 1 free"),
        (lambda a, s: a.add(1000), "250 pages needed, 5 free"),
        (lambda a, s: PrefixCache(a).insert(s, [1] * 7), "at most the 6 that sequence 0 holds"),
        (lambda a, s: (PrefixCache(a), PrefixCache(a)), "already has a prefix cache"),
        (lambda a, s: PrefixCache(a).add([1, "x"]), r"tokens\[1\] must be a whole number"),
        (lambda a, s: PageAllocator(num_pages=1, page_size=4), "num_pages must be a whole number >= 2"),
        (lambda a, s: PageAllocator(num_pages=4, page_size=0), "page_size must be a whole number >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(operation, message):
    allocator, seq = filled(host_pages=1)
    with pytest.raises(PageError, match=message):
        operation(allocator, seq)
    assert allocator.length(seq) == 6
    allocator.check()
