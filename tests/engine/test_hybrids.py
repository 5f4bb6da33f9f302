"""Models with recurrent layers: token for token what `model.generate` says, whatever becomes of their states."""

import copy
import random

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine.model_runner import ModelRunner
from attnspan.errors import EngineError, ModelError
from attnspan.paged import StatePool
from attnspan.recurrence import PackedSequences
from attnspan.testing import loopback
from tests.engine.models import greedy, prompts, tiny
from tests.integrations.hybrids import REFUSED, SPECS, hybrid

pytestmark = pytest.mark.usefixtures("quietly")

DAILY = ("olmo-hybrid", "kimi-linear", "mamba2", "falcon-h1", "minimax", "lfm2", "jamba")
"""Each has a recurrence, a mixture of layers or a convolution that no other has."""


def model_of(name):
    model = hybrid(name).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def engine(model, **options):
    sizes = {"pages": 40, "page_size": 4, "max_tokens": 9, "max_sequences": 3, "state_every": 2, "states": 16}
    return Engine(model, **(sizes | options))


def asked_of(model, lengths=(5, 33, 17, 1)):
    """Prompts, of which one begins like another."""
    found = [[token % (model.config.vocab_size - 2) + 2 for token in prompt] for prompt in prompts(lengths)]
    return [*found, [*found[1][:20], 3, 4]]


def said(one, asked, new=8):
    answers = one.generate(asked, SamplingParams(max_new_tokens=new))
    one.check()
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def test_a_family_says_what_it_says_alone(name):
    model = model_of(name)
    asked = asked_of(model)
    true = [greedy(model, prompt, 8) for prompt in asked]
    one = engine(model)
    assert said(one, asked) == true
    assert said(one, asked) == true
    assert one.counts.cached >= 32 + 16 + 16  # whole borders, of prompts that are found again
    for found in loopback(2).run(lambda world: said(engine(model, mesh=world, context_parallel_from=16), asked)):
        assert found == true


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_family_says_what_it_says_alone_over_ranks_in_chunks_or_all_at_once(name, ranks):
    model = model_of(name)
    asked = asked_of(model, (5, 33, 17, 1, 2))
    true = [greedy(model, prompt, 8) for prompt in asked]
    for options in ({"context_parallel_from": 6}, {"context_parallel_from": 99}, {"prefix_cache": False}):
        options = {"context_parallel_from": 16, "max_tokens": 7} | options
        for found in loopback(ranks).run(lambda world: said(engine(model, mesh=world, **options), asked)):  # noqa: B023
            assert found == true


@pytest.mark.parametrize("chunk", [3, 5, 16])
def test_prompts_are_computed_in_chunks_of_any_size(chunk):
    model = tiny("Qwen3Next")
    asked = asked_of(model)
    for options in ({"prefix_cache": False}, {"state_every": 1}):
        one = engine(model, max_tokens=chunk, **options)
        assert said(one, asked) == [greedy(model, prompt, 8) for prompt in asked]


@pytest.mark.parametrize(("name", "host_pages"), [("Qwen3Next", 0), ("Qwen3Next", 30), ("mamba2", 0), ("mamba2", 30)])
def test_tokens_stay_the_same_when_requests_come_and_go_and_states_run_out(name, host_pages):
    model, draw = tiny(name) if name == "Qwen3Next" else model_of(name), random.Random(name)
    one = engine(model, pages=13, page_size=3, max_sequences=5, host_pages=host_pages, states=5, state_every=1)
    left, requests, cancelled = asked_of(model, (3, 1, 2, 1, 20, 14, 11)), [], []
    while left or one.unfinished:
        while left and (len(requests) < 4 or draw.random() < 0.3):
            requests.append(one.add(left.pop(0), SamplingParams(max_new_tokens=16)))
        if one.unfinished and len(cancelled) < 2 and draw.random() < 0.1:
            cancelled.append(draw.choice(one.unfinished))
            one.cancel(cancelled[-1])
        one.step()
        one.check()
    for request in requests:
        expected = greedy(model, request.prompt, 16)
        assert request.token_ids == (expected[: len(request.token_ids)] if request in cancelled else expected)
    assert len(cancelled) == 2
    assert one.counts.swapped_out if host_pages else one.counts.recomputed, "there were to be too few states"


