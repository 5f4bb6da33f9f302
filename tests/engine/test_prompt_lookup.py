"""Prompt-lookup speculation: whatever is proposed, tokens are those of an engine that proposes nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnspan import Engine, SamplingParams
from attnspan.engine.prompt_lookup import SIZES, PromptLookup
from attnspan.errors import EngineError
from attnspan.testing import loopback
from tests.engine.disturbed import Faults, History, catalogue, interrupt, made, speaker
from tests.engine.models import FAMILIES, HYBRIDS, greedy, prompts, tiny, tokenizer
from tests.engine.test_disturbed import at_lines, faulty

TWO_POOLS = "Gemma3"


def engine(model, **options):
    sizes = {"pages": 64, "page_size": 4, "max_sequences": 8, "prompt_lookup_num_tokens": 4}
    return Engine(model, **(sizes | options))


@pytest.fixture
def guesses(monkeypatch):
    """Drafts that are right for as long as chance has it. Returns a function that says what is right."""
    texts, draw = [], random.Random(0)

    def draft(lookup, tokens, most):
        tokens = list(tokens)
        right = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
        guess = [token if draw.random() < 0.8 else draw.randrange(97) for token in right]
        return tuple([*guess, *draw.choices(range(97), k=5)][: max(0, min(most, draw.randrange(6)))])

    monkeypatch.setattr(PromptLookup, "draft", draft)
    return texts.extend


# ---- the lookup ------------------------------------------------------------------------------------------------------


def slowly(tokens, most):
    """What followed the latest occurrence of the last tokens, found by looking at every place."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for place in range(end, end + most):
                    text.append(text[place])
                return tuple(text[len(tokens) :])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 6))
def test_a_draft_is_what_followed_the_last_tokens_last_time(tokens, grows, most):
    lookup = PromptLookup(num_tokens=5)
    for length in range(1, len(tokens) + 1, grows):
        assert lookup.draft(tokens[:length], most) == slowly(tokens[:length], min(most, 5))
        assert lookup.copy().draft(tokens[:length]) == slowly(tokens[:length], 5)
    assert PromptLookup(5).draft(tokens) == slowly(tokens, 5)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_repeating_prompts_are_those_of_model_generate(family):
    model, asked = tiny(family), [prompt * 3 for prompt in prompts([9, 20, 5])]
    one = engine(model)
    answers = one.generate(asked, SamplingParams(max_new_tokens=40))
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 40) for prompt in asked]
    stats = one.stats()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert stats.generated_tokens == 3 * 40
    assert stats.computed_tokens == sum(map(len, asked)) + 3 * 39 + stats.drafted_tokens - stats.accepted_tokens
    one.check()
    [again] = one.generate(asked[:1], SamplingParams(max_new_tokens=40))  # on pages that held drafts
    assert again.token_ids == answers[0].token_ids
    assert one.counts.cached > stats.prefix_tokens


def test_a_text_that_repeats_takes_fewer_steps():
    model, [prompt] = tiny("Gemma2"), prompts([9])
    plain, ahead = engine(model, prompt_lookup_num_tokens=0), engine(model, prompt_lookup_num_tokens=8)
    answers = [each.generate([prompt * 3], SamplingParams(max_new_tokens=40))[0].token_ids for each in (plain, ahead)]
    assert answers[0] == answers[1] == greedy(model, prompt * 3, 40)
    assert (plain.counts.steps, plain.counts.drafted) == (40, 0)
    assert ahead.counts.steps < 15


