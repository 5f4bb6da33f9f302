"""What a caller sees: results in order, samples, seeds, ends, streams, errors that leave the engine well."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, ModelError, UnknownRequest
from attnspan.integrations.huggingface.transformers_model import max_positions_of
from tests.engine.models import VOCABULARY, greedy, prompts, tiny, tokenizer


def engine(model=None, **options):
    return Engine(model or tiny("Llama"), **({"pages": 64, "page_size": 4, "max_sequences": 8} | options))


def speaking(**options):
    """An engine with a tokenizer."""
    return engine(tiny("Llama", vocab_size=320), tokenizer=tokenizer(), **options)


def drive(one):
    """Until nothing is left to do."""
    while one.unfinished:
        one.step()


def drawn(**options):
    return SamplingParams(**({"max_new_tokens": 10, "temperature": 1.0, "seed": 7} | options))


# ---- results ---------------------------------------------------------------------------------------------------------


def test_results_are_in_the_order_of_prompts_each_with_its_own_wishes():
    asked, new = prompts([9, 2, 5]), [3, 12, 7]
    answers = engine().generate(asked, [SamplingParams(max_new_tokens=n) for n in new])
    assert [answer.prompt for answer in answers] == asked
    assert [answer.token_ids for answer in answers] == [
        greedy(tiny("Llama"), *pair) for pair in zip(asked, new, strict=True)
    ]
    assert engine().generate([]) == []


def test_prompts_may_be_tensors_and_numbers_of_any_kind():
    [prompt] = prompts([6])
    [answer] = engine().generate([torch.tensor(prompt)], SamplingParams(max_new_tokens=3))
    assert answer.token_ids == greedy(tiny("Llama"), prompt, 3)


def test_a_seed_gives_the_same_tokens_alone_in_company_and_after_preemption():
    [alone] = engine().generate(prompts([9]), drawn(max_new_tokens=16))
    company = prompts([9]) + prompts([3, 11, 6], seed=5)
    crowded = engine(pages=11, page_size=3, max_tokens=8, prefix_cache=False)
    answers = crowded.generate(company, drawn(max_new_tokens=16))
    assert crowded.counts.recomputed
    assert answers[0].token_ids == alone.token_ids
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    [other] = engine().generate(prompts([9]), drawn(max_new_tokens=16, seed=8))
    assert other.token_ids != alone.token_ids


def test_samples_share_the_prompt_and_differ():
    one = engine()
    [answer] = one.generate(prompts([30]), drawn(n=4, logprobs=True))
    assert one.counts.tokens == 30 + 4 * 9
    assert len({tuple(sample.token_ids) for sample in answer.continuations}) == 4
    assert [len(sample.logprobs) for sample in answer.continuations] == [10] * 4
    [first] = engine().generate(prompts([30]), drawn())
    assert answer.token_ids == first.token_ids  # the first of n is the one of one
    one.check()


def test_samples_of_one_prompt_survive_a_pool_that_is_too_small_for_all():
    [roomy] = engine(prefix_cache=False).generate(prompts([13]), drawn(n=4, max_new_tokens=20))
    small = engine(pages=13, page_size=3, prefix_cache=False)
    [answer] = small.generate(prompts([13]), drawn(n=4, max_new_tokens=20))
    assert [sample.token_ids for sample in answer.continuations] == [sample.token_ids for sample in roomy.continuations]
    assert small.counts.recomputed


def test_an_end_token_ends_a_sample_unless_it_is_to_be_ignored():
    [prompt] = prompts([9])
    plain = greedy(tiny("Llama"), prompt, 12)
    end = plain[4]
    first = plain.index(end)
    one = engine()
    one.end_tokens = frozenset([end])
    [stopped] = one.generate([prompt], SamplingParams(max_new_tokens=12))
    assert (stopped.token_ids, stopped.finish_reason) == (plain[: first + 1], "stop")
    [ignored] = one.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == (plain, "length")
    [asked] = engine().generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=[end]))
    assert (asked.token_ids, asked.finish_reason) == (plain[: first + 1], "stop")


def test_the_models_own_end_tokens_are_known():
    model = tiny("Llama", num_hidden_layers=1)
    for said, known in ((None, set()), (5, {5}), ([5, 9], {5, 9})):
        model.generation_config.eos_token_id = said
        assert engine(model).end_tokens == known
    model.generation_config.eos_token_id = None


def test_logprobs_are_those_of_the_model():
    [prompt], model = prompts([9]), tiny("Llama")
    [answer] = engine().generate([prompt], drawn(logprobs=True, top_logprobs=3))
    logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    true = logits.log_softmax(-1)
    expected = true.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).flatten()
    assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)  # float32 logits of size 10
    for row, top in enumerate(answer.top_logprobs):
        assert list(top) == true[row].topk(3).indices.tolist()
    [silent] = engine().generate([prompt], drawn())
    assert silent.logprobs is None


def test_prefixes_are_found_only_under_the_same_salt():
    one, [prompt] = engine(), prompts([33])
    for salt, known in (("a", 0), ("b", 0), ("a", 32), ("b", 64)):
        [answer] = one.generate([prompt], SamplingParams(max_new_tokens=2), salt=salt)
        assert answer.token_ids == greedy(tiny("Llama"), prompt, 2)
        assert one.counts.cached == known


# ---- text ------------------------------------------------------------------------------------------------------------


def test_texts_go_in_and_come_out():
    one = speaking()
    [answer] = one.generate(["the cat"], SamplingParams(max_new_tokens=12))
    assert answer.prompt == tokenizer().encode("the cat")
    assert answer.text == tokenizer().decode(answer.token_ids, skip_special_tokens=True)


def test_a_text_to_stop_at_ends_the_sample_and_is_cut_off():
    [whole] = speaking().generate(["the cat"], drawn(max_new_tokens=30))
    stop = whole.text[6:9]
    [answer] = speaking().generate(["the cat"], drawn(max_new_tokens=30, stop=stop))
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert stop in tokenizer().decode(answer.token_ids)


def test_a_text_to_stop_at_is_found_beside_a_letter_that_the_last_token_left_unfinished():
    said = greedy(tiny("Llama"), [5, 6, 7], 12)
    count = next(n for n in range(3, 12) if said[n - 1] not in said[: n - 1])

    class Halves:
        def __len__(self):
            return VOCABULARY

        def encode(self, text):
            return [5, 6, 7]

        def decode(self, token_ids, skip_special_tokens=True):
            written = b"".join(b"end\xc3" if token == said[count - 1] else b"x" for token in token_ids)
            return written.decode(errors="replace")

    one = engine(tokenizer=Halves())
    [answer] = one.generate([[5, 6, 7]], SamplingParams(max_new_tokens=count, stop="end"))
    assert (answer.text, answer.finish_reason) == ("x" * (count - 1), "stop")


def test_a_stream_tells_what_generate_returns():
    one, params = speaking(), drawn(max_new_tokens=20, n=2)
    [whole] = speaking().generate(["the cat"], params)
    told = list(one.stream("the cat", params))
    for number, sample in enumerate(whole.continuations):
        mine = [token for token in told if token.sample_index == number]
        assert [token.token_id for token in mine] == sample.token_ids
        assert "".join(token.text for token in mine) == sample.text
        assert [token.finish_reason for token in mine] == [None] * 19 + ["length"]


def test_a_stream_of_several_prompts_and_one_that_is_left():
    one, asked = engine(), prompts([4, 9])
    stream = one.stream(asked, SamplingParams(max_new_tokens=6))
    other = one.add([5, 6], SamplingParams(max_new_tokens=6))
    assert {next(stream).request.number for _ in range(2)} == {0, 1}
    assert len(one.unfinished) == 3
    stream.close()
    assert one.unfinished == [other]
    drive(one)
    assert other.token_ids == greedy(tiny("Llama"), [5, 6], 6)
    one.check()


def test_streams_that_take_turns_lose_nothing_whoever_steps():
    one, asked, params = engine(), prompts([4, 9, 6]), SamplingParams(max_new_tokens=6)
    first, second = (one.stream(prompt, params) for prompt in asked[:2])
    told = [[next(stream).token_id] for stream in (first, second)]
    one.step()
    [third] = one.generate(asked[2:], params)  # which finishes the others, too
    for stream, tokens in zip((first, second), told, strict=True):
        tokens += [token.token_id for token in stream]
    assert [*told, third.token_ids] == [greedy(tiny("Llama"), prompt, 6) for prompt in asked]
    one.check()


def test_a_stream_that_nobody_reads_ends_its_requests():
    one = engine()
    one.stream([5, 6, 7]).close()
    assert one.unfinished == []
    one.check()


def test_a_stream_ends_where_its_request_is_cancelled_and_keeps_what_came_before():
    one = engine()
    stream = one.stream([5, 6, 7], SamplingParams(max_new_tokens=9))
    told = [next(stream).token_id]
    one.step()
    one.cancel(one.unfinished[0])
    told += [token.token_id for token in stream]
    assert told == greedy(tiny("Llama"), [5, 6, 7], 2)


def test_one_prompt_of_tokens_is_streamed_as_one():
    for prompt in ([5, 6, 7], torch.tensor([5, 6, 7]), (5, 6, 7)):
        told = list(engine().stream(prompt, SamplingParams(max_new_tokens=4)))
        assert [token.token_id for token in told] == greedy(tiny("Llama"), [5, 6, 7], 4)
    with pytest.raises(EngineError, match="prompt must hold at least one token, got none"):
        engine().stream([])


def test_a_progress_bar_is_drawn_when_asked_for(capsys):
    engine().generate(prompts([4, 9]), SamplingParams(max_new_tokens=3), progress=True)
    assert "generating" in capsys.readouterr().out


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_request_is_cancelled_once():
    one = engine()
    request, other = (one.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in prompts([9, 4]))
    for _ in range(3):
        one.step()
    one.cancel(request)
    assert request.finish_reason == "cancelled"
    assert request.token_ids == greedy(tiny("Llama"), request.prompt, 8)[:3]
    with pytest.raises(UnknownRequest, match=r"request 0 has ended \(cancelled\) and cannot be cancelled"):
        one.cancel(request)
    with pytest.raises(UnknownRequest, match=r"request must be one that add\(\) of this engine returned, got 'x'"):
        one.cancel("x")
    with pytest.raises(UnknownRequest, match="request must be one that"):
        engine().cancel(other)
    drive(one)
    with pytest.raises(UnknownRequest, match=r"request 1 has ended \(length\)"):
        one.cancel(other)
    assert other.token_ids == greedy(tiny("Llama"), other.prompt, 8)
    one.check()


def test_a_cancelled_request_keeps_the_text_that_might_have_become_a_stop():
    whole = speaking().generate(["the cat"], SamplingParams(max_new_tokens=8))[0]
    one = speaking()
    request = one.add("the cat", SamplingParams(max_new_tokens=20, stop=whole.text + "never"))
    for _ in range(8):
        one.step()
    assert request.text == ""  # all of it is held back
    one.cancel(request)
    assert (request.token_ids, request.text) == (whole.token_ids, whole.text)


REFUSALS = [
    ([[]], {}, "prompt must hold at least one token, got none"),
    ([[5, -1]], {}, r"prompt\[1\] must be a whole number >= 0, got -1"),
    ([[5, VOCABULARY]], {}, f"prompt must hold tokens below the model's {VOCABULARY}, got {VOCABULARY}"),
    ([5], {}, r"prompt must be a list of whole numbers >= 0, got 5"),
    ([[True]], {}, r"prompt\[0\] must be a whole number >= 0, got True"),
    ([[5.0]], {}, r"prompt\[0\] must be a whole number >= 0, got 5.0"),
    (["text"], {}, "prompt is a text, which needs a tokenizer; give the engine one, or tokens"),
    ("text", {}, r"prompts must be a list of prompts, got a text; as in generate\(\[prompt\]\)"),
    ([[5] * 300], {}, "the request does not fit: 300 tokens of prompt and up to 15 more, 315 tokens need 79 pages"),
    ([[5]], {"max_new_tokens": 300}, "the request does not fit: 2 tokens of prompt and up to 299 more"),
    ([[5]], {"stop_token_ids": [97]}, "stop_token_ids must hold tokens below the model's 97, got 97"),
    ([[5]], {"top_logprobs": 98}, "top_logprobs must be at most the model's 97 tokens, got 98"),
    ([[5]], {"suppress_tokens": [97]}, "suppress_tokens must hold tokens below the model's 97, got 97"),
    ([[5]], {"logit_bias": {97: 1}}, "logit_bias must hold tokens below the model's 97, got 97"),
    ([[5]], {"sequence_bias": {(1, 97): 1}}, "sequence_bias must hold tokens below the model's 97, got 97"),
    ([[5]], {"bad_words": [[1], [97]]}, "bad_words must hold tokens below the model's 97, got 97"),
    ([[5]], {"bad_words": ["x"]}, r"bad_words=\('x',\) needs a tokenizer; give the engine one, or tokens"),
    ([[5]], {"forced_bos_token_id": 98}, "forced_bos_token_id must hold tokens below the model's 97, got 98"),
    ([[5]], {"stop": "x"}, "stop=.* needs a tokenizer; give the engine one, or use stop_token_ids"),
    ([[5]], {"salt": []}, r"salt must be hashable, such as a text or a number, got \[\]"),
    ([[5]], {"n": 9}, "n must be at most max_sequences=8, .* got 9"),
]


@pytest.mark.parametrize(("asked", "wishes", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_request_that_cannot_be_served_is_refused_and_the_engine_is_well(asked, wishes, message):
    one = engine()
    options = {name: value for name, value in wishes.items() if name == "salt"}
    params = SamplingParams(**{name: value for name, value in wishes.items() if name != "salt"})
    prompts = asked if isinstance(asked, str) else [[5, 6], *asked]
    with pytest.raises(EngineError, match=message):
        one.generate(prompts, params, **options)
    assert one.unfinished == []  # not even the one that was fine
    one.check()
    assert one.generate([[5, 6]], SamplingParams(max_new_tokens=3))[0].token_ids == greedy(tiny("Llama"), [5, 6], 3)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens must be a whole number >= 1, got 2.5 \(float\)"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0, got -0.1; 0 is greedy"),
        ({"temperature": float("nan")}, "temperature must be a number, got nan"),
        ({"temperature": float("inf")}, "temperature must be a number of at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": -1}, "top_k must be a whole number >= 0, got -1"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and at most 1, got 1.1"),
        ({"seed": -3}, "seed must be a whole number >= 0, got -3"),
        ({"seed": 2**64}, r"seed must be below 2\*\*64, got 18446744073709551616"),
        ({"n": 0}, "n must be a whole number >= 1, got 0"),
        ({"stop": ""}, "stop must be a text, or a list of them, none empty, got ''"),
        ({"stop": 5}, "stop must be a text, or a list of them, got 5"),
        ({"stop": [5]}, "stop must be a text, or a list of them, none empty, got 5"),
        ({"stop_token_ids": [-5]}, r"stop_token_ids\[0\] must be a whole number >= 0, got -5"),
        ({"logprobs": 3}, "logprobs must be True or False, got 3"),
        ({"min_p": True}, "min_p must be a number, got True"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"typical_p": 0}, "typical_p must be a number above 0 and at most 1, got 0.0"),
        ({"epsilon_cutoff": 1}, "epsilon_cutoff must be a number of at least 0 and below 1, got 1.0"),
        ({"eta_cutoff": -1}, "eta_cutoff must be a number of at least 0 and below 1, got -1.0"),
        ({"top_h": 2}, "top_h must be a number from 0 to 1, got 2.0; 0 leaves it out"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, got 0.0; 1 leaves it out"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be a number, got nan"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be a number that is finite, got inf"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number, got '1'"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be a whole number >= 0, got -1"),
        ({"min_new_tokens": 1.0}, r"min_new_tokens must be a whole number >= 0, got 1.0 \(float\)"),
        ({"min_length": True}, r"min_length must be a whole number >= 0, got True"),
        ({"logit_bias": {5: "1"}}, r"logit_bias\[5\] must be a number, got '1'"),
        ({"logit_bias": {5: True}}, r"logit_bias\[5\] must be a number, got True"),
        ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] must be a number, got nan"),
        ({"logit_bias": {5: float("inf")}}, r"logit_bias\[5\] must be a number below infinity, got inf; see allowed_t"),
        ({"logit_bias": {-5: 1}}, "a token of logit_bias must be a whole number >= 0, got -5"),
        ({"logit_bias": {"5": 1}}, "a token of logit_bias must be a whole number >= 0, got '5'"),
        ({"logit_bias": {True: 1}}, "a token of logit_bias must be a whole number >= 0, got True"),
        ({"logit_bias": 5}, "logit_bias must be a dict of numbers, or pairs, got 5"),
        ({"logit_bias": [5]}, "logit_bias must be a dict of numbers, or pairs, got 5"),
        ({"logit_bias": "55"}, "logit_bias must be a dict of numbers, or pairs, got '55'"),
        ({"sequence_bias": {(): 1.0}}, "sequence_bias must hold sequences of at least one token, got an empty one"),
        ({"sequence_bias": {5: 1.0}}, r"a sequence of sequence_bias must be a list of whole numbers >= 0, got 5"),
        ({"sequence_bias": {(5, -1): 1.0}}, r"a sequence of sequence_bias\[1\] must be a whole number >= 0, got -1"),
        ({"bad_words": "word"}, "bad_words must be a list of texts or of lists of tokens, got 'word'"),
        ({"bad_words": [[]]}, "bad_words must hold sequences of at least one token, got an empty one"),
        ({"bad_words": [""]}, "bad_words must be a list of texts or of lists of tokens, none empty, got ''"),
        ({"bad_words": [5]}, "a sequence of bad_words must be a list of whole numbers >= 0, got 5"),
        ({"allowed_tokens": []}, "allowed_tokens must hold at least one token, got none; None allows all"),
        ({"allowed_tokens": [True]}, r"allowed_tokens\[0\] must be a whole number >= 0, got True"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of whole numbers >= 0, got 5"),
        ({"begin_suppress_tokens": [1.5]}, r"begin_suppress_tokens\[0\] must be a whole number >= 0, got 1.5"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id must be a whole number >= 0, got -1"),
        ({"forced_eos_token_id": [2, "x"]}, r"forced_eos_token_id\[1\] must be a whole number >= 0, got 'x'"),
        ({"forced_eos_token_id": 2, "suppress_tokens": [2]}, r"forced_eos_token_id=\(2,\) is also in suppress_tokens"),
        ({"exponential_decay_length_penalty": 2}, r"length_penalty must be \(tokens before it begins, factor\), got 2"),
        ({"exponential_decay_length_penalty": (2, 0)}, r"length_penalty\[1\] must be a number above 0, got 0.0"),
        ({"exponential_decay_length_penalty": (-2, 2)}, r"length_penalty\[0\] must be a whole number >= 0, got -2"),
    ],
    ids=str,
)
def test_sampling_values_that_make_no_sense_are_refused(wishes, message):
    with pytest.raises(EngineError, match=message):
        SamplingParams(**wishes)


def test_params_are_one_for_all_or_one_for_each():
    with pytest.raises(EngineError, match="params must be one for all 2 prompts, or one for each, got 3"):
        engine().generate([[5], [6]], [SamplingParams()] * 3)
    with pytest.raises(EngineError, match=r"params must be SamplingParams\(...\), got 7"):
        engine().add([5], 7)
    for wrong in (7, {"max_new_tokens": 3}):
        with pytest.raises(EngineError, match=r"params must be SamplingParams\(...\), or a list of them, got"):
            engine().generate([[5]], wrong)


@pytest.mark.parametrize("wrong", [[5, 6], torch.tensor([5, 6])], ids=["list", "tensor"])
def test_a_prompt_where_a_list_of_them_belongs_is_refused(wrong):
    with pytest.raises(EngineError, match=r"prompts must be a list of .*, got one that begins with .*5.*; as in gener"):
        engine().generate(wrong)


def test_what_a_tokenizer_returns_is_not_taken_for_texts():
    for call in (speaking().generate, speaking().stream):
        with pytest.raises(EngineError, match='got BatchEncoding; of what a tokenizer returns, take its "input_ids"'):
            call(tokenizer()(["the cat"]))
        with pytest.raises(EngineError, match="prompts must be a list of texts or of lists of tokens, got int"):
            call(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages": 0}, "pages must be a whole number >= 1, got 0"),
        ({"page_size": 0}, "page_size must be a whole number >= 1, got 0"),
        ({"host_pages": -1}, "host_pages must be a whole number >= 0, got -1"),
        ({"max_sequences": 0}, "max_sequences must be a whole number >= 1, got 0"),
        ({"max_tokens": 4}, "max_tokens must be at least max_sequences=8, .* got 4"),
        ({"tokenizer": tokenizer()}, "tokenizer does not fit the model: it has 281 tokens, and the model knows 97; "),
        ({"tokenizer": 5}, "tokenizer must have encode and decode, got int"),
        ({"kernel": "fast"}, "kernel must be .*, got 'fast'"),
    ],
    ids=["pages", "page_size", "host_pages", "sequences", "tokens", "another's tokenizer", "no tokenizer", "kernel"],
)
def test_an_engine_that_cannot_be_made_is_refused(options, message):
    with pytest.raises(EngineError, match=message):
        engine(**options)


def test_models_that_are_not_served_are_refused_by_their_layer():
    from transformers import BertConfig, BertModel, RwkvConfig, RwkvForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    bert = BertModel(BertConfig(**small, num_attention_heads=2, intermediate_size=32)).eval()
    with pytest.raises(ModelError, match=r"encoder.layer.0.attention.self has attention that looks ahead; an engine"):
        engine(bert)
    rwkv = RwkvForCausalLM(RwkvConfig(**(small | {"num_hidden_layers": 2}))).eval()
    with pytest.raises(ModelError, match="is not served"):
        engine(rwkv)
    for wrong in (torch.nn.Linear(2, 2), "a name"):
        with pytest.raises(ModelError, match="model must be a transformers model"):
            engine(wrong)
    training = tiny("Llama", num_hidden_layers=1)
    training.train()
    try:
        with pytest.raises(EngineError, match=r"model is in training mode, .* call model.eval\(\)"):
            engine(training)
    finally:
        training.eval()


def test_a_model_has_positions_for_so_many_tokens():
    model = tiny("Llama", max_position_embeddings=40)
    one = engine(model)
    with pytest.raises(
        EngineError, match="the model has positions for 40 tokens; the prompt has 30 and max_new_tokens=12"
    ):
        one.generate([[5] * 30], SamplingParams(max_new_tokens=12))
    assert one.generate([[5] * 30], SamplingParams(max_new_tokens=11))[0].token_ids == greedy(model, [5] * 30, 11)


@pytest.mark.parametrize(
    ("rope", "known"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, 128),
    ],
    ids=str,
)
def test_angles_that_follow_the_longest_of_a_batch_are_served_while_they_stay_the_same(rope, known):
    text = SimpleNamespace(max_position_embeddings=128, rope_parameters=rope)
    config = SimpleNamespace(max_position_embeddings=512, get_text_config=lambda decoder: text)
    assert max_positions_of(SimpleNamespace(config=config)) == known


def test_a_step_that_fails_can_be_tried_again():
    one, [prompt] = engine(), prompts([9])
    request = one.add(prompt, SamplingParams(max_new_tokens=5))
    one.step()
    head = one.model.lm_head
    handle = head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    before = one.model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(MemoryError, match="planted"):
            one.step()
        one.check()
    handle.remove()
    assert one.model.config._attn_implementation == before
    drive(one)
    assert request.token_ids == greedy(tiny("Llama"), prompt, 5)
    handle = head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    with pytest.raises(MemoryError, match="planted"):
        one.generate([prompt])
    handle.remove()
    assert one.unfinished == []
    one.check()


def trained_a_step(model, prompt):
    """As a training loop does it."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
    optimizer.step()
    model.eval().requires_grad_(False)


