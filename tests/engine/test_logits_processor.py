"""Logits are what transformers' own processors make of them, in transformers' own order, for all rows at once."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import GenerationConfig

from attnspan import Engine, SamplingParams
from attnspan.engine.draws import RowSampling, SamplingTensors, probabilities
from attnspan.engine.logits_processor import LogitsProcessor, LogitsRow, LogitsRules, RuledRows
from attnspan.engine.request import Request
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import SampledToken, Sampler
from attnspan.engine.scheduler import Chunk
from attnspan.testing import loopback
from tests.engine.models import greedy, prompts, tiny, tokenizer

V = 40
tokens = st.integers(0, V - 1)
biases = st.sampled_from([-float("inf"), -3.0, -0.5, 0.25, 2.5])
sequences = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)  # of few tokens, so that they occur
FIELDS = {
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "sequence_bias": st.dictionaries(sequences, biases, min_size=1, max_size=4),
    "bad_words": st.lists(sequences, min_size=1, max_size=4),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
    "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
    "min_new_tokens": st.integers(0, 4),
    "min_length": st.integers(0, 6),
    "forced_bos_token_id": tokens,
    "forced_eos_token_id": tokens,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 2), st.sampled_from([0.9, 1.2, 2.0])),
}
CUTS = {
    "top_h": st.sampled_from([0.1, 0.4, 0.95]),  # at 1 rounding decides whether the last of all is in
    "top_k": st.integers(1, V + 5),
    "top_p": st.sampled_from([1e-6, 0.3, 0.9]),
    "min_p": st.sampled_from([0.01, 0.2, 1.0]),
    "typical_p": st.sampled_from([0.1, 0.5, 0.95]),
    "epsilon_cutoff": st.sampled_from([1e-3, 0.05, 0.9]),
    "eta_cutoff": st.sampled_from([1e-3, 0.05, 0.9]),
}
some = st.fixed_dictionaries({}, optional=FIELDS)
cuts = st.fixed_dictionaries({}, optional=CUTS)
histories = st.tuples(st.integers(1, 8), st.lists(st.integers(0, 5), min_size=0, max_size=8))


def history(prompt, generated):
    """A prompt of so many tokens, which occur among the generated ones too."""
    return [place % 4 for place in range(prompt)] + generated


def oracle(options, said, prompt_length, ends, new=6, **sampling):
    """transformers' processors, as `generate` lists them."""
    named = {{"bad_words": "bad_words_ids"}.get(name, name): value for name, value in options.items()}
    if "min_new_tokens" in options:
        named.pop("min_length", None)  # as `generate` does before it lists them
    if "bad_words" in options:
        named["bad_words_ids"] = [list(word) for word in options["bad_words"]]
    config = GenerationConfig(**named, max_length=prompt_length + new, do_sample=bool(sampling), **sampling)
    config._eos_token_tensor = torch.tensor(sorted(ends)) if ends else None
    if not ends:
        config.exponential_decay_length_penalty = None  # transformers needs an end token for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processors = tiny("Llama")._get_logits_processor(config, input_ids_seq_length=prompt_length, device="cpu")
    return lambda scores: processors(torch.tensor([said]), scores.unsqueeze(0))[0]


def logits_of(rows):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * 3


def ruled(logits, rows, rules):
    return RuledRows(rows, rules, logits.shape[1], logits.device)


def processed(logits, rows, rules):
    """By our own, for the rows that have rules."""
    out = logits.clone()
    places = [place for place, rule in enumerate(rules) if rule is not None]
    if places:
        some = [rows[place] for place in places], [rules[place] for place in places]
        out[places] = LogitsProcessor()(logits[places], ruled(logits, *some))
    return out


