"""What a model's generation_config asks for is done where a request says nothing else, or named."""

import copy
import warnings

import pytest
import torch
from transformers import GenerationConfig

from attnspan import Engine, EngineError, SamplingParams
from attnspan.integrations.huggingface.generation_config import defaults_of
from tests.engine.models import greedy, prompts, tiny, tokenizer

NEW = 10


def asking(**settings):
    """A model whose generation_config has these settings."""
    model = copy.deepcopy(tiny("Llama", vocab_size=320))
    vars(model.generation_config).update(settings)
    return model


def engine(model, **options):
    return Engine(model, **({"pages": 64, "page_size": 4} | options))


def plain(model, prompt, **options):
    given = torch.tensor([prompt])
    out = model.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


GREEDY = [
    {"repetition_penalty": 1.4, "max_new_tokens": 7},
    {"suppress_tokens": [7, 9], "no_repeat_ngram_size": 2, "bad_words_ids": [[11], [3, 4]]},
    {"sequence_bias": [[[5], 3.0], [[8, 9], -2.0]], "min_new_tokens": 5, "eos_token_id": [41, 42]},
    {"temperature": 0.4, "top_p": 0.3},  # without do_sample
]


@pytest.mark.parametrize("settings", GREEDY, ids=str)
def test_greedy_tokens_are_those_of_generate_without_a_word_more(settings):
    model, [prompt] = asking(**settings), prompts([9])
    new = {} if "max_new_tokens" in settings else {"max_new_tokens": NEW}
    [answer] = engine(model).generate([prompt], SamplingParams(**new))
    assert answer.token_ids == plain(model, prompt, **new)


def test_a_request_may_ask_for_something_else():
    model, [prompt] = asking(repetition_penalty=1.4, suppress_tokens=[7], do_sample=True, top_p=0.5), prompts([9])
    neutral = SamplingParams(max_new_tokens=NEW, temperature=0, repetition_penalty=1, suppress_tokens=[])
    one = engine(model)
    assert one.generate([prompt], neutral)[0].token_ids == greedy(tiny("Llama", vocab_size=320), prompt, NEW)
    one.default_params = SamplingParams()
    left = SamplingParams(max_new_tokens=NEW)
    assert one.generate([prompt], left)[0].token_ids == greedy(tiny("Llama", vocab_size=320), prompt, NEW)
    one.default_params = None
    with pytest.raises(EngineError, match=r"the engine's default_params must be SamplingParams\(...\), got None"):
        one.add(prompt)


def test_do_sample_draws_as_generate_would():
    assert defaults_of(GenerationConfig(do_sample=True)) == SamplingParams(temperature=1.0, top_k=50)
    assert defaults_of(GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9
    )
    [prompt] = prompts([9])
    one = engine(asking(do_sample=True, temperature=0.6, top_k=20))
    request = one.add(prompt, SamplingParams(seed=3))
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.6, 20, 1.0)
    [drawn] = engine(tiny("Llama", vocab_size=320)).generate(
        [prompt], SamplingParams(temperature=0.6, top_k=20, seed=3)
    )
    while one.unfinished:
        one.step()
    assert request.token_ids == drawn.token_ids


def test_texts_to_stop_at_and_several_answers_are_taken_too():
    model = asking(stop_strings=["e"], num_return_sequences=2, do_sample=True)
    [answer] = engine(model, tokenizer=tokenizer()).generate(["the cat"], SamplingParams(max_new_tokens=40, seed=1))
    assert len(answer.continuations) == 2
    assert answer.params.stop == ("e",)
    with pytest.raises(EngineError, match=r"stop=.* needs a tokenizer"):
        engine(model).add([5])


def test_neither_a_config_that_says_nothing_nor_none_changes_anything():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = GenerationConfig(**GenerationConfig._get_default_generation_params() | {"max_length": None})
        assert defaults_of(full).over(SamplingParams()) == SamplingParams(temperature=0.0, top_k=50).over(
            SamplingParams()
        )
        assert defaults_of(None) == defaults_of(GenerationConfig()) == SamplingParams()


def test_what_is_not_served_is_named_and_so_is_what_is_not_known():
    with pytest.warns(
        UserWarning,
        match=r"ignores these options of generation_config: guidance_scale=2.0, max_length=40, num_beams=4, "
        r"words_of_power=\['x'\]; tokens may differ from those of model.generate",
    ):
        engine(asking(num_beams=4, max_length=40, guidance_scale=2.0, words_of_power=["x"], use_cache=False))


def test_what_is_not_valid_is_refused_when_the_engine_is_made():
    with pytest.raises(
        EngineError, match=r"generation_config: suppress_tokens\[0\] must be a whole number >= 0, got -1"
    ):
        engine(asking(suppress_tokens=[-1]))


def test_every_setting_of_transformers_is_known_by_name():
    """A release that adds one turns this red, so that somebody decides what becomes of it."""
    from attnspan.integrations.huggingface import generation_config as known

    named = {
        "max_length", "max_time", "watermarking_config", "dola_layers", "constraints", "force_words_ids",
    }  # fmt: skip
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert settings <= {*known.SAME, *known.RENAMED, *known.WITHOUT_EFFECT, *known.NEUTRAL, *named}
