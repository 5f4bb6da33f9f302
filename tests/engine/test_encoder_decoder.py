"""Encoder-decoders: the encoder reads a prompt once, and tokens are those of `model.generate`."""

import copy
import functools
import random
import re
from dataclasses import replace

import pytest
import torch
import transformers

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface import attention_layers
from attnspan.integrations.huggingface.encoder_decoder import _check_plain
from attnspan.testing import loopback
from tests.engine.models import prompts, tokenizer
from tests.integrations.families import BART, T5, VOCAB
from tests.turns import in_turn

pytestmark = pytest.mark.usefixtures("quietly")

START = 2
ENDLESS = {"eos_token_id": None, "forced_eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": START}
FAMILIES = {
    "Bart": BART | ENDLESS,
    "T5": T5 | {"decoder_start_token_id": START},
    "UMT5": T5 | {"decoder_start_token_id": START},  # a table for each layer
    "Pegasus": BART | ENDLESS,  # positions that are not learned
    "Marian": BART | ENDLESS | {"decoder_vocab_size": VOCAB},
    "MT5": T5 | {"decoder_start_token_id": START},
    "MBart": BART | ENDLESS,
    "Blenderbot": BART | ENDLESS,
    "BlenderbotSmall": BART | ENDLESS,
    "PLBart": BART | ENDLESS,
}
DAILY = ("Bart", "T5", "UMT5", "Pegasus")
ALL = [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@functools.cache
def tiny(name, **more):
    """Its weights are large, so that it does not say one token again and again."""
    config = getattr(transformers, f"{name}Config")(**(FAMILIES[name] | more))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for path, each in model.named_parameters():
            if each.dim() > 1:
                size = 3.0 if "relative_attention_bias" in path else 0.3
                each.normal_(0.0, size, generator=torch.Generator().manual_seed(each.numel()))
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def greedy(model, prompt, new):
    given = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0, 1:].tolist()


def asked(lengths, seed=0):
    return [[t % (VOCAB - 3) + 3 for t in prompt] for prompt in prompts(lengths, seed)]


@pytest.mark.parametrize(("name", "host_pages"), [*in_turn(DAILY, [0, 12])])
def test_tokens_are_those_of_model_generate_when_requests_come_and_go(name, host_pages):
    model, draw, new = tiny(name), random.Random(name), 12
    left, requests, cancelled = asked([3, 1, 20, 14, 30, 3]), [], []
    left.append(left[2])  # another with the same prompt
    true = {tuple(prompt): greedy(model, prompt, new) for prompt in left}
    engine = Engine(model, pages=8, page_size=3, max_tokens=8, max_sequences=4, host_pages=host_pages)
    while left or engine.unfinished:
        while left and (len(requests) < 4 or draw.random() < 0.3):
            requests.append(engine.add(left.pop(0), SamplingParams(max_new_tokens=new)))
        if len(requests) == 5 and not cancelled:
            cancelled.append(engine.unfinished[-1])
            engine.cancel(cancelled[0])
        engine.step()
        engine.check()
    for request in requests:
        expected = true[tuple(request.prompt)]
        assert request.token_ids == (expected[: len(request.token_ids)] if request in cancelled else expected)
    assert engine.counts.swapped_out if host_pages else engine.counts.recomputed, "the pool was to be too small"
    assert not engine._runner._encoded


@pytest.mark.parametrize("name", ALL)
def test_tokens_are_the_same_over_ranks(name):
    """Samples that are computed again are long enough for context parallelism."""
    model, given = tiny(name), asked([33, 5, 1])
    true = [greedy(model, prompt, 14) for prompt in given]

    def rank(world):
        options = {"max_tokens": 16, "max_sequences": 4, "context_parallel_from": 4}
        engine = Engine(model, pages=6, page_size=2, mesh=world, **options)
        found = engine.generate(given, SamplingParams(max_new_tokens=14))
        return [answer.token_ids for answer in found], engine.counts.recomputed > 0

    assert loopback(2).run(rank) == [(true, True)] * 2


def test_samples_of_one_prompt_are_those_of_each_alone():
    model, params = tiny("T5"), SamplingParams(max_new_tokens=10, n=3, temperature=1.0, seed=5)
    [prompt] = asked([11])
    small = Engine(model, pages=7, page_size=2, max_tokens=8, max_sequences=3)
    found = small.generate([prompt], params)[0].continuations
    assert small.counts.recomputed
    true = Engine(model, pages=64).generate([prompt], params)[0].continuations
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in true]
    assert len({tuple(sample.token_ids) for sample in found}) == 3


def test_pages_of_another_prompt_are_not_found():
    """All decoders begin alike; what differs is what the encoder has read."""
    model = tiny("Bart", vocab_size=4)  # few tokens, so that answers begin alike
    engine, given = Engine(model, pages=64, page_size=2), [[3] * 9, [3] * 9, [3] * 8, [3, 1, 2]]
    for _ in range(2):
        for prompt in given:
            found = engine.generate([prompt], SamplingParams(max_new_tokens=9))[0]
            assert found.token_ids == greedy(model, prompt, 9)
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=1)
    engine = Engine(model, pages=9, page_size=2, max_tokens=4, max_sequences=2)
    requests = [engine.add([3] * 9, params), engine.add([3] * 9, params)]
    while engine.unfinished:
        engine.step()
    assert requests[0].token_ids == requests[1].token_ids
    assert engine.counts.cached, "the second was computed again, and its pages were there"