@given(st.lists(st.tuples(some, histories), min_size=1, max_size=4), st.sets(tokens, max_size=2))
def test_every_row_is_what_transformers_makes_of_it(asked, ends):
    rows, rules, expected = [], [], []
    logits = logits_of(len(asked))
    for number, (options, (prompt, generated)) in enumerate(asked):
        said = history(prompt, generated)
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            assume(options.get(name) not in options.get("suppress_tokens", []))  # refused, here and there
        rows.append(LogitsRow((number, 0), said, prompt))
        params = SamplingParams(max_new_tokens=6, **options).over(SamplingParams())
        rules.append(LogitsRules.of(params, frozenset(ends)))
        expected.append(oracle(options, said, prompt, ends)(logits[number]))
    # The same operations in float32; only where there are two biases for one token may a sum be rounded otherwise.
    torch.testing.assert_close(processed(logits, rows, rules), torch.stack(expected), rtol=1e-6, atol=1e-6)


@given(st.lists(cuts, min_size=1, max_size=4), st.sampled_from([0.3, 1.0, 2.0]), st.booleans())
def test_cuts_leave_the_probabilities_that_transformers_leaves(asked, temperature, banned):
    logits = logits_of(len(asked)).double()
    if banned:
        logits[:, ::3] = -torch.inf  # by an earlier rule
    draws = [RowSampling.of(SamplingParams(temperature=temperature, **options)) for options in asked]
    found = probabilities(logits, SamplingTensors(draws, logits.device))
    for row, options in enumerate(asked):
        scores = oracle({}, [1], 1, (), temperature=temperature, **({"top_k": 0} | options))(logits[row])
        torch.testing.assert_close(found[row], scores.softmax(-1), rtol=1e-9, atol=1e-12)  # float64, both


@given(st.lists(st.integers(0, 5), min_size=3, max_size=12), st.integers(0, 3), st.booleans())
def test_what_is_remembered_of_a_sample_is_what_its_tokens_say(said, forgotten, same):
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, no_repeat_ngram_size=2)
    rule, logits, one = LogitsRules.of(params.over(SamplingParams()), frozenset()), logits_of(2), LogitsProcessor()
    growing = said[:2]
    batch = ruled(logits, [LogitsRow((0, 0), growing, 2), LogitsRow((0, 1), growing, 2)], [rule] * 2)
    for length in range(2, len(said) + 1):
        growing[:] = said[:length]
        if length == forgotten:
            one.reset()
        rows = batch if same else ruled(logits, [LogitsRow((0, 0), growing, 2), batch.rows[1]], [rule] * 2)
        one.discard((0, 1))  # as if it were another each time
        again = LogitsProcessor()(logits, rows)
        assert one(logits, rows).equal(again)
        assert one(logits, rows).equal(again)  # a step that is tried again counts nothing twice


def test_a_sequence_that_is_longer_than_the_history_adds_nothing():
    params = SamplingParams(sequence_bias={(1, 2): -3.0, (1, 1, 2): -5.0}).over(SamplingParams())
    logits = logits_of(1)
    [found] = LogitsProcessor()(
        logits, ruled(logits, [LogitsRow((0, 0), [1], 1)], [LogitsRules.of(params, frozenset())])
    )
    assert found[2] == logits[0, 2] - 3.0


def test_presence_and_frequency_count_generated_tokens_as_openai_does():
    rule = LogitsRules.of(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25).over(SamplingParams()), frozenset()
    )
    logits = logits_of(1)
    found = LogitsProcessor()(logits, ruled(logits, [LogitsRow((0, 0), [1, 2, 3, 3, 2, 3], 2)], [rule]))
    expected = logits.clone()
    expected[0, 3] -= 0.5 + 3 * 0.25
    expected[0, 2] -= 0.5 + 0.25
    assert found.equal(expected)  # numbers that are exact in float32


def test_a_bias_is_added_and_only_allowed_tokens_are_left():
    params = SamplingParams(logit_bias={3: 2.5, 9: -1}, allowed_tokens=[3, 5, 9]).over(SamplingParams())
    logits = logits_of(1)
    [found] = LogitsProcessor()(
        logits, ruled(logits, [LogitsRow((0, 0), [1], 1)], [LogitsRules.of(params, frozenset())])
    )
    assert found[[3, 5, 9]].equal(logits[0, [3, 5, 9]] + torch.tensor([2.5, 0.0, -1.0]))
    assert found.isfinite().sum() == 3


