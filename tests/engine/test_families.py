"""Token for token what `model.generate` says: every family, whatever comes, goes or must wait meanwhile."""

import random

import pytest

from attnspan import Engine, SamplingParams
from tests.engine.models import FAMILIES, greedy, prompts, tiny
from tests.turns import in_turn

families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_greedy_tokens_are_those_of_model_generate(family, prefix_cache):
    model = tiny(family)
    engine = Engine(model, pages=64, page_size=4, max_tokens=32, max_sequences=8, prefix_cache=prefix_cache)
    asked = prompts([5, 17, 1, 40])
    asked.append([*asked[1][:9], 3, 4])  # begins like another
    for _ in range(2):  # the second time from what was kept
        answers = engine.generate(asked, SamplingParams(max_new_tokens=12))
        assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 12) for prompt in asked]
        assert {answer.finish_reason for answer in answers} == {"length"}
        engine.check()
    assert (engine.counts.cached > 0) is prefix_cache


@pytest.mark.parametrize(("family", "host_pages"), in_turn(FAMILIES, [0, 30]))
def test_tokens_stay_the_same_when_requests_come_and_go_and_pages_run_out(family, host_pages):
    model, draw = tiny(family), random.Random(family)
    pages = 8 if family == "Mistral" else 13  # a window needs few
    engine = Engine(model, pages=pages, page_size=3, max_tokens=10, max_sequences=5, host_pages=host_pages)
    asked = prompts([3, 1, 2, 1, 20, 14, 11, 2], seed=1)
    new = 16
    left, requests, cancelled = list(asked), [], []
    while left or engine.unfinished:
        while left and (len(requests) < 4 or draw.random() < 0.3):
            requests.append(engine.add(left.pop(0), SamplingParams(max_new_tokens=new)))
        if engine.unfinished and len(cancelled) < 2 and draw.random() < 0.1:
            cancelled.append(draw.choice(engine.unfinished))
            engine.cancel(cancelled[-1])
        engine.step()
        engine.check()
    for request in requests:
        expected = greedy(model, request.prompt, new)
        assert request.token_ids == (expected[: len(request.token_ids)] if request in cancelled else expected)
    assert len(cancelled) == 2
    counts = engine.counts
    assert counts.swapped_out if host_pages else counts.recomputed, "the pool was to be too small"


@pytest.mark.parametrize("family", ["Mistral"])
def test_a_windowed_model_continues_prompts_longer_than_the_pool(family):
    model = tiny(family)
    engine = Engine(model, pages=10, page_size=4, max_tokens=12, max_sequences=4)
    asked = prompts([100, 61], seed=2)
    answers = engine.generate(asked, SamplingParams(max_new_tokens=30))
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 30) for prompt in asked]


def test_layers_that_see_everything_and_layers_that_see_a_window_are_in_pools_of_their_own():
    engine = Engine(tiny("Gemma3"), pages=64, page_size=4, max_tokens=16, max_sequences=4)
    full, windowed = engine._scheduler.kv_cache.groups
    request = engine.add(prompts([60])[0], SamplingParams(max_new_tokens=20))
    for _ in range(10):
        engine.step()
    assert full.allocator.stats().used == 17
    table = windowed.allocator.table(0)
    assert table[: len(table) - 4] == [0] * (len(table) - 4)
    engine.cancel(request)


def test_the_model_is_left_as_it_was():
    model = tiny("Llama")
    before = model.config._attn_implementation
    engine = Engine(model, pages=64)
    engine.generate(prompts([5]), SamplingParams(max_new_tokens=2))
    assert model.config._attn_implementation == before
    stream = engine.stream(prompts([5]), SamplingParams(max_new_tokens=3))
    next(stream)
    assert model.config._attn_implementation == before
    stream.close()
    assert engine.unfinished == []
