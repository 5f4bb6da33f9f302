"""Steps that are launched before the tokens are read that they are fed: nobody is told anything else.

Engines run ahead where they decode by CUDA graphs. On the CPU they are made to, and the device is done at once.
"""

import copy

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine import core
from attnspan.engine.model_runner import ModelRunner
from tests.devices import on_every_device
from tests.engine.disturbed import Faults, catalogue, interrupt
from tests.engine.models import greedy, prompts, tiny, tokenizer
from tests.engine.test_disturbed import at_lines, faulty


@pytest.fixture
def ahead(monkeypatch):
    """Every engine without recurrent layers runs ahead; what was launched, and how much of it counted."""
    counts = {"launched": 0, "adopted": 0}
    init, launch, adopt = ModelRunner.__init__, core.EngineCore._launch_ahead, core.EngineCore._adopt_ahead

    def made(self, *args):
        init(self, *args)
        self.runs_ahead = self.pools.states is None

    def counted(name, method):
        def call(self, *args):
            found = method(self, *args)
            counts[name] += 0 if found is None else len(found.batch)
            return found

        return call

    monkeypatch.setattr(ModelRunner, "__init__", made)
    monkeypatch.setattr(core.EngineCore, "_launch_ahead", counted("launched", launch))
    monkeypatch.setattr(core.EngineCore, "_adopt_ahead", counted("adopted", adopt))
    return counts


def engine(family="Llama", device="cpu", **options):
    model = copy.deepcopy(tiny(family)).to(device)
    sizes = {"pages": 64, "page_size": 4, "max_sequences": 8, "cuda_graphs": device == "cuda"}
    return Engine(model, **(sizes | options))


def said(requests):
    return [[sample.token_ids for sample in request.continuations] for request in requests]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3"])
@on_every_device
def test_tokens_are_those_of_generate_and_every_row_counts_where_lengths_end_samples(family, device, ahead):
    asked, one = prompts([5, 17, 1, 9]), engine(family, device)
    params = [SamplingParams(max_new_tokens=new) for new in (12, 3, 1, 20)]
    requests = one.generate(asked, params)
    assert said(requests) == [
        [greedy(tiny(family), prompt, each.max_new_tokens)] for prompt, each in zip(asked, params, strict=True)
    ]
    assert ahead["launched"] == ahead["adopted"] == 11 + 2 + 19
    assert one.counts.tokens == 5 + 17 + 1 + 9 + 11 + 2 + 19
    assert one._journal.ahead is None
    one.check()