def test_a_learned_bias_follows_its_weights():
    model = copy.deepcopy(tiny("T5"))
    engine, [prompt] = Engine(model, pages=64), asked([7])
    assert engine.generate([prompt], SamplingParams(max_new_tokens=9))[0].token_ids == greedy(model, prompt, 9)
    model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data *= -2
    changed = greedy(model, prompt, 20)
    assert changed != greedy(tiny("T5"), prompt, 20)
    assert engine.generate([prompt], SamplingParams(max_new_tokens=20))[0].token_ids == changed


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_the_model_computes_by_itself_as_before(name):
    model, [prompt] = copy.deepcopy(tiny(name)), asked([9])
    given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[START, 5, 6]])}
    true, before = tiny(name)(**given).logits, model.config._attn_implementation
    engine = Engine(model, pages=16)
    engine.warm_up()
    assert not engine._runner._encoded
    engine.generate([prompt], SamplingParams(max_new_tokens=3))
    assert torch.equal(model(**given).logits, true)
    assert model.config._attn_implementation == before


def test_a_request_that_fails_in_its_encoder_can_be_tried_again():
    model, [prompt] = copy.deepcopy(tiny("Bart")), asked([9])
    engine = Engine(model, pages=16)
    request = engine.add(prompt, SamplingParams(max_new_tokens=5))
    handle = model.model.encoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    handle.remove()
    while engine.unfinished:
        engine.step()
    assert request.token_ids == greedy(model, prompt, 5)


def test_a_warm_up_that_is_broken_off_leaves_nothing_for_requests():
    model, [prompt] = copy.deepcopy(tiny("Bart")), asked([9])
    engine = Engine(model, pages=16)
    handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0 if engine._runner._encoded else None)
    with pytest.raises(ZeroDivisionError):
        engine.warm_up()
    handle.remove()
    assert engine.generate([prompt], SamplingParams(max_new_tokens=5))[0].token_ids == greedy(model, prompt, 5)


def test_text_is_that_of_the_answer_alone():
    model = tiny("T5", vocab_size=300)
    engine = Engine(model, pages=16, tokenizer=tokenizer())
    answer = engine.generate(["the cat and the hat"], SamplingParams(max_new_tokens=8))[0]
    assert answer.token_ids == greedy(model, tokenizer().encode("the cat and the hat"), 8)
    assert answer.text == tokenizer().decode([START, *answer.token_ids])[len(tokenizer().decode([START])) :]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_longer_than_the_encoder_is_refused():
    engine = Engine(tiny("Bart"), pages=16)
    with pytest.raises(
        EngineError, match=r"^the model's encoder has positions for 128 tokens, and the prompt has 129$"
    ):
        engine.add([5] * 129)
    assert not engine.unfinished


def test_a_model_that_does_not_say_how_its_decoder_begins_is_refused():
    model = copy.deepcopy(tiny("T5"))
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    wanted = "T5ForConditionalGeneration must have one decoder_start_token_id in its generation_config, got None"
    with pytest.raises(ModelError, match=f"^{wanted}$"):
        Engine(model, pages=16)


@pytest.mark.parametrize(("changed", "what"), [({"sinks": True}, "sinks"), ({"softcap": 2.0}, "a soft-cap")])
def test_attention_to_the_encoder_is_plain(changed, what):
    cross = replace(next(layer for layer in attention_layers(tiny("Bart")) if layer.cross), **changed)
    wanted = f"{cross.name} has {what}; an engine serves encoders whose tokens all see each other"
    with pytest.raises(ModelError, match=f"^{re.escape(wanted)}$"):
        _check_plain([cross], set())


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}


@pytest.mark.parametrize(
    ("config", "sizes", "why"),
    [
        ("WhisperConfig", BART, "WhisperForConditionalGeneration has an encoder of input_features, and an engine enc"),
        (
            "LEDConfig",
            BART,
            r"led.encoder.layers.0.self_attn \(LEDEncoderAttention\) has a way of its own to mix tokens",
        ),
        (
            "M2M100Config",
            BART,
            "M2M100ForConditionalGeneration counts positions of its decoder by itself, in a way that",
        ),
        (
            "T5GemmaConfig",
            {"encoder": SMALL, "decoder": SMALL | {"cross_attention_hidden_size": 32}, "vocab_size": 64},
            "model.encoder.layers.0.self_attn has a window; an engine serves encoders whose tokens all see each other",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("Config") else "",
)
def test_a_model_is_refused_by_name(config, sizes, why):
    kind = transformers.AutoModelForSpeechSeq2Seq if "Whisper" in config else transformers.AutoModelForSeq2SeqLM
    given = getattr(transformers, config)(**(ENDLESS | sizes | {"decoder_start_token_id": START}))
    model = kind.from_config(given).eval()
    model.generation_config.decoder_start_token_id = START
    with pytest.raises(ModelError, match=f"^{why}"):
        Engine(model, pages=16)
