"""Prompts with images and sounds over pages: token for token what `model.generate` gives, however they are computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnspan as span
from attnspan.engine.sample import Sample
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.cache import PagedCache
from attnspan.testing import loopback
from tests.integrations import families
from tests.integrations.images import SPECS, batch, family
from tests.integrations.more_images import SELDOM
from tests.integrations.recent_images import ALWAYS

NEW = 7
WIDE = {"paligemma1": 48, "molmo2": 32}
"""How many tokens of a step prompts want whose tokens see each other, all of them or those of all images."""

SERVED = [name for name in SPECS if name not in ("paligemma", "unlimited-ocr", *ALWAYS)]


def model_of(name):
    model = family(name).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompt(name, images, length, seed=0):
    inputs = batch(name, images=(images,), length=length, seed=seed)
    del inputs["labels"]
    return inputs


def prompts(name):
    """Two images, one, none, and the first again with more behind it."""
    longer = prompt(name, (2, 11), 23, seed=3)
    first = {
        key: value[:, :19] if key != "pixel_values" and value.shape[-1] == 23 else value
        for key, value in longer.items()
    }
    return [first, prompt(name, (6,), 20, seed=1), prompt(name, (), 21, seed=2), longer]


def generated(model, inputs, new=NEW):
    """Tokens of `generate`, and their log-probabilities."""
    out = model.generate(
        **inputs, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    tokens = out.sequences[0, -new:].tolist()
    return tokens, [scores[0].log_softmax(0)[token].item() for scores, token in zip(out.logits, tokens, strict=True)]


def answers(engine, inputs, new=NEW):
    asked = span.SamplingParams(max_new_tokens=new, logprobs=True)
    return [(request.token_ids, request.logprobs) for request in engine.generate(inputs, asked)]


def same(found, wanted):
    """Whether tokens are equal, and log-probabilities within float32's rounding through a few layers."""
    return all(
        tokens == true and torch.allclose(torch.tensor(logprobs), torch.tensor(truly), atol=2e-5, rtol=1e-5)
        for (tokens, logprobs), (true, truly) in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in SERVED]
)
def test_tokens_are_those_of_generate(name):
    model, inputs = model_of(name), prompts(name)
    room = WIDE.get(name, 9)  # in chunks, beside each other
    engine = span.Engine(model, pages=64, page_size=4, max_tokens=room, max_sequences=4)
    assert same(answers(engine, inputs), [generated(model, each) for each in inputs])