def replaced(model, prompt):
    """As averages of weights are put in."""
    for weight in model.parameters():
        weight.data = -weight.data


@pytest.mark.parametrize("change", [trained_a_step, replaced])
def test_what_other_weights_computed_is_not_found_again(change):
    model, [prompt, *_] = copy.deepcopy(tiny("Llama")), prompts([40])
    one, params = engine(model), SamplingParams(max_new_tokens=6)
    running = one.add(prompt, SamplingParams(max_new_tokens=20))
    one.generate([prompt], params)
    change(model, prompt)
    assert one.generate([prompt], params)[0].token_ids == greedy(model, prompt, 6)
    assert one.counts.cached == 0  # though the pages of the first two are there
    assert one.generate([prompt], params)[0].token_ids == greedy(model, prompt, 6)
    assert one.counts.cached > 0  # with the same weights it is found
    drive(one)
    assert running.finish_reason == "length"
    one.check()


@pytest.mark.parametrize("change", [trained_a_step, replaced])
def test_a_request_that_only_queued_while_weights_changed_is_of_the_new_ones(change):
    model, [prompt, *_] = copy.deepcopy(tiny("Llama")), prompts([40])
    one, params = engine(model), SamplingParams(max_new_tokens=6)
    one.generate([prompt], params)
    request = one.add(prompt, params)
    change(model, prompt)
    drive(one)
    assert request.token_ids == greedy(model, prompt, 6)