@pytest.mark.parametrize(
    "options",
    [
        {"pages": 12, "page_size": 3, "max_sequences": 4, "max_tokens": 8, "host_pages": 14},
        {"pages": 12, "page_size": 3, "max_sequences": 4, "max_tokens": 8, "prefix_cache": False},
        {"pages": 200, "max_tokens": 20},
    ],
    ids=["swapped", "recomputed", "roomy"],
)
@pytest.mark.parametrize("family", ["Llama", TWO_POOLS])
def test_whatever_is_proposed_answers_are_the_same(family, options, guesses):
    """Greedy and drawn, with several samples, stop strings and penalties."""
    asked = catalogue(family)
    guesses(prompt + tokens for prompt, _, samples in asked for tokens, _, _ in samples)
    one = engine(speaker(family), tokenizer=tokenizer(), **options)
    order = random.Random(1).sample(range(len(asked)), len(asked))
    answers = one.generate([asked[place][0] for place in order], [asked[place][1] for place in order])
    for place, answer in zip(order, answers, strict=True):
        said = [(sample.token_ids, sample.text, sample.finish_reason) for sample in answer.continuations]
        assert said == asked[place][2]
    one.check()
    assert 20 < one.counts.accepted < one.counts.drafted - 10
    assert options.get("pages") != 12 or one.counts.preempted


def test_seeds_logprobs_and_likeliest_tokens_are_the_same(guesses):
    model, [prompt] = tiny("Llama"), prompts([9])
    params = SamplingParams(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=3, n=3, top_logprobs=2)
    [plain] = engine(model, prompt_lookup_num_tokens=0).generate([prompt], params)
    guesses(prompt + sample.token_ids for sample in plain.continuations)
    one = engine(model)
    [answer] = one.generate([prompt], params)
    assert one.counts.accepted > 20
    assert one.counts.steps < 30
    for sample, before in zip(answer.continuations, plain.continuations, strict=True):
        assert sample.token_ids == before.token_ids
        assert sample.logprobs == pytest.approx(before.logprobs, abs=1e-4)  # float32 logits of size 10
        assert [list(top) for top in sample.top_logprobs] == [list(top) for top in before.top_logprobs]


def test_a_sample_ends_where_it_would_have_whatever_was_accepted_beyond(monkeypatch):
    model, [prompt] = tiny("Llama"), prompts([9])
    plain = greedy(model, prompt, 20)
    monkeypatch.setattr(PromptLookup, "draft", lambda _, tokens, most: tuple(plain[len(tokens) - 9 :][:most]))
    for at in range(1, 12):
        first = plain.index(plain[at])
        one = engine(model, prompt_lookup_num_tokens=6)
        told = [*one.stream(prompt, SamplingParams(max_new_tokens=20, stop_token_ids=[plain[at]]))]
        assert [token.token_id for token in told] == plain[: first + 1]
        assert [token.finish_reason for token in told] == [None] * first + ["stop"]
        [short] = one.generate([prompt], SamplingParams(max_new_tokens=at))
        assert (short.token_ids, short.finish_reason) == (plain[:at], "length")
        one.check()


@pytest.mark.parametrize("at", range(4))
def test_logits_that_are_not_numbers_within_a_draft_end_the_sample_there(at, monkeypatch):
    model, [prompt] = tiny("Llama"), prompts([9])
    plain = greedy(model, prompt, 20)
    monkeypatch.setattr(PromptLookup, "draft", lambda _, tokens, most: tuple(plain[len(tokens) - 9 :][:most]))
    one = engine(model)
    request = one.add(prompt, SamplingParams(max_new_tokens=20))
    one.step()

    def broken(module, given, logits):
        logits[0, at] = float("nan")

    with model.lm_head.register_forward_hook(broken):
        told = one.step()
    assert [token.token_id for token in told] == [*plain[1 : 1 + at], None]
    assert (request.token_ids, request.finish_reason) == (plain[: 1 + at], "error")
    assert f"sample 0 of request 0 ended after {10 + at} tokens" in str(request.error)
    one.check()