@pytest.mark.parametrize("host_pages", [0, 32], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_preempted_samples(name, host_pages):
    model, inputs = model_of(name), prompts(name)
    engine = span.Engine(
        model, pages=14, page_size=4, max_tokens=16, max_sequences=3, host_pages=host_pages, prefix_cache=False
    )
    assert same(answers(engine, inputs, 14), [generated(model, each, 14) for each in inputs])
    assert engine.counts.swapped_out if host_pages else engine.counts.recomputed


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3", "llava"])
def test_cached_prefixes_are_those_of_the_same_images(name):
    model = model_of(name)
    engine = span.Engine(model, pages=64, page_size=4)
    first, _, _, longer = prompts(name)
    other = {key: value.clone() for key, value in longer.items()}
    other["pixel_values"][len(other["pixel_values"]) // 2 :] += 0.5  # the second image
    asked, found = (first, longer, other), []
    true = [generated(model, each) for each in asked]  # before: it writes on Qwen's models
    for each, wanted in zip(asked, true, strict=True):
        before = engine.counts.cached
        assert same(answers(engine, [each]), [wanted])
        found.append(engine.counts.cached - before)
    assert found[0] == 0
    assert found[1] >= 16  # all full pages of the first
    assert 6 <= found[2] <= 11  # what is before the second image


def test_tokens_that_are_typed_as_an_image_are_another_prefix():
    model = model_of("ernie4.5-vl")
    text = prompt("ernie4.5-vl", (), 21)
    typed = text | {"moe_mm_token_type_ids": torch.zeros(1, 21).long()}
    typed["moe_mm_token_type_ids"][:, 3:7] = 1  # experts of images compute these
    true = [generated(model, each) for each in (text, typed)]
    assert not same(true[:1], true[1:])
    engine = span.Engine(model, pages=64, page_size=4)
    for each, wanted in zip((text, typed, text), (*true, true[0]), strict=True):
        assert same(answers(engine, [each]), [wanted])


def test_samples_of_one_prompt():
    model, inputs = model_of("qwen2.5-vl"), prompts("qwen2.5-vl")[0]
    engine = span.Engine(model, pages=64, page_size=4)
    [request] = engine.generate([inputs], span.SamplingParams(max_new_tokens=NEW, n=3))
    assert [sample.token_ids for sample in request.continuations] == [generated(model, inputs)[0]] * 3


def test_a_prompt_of_text_is_that_of_its_tokens():
    model, inputs = model_of("qwen3-vl"), prompts("qwen3-vl")[2]
    engine = span.Engine(model, pages=64, page_size=4)
    for each in (inputs["input_ids"][0].tolist(), inputs):
        assert same(answers(engine, [each]), [generated(model, inputs)])


@pytest.mark.parametrize("name", ["glm4v", "gemma4"])
def test_ranks_share_the_pages_of_a_prompt(name):
    model, inputs = model_of(name), prompts(name)
    true = [generated(model, each) for each in inputs]

    def rank(world):
        engine = span.Engine(model, pages=32, page_size=2, mesh=world, max_tokens=12, max_sequences=4)
        return answers(engine, inputs)

    for found in loopback(2).run(rank):
        assert same(found, true)


def test_ranks_with_other_images_are_refused():
    model = model_of("llava")

    def rank(world):
        engine = span.Engine(model, pages=32, page_size=2, mesh=world)
        inputs = prompt("llava", (4,), 12)
        inputs["pixel_values"] += world.rank
        with pytest.raises(EngineError, match=r"requests differ between rank 0 and ranks \[1\]; every rank adds the"):
            engine.add(inputs)

    loopback(2).run(rank)


def test_groups_that_are_forgotten_would_be_noticed(monkeypatch):
    model, inputs = model_of("gemma3"), prompts("gemma3")
    monkeypatch.setattr("attnspan.engine.model_runner._group_masks", lambda batch: {})
    engine = span.Engine(model, pages=64, page_size=4)
    assert not same(answers(engine, inputs), [generated(model, each) for each in inputs])


@pytest.mark.parametrize("name", ["llava", "paligemma", "gemma3"])
def test_a_paged_cache_for_generate(name):
    model, inputs = model_of(name), prompts(name)[0]
    if name == "paligemma":
        with pytest.raises(ModelError, match="looks ahead; PagedCache serves decoder-only models"):
            PagedCache(model, pages=64)
        return
    cache = PagedCache(model, pages=64, page_size=4)
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
    assert found == generated(model, inputs)[0]


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_no_chunk_ends_within_a_group(lengths, computed, count):
    groups, stop = [], 0
    for length in lengths:
        groups.append((stop + 1, stop + 1 + length))
        stop += 1 + length
    sample = Sample(0, [0] * 64, 70, computed=computed, atomic_spans=groups)
    end = computed + sample.round_to_spans(count)
    inside = [(start, stop) for start, stop in groups if start < end < stop and start >= computed]
    assert computed <= end <= computed + count
    assert not inside
    assert end == computed + count or any(start == end for start, _ in groups) or end == computed


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_layers_that_see_less_in_generation_than_in_training():
    for serve in (span.Engine, PagedCache):
        with pytest.raises(ModelError, match="is of the type 'reference_sliding_attention', which is not served"):
            serve(model_of("unlimited-ocr"), pages=8)


@pytest.mark.parametrize("name", ALWAYS)
def test_a_model_that_must_have_an_image_in_every_call(name):
    with pytest.raises(ModelError, match=r"must be given pixel_values|takes no position_ids"):
        span.Engine(model_of(name), pages=8)


def test_a_prompt_whose_tokens_see_each_other_beyond_a_window():
    engine = span.Engine(model_of("paligemma"), pages=32)
    with pytest.raises(EngineError, match="see each other by a mask that is not served: causal, window 3, groups that"):
        engine.add(prompts("paligemma")[0])


def changed(**entries):
    return prompt("llava", (4,), 12) | entries


REFUSED = {
    "several prompts": (
        changed(input_ids=torch.ones(2, 5, dtype=torch.int64)),
        r"prompt must have input_ids of \(S,\) or \(1, S\), one prompt's tokens, got shape \(2, 5\); add",
    ),
    "none": (changed(input_ids=None), r"prompt must have input_ids of .* got shape \(1, 0\)"),
    "padding": (
        changed(attention_mask=torch.tensor([[0] + [1] * 11])),
        "prompt must have no padding, got an attention_mask with zeros; process prompts one by one",
    ),
    "labels": (changed(labels=None), "prompt must be what a processor returns, got labels too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_one_prompt(case):
    inputs, message = REFUSED[case]
    engine = span.Engine(model_of("llava"), pages=16)
    with pytest.raises(EngineError, match=message):
        engine.add(inputs)
    assert not engine.unfinished


def test_a_model_of_text_takes_tokens():
    engine = span.Engine(families.family("llama").eval(), pages=8)
    with pytest.raises(EngineError, match=r"prompt must be a text or tokens, got dict: LlamaForCausalLM takes tokens"):
        engine.add({"input_ids": torch.ones(1, 5, dtype=torch.int64)})


def test_an_image_that_no_step_has_room_for():
    engine = span.Engine(model_of("gemma3"), pages=32, max_tokens=6, max_sequences=4)
    with pytest.raises(
        EngineError, match="4 tokens of its prompt see each other and are computed in one step, which has"
    ):
        engine.add(prompts("gemma3")[0])