@pytest.mark.parametrize(("family", "pages"), [("Llama", 64), ("Gemma3", 64), ("Llama", 3)])
def test_an_engine_that_is_warm_says_the_same_and_has_counted_and_kept_nothing(family, pages, monkeypatch):
    model, asked = tiny(family), prompts([9, 2])
    one, rows = engine(model, pages=pages), []
    run = one._runner.run
    monkeypatch.setattr(one._runner, "run", lambda batch: (rows.append([chunk.new for chunk in batch]), run(batch))[1])
    one.warm_up()
    assert [1] in rows
    assert max(map(sum, rows)) == min(512, one._scheduler.max_chunk, 4 * pages - 1)
    assert one.counts == engine(model).counts
    one.check()
    for group in one._scheduler.kv_cache.groups:
        assert group.allocator.stats().free == group.num_pages
    answers = one.generate(asked, SamplingParams(max_new_tokens=3))
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 3) for prompt in asked]


def test_an_engine_with_requests_is_not_warmed_up_and_one_that_fails_meanwhile_is_well(monkeypatch):
    one = engine()
    request = one.add([5])
    with pytest.raises(EngineError, match="warm_up is for an engine without requests, got 1 unfinished"):
        one.warm_up()
    one.cancel(request)
    with monkeypatch.context() as patch:
        patch.setattr(one._runner, "run", fails)
        with pytest.raises(MemoryError):
            one.warm_up()
    one.check()
    assert one._scheduler.kv_cache.groups[0].allocator.stats().free == 64
    assert one.generate([[5]], SamplingParams(max_new_tokens=2))[0].token_ids == greedy(tiny("Llama"), [5], 2)