@pytest.mark.parametrize("length", [15, 16, 17])  # before a border, at one, behind one
def test_samples_of_one_prompt_share_its_state_until_they_go_on(length):
    model = tiny("Qwen3Next")
    [prompt] = prompts([length])
    params = SamplingParams(max_new_tokens=12, n=3, temperature=1.0, seed=1)
    found = [
        [sample.token_ids for sample in engine(model, **options).generate([prompt], params)[0].continuations]
        for options in ({}, {"prefix_cache": False}, {"states": 3, "host_pages": 9}, {"states": 2, "state_every": 1})
    ]
    assert found == [found[0]] * 4
    assert len({tuple(tokens) for tokens in found[0]}) == 3
    alone = engine(model).generate([prompt], SamplingParams(max_new_tokens=5, n=3))[0]
    assert [sample.token_ids for sample in alone.continuations] == [greedy(model, prompt, 5)] * 3


def test_a_prompt_begins_at_the_last_border_that_it_shares():
    model = tiny("Qwen3Next")
    [stem, tail] = prompts([30, 6])
    one = engine(model)
    said(one, [stem])
    for shared, found in ((30, 24), (29, 24), (24, 24), (23, 16), (9, 8), (7, 0)):
        before, prompt = one.counts.cached, [*stem[:shared], *tail]
        assert said(one, [prompt]) == [greedy(model, prompt, 8)]
        assert one.counts.cached - before == found, shared
    answer = [*stem, *greedy(model, stem, 8)]  # borders within an answer are found as well
    before = one.counts.cached
    assert said(one, [[*answer, 5]]) == [greedy(model, [*answer, 5], 8)]
    assert one.counts.cached - before == 32


def test_a_salt_keeps_states_apart_as_it_keeps_pages():
    model = tiny("Qwen3Next")
    one, [prompt] = engine(model), prompts([20])
    for salt, found in (("a", 0), ("b", 0), ("a", 16)):
        before = one.counts.cached
        one.generate([prompt], SamplingParams(max_new_tokens=2), salt=salt)
        assert one.counts.cached - before == found


def test_a_step_that_fails_leaves_states_as_they_were(monkeypatch):
    model = tiny("Qwen3Next")
    one, asked = engine(model), prompts([20, 9])
    requests = [one.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in asked]
    states = one._pools.states
    for number in range(12):
        one.step()
        before = [state.clone() for state in states.states]
        with monkeypatch.context() as patch:
            owner, name = [(PackedSequences, "run"), (model.lm_head, "forward"), (ModelRunner, "_logits")][number % 3]
            function, calls = getattr(owner, name), []

            def fails_at_last(*args, function=function, calls=calls):
                calls.append(function(*args))
                if len(calls) == (2 if number % 3 == 0 else 1):  # noqa: B023
                    raise MemoryError("planted")
                return calls[-1]

            patch.setattr(owner, name, fails_at_last)
            if one.unfinished:
                with pytest.raises(MemoryError, match="planted"):
                    one.step()
                assert all(map(torch.equal, before, states.states))
        one.check()
    while one.unfinished:
        one.step()
    assert [request.token_ids for request in requests] == [greedy(model, prompt, 8) for prompt in asked]


@pytest.mark.parametrize("defect", ["not reset", "not copied", "not at a border", "written at once"])
def test_a_planted_defect_is_seen(monkeypatch, defect):
    model = tiny("Qwen3Next")
    [stem] = prompts([13])
    asked = [stem, [*stem[:9], 3], [*stem[:12], 7, 8]]
    params = SamplingParams(max_new_tokens=8, n=2, temperature=1.0, seed=3)
    expected = [sample.token_ids for sample in engine(model).generate([stem], params)[0].continuations]
    one = engine(model, max_tokens=5)
    if defect == "not reset":
        for state in one._pools.states.states:
            state[0] += 1
    elif defect == "not copied":
        monkeypatch.setattr(StatePool, "copy", lambda self, copies: None)
    elif defect == "not at a border":
        monkeypatch.setattr(type(one._scheduler.kv_cache), "to_border", lambda self, computed: None)
    else:
        attention, before = one._runner._attention, one._runner._attention._read

        def counted_twice(state, used):
            attention.pools.states.write(state, attention.states, before(state, used) * 1.5)
            return attention.pools.states.read(state, attention.states)

        monkeypatch.setattr(attention, "_read", counted_twice)
    true = [greedy(model, prompt, 8) for prompt in asked]
    if defect == "not copied":
        assert [sample.token_ids for sample in one.generate([stem], params)[0].continuations] != expected
    else:
        assert said(one, asked) != true or said(one, asked) != true


# ---- the model -------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = tiny("Qwen3Next")
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    stream = engine(model).stream(prompts([5]), SamplingParams(max_new_tokens=3))
    next(stream)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    stream.close()