def test_a_length_penalty_without_bound_leaves_logits_finite():
    params = SamplingParams(exponential_decay_length_penalty=(0, 3.0), max_new_tokens=5000).over(SamplingParams())
    rule, logits = LogitsRules.of(params, frozenset({7})), logits_of(1)
    [found] = LogitsProcessor()(logits, ruled(logits, [LogitsRow((0, 0), [1] * 4000, 1)], [rule]))
    assert found.isfinite().all()
    assert found.argmax() == 7


def test_tokens_that_have_no_logits_may_be_named_and_do_nothing():
    beyond = {
        "logit_bias": {V + 1: 3.0}, "suppress_tokens": [V], "begin_suppress_tokens": [V], "bad_words": [[1, V], [V]],
        "repetition_penalty": 2.0, "frequency_penalty": 1.0, "exponential_decay_length_penalty": (0, 2.0),
        "stop_token_ids": [V], "min_new_tokens": 9, "no_repeat_ngram_size": 2, "allowed_tokens": [*range(V + 3)],
    }  # fmt: skip
    params, row = SamplingParams(**beyond).over(SamplingParams()), LogitsRow((0, 0), [V, 1, V, 1], 3)
    logits = logits_of(1)
    [found] = LogitsProcessor()(logits, ruled(logits, [row], [LogitsRules.of(params, frozenset())]))
    others = torch.arange(V) != 1
    assert found[others].equal(logits[0, others])
    forced = SamplingParams(forced_bos_token_id=V).over(SamplingParams())
    [found] = LogitsProcessor()(
        logits, ruled(logits, [LogitsRow((0, 0), [1], 1)], [LogitsRules.of(forced, frozenset())])
    )
    assert found.isneginf().all()


def test_params_can_be_replaced_hashed_and_sent():
    params = SamplingParams(
        logit_bias={3: 1.0}, sequence_bias=[[[1, 2], 0.5]], bad_words=["a", [4]], forced_eos_token_id=2, stop=["x"],
        exponential_decay_length_penalty=(2, 1.5),
    )  # fmt: skip
    for same in (dataclasses.replace(params), pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert same == params
        assert hash(same) == hash(params)
    assert params.over(SamplingParams(top_k=3)).over(SamplingParams()) == params.over(SamplingParams(top_k=3))


def test_rows_without_rules_do_not_come_here():
    assert (
        LogitsRules.of(SamplingParams(temperature=1.0, top_k=3, min_p=0.1).over(SamplingParams()), frozenset({5}))
        is None
    )
    assert (
        LogitsRules.of(SamplingParams(min_new_tokens=3).over(SamplingParams()), frozenset()) is None
    )  # nothing ends it


# ---- over the engine -------------------------------------------------------------------------------------------------

OPTIONS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1},
    {"bad_words": [[5], [7, 8]], "suppress_tokens": [9, 11]},
    {"sequence_bias": {(5,): 2.0, (3, 4): -4.0}, "begin_suppress_tokens": [61, 29]},
    {"min_new_tokens": 7, "exponential_decay_length_penalty": (2, 1.4)},
    {"forced_eos_token_id": 2, "min_length": 12},
    {"min_new_tokens": 1, "min_length": 20},  # the first alone counts
    {"forced_bos_token_id": 3},
    {},
]