def fails(batch):
    raise MemoryError


def test_a_model_of_another_dtype_than_its_pages_is_told_to_make_a_new_engine():
    for change in (
        lambda model: model.double(),
        lambda model: model.load_state_dict(copy.deepcopy(model).double().state_dict(), assign=True),
    ):
        model = copy.deepcopy(tiny("Llama"))
        one = engine(model)
        change(model)
        with pytest.raises(EngineError, match=r"model is torch.float64, .* torch.float32; make a new engine"):
            one.generate([[5]])


def test_a_model_that_went_into_training_is_refused_until_it_is_back():
    model = copy.deepcopy(tiny("Llama", attention_dropout=0.5))
    one = engine(model)
    request = one.add([5, 6], SamplingParams(max_new_tokens=4))
    model.train()
    with pytest.raises(EngineError, match=r"model is in training mode, .*; call model.eval\(\)"):
        one.step()
    one.check()
    model.eval()
    drive(one)
    assert request.token_ids == greedy(model, [5, 6], 4)


def test_a_text_that_cannot_be_decoded_ends_its_request_and_no_other():
    class Broken:
        def __len__(self):
            return 97

        def encode(self, text):
            return [5]

        def decode(self, token_ids, skip_special_tokens=True):
            if self.bad in token_ids:
                raise RuntimeError("planted")
            return "x" * len(token_ids)

    broken, asked = Broken(), prompts([4, 9, 6])
    expected = [greedy(tiny("Llama"), prompt, 8) for prompt in asked]
    broken.bad = next(token for token in expected[1] if token not in expected[0] + expected[2])
    one = engine(tokenizer=broken)
    requests = [one.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in asked]
    with pytest.raises(RuntimeError, match="planted"):
        drive(one)
    one.check()
    assert requests[1].finish_reason == "error"
    assert str(requests[1].error) == "planted"
    drive(one)
    assert [requests[place].token_ids for place in (0, 2)] == [expected[0], expected[2]]
    one.check()


