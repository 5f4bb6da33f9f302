"""Keys in 8 bits: the answers are those of `model.generate` over a cache that rounds every key and value as stated."""

import random

import pytest
import torch
from transformers import DynamicCache

from attnspan import Engine, SamplingParams
from attnspan.engine import memory
from attnspan.engine.config import EngineConfig
from attnspan.engine.pools import pools_of
from attnspan.errors import EngineError
from attnspan.integrations.huggingface.transformers_model import TransformersModel
from attnspan.paged.quantised import quantise
from attnspan.testing import loopback
from tests.engine.models import FAMILIES, HYBRIDS, eager, greedy, prompts, tiny
from tests.engine.test_latents import model_of

DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class Rounding(DynamicCache):
    """A cache of transformers whose keys and values are rounded when they come."""

    def __init__(self, model, dtype):
        super().__init__(config=model.config)
        self.dtype = dtype

    def update(self, key, value, layer, *more, **others):
        key, value = (quantise(each, self.dtype).dequantise().to(each.dtype) for each in (key, value))
        return super().update(key, value, layer, *more, **others)


def rounded(model, prompt, new, dtype):
    """The oracle."""
    given = torch.tensor([prompt])
    with eager(model):
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, pad_token_id=0,
            past_key_values=Rounding(model, dtype),
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def engine(model, **options):
    return Engine(model, **({"pages": 64, "page_size": 4, "max_sequences": 8, "kv_dtype": torch.int8} | options))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_cache_that_rounds(family, name):
    model, asked = tiny(family), prompts([9, 30, 1, 14])
    expected = [rounded(model, prompt, 12, DTYPES[name]) for prompt in asked]
    for options in ({"kv_dtype": DTYPES[name]}, {"kv_dtype": name, "max_tokens": 8}):
        one = engine(model, **options)
        answers = one.generate(asked, SamplingParams(max_new_tokens=12))
        assert [answer.token_ids for answer in answers] == expected
        one.check()


def test_rounding_changes_answers():
    """Or the oracle would show nothing."""
    model, asked = tiny("Llama"), prompts([40] * 4)
    assert any(rounded(model, prompt, 20, torch.float8_e4m3fn) != greedy(model, prompt, 20) for prompt in asked)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_pages_that_are_shared_copied_swapped_and_found_keep_every_bit(family):
    model, stems = tiny(family), prompts([13, 17], seed=3)
    draw, asked = random.Random(0), []
    for number in range(12):
        asked.append([*stems[number % 2][: draw.choice([1, 6, 9, 13])], *prompts([draw.randrange(1, 7)], number)[0]])
    expected = [rounded(model, prompt, 10, torch.int8) for prompt in asked]
    for host_pages, lookup in ((0, 0), (20, 3)):
        one = engine(model, pages=12, page_size=3, max_tokens=8, host_pages=host_pages, prompt_lookup_num_tokens=lookup)
        assert [each.token_ids for each in one.generate(asked, SamplingParams(max_new_tokens=10))] == expected
        assert one.counts.swapped_in if host_pages else one.counts.recomputed
        assert one.counts.cached
    drawn = SamplingParams(max_new_tokens=10, n=3, temperature=1.0, seed=5)
    [alone], [tight] = (engine(model, pages=pages).generate(asked[:1], drawn) for pages in (64, 14))
    assert [sample.token_ids for sample in alone.continuations] == [sample.token_ids for sample in tight.continuations]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_ranks_say_what_one_rank_says(family):
    model, asked = tiny(family), prompts([40, 5, 23])
    expected = [rounded(model, prompt, 8, torch.int8) for prompt in asked]

    def rank(world):
        one = engine(model, mesh=world, context_parallel_from=20, max_tokens=16)
        found = [answer.token_ids for answer in one.generate(asked, SamplingParams(max_new_tokens=8))]
        one.check()
        return found

    assert loopback(3).run(rank) == [expected] * 3


def test_states_of_recurrent_layers_stay_as_they_are():
    [family], [prompt] = HYBRIDS, prompts([19])
    one = engine(tiny(family))
    [answer] = one.generate([prompt], SamplingParams(max_new_tokens=8))
    assert answer.token_ids == rounded(tiny(family), prompt, 8, torch.int8)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 64)])
def test_a_token_takes_one_byte_for_each_number_and_four_for_each_head(dtype, head_dim):
    model = tiny("Llama", head_dim=head_dim).to(dtype)
    info = TransformersModel(model).info()
    sizes = []
    for kv_dtype in (None, torch.int8, torch.float8_e4m3fn):
        [pool] = pools_of(info, EngineConfig(pages=9, page_size=4, kv_dtype=kv_dtype), ranks=1).pools
        sizes.append(pool.nbytes / (10 * 4))  # of a token; one page more, which is nobody's
    model.to(torch.float32)
    numbers = 2 * 2 * 2 * head_dim  # layers, keys and values, heads
    assert sizes == [numbers * dtype.itemsize, *[numbers + 2 * 2 * 2 * 4] * 2]


def test_free_memory_holds_more_pages_of_eight_bits(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: memory.FreeMemory("here", 4 << 20))
    model = tiny("Llama", max_position_embeddings=4096)
    full, half = (Engine(model, memory_share=1.0, kv_dtype=kv_dtype).stats().pages for kv_dtype in (None, torch.int8))
    assert half > 2.6 * full  # 12 bytes instead of 32 for a head of 8 numbers


def test_what_cannot_be_stored_in_eight_bits_is_refused():
    for wrong in (torch.int4, torch.bfloat16, "fp4", 8):
        with pytest.raises(EngineError, match="kv_dtype must be one of"):
            engine(tiny("Llama"), kv_dtype=wrong)
    with pytest.raises(EngineError, match="kernel='flex' reads no pages in 8 bits, got kv_dtype='int8'"):
        engine(tiny("Llama"), kernel="flex")
    with pytest.raises(EngineError, match="kv_dtype='int8': layer 0 keeps latents, which are not stored in 8 bits"):
        engine(model_of("DeepseekV3"))


def test_ranks_that_store_in_other_dtypes_are_refused():
    def rank(world):
        with pytest.raises(EngineError, match="kv_dtype must be the same on every rank"):
            engine(tiny("Llama"), mesh=world, kv_dtype=[torch.int8, torch.float8_e4m3fn][world.rank])

    loopback(2).run(rank)