def test_options_that_look_at_earlier_tokens_are_served_without_drafts():
    model, prompt = tiny("Gemma2"), prompts([9])[0] * 3
    ruled = {"repetition_penalty": 1.1}, {"min_new_tokens": 3, "stop_token_ids": [5]}, {"logit_bias": {3: 1.0}}
    for options in ruled:
        params = SamplingParams(max_new_tokens=20, **options)
        plain, ahead = (engine(model, prompt_lookup_num_tokens=count) for count in (0, 8))
        assert plain.generate([prompt], params)[0].token_ids == ahead.generate([prompt], params)[0].token_ids
        assert ahead.counts.drafted == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(EngineError, match="prompt_lookup_num_tokens must be a whole number >= 0, got -1"):
        engine(tiny("Llama"), prompt_lookup_num_tokens=-1)
    message = "prompt_lookup_num_tokens=4: the model has recurrent layers, whose states cannot be trimmed"
    for family in HYBRIDS:
        with pytest.raises(EngineError, match=message):
            engine(tiny(family))


# ---- over ranks, and disturbed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", TWO_POOLS])
def test_ranks_propose_and_accept_the_same(family, monkeypatch):
    model, asked = tiny(family), prompts([40, 5, 23])
    expected = [greedy(model, prompt, 20) for prompt in asked]
    monkeypatch.setattr(PromptLookup, "draft", alike(asked, expected))
    steps = []

    def rank(world):
        one = engine(model, mesh=world, max_tokens=16, context_parallel_from=20)
        found = [answer.token_ids for answer in one.generate(asked, SamplingParams(max_new_tokens=20))]
        one.check()
        steps.append(one.counts.steps)
        return found

    assert loopback(3).run(rank) == [expected] * 3
    assert max(steps) < 20


def alike(asked, expected):
    """Drafts that are right for some tokens, by the length of the text."""
    texts = [prompt + said for prompt, said in zip(asked, expected, strict=True)]

    def draft(lookup, tokens, most):
        right = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == list(tokens)), [])
        return tuple([*right[: len(tokens) % 4], 1, 2][: max(0, min(most, 4))])

    return draft


@pytest.mark.parametrize("family", ["Llama", TWO_POOLS])
def test_faults_and_interrupts_change_no_answer(family, guesses):
    guesses(prompt + tokens for prompt, _, samples in catalogue(family) for tokens, _, _ in samples)
    history = faulty(family, Faults(seed=6), seed=7, count=12, patience=6, prompt_lookup_num_tokens=4)
    assert history.raised >= 8
    assert history.engine.counts.accepted
    history = at_lines(family, interrupt, seed=8, count=30, prompt_lookup_num_tokens=4)
    assert history.raised >= 25
    assert history.finished > 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", TWO_POOLS])
def test_faults_and_interrupts_change_no_answer_ever(family, guesses):
    guesses(prompt + tokens for prompt, _, samples in catalogue(family) for tokens, _, _ in samples)
    faults = Faults(seed=9)
    for seed in range(20):
        options = {"host_pages": [0, 14][seed % 2], "prefix_cache": seed % 3 != 2, "prompt_lookup_num_tokens": 1 + seed}
        faulty(family, faults, seed, count=15, **options)
        at_lines(family, interrupt, seed, count=20, rarely=[60, 300, 1500][seed % 3], **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_histories_change_no_answer(seed, guesses):
    family = ["Llama", TWO_POOLS, "GptOss"][seed % 3]
    guesses(prompt + tokens for prompt, _, samples in catalogue(family) for tokens, _, _ in samples)
    draw = random.Random(seed)
    sizes = {"pages": draw.randrange(12, 40), "page_size": draw.choice([3, 4, 7]), "max_tokens": draw.randrange(4, 30)}
    options = {"prefix_cache": draw.random() < 0.7, "host_pages": draw.choice([0, 14])}
    one = made(family, **sizes, **options, prompt_lookup_num_tokens=draw.randrange(1, 9))
    history = History(one, family, seed)
    for _ in range(300):
        history.turn()
    history.end()
    assert one.counts.accepted