def test_a_model_in_half_precision_is_served_in_it():
    model, [prompt] = copy.deepcopy(tiny("Llama")).bfloat16(), prompts([20])
    [answer] = engine(model).generate([prompt], SamplingParams(max_new_tokens=8, logprobs=True))
    logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].float()
    true = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).flatten()
    assert answer.logprobs == pytest.approx(true.tolist(), abs=0.3)  # logits of size 20 with 8 bits each


def test_an_engine_that_was_made_in_inference_mode_goes_on_without():
    with torch.inference_mode():
        one = engine()
        [answer] = one.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    [again] = one.generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=4))
    assert answer.token_ids == greedy(tiny("Llama"), [5, 6, 7], 4)
    assert again.token_ids == greedy(tiny("Llama"), [5, 6, 7, 8], 4)


def test_a_model_that_is_called_while_it_is_served_says_so():
    from attnspan.integrations.huggingface.served_layers import served_layers
    from attnspan.integrations.huggingface.serving_binding import attention_over_pages

    model = tiny("Llama")
    served_layers(model)  # as an engine does when it is made: transformers then knows the name
    with (
        attention_over_pages(model),
        pytest.raises(EngineError, match="LlamaAttention was called while an engine serves its model"),
    ):
        model(torch.tensor([[5]]))