def test_ranks_that_share_a_model_do_not_take_each_others_steps_for_changes():
    """One compares the parts of the model while another serves it."""
    model, asked = tiny("Qwen3Next"), prompts([20, 33])

    def rank(world):
        one = engine(model, mesh=world, context_parallel_from=999)
        assert said(one, asked) == said(one, asked)
        return one._fingerprint.changes, one.counts.cached

    assert loopback(3).run(rank) == [(0, 16 + 32)] * 3


def test_a_mixer_that_was_exchanged_for_another_is_served():
    model = copy.deepcopy(tiny("Qwen3Next"))
    one, [prompt] = engine(model), prompts([20])
    assert said(one, [prompt]) == [greedy(model, prompt, 8)]
    mixer = copy.deepcopy(model.model.layers[0].linear_attn)
    mixer.A_log.sub_(3)
    model.model.layers[0].linear_attn = mixer
    other = copy.deepcopy(model)  # greedy remembers what a model said
    assert said(one, [prompt]) == [greedy(other, prompt, 8)]


def test_mixers_that_changed_places_are_served_where_they_are():
    model = copy.deepcopy(tiny("Qwen3Next"))
    one, [prompt] = engine(model), prompts([20])
    said(one, [prompt])
    first, middle, last = model.model.layers
    model.model.layers = torch.nn.ModuleList([last, middle, first])
    assert said(one, [prompt]) == [greedy(copy.deepcopy(model), prompt, 8)]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (
            0,
            r"layers\.2\.linear_attn uses state 0 of its model, unlike when it was probed; the model has changed since",
        ),
        (2, "2 of 4 recurrent states were used in a call of the model; it has changed since the engine was made"),
    ],
)
def test_a_model_that_leaves_a_mixer_out_is_refused(layer, why):
    model = copy.deepcopy(tiny("Qwen3Next"))
    one, [prompt] = engine(model), prompts([20])
    model.model.layers[layer].forward = lambda hidden_states, *args, **named: hidden_states
    with pytest.raises(ModelError, match=why):
        one.generate([prompt])
    del model.model.layers[layer].forward
    assert said(one, [prompt]) == [greedy(model, prompt, 8)]


def test_a_model_whose_mixer_runs_by_itself_while_it_is_served_is_refused():
    from attnspan.integrations.huggingface.serving_binding import attention_over_pages

    model = tiny("Qwen3Next")
    engine(model)
    with attention_over_pages(model), pytest.raises(EngineError, match="was called while an engine serves its model"):
        model.model.layers[0](torch.zeros(1, 2, 32), position_embeddings=None)


def test_a_model_without_attention_has_no_last_position_and_no_pages():
    model = model_of("mamba2")
    one = engine(model, pages=1)
    assert one.max_length == (1 << 31) - 1
    prompt = asked_of(model, (5, 99))[1]
    assert said(one, [prompt]) == [greedy(model, prompt, 8)]
    assert "16 states" in repr(one)


def test_an_engine_is_warmed_up():
    model = tiny("Qwen3Next")
    one, [prompt] = engine(model, pages=200), prompts([20])
    said(one, [prompt])
    one.warm_up()
    one.check()
    before = one.counts.cached
    assert said(one, [prompt]) == [greedy(model, prompt, 8)]
    assert one.counts.cached > before


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_as_enable_does(name):
    model, (_, _, why) = hybrid(name).eval(), REFUSED[name]
    with pytest.raises(ModelError) as raised:
        engine(model)
    assert why in str(raised.value)


def test_other_refusals():
    model = copy.deepcopy(tiny("Qwen3Next"))
    with pytest.raises(EngineError, match="states must be a whole number >= 2, got 1"):
        engine(model, states=1)
    with pytest.raises(EngineError, match="state_every must be a whole number >= 1, got 0"):
        engine(model, state_every=0)
    with pytest.raises(EngineError, match="cuda_graphs=True: the model has recurrent layers, whose states no graph"):
        engine(model, cuda_graphs=True)
    mixer = model.model.layers[2].linear_attn
    mixer.forward = lambda *args, **named: None
    with pytest.raises(ModelError, match=r"layers.2.linear_attn .* has forward, a function of its own"):
        engine(model)
    del mixer.forward
    mixer._compiled_call_impl = object()  # as compile() does
    with pytest.raises(ModelError, match=r"layers.2.linear_attn .* is compiled, by compile\(\)"):
        engine(model)
