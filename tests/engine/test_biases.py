"""Decoders with ALiBi over pages: token for token what `model.generate` says, whatever comes, goes or must wait."""

import copy
import functools
import random

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine import LayerSpec
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import PagedCache, enable
from attnspan.testing import loopback
from tests.engine.models import prompts
from tests.integrations.families import VOCAB, family
from tests.turns import in_turn

ALIBI = ("bloom", "mpt", "falcon", "falcon, rotary")


@functools.cache
def model_of(name):
    """Its weights are large, so that it does not say one token again and again."""
    model = family(name).eval().requires_grad_(False)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(each.numel()))
    model.generation_config.eos_token_id = None
    return model


def greedy(model, prompt, new, **more):
    given = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(given, attention_mask=torch.ones_like(given), **options, **more)[0, len(prompt) :].tolist()


def asked(lengths, seed=0):
    return [[t % (VOCAB - 2) + 2 for t in prompt] for prompt in prompts(lengths, seed)]


@pytest.mark.parametrize(("name", "host_pages"), in_turn(ALIBI, [0, 30]))
def test_greedy_tokens_are_those_of_model_generate(name, host_pages):
    model, draw = model_of(name), random.Random(name)
    left, requests, new = asked([3, 1, 20, 14, 11]), [], 12
    left.append([*left[2][:9], 3, 4])  # begins like another
    true = {tuple(prompt): greedy(model, prompt, new) for prompt in left}
    engine = Engine(model, pages=13, page_size=3, max_tokens=10, max_sequences=5, host_pages=host_pages)
    while left or engine.unfinished:
        while left and (len(requests) < 4 or draw.random() < 0.3):
            requests.append(engine.add(left.pop(0), SamplingParams(max_new_tokens=new)))
        engine.step()
        engine.check()
    assert all(request.token_ids == true[tuple(request.prompt)] for request in requests)
    assert engine.counts.swapped_out if host_pages else engine.counts.recomputed, "the pool was to be too small"


@pytest.mark.parametrize(("name", "ranks"), in_turn(ALIBI, [2, 3]))
def test_tokens_are_the_same_over_ranks(name, ranks):
    model, prompts = model_of(name), asked([33, 5, 20])
    true = [greedy(model, prompt, 8) for prompt in prompts]

    def rank(world):
        options = {"max_tokens": 16, "max_sequences": 4, "context_parallel_from": 8}
        engine = Engine(model, pages=40, page_size=4, mesh=world, **options)
        return [answer.token_ids for answer in engine.generate(prompts, SamplingParams(max_new_tokens=8))]

    assert loopback(ranks).run(rank) == [true] * ranks


def test_samples_of_one_prompt_are_those_of_each_alone():
    model, params = model_of("bloom"), SamplingParams(max_new_tokens=10, n=3, temperature=1.0, seed=5)
    [prompt] = asked([11])
    small = Engine(model, pages=9, page_size=3, max_tokens=8, max_sequences=3)
    found = small.generate([prompt], params)[0].continuations
    assert small.counts.recomputed
    true = Engine(model, pages=64).generate([prompt], params)[0].continuations
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in true]
    assert len({tuple(sample.token_ids) for sample in found}) == 3


def test_a_cache_in_pages_holds_its_keys():
    model, [prompt] = model_of("bloom"), asked([17])
    cache = PagedCache(model, pages=16, page_size=4)
    assert greedy(model, prompt, 10, past_key_values=cache) == greedy(model, prompt, 10)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_a_model_of_an_engine_computes_by_itself_as_before(name):
    model, given = copy.deepcopy(model_of(name)), torch.tensor(asked([9]))
    true = model_of(name)(given).logits
    engine = Engine(model, pages=16)
    assert torch.equal(model(given).logits, true)
    with enable(model, loopback(1).run(lambda world: world)[0]):
        pass
    assert torch.equal(model(given).logits, true)
    wanted = greedy(model, given[0].tolist(), 5)
    assert engine.generate([given[0].tolist()], SamplingParams(max_new_tokens=5))[0].token_ids == wanted
    assert torch.equal(copy.deepcopy(model)(given).logits, true)


def test_a_layer_has_a_cap_or_a_score_mod():
    with pytest.raises(
        ModelError, match=r"^softcap and score_mod are given together; leave softcap out, and let score"
    ):
        LayerSpec(2, 8, softcap=1.0, score_mod=lambda score, b, h, q, k: score)