@pytest.mark.parametrize(("name", "plain"), [("LlamaConfig", True), ("Gemma3Config", False)])  # with configs inside
def test_a_config_is_served_as_by_its_setter(name, plain):
    import transformers

    from attnspan.integrations.huggingface.serving_binding import ServingBinding, _is_plain

    model, expected = torch.nn.Module(), getattr(transformers, name)()
    model.config = getattr(transformers, name)()
    assert _is_plain(model.config) is plain
    binding = ServingBinding(model)
    for attention in ("attnspan_paged", "eager"):
        binding.set_attention(model.config, attention)
        expected._attn_implementation = attention
        for one, must in zip(_all_configs(model.config), _all_configs(expected), strict=True):
            assert one._attn_implementation == must._attn_implementation == attention
        assert binding.attention_of(model.config) == attention


def test_a_config_whose_attention_lies_elsewhere_is_served_by_its_setter():
    from transformers import LlamaConfig

    from attnspan.integrations.huggingface.serving_binding import _is_plain

    class Moved(LlamaConfig):
        _attn_implementation = property(lambda self: self.moved, lambda self, name: setattr(self, "moved", name))

    assert not _is_plain(Moved())


def _all_configs(config):
    return [config, *(getattr(config, name) for name in config.sub_configs)]


def test_leaving_the_block_ends_what_is_left():
    with engine() as one:
        request = one.add([5], SamplingParams(max_new_tokens=5))
        one.step()
    assert request.finish_reason == "cancelled"
    one.check()


