"""Numbers of an engine add up: at any moment, in any thread, and after a step that was broken off."""

from threading import Thread

import pytest

from attnspan import Engine, EngineError, SamplingParams
from attnspan.engine import Histogram
from attnspan.testing import loopback
from tests.engine.models import prompts, tiny


def engine(**options):
    return Engine(tiny("Llama"), **({"pages": 64, "page_size": 4, "max_sequences": 4} | options))


def check(stats):
    assert stats.pages_used + stats.pages_free + stats.pages_cached == stats.pages
    assert min(stats.pages_used, stats.pages_free, stats.pages_cached) >= 0
    assert sum(stats.finished.values()) <= stats.requests


def test_everything_is_counted():
    one, asked = engine(), prompts([9, 9, 4, 12, 5, 7])
    assert one.stats().requests == one.stats().steps == one.stats().pages_used == 0
    requests = [one.add(prompt, SamplingParams(max_new_tokens=5)) for prompt in asked]
    assert (one.stats().waiting, one.stats().running) == (6, 0)
    one.step()
    half = one.stats()
    check(half)
    assert (half.waiting, half.running, half.generated_tokens) == (2, 4, 4)
    assert half.time_to_first_token.count == 4
    one.cancel(requests[0])
    while one.unfinished:
        one.step()
        check(one.stats())
    done = one.stats()
    assert done.finished == {"length": 5, "cancelled": 1}
    assert done.generated_tokens == 1 + 5 * 5
    assert done.prompt_tokens == sum(map(len, asked))
    assert (done.waiting, done.running, done.pages_used) == (0, 0, 0)
    assert done.pages_cached > 0
    assert (done.steps, done.computed_tokens, done.prefix_tokens) == (
        one.counts.steps, one.counts.tokens, one.counts.cached,
    )  # fmt: skip
    assert (done.time_to_first_token.count, done.time_per_token.count) == (6, 5)
    assert 0 < done.time_per_token.mean < done.time_to_first_token.total
    assert str(done).splitlines()[1] == f"64 pages: 0 used, {done.pages_free} free, {done.pages_cached} cached"
    one.add(asked[3], SamplingParams(max_new_tokens=1))
    one.step()
    assert one.stats().prefix_tokens > done.prefix_tokens
    assert half.requests == 6  # what was told stays as it was
    assert not one._meter.added
    assert not one._meter.began


def test_states_of_recurrent_layers_are_no_pages():
    one = Engine(tiny("Qwen3Next"), pages=64, page_size=4, states=9, state_every=2)
    assert (one.stats().pages, one.stats().states, one.stats().states_free) == (64, 9, 9)
    one.add(list(range(20)), SamplingParams(max_new_tokens=4))
    one.step()
    assert one.stats().states_used >= 1
    while one.unfinished:
        one.step()
    done = one.stats()
    assert (done.pages_used, done.states_used, done.states_free + done.states_cached) == (0, 0, 9)
    assert done.states_cached > 0
    assert str(done).splitlines()[2] == f"9 states: 0 used, {done.states_free} free, {done.states_cached} cached"


def test_preemptions_are_counted():
    one = engine(pages=11, page_size=3, max_tokens=8, prefix_cache=False)
    one.generate(prompts([9, 3, 11, 6]), SamplingParams(max_new_tokens=16))
    assert one.stats().preempted == one.counts.preempted > 0


def test_a_thread_that_looks_on_sees_only_what_adds_up():
    one, seen, over = engine(), [], []

    def look():
        while not over:
            seen.append(one.stats())

    watcher = Thread(target=look)
    watcher.start()
    one.generate(prompts([9, 3, 11, 6]), SamplingParams(max_new_tokens=12))
    over.append(True)
    watcher.join()
    for stats in seen:
        check(stats)
        assert stats.generated_tokens <= 48
        assert stats.steps == 0 or stats.time_to_first_token.count > 0
    tokens = [stats.generated_tokens for stats in seen]
    assert tokens == sorted(tokens)
    assert one.stats().generated_tokens == 48


def test_a_report_that_is_broken_off_and_completed_counts_once(monkeypatch):
    one = engine()
    request = one.add(prompts([9])[0], SamplingParams(max_new_tokens=3))
    apply, broken = one._table.apply, iter([True, False] * 9)

    def applied(commit):
        apply(commit)
        if next(broken):
            raise KeyboardInterrupt

    monkeypatch.setattr(one._table, "apply", applied)
    told = []
    for _ in range(9):
        try:
            told += one.step()
        except KeyboardInterrupt:
            assert one.stats().generated_tokens == len(request.token_ids)
    assert one.stats().generated_tokens == len(told) == 3
    assert one.stats().finished == {"length": 1}


def test_a_request_that_was_not_added_is_not_counted(monkeypatch):
    one = engine()
    add = one._meter.add
    monkeypatch.setattr(one._meter, "add", lambda request: add(request) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.add([5])
    assert one.stats().requests == one.stats().prompt_tokens == 0


def test_a_cancellation_that_is_broken_off_and_completed_counts_once(monkeypatch):
    one = engine()
    request = one.add([5])
    discard, broken = one._discard, iter([True, False])
    monkeypatch.setattr(one, "_discard", lambda request: discard(request) or (next(broken) and 1 / 0))
    with pytest.raises(ZeroDivisionError):
        one.cancel(request)
    assert one.stats().finished == {"cancelled": 1}


def test_logits_that_are_not_numbers_count_as_errors_and_give_no_token():
    one = engine()
    one.generate([[5]], SamplingParams(allowed_tokens=[7], suppress_tokens=[7]))
    assert one.stats().finished == {"error": 1}
    assert one.stats().generated_tokens == one.stats().time_to_first_token.count == 0


def test_over_ranks_any_thread_may_look_and_owns_nothing():
    def rank(world):
        one = engine(mesh=world)
        watcher = Thread(target=one.stats)
        watcher.start()
        watcher.join()
        one.generate(prompts([9]), SamplingParams(max_new_tokens=4))
        return one.stats().generated_tokens

    assert loopback(2).run(rank) == [4, 4]


def test_ranks_that_give_a_request_different_priorities_refuse_it():
    def rank(world):
        one = engine(mesh=world)
        with pytest.raises(EngineError, match="requests differ between rank 0 and ranks"):
            one.add([5, 6], priority=world.rank)
        one.add([5, 6], priority=-3)
        return one.stats().requests

    assert loopback(2).run(rank) == [1, 1]


def test_a_priority_is_a_whole_number():
    for wrong in (True, 1.0, "high", None):
        with pytest.raises(EngineError, match="priority must be a whole number >= -2147483648, got"):
            engine().add([5], priority=wrong)


def test_streams_and_generate_have_priorities_too():
    one, params = engine(max_sequences=1, max_tokens=16), SamplingParams(max_new_tokens=4)
    low = one.add([5, 6], params, priority=-1)
    list(one.stream([7, 8], params, priority=2))
    assert low.token_ids == []
    one.generate([[7, 8]], params, priority=-2)
    assert low.finished


@pytest.mark.parametrize(("time", "place"), [(0.0, 0), (0.001, 0), (0.0011, 1), (60.0, 14), (61.0, 15)])
def test_a_time_is_in_the_bucket_that_it_does_not_exceed(time, place):
    assert Histogram().plus([time]).counts[place] == 1