OPTIONS = {
    "drawn": {"temperature": 1.0, "seed": 3},
    "drawn, of the likeliest": {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "seed": 4},
    "told": {"top_logprobs": 3},
    "a token that stops": {"stop_token_ids": range(20)},
    "several": {"n": 3, "temperature": 1.0, "seed": 5},
    "a penalty, which looks at tokens": {"repetition_penalty": 1.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@on_every_device
def test_options_mean_what_they_do_without(name, device, ahead, monkeypatch):
    params = SamplingParams(max_new_tokens=15, **OPTIONS[name])
    asked = prompts([5, 11, 3])
    found = engine(device=device).generate(asked, params)
    assert bool(ahead["launched"]) == ("penalty" not in name)
    plain = engine(device=device)
    plain._runner.runs_ahead = False
    expected = plain.generate(asked, params)
    assert said(found) == said(expected)
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.continuations[0].logprobs == other.continuations[0].logprobs
        assert one.continuations[0].top_logprobs == other.continuations[0].top_logprobs


@on_every_device
def test_a_text_that_stops_a_sample_leaves_one_row_for_nothing(device, ahead):
    one = Engine(copy.deepcopy(tiny("Llama", vocab_size=300)).to(device), pages=64, tokenizer=tokenizer(),
                 cuda_graphs=device == "cuda")  # fmt: skip
    [whole] = one.generate(["the cat"], SamplingParams(max_new_tokens=20))
    ahead.update(launched=0, adopted=0)
    stopped, other = one.generate(["the cat", "the dog"], [SamplingParams(max_new_tokens=20, stop=whole.text[4:7]),
                                                           SamplingParams(max_new_tokens=20)])  # fmt: skip
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.text[: whole.text.index(whole.text[4:7])])
    assert other.finish_reason == "length"
    assert ahead["launched"] == ahead["adopted"] + 1
    one.check()


@on_every_device
def test_requests_come_are_cancelled_and_are_preempted_meanwhile(device, ahead):
    asked = prompts([5, 17, 1, 9, 12, 7], seed=2)
    one = engine(device=device, pages=11, max_tokens=16, max_sequences=3, prefix_cache=False)
    requests = [one.add(prompt, SamplingParams(max_new_tokens=14)) for prompt in asked[:3]]
    for step in range(200):
        if step in (2, 4, 5):
            requests.append(one.add(asked[len(requests)], SamplingParams(max_new_tokens=14)))
        if step == 6:
            one.cancel(requests[1])
        one.check()
        if not one.unfinished:
            break
        one.step()
    for prompt, request in zip(asked, requests, strict=True):
        expected = greedy(tiny("Llama"), prompt, 14)
        assert request.token_ids == expected[: len(request.token_ids)]
        assert request.finish_reason == ("cancelled" if request is requests[1] else "length")
    assert one.counts.preempted
    assert ahead["adopted"]


def test_a_request_that_arrives_waits_for_one_step_at_most(ahead):
    one = engine()
    first = one.add([5, 6, 7], SamplingParams(max_new_tokens=30))
    for _ in range(4):
        one.step()
    second = one.add([8, 9], SamplingParams(max_new_tokens=2))
    one.step()
    assert len(second.token_ids) == 0
    one.step()
    assert len(second.token_ids) == 1
    assert len(first.token_ids) == 6


def test_what_ran_ahead_with_a_model_that_has_changed_does_not_count(ahead):
    model, [prompt] = copy.deepcopy(tiny("Llama")), prompts([5])
    one = Engine(model, pages=64)
    request = one.add(prompt, SamplingParams(max_new_tokens=9))
    for _ in range(3):
        one.step()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(len(request.token_ids)))
    with torch.no_grad():
        model.lm_head.weight.neg_()
    one.step()
    assert calls == [3, 3]  # the step itself, and the one ahead of it
    changed = copy.deepcopy(model)
    logits = changed(torch.tensor([prompt + request.token_ids[:3]])).logits[0, -1]
    assert request.token_ids[3] == int(logits.argmax())


def test_warming_up_forgets_what_was_launched_for_samples_that_have_ended(ahead):
    one = engine()
    [whole] = one.generate([[5, 6]], SamplingParams(max_new_tokens=9))
    [request] = one.generate([[5, 6]], SamplingParams(max_new_tokens=9, stop_token_ids=[whole.token_ids[3]]))
    assert request.finish_reason == "stop"
    assert one._journal.ahead is not None
    one.warm_up()
    assert one._journal.ahead is None
    assert said(one.generate([[5, 6]], SamplingParams(max_new_tokens=9))) == said([whole])


@pytest.mark.parametrize("method", ["prepare", "run_decode"])
def test_a_step_whose_next_one_fails_has_not_happened(method, ahead, monkeypatch):
    one, [prompt] = engine(), prompts([7])
    request = one.add(prompt, SamplingParams(max_new_tokens=8))
    one.step()
    own, failed = getattr(one._runner, method), []

    def fails(batch, *args, **named):
        if (named or method == "run_decode") and not failed:
            failed.append(batch)
            raise MemoryError("planted")
        return own(batch, *args, **named)

    monkeypatch.setattr(one._runner, method, fails)
    with pytest.raises(MemoryError, match="planted"):
        one.step()
    one.check()
    assert len(request.token_ids) == 1
    while one.unfinished:
        one.step()
    assert request.token_ids == greedy(tiny("Llama"), prompt, 8)


def forget_catalogue(family, counts):
    """What was counted while the first test of a process made the answers that histories are compared with."""
    catalogue(family)
    counts.update(dict.fromkeys(counts, 0))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_an_interrupt_at_any_line_changes_no_answer(family, ahead):
    forget_catalogue(family, ahead)
    history = at_lines(family, interrupt, seed=9, count=40)
    assert history.raised >= 30
    assert history.finished > 4
    assert ahead["adopted"] > 20


def test_calls_that_fail_change_no_answer(ahead):
    forget_catalogue("Llama", ahead)
    history = faulty("Llama", Faults(seed=5), seed=6, count=20, patience=6)
    assert history.raised >= 10
    assert ahead["adopted"] > 20
