"""The scheduler by itself: nothing is lost, nobody is overtaken, and pages hold what they should, after every step."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnspan.engine.kv_cache_manager import KVCacheGroup, KVCacheManager
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Limits, Scheduler
from attnspan.errors import EngineError
from attnspan.paged import PageAllocator, PrefixCache


class Shadow:
    """Pages that hold tokens instead of keys: what a model would find there."""

    def __init__(self, num_pages, page_size, host_pages, window, prefixes):
        self.allocator = PageAllocator(num_pages=num_pages, page_size=page_size, host_pages=host_pages)
        self.pages, self.host = defaultdict(dict), {}
        self.group = KVCacheGroup(self.allocator, self, window, PrefixCache(self.allocator) if prefixes else None)

    def swap_out(self, seq):
        for page, there in self.allocator.swap_out(seq):
            self.host[there] = dict(self.pages[page])

    def swap_in(self, seq):
        for there, page in self.allocator.swap_in(seq):
            self.pages[page] = dict(self.host[there])

    def feed(self, batch):
        """Write the new tokens; what is found before them must be the sample's own, as far as a window reaches."""
        named = [(chunk.sample.seq, chunk.new) for chunk in batch]
        needed = self.allocator.needs(named)
        assert self.allocator.free_pages >= needed, "the scheduler made room"
        given = self.allocator.step(named)
        assert needed == len(given.pages) + len(given.copies)
        for source, target in given.copies:
            self.pages[target] = dict(self.pages[source])
        size = self.allocator.page_size
        for chunk in batch:
            sample, tokens = chunk.sample, chunk.sample.tokens + list(chunk.draft)
            table, after = self.allocator.table(sample.seq), sample.computed + chunk.new
            assert self.allocator.length(sample.seq) == after
            for position in range(sample.computed, after):
                assert table[position // size], "a page that is written to is no null page"
                self.pages[table[position // size]][position % size] = tokens[position]
            seen = 0 if self.group.window is None else max(0, sample.computed - self.group.window + 1)
            found = [self.pages[table[p // size]].get(p % size) for p in range(seen, after)]
            assert found == tokens[seen:after]


def next_token(sample):
    """The model: any function of what a sample says."""
    return (sum(sample.tokens) * 7 + len(sample.tokens) + sample.number) % 5


class Guesses:
    """In the place of a lookup: drafts of any length, of which any number of tokens are right."""

    def __init__(self, number, draw):
        self.number, self.draw = number, draw

    def copy(self):
        return Guesses(self.number, self.draw)  # which guesses wrong for another number

    def draft(self, tokens, most):
        right, count = self.draw.randrange(4), min(self.draw.randrange(4), most)
        guess = Sample(0, list(tokens), 0, self.number)
        for place in range(count):
            guess.tokens.append(next_token(guess) + (place >= right))
        return tuple(guess.tokens[len(tokens) :])


def name(sample):
    return sample.request_number, sample.number


class Driver:
    """An engine without a model: feeds, samples, forks, ends."""

    def __init__(self, shadows, limits, guesses=None):
        self.shadows, self.guesses = shadows, guesses
        self.scheduler = Scheduler(KVCacheManager([shadow.group for shadow in shadows]), limits)
        self.alive, self.ended, self.arrivals = {}, {}, 0

    def add(self, prompt, new, n=1, salt=None, priority=0):
        sample = Sample(self.arrivals, list(prompt), len(prompt) + new, forks=n - 1, salt=salt, priority=priority)
        if self.guesses is not None:
            sample.lookup = Guesses(0, self.guesses)
        self.scheduler.add(sample)
        self.alive[name(sample)] = sample
        self.arrivals += 1
        return sample

    def cancel(self, arrival):
        for order in [order for order in self.alive if order[0] == arrival]:
            self.scheduler.remove(self.alive.pop(order))

    def step(self):
        scheduler, limits = self.scheduler, self.scheduler.limits
        batch = scheduler.schedule()
        assert batch or not (scheduler.running or scheduler.queued)
        assert len(batch) <= limits.max_sequences
        whole = (
            len(batch) == 1
            and limits.context_parallel_from is not None
            and batch[0].new >= limits.context_parallel_from
        )
        assert whole or sum(chunk.new for chunk in batch) <= limits.max_tokens
        assert all(chunk.new >= 1 for chunk in batch)
        running, queued = ([sample.order for sample in side] for side in (scheduler.running, scheduler.queued))
        assert running == sorted(running)
        assert queued == sorted(queued)
        assert sorted(running + queued) == sorted(sample.order for sample in self.alive.values()), "all run or queue"
        for priority in {order[0] for order in queued}:
            most = max((order for order in running if order[0] == priority), default=(priority,))
            assert most < min(order for order in queued if order[0] == priority), "no younger one of a kind runs first"
        for shadow in self.shadows:
            shadow.feed(batch)
        splits = [(chunk.sample, chunk.sample.split()) for chunk in batch if chunk.sample.forks and chunk.gets_token]
        done = [each for sample, forks in splits for each in (sample, *forks)]
        done += [chunk.sample for chunk in batch if chunk.gets_token and not chunk.sample.forks]
        for each in done:
            each.tokens.append(next_token(each))
        for chunk in batch:
            for proposed in chunk.draft:
                if chunk.sample.tokens[-1] != proposed or len(chunk.sample.tokens) == chunk.sample.max_length:
                    break
                chunk.sample.tokens.append(next_token(chunk.sample))
        for sample, _ in splits:
            sample.forks = 0
        scheduler.mark_computed(batch)
        for sample, forks in splits:
            scheduler.fork(sample, forks)
        for each in done:
            self.alive[name(each)] = each
            if len(each.tokens) == each.max_length:
                self.ended[name(each)] = each.tokens
                del self.alive[name(each)]
                scheduler.remove(each)
        scheduler.kv_cache.check()
        return batch


def continued(prompt, new, number):
    sample = Sample(0, list(prompt), 0, number)
    for _ in range(new):
        sample.tokens.append(next_token(sample))
    return sample.tokens


def shadows(draw_pages, page_size, host_pages, windows, prefixes):
    return [Shadow(draw_pages + 1, page_size, host_pages, window, prefixes) for window in windows]


rooms = st.builds(
    shadows,
    st.integers(6, 14),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([0, 5, 40]),
    st.sampled_from([(None,), (4,), (None, 5), (None, 1)]),
    st.booleans(),
)
limits = st.builds(
    Limits, st.integers(2, 6), st.integers(6, 20), st.sampled_from([None, None, 7])
)  # whole: rarely asked for
requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # at which step it arrives
        st.lists(st.integers(0, 1), min_size=1, max_size=12),  # two tokens only: prompts begin alike
        st.integers(1, 6),
        st.integers(1, 2),
        st.integers(0, 9),  # 0: it is cancelled three steps later
        st.sampled_from(["a", "b"]),
        st.sampled_from([0, 0, 0, 1, -3]),
    ),
    min_size=1,
    max_size=10,
)


@given(rooms, limits, requests, st.none() | st.integers(0, 99).map(random.Random))
def test_every_request_ends_as_if_alone_and_pages_hold_what_they_should(stores, limit, wanted, guesses):
    driver, expected, step = Driver(stores, limit, guesses), {}, 0
    cancels = defaultdict(list)
    left = sorted(wanted, key=lambda request: request[0])
    while left or driver.scheduler.running or driver.scheduler.queued:
        while left and left[0][0] <= step:
            _, prompt, new, n, mood, salt, priority = left.pop(0)
            arrival = driver.arrivals
            try:
                driver.add(prompt, new, n, salt, priority)
            except EngineError:
                assert driver.scheduler.kv_cache.refusal(len(prompt) + new, driver.scheduler.max_chunk) is not None
                continue
            if mood == 0:
                cancels[step + 3].append(arrival)
            else:
                expected |= {(arrival, number): continued(prompt, new, number) for number in range(n)}
        for arrival in cancels.pop(step, ()):
            driver.cancel(arrival)
        driver.step()
        step += 1
        assert step < 2000, "everyone's turn comes"
    ended = {order: tokens for order, tokens in driver.ended.items() if order in expected}
    assert ended == expected
    for shadow in stores:
        stats = shadow.allocator.stats()
        assert (stats.sequences, stats.used, stats.host_free) == (0, 0, stats.host_pages)


def test_a_higher_priority_is_admitted_first_and_preempted_last():
    driver = alone(num_pages=6, max_sequences=2)
    low, high = driver.add([1] * 4, new=12, priority=-1), driver.add([1] * 4, new=12)
    driver.step()
    assert driver.scheduler.running == [high, low]
    while not driver.scheduler.queued:
        driver.step()
    assert driver.scheduler.queued == [low]  # though it is the older
    assert driver.scheduler.counts.preempted == 1
    urgent, later = (driver.add([0] * 4, new=2, priority=5) for _ in range(2))
    assert driver.scheduler.queued == [urgent, later, low]
    run(driver)
    ended = [*driver.ended]
    assert ended.index(name(urgent)) < ended.index(name(later)) < ended.index(name(low))


def alone(num_pages, page_size=4, host_pages=0, window=None, prefixes=False, **limit):
    shadow = Shadow(num_pages + 1, page_size, host_pages, window, prefixes)
    return Driver([shadow], Limits(**({"max_sequences": 4, "max_tokens": 16} | limit)))


def run(driver):
    while driver.scheduler.running or driver.scheduler.queued:
        driver.step()
    return driver.scheduler.counts


@pytest.mark.parametrize(("host_pages", "swapped", "recomputed"), [(0, 0, 1), (8, 1, 0)])
def test_a_pool_that_runs_out_swaps_if_it_can_and_else_computes_again(host_pages, swapped, recomputed):
    driver = alone(num_pages=6, host_pages=host_pages)
    for _ in range(2):
        driver.add([1] * 4, new=12)
    counts = run(driver)
    assert (counts.swapped_out, counts.swapped_in, counts.recomputed) == (swapped, swapped, recomputed)
    assert driver.ended == {(number, 0): continued([1] * 4, 12, 0) for number in range(2)}


def test_what_was_given_up_is_found_again_where_the_prefix_cache_kept_it():
    without, with_ = (alone(num_pages=8, prefixes=prefixes) for prefixes in (False, True))
    for driver in (without, with_):
        for token in range(2):
            driver.add([token] * 4, new=16)
        run(driver)
    assert without.ended == with_.ended
    assert with_.scheduler.counts.tokens < without.scheduler.counts.tokens


def test_what_was_computed_is_shown_to_whoever_begins_alike_and_else_once_at_the_end(monkeypatch):
    driver = alone(num_pages=20, prefixes=True)
    shown, cache_prefix = [], KVCacheManager.cache_prefix

    def noted(manager, *given):
        shown.append(len(given[1]))
        cache_prefix(manager, *given)

    monkeypatch.setattr(KVCacheManager, "cache_prefix", noted)
    driver.add([1] * 9, new=8)
    driver.step()
    driver.add([1, 1, 1, 0] * 2, new=8)  # begins otherwise, though only just
    run(driver)
    assert shown == [16, 15]
    first = driver.add([0] * 9, new=8)
    driver.step()
    second = driver.add([0] * 9, new=1)
    driver.step()
    assert shown == [16, 15, 9, 9]  # the first one's, for the second to find, and the second's own when it ends
    assert (first.computed, driver.scheduler.counts.cached) == (10, 8)
    assert name(second) in driver.ended


def test_decoding_goes_on_while_a_long_prompt_comes_in_by_chunks():
    driver = alone(num_pages=40, max_tokens=8)
    driver.add([1, 0], new=20)
    driver.step()
    driver.add([0] * 30, new=1)
    counts = [{chunk.sample.request_number: chunk.new for chunk in driver.step()} for _ in range(5)]
    assert counts == [{0: 1, 1: 7}] * 4 + [{0: 1, 1: 2}]


def test_a_windowed_pool_serves_a_prompt_longer_than_itself():
    driver = alone(num_pages=6, window=5)
    driver.add([1, 0, 1] * 30, new=30)
    run(driver)
    assert driver.ended == {(0, 0): continued([1, 0, 1] * 30, 30, 0)}


def test_drafts_save_steps_and_take_only_what_a_step_has_left():
    class Right(Guesses):
        def draft(self, tokens, most):
            return tuple(continued(tokens, min(most, 5), 0)[len(tokens) :])

    plain, drafts, short = (alone(num_pages=num_pages, max_sequences=2) for num_pages in (40, 40, 6))
    for driver in (plain, drafts, short):
        for sample in [driver.add([1] * 4, new=12) for _ in range(2)]:
            sample.lookup = None if driver is plain else Right(0, None)
        run(driver)
    assert plain.ended == drafts.ended == short.ended
    steps = [driver.scheduler.counts.steps for driver in (plain, drafts)]
    assert steps == [12, 3]  # each of two samples decodes up to 6 tokens in a step
    assert (drafts.scheduler.counts.drafted, drafts.scheduler.counts.accepted) == (20, 18)  # 2 beyond the end
    assert short.scheduler.counts.preempted == 1  # as without drafts: two samples of 16 tokens need 8 pages


def test_samples_of_one_prompt_compute_it_once():
    driver = alone(num_pages=20)
    driver.add([1] * 9, new=2, n=4)
    counts = run(driver)
    assert counts.tokens == 9 + 4
    assert driver.ended == {(0, number): continued([1] * 9, 2, number) for number in range(4)}


def test_a_sample_that_holds_on_to_a_page_it_must_copy_starts_over_alone():
    driver = alone(num_pages=3, prefixes=True)
    driver.add([1] * 8, new=2)
    run(driver)
    driver.add([1] * 7, new=5)  # begins on a part of a kept page, and needs all three
    run(driver)
    assert driver.ended[(1, 0)] == continued([1] * 7, 5, 0)


def test_what_can_never_run_is_refused_and_leaves_no_trace():
    driver = alone(num_pages=3)
    message = (
        "the request does not fit: 10 tokens of prompt and up to 3 more, 13 tokens need 4 pages of 4 tokens, and the "
        "pool has 3; shorten it, or give the engine more pages"
    )
    with pytest.raises(EngineError, match=message):
        driver.add([1] * 10, new=3)
    with pytest.raises(EngineError, match=r"n must be at most max_sequences=4, .* got 5"):
        driver.add([1], new=3, n=5)
    assert not [*driver.scheduler.running, *driver.scheduler.queued]
    with pytest.raises(EngineError, match=r"max_tokens must be at least max_sequences=8, .* got 4"):
        Limits(max_sequences=8, max_tokens=4)


def test_a_step_that_failed_can_be_planned_again():
    driver = alone(num_pages=6)
    driver.add([1] * 9, new=3)
    batch = driver.scheduler.schedule()
    driver.shadows[0].allocator.step([(chunk.sample.seq, chunk.new) for chunk in batch])
    driver.scheduler.rollback(batch)
    assert run(driver).tokens == 9 + 2