def test_an_engine_that_is_let_go_of_frees_its_pages():
    import weakref

    one = engine()
    one.generate([[5]], SamplingParams(max_new_tokens=2))
    pool = weakref.ref(one._pools.pools[0])
    del one
    gc.collect()
    assert pool() is None


def test_printed_it_tells_what_it_has_and_does():
    one = engine()
    request = one.add([5, 6], SamplingParams(max_new_tokens=5))
    assert repr(one) == "Engine(LlamaForCausalLM, 64 pages of 4 tokens, 0 running, 1 queued)"
    one.step()
    assert repr(request) == "Request(0, prompt of 2 tokens, 1 tokens so far)"


# ---- logits that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}, {"top_logprobs": 3}], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_end_a_sample_with_an_error_and_no_other(params, number):
    model, [bad, good] = copy.deepcopy(tiny("Llama")), prompts([9, 12])
    marked, bad = 96, [*bad, 96]
    good = [token if token != marked else 5 for token in good]
    expected = greedy(tiny("Llama"), good, 5)
    assert marked not in expected
    model.model.embed_tokens.weight[marked, 0] = number
    one = engine(model)
    request = one.add(bad, SamplingParams(max_new_tokens=5, n=2, seed=0, **params))
    other = one.add(good, SamplingParams(max_new_tokens=5))
    told = [token for _ in range(8) for token in one.step()]
    assert [sample.finish_reason for sample in request.continuations] == ["error", "error"]
    assert [sample.token_ids for sample in request.continuations] == [[], []]
    assert str(request.error).startswith(
        f"sample 1 of request 0 ended after {len(bad)} tokens: the model's logits are NaN or infinite there"
    )
    assert [(token.token_id, token.finish_reason) for token in told if token.request is request] == [
        (None, "error")
    ] * 2
    assert other.token_ids == expected
    assert one.unfinished == []
    one.check()
    streamed = list(one.stream(bad, SamplingParams(max_new_tokens=5)))
    assert [(token.token_id, token.finish_reason) for token in streamed] == [(None, "error")]
    one.check()