def generated(model, prompt, options, **more):
    """By `model.generate`."""
    named = {{"bad_words": "bad_words_ids"}.get(name, name): value for name, value in options.items()}
    given_ = torch.tensor([prompt])
    out = model.generate(
        given_, attention_mask=torch.ones_like(given_), max_new_tokens=12, pad_token_id=0, **named, **more
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model():
    """A model with end tokens that it is likely to say."""
    model = copy.deepcopy(tiny("Llama"))
    said = [token for prompt in prompts([9, 4, 1]) for token in greedy(model, prompt, 12)]
    model.generation_config.eos_token_id = [said[6], said[16]]
    return model


def engine(model, **options):
    return Engine(model, **({"pages": 128, "page_size": 4, "max_sequences": 16} | options))


def test_greedy_tokens_are_those_of_generate_with_the_same_options_all_in_one_batch(model):
    asked = [(prompt, options) for options in OPTIONS for prompt in prompts([9, 1])]
    answers = engine(model).generate(
        [prompt for prompt, _ in asked], [SamplingParams(max_new_tokens=12, **options) for _, options in asked]
    )
    for answer, (prompt, options) in zip(answers, asked, strict=True):
        assert answer.token_ids == generated(model, prompt, options), options


def test_penalties_count_on_after_a_step_in_inference_mode(model):
    one, [prompt] = engine(model), prompts([9])
    request = one.add(prompt, SamplingParams(max_new_tokens=12, repetition_penalty=1.3))
    with torch.inference_mode():
        one.step()
    while one.unfinished:
        one.step()
    assert request.token_ids == generated(model, prompt, {"repetition_penalty": 1.3})


def test_a_seed_gives_the_same_tokens_with_all_options_in_any_company_and_after_preemption(model):
    every = SamplingParams(
        max_new_tokens=16, temperature=1.2, seed=7, n=2, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.95,
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2, no_repeat_ngram_size=3,
        logit_bias={5: 1.0}, bad_words=[[7], [8, 9]], suppress_tokens=[11], min_new_tokens=14, ignore_eos=True,
    )  # fmt: skip
    asked = prompts([9, 3, 11, 6])
    alone = [engine(model).generate([prompt], every)[0] for prompt in asked]
    crowded = engine(model, pages=20, page_size=3, max_tokens=16, prefix_cache=False)
    answers = crowded.generate(asked, every)
    assert crowded.counts.recomputed
    for one, other in zip(alone, answers, strict=True):
        assert [each.token_ids for each in one.continuations] == [each.token_ids for each in other.continuations]
    assert not crowded._sampler.requests
    assert not crowded._sampler.processor.counts.table_rows
    assert not crowded._sampler.processor.ngrams


def test_two_ranks_say_what_one_says(model):
    asked, params = prompts([9, 30]), [
        SamplingParams(max_new_tokens=9, temperature=1.2, seed=7, repetition_penalty=1.4, bad_words=[[5]], n=2),
        SamplingParams(max_new_tokens=9, no_repeat_ngram_size=2, presence_penalty=1.0),
    ]  # fmt: skip
    alone = [[each.token_ids for each in answer.continuations] for answer in engine(model).generate(asked, params)]

    def rank(world):
        spread = engine(model, mesh=world, context_parallel_from=16)
        return [[each.token_ids for each in answer.continuations] for answer in spread.generate(asked, params)]

    assert loopback(2).run(rank) == [alone] * 2


def test_logprobs_are_the_models_own_whatever_the_options_make_of_them(model):
    [prompt] = prompts([9])
    [answer] = engine(model).generate([prompt], SamplingParams(suppress_tokens=[5], logit_bias={3: 50}, logprobs=True))
    assert set(answer.token_ids) == {3}
    logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert answer.logprobs == pytest.approx(logits.log_softmax(-1)[:, 3].tolist(), abs=1e-4)


def test_a_sample_for_which_no_token_is_left_ends_with_an_error_that_says_so(model):
    one = engine(model)
    none = SamplingParams(allowed_tokens=[5], suppress_tokens=[5])
    drawn = SamplingParams(allowed_tokens=[5], suppress_tokens=[5], temperature=1.0, logprobs=True)
    bad, worse, good = one.generate([[5, 6]] * 3, [none, drawn, SamplingParams(max_new_tokens=4)])
    for request in (bad, worse):
        assert request.finish_reason == "error"
        assert "its options leave no token there; allow one more, or ban fewer" in str(request.error)
    assert good.token_ids == generated(model, [5, 6], {})[:4]


def test_bad_words_may_be_texts_which_are_banned_at_the_beginning_and_after_a_space():
    one = Engine(tiny("Llama", vocab_size=320), pages=64, tokenizer=tokenizer())
    said = one.add("the", SamplingParams(bad_words=["cat", [5]]))
    spelt = {tuple(tokenizer().encode(text)) for text in ("cat", " cat")}
    assert {*said.params.bad_words} == {*spelt, (5,)}

    class Wrapping:
        """As tokenizers that put tokens around every text."""

        def __len__(self):
            return 97

        def encode(self, text):
            return [1, *(3 + ord(letter) % 50 for letter in text), 2]

        def decode(self, token_ids, *, skip_special_tokens=True):
            return ""

    one = Engine(tiny("Llama"), pages=64, tokenizer=Wrapping())
    a, b, space = (3 + ord(letter) % 50 for letter in "ab ")
    assert one.add("x", SamplingParams(bad_words=["ab"])).params.bad_words == ((a, b), (space, a, b))


def test_a_step_that_is_tried_again_counts_no_token_twice(model):
    [prompt], params = prompts([9]), SamplingParams(max_new_tokens=8, repetition_penalty=1.5, frequency_penalty=1.0)
    one = engine(model)
    expected = one.generate([prompt], params)[0].token_ids
    request, commit, failing = one.add(prompt, params), one._outcomes, iter([False, True] * 20)

    def outcomes(samples, answers):
        if next(failing):
            raise MemoryError
        return commit(samples, answers)

    one._outcomes = outcomes
    while one.unfinished:
        try:
            one.step()
        except MemoryError:
            continue
    assert request.token_ids == expected


def test_choosing_among_rows_with_and_without_rules_draws_each_from_its_own():
    logits = logits_of(4)
    params = [
        SamplingParams(temperature=1.0, seed=1, suppress_tokens=range(20)),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(suppress_tokens=range(20)),
        SamplingParams(),
    ]

    together = Sampler()
    for number, each in enumerate(params):
        together.add(Request(number, [1, 2], each.over(SamplingParams()), each.seed or 0), frozenset())
    chunks = [Chunk(Sample(number, [1, 2], 9), 2) for number in range(4)]
    answers = together.sample(logits, chunks).read()
    for place, chunk in enumerate(chunks):
        assert together.sample(logits[place : place + 1], [chunk]).read() == [answers[place]]
    assert answers[0].token >= 20 <= answers[2].token
    assert answers[3] == SampledToken(int(logits[3].argmax()))


MIXED = [
    {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5}, {"logit_bias": {3: 4.0}, "logprobs": True},
    {"temperature": 1.3, "allowed_tokens": [*range(9)], "top_logprobs": 2}, {"bad_words": [[1, 2], [5]], "n": 2},
    {"temperature": 1.0, "presence_penalty": 2.0, "n": 3}, {"no_repeat_ngram_size": 1, "min_p": 0.1},
]  # fmt: skip


@given(st.lists(st.lists(st.integers(0, len(MIXED) - 1), min_size=1, max_size=5, unique=True), min_size=1, max_size=6))
def test_a_sampler_remembers_nothing_that_changes_a_token(batches):
    params = [SamplingParams(**{"seed": 1} | options).over(SamplingParams()) for options in MIXED]
    requests = [Request(number, [1, 2], each, each.seed) for number, each in enumerate(params)]

    def fresh():
        sampler = Sampler()
        for request in requests:
            sampler.add(request, frozenset({7}))
        return sampler

    one = fresh()
    samples = [Sample(number, [1, 2, 5], 99, forks=(each.n or 1) - 1) for number, each in enumerate(params)]
    for step, batch in enumerate(batches):
        chunks = [Chunk(samples[number], 1) for number in batch]
        logits = logits_of(step + 1)[:1].expand(sum(1 + samples[number].forks for number in batch), -1)
        found = one.sample(logits, chunks).read()
        assert found == fresh().sample(logits, chunks).read()
        assert found == one.sample(logits, chunks).read()  # a step that is tried again
        for number in batch:
            samples[number].tokens.append(found.pop(0).token)
            del found[: samples[number].forks]
            samples[number].forks = 0