# ---- salts and stops -------------------------------------------------------------------------------------------------


def test_salts_of_different_types_are_different():
    one, [prompt] = engine(pages=256), prompts([40])
    salts = [1, True, 1.0, (1, "a"), (True, "a"), frozenset([1]), frozenset([1.0]), "1", None, 0, False]
    for salt in salts:
        one.generate([prompt], salt=salt)
    assert one.counts.cached == 0
    for salt in salts:
        known = one.counts.cached
        one.generate([prompt], salt=salt)
        assert one.counts.cached == known + 39


def test_a_special_token_is_a_text_to_stop_at():
    model, end = tiny("Llama", vocab_size=300), tokenizer().convert_tokens_to_ids("<end>")
    one = Engine(model, pages=64, page_size=4, tokenizer=tokenizer())
    [free] = one.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    model = copy.deepcopy(model)
    weight = model.lm_head.weight
    weight[[end, free.token_ids[2]]] = weight[[free.token_ids[2], end]]
    one = Engine(model, pages=64, page_size=4, tokenizer=tokenizer())
    [answer] = one.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, stop="<end>"))
    assert answer.token_ids == [*free.token_ids[:2], end]
    assert answer.finish_reason == "stop"


# ---- compiled models -------------------------------------------------------------------------------------------------


def in_place(model):
    model.compile()
    return model


def a_layer(model):
    model.model.layers[0].compile()
    return model


def its_forward(model):
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (torch.compile, r"model \(OptimizedModule\) is compiled, by torch.compile\(...\); give what was compiled"),
        (in_place, r"model \(LlamaForCausalLM\) is compiled, by compile\(\); give a model that was not"),
        (a_layer, r"model.layers.0 \(LlamaDecoderLayer\) is compiled, by compile\(\)"),
        (its_forward, r"model \(LlamaForCausalLM\) is compiled, by forward = torch.compile\(forward\)"),
    ],
)
def test_a_compiled_model_is_refused_by_name_also_where_it_is_compiled_later(compiled, message):
    with pytest.raises(ModelError, match=message):
        Engine(compiled(copy.deepcopy(tiny("Llama"))), pages=64)
    if compiled is not torch.compile:
        model = copy.deepcopy(tiny("Llama"))
        one = engine(model)
        compiled(model)
        for _ in range(2):
            with pytest.raises(ModelError, match=message):
                one.generate([[5, 6]])
        one.check()


def test_parts_without_attention_may_be_compiled():
    model = copy.deepcopy(tiny("Llama"))
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    [prompt] = prompts([9])
    assert engine(model).generate([prompt], SamplingParams(max_new_tokens=4))[0].token_ids == greedy(
        tiny("Llama"), prompt, 4
    )
