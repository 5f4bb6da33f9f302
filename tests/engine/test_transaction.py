"""A step is a transaction: what fails or is interrupted has not happened, or is carried through; and who owns it."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine.journal import Journal
from attnspan.engine.output_processor import Outcome
from attnspan.errors import EngineError, PageError, UnknownRequest
from attnspan.paged import PagePool
from attnspan.testing import loopback
from tests.engine.disturbed import quick_collections
from tests.engine.models import greedy, prompts, tiny, tokenizer
from tests.pace import stretched


def engine(**options):
    return Engine(tiny("Llama"), **({"pages": 64, "page_size": 4, "max_sequences": 8} | options))


def drive(one, most=500):
    """Until nothing is left to do; in so many steps, or it hangs."""
    for _ in range(most):
        if not one.unfinished:
            return
        one.step()
    raise AssertionError("a request never ends")


class Once:
    """Fails at one call and never again."""

    def __init__(self, function, at=0, error=MemoryError):
        self.function, self.at, self.error, self.calls = function, at, error, 0

    def __get__(self, instance, kind):
        return lambda *args, **named: self(instance, *args, **named)

    def __call__(self, *args, **named):
        self.calls += 1
        if self.calls == self.at + 1:
            raise self.error("planted")
        return self.function(*args, **named)


# ---- copies and swaps ------------------------------------------------------------------------------------------------


def test_a_shared_page_whose_copy_failed_is_copied_when_the_step_is_tried_again(monkeypatch):
    [prompt], params = prompts([10]), SamplingParams(max_new_tokens=6, n=3, temperature=1.0, seed=3)
    [expected] = engine().generate([prompt], params)
    one = engine()
    request = one.add(prompt, params)
    one.step()
    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "copy", Once(PagePool.copy))
        with pytest.raises(MemoryError, match="planted"):
            one.step()
        one.check()
    drive(one)
    assert [sample.token_ids for sample in request.continuations] == [
        sample.token_ids for sample in expected.continuations
    ]


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma3"]
)  # one pool, and two: the second may fail when the first has moved
@pytest.mark.parametrize("method", ["swap_out", "swap_in", "_to_host", "_from_host"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_swap_that_fails_loses_no_sample(monkeypatch, family, method, at):
    model, asked = tiny(family), prompts([3, 9, 1, 14, 6], seed=1)
    one = Engine(model, pages=14, page_size=3, max_tokens=8, max_sequences=4, host_pages=30, prefix_cache=False)
    requests = [one.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in asked]
    failed = 0
    with monkeypatch.context() as patch:
        patch.setattr(PagePool, method, Once(getattr(PagePool, method), at))
        for _ in range(300):
            if not one.unfinished:
                break
            try:
                one.step()
            except MemoryError:
                failed += 1
                one.check()
    assert failed == 1
    assert one.counts.swapped_out
    assert [request.token_ids for request in requests] == [greedy(model, prompt, 12) for prompt in asked]
    one.check()


def test_host_pages_are_taken_when_the_engine_is_made():
    with pytest.raises(
        PageError, match=r"host_pages must fit into the host's memory, got 1000000, which take 15.* GiB"
    ):
        engine(pages=1, page_size=65536, host_pages=10**6)
    assert engine(host_pages=5)._pools.pools[0]._host[0].shape[0] == 5


# ---- interrupts ------------------------------------------------------------------------------------------------------


def test_tokens_that_were_being_told_when_an_interrupt_came_are_told_once_and_come_with_the_next_step(monkeypatch):
    one, asked = engine(), prompts([9, 4, 6])
    for prompt in asked:
        one.add(prompt, SamplingParams(max_new_tokens=5, logprobs=True))
    requests, told = one.unfinished, []
    with monkeypatch.context() as patch:
        patch.setattr(Outcome, "apply", Once(Outcome.apply, at=4, error=KeyboardInterrupt))
        for _ in range(9):
            try:
                told += one.step()
            except KeyboardInterrupt:
                one.check()
    for request, prompt in zip(requests, asked, strict=True):
        expected = greedy(tiny("Llama"), prompt, 5)
        assert request.token_ids == expected
        assert len(request.logprobs) == 5
        assert [token.token_id for token in told if token.request is request] == expected


def test_text_is_the_same_after_a_step_that_failed_while_it_was_decoded(monkeypatch):
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, stop="zz")
    speaking = {"model": tiny("Llama", vocab_size=320), "tokenizer": tokenizer(), "pages": 64, "page_size": 4}
    expected = Engine(**speaking).generate(["the cat", "a hat"], params)
    one = Engine(**speaking)
    requests = [one.add(text, params) for text in ("the cat", "a hat")]
    for at in range(3, 9):
        with monkeypatch.context() as patch:
            patch.setattr(type(one.tokenizer), "decode", Once(type(one.tokenizer).decode, at, KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                drive(one)
    drive(one)
    assert [request.text for request in requests] == [request.text for request in expected]


def test_a_cancel_that_was_interrupted_has_not_happened(monkeypatch):
    speaking = {"model": tiny("Llama", vocab_size=320), "tokenizer": tokenizer(), "pages": 64, "page_size": 4}
    [whole] = Engine(**speaking).generate(["the cat"], SamplingParams(max_new_tokens=8))
    one = Engine(**speaking)
    params = SamplingParams(max_new_tokens=8, stop=whole.text + "never")  # all of it is held back
    request = one.add("the cat", params)
    for _ in range(4):
        one.step()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "commit", Once(Journal.commit, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.cancel(request)
    assert one.unfinished == [request]
    drive(one)
    assert (request.text, request.finish_reason) == (whole.text, "length")


def test_a_scheduler_that_lost_a_sample_says_so_instead_of_being_asked_for_ever():
    one = engine()
    request = one.add([5, 6, 7], SamplingParams(max_new_tokens=4))
    one.step()
    one._scheduler.running.clear()  # planted
    with pytest.raises(EngineError, match="the scheduler has lost a sample; the next call computes all requests again"):
        drive(one)
    drive(one)
    assert request.token_ids == greedy(tiny("Llama"), [5, 6, 7], 4)
    one.check()


# ---- finalizers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooked():
    """Calls something in the middle of every step."""
    handles = []
    yield lambda act: handles.append(
        tiny("Llama").model.layers[0].register_forward_pre_hook(lambda *_: (act(), None)[1])
    )
    for handle in handles:
        handle.remove()


def test_a_stream_that_the_collector_ends_in_the_middle_of_a_step_disturbs_nobody(hooked):
    one, asked = engine(), prompts([4, 9, 6])
    expected = [greedy(tiny("Llama"), prompt, 6) for prompt in asked]  # before there is a hook
    with quick_collections():
        for number in range(3):
            cycle = [one.stream([5 + number, 6, 7], SamplingParams(max_new_tokens=50))]
            cycle.append(cycle)
            next(cycle[0])
        del cycle
        assert len(one.unfinished) == 3
        hooked(gc.collect)
        answers = one.generate(asked, SamplingParams(max_new_tokens=6))
    assert [answer.token_ids for answer in answers] == expected
    assert one.unfinished == []
    one.check()


def test_calls_in_the_middle_of_a_step_are_refused_by_name_and_cancel_is_noted(hooked):
    one, refusals, counts = engine(), [], []
    expected = [greedy(tiny("Llama"), prompt, 8) for prompt in prompts([9, 4])]  # before there is a hook
    request, other = (one.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in prompts([9, 4]))

    def meddle():
        counts.append(len(one.unfinished))
        for call in (one.step, lambda: one.add([5]), lambda: one.generate([[5]]), one.check, one.warm_up):
            with pytest.raises(EngineError) as refusal:
                call()
            refusals.append(str(refusal.value))
        if len(counts) == 3:
            one.cancel(request)

    hooked(meddle)
    drive(one)
    assert set(counts) == {2, 1}
    assert refusals[0] == (
        "step was called in the middle of another call of the same engine, by a hook, a tokenizer or a finalizer; call "
        "it when that call has returned"
    )
    assert {refusal.split()[0] for refusal in refusals} == {"step", "add", "check", "warm_up"}
    assert (request.finish_reason, request.token_ids) == ("cancelled", expected[0][:3])
    assert other.token_ids == expected[1]
    one.check()


def test_the_model_has_its_own_attention_back_after_a_step_that_was_interrupted_on_its_way_out(monkeypatch):
    from attnspan.integrations.huggingface.serving_binding import ServingBinding

    one, model = engine(), tiny("Llama")
    before = model.config._attn_implementation
    request = one.add([5, 6, 7], SamplingParams(max_new_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(ServingBinding, "end", Once(ServingBinding.end, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.step()
    drive(one)
    assert model.config._attn_implementation == before
    assert model(torch.tensor([[5, 6]])).logits.shape[1] == 2
    assert request.token_ids == greedy(model, [5, 6, 7], 4)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_add_stream_and_generate_while_another_steps():
    one, model = engine(pages=20, page_size=3, max_sequences=4, max_tokens=8, host_pages=10), tiny("Llama")
    asked = prompts([4, 9, 6, 12, 3, 7] * 4, seed=9)
    expected = {tuple(prompt): greedy(model, prompt, 6) for prompt in asked}
    params, over = SamplingParams(max_new_tokens=6), threading.Event()

    def steps():
        while not over.is_set():
            one.step()

    def adds(some):
        found = [one.add(prompt, params) for prompt in some]
        while not all(request.finished for request in found):
            over.wait(0.001)
        return [request.token_ids for request in found]

    def streams(some):
        return [[token.token_id for token in one.stream(prompt, params)] for prompt in some]

    def generates(some):
        return [answer.token_ids for answer in one.generate(some, params)]

    def cancels(some):
        for prompt in some:
            request = one.add(prompt, SamplingParams(max_new_tokens=40))
            over.wait(0.01)
            try:
                one.cancel(request)
            except UnknownRequest:  # other threads were slow, and it has ended meanwhile
                assert request.finished
            assert request.token_ids[:6] == expected[tuple(prompt)][: len(request.token_ids)]
        return [expected[tuple(prompt)] for prompt in some]

    with ThreadPoolExecutor(6) as pool:
        stepping = pool.submit(steps)
        work = [
            (adds, asked[:6]),
            (streams, asked[6:12]),
            (generates, asked[12:18]),
            (adds, asked[18:]),
            (cancels, asked[:4]),
        ]
        futures = [pool.submit(call, some) for call, some in work]
        try:
            for (_, some), future in zip(work, futures, strict=True):
                assert future.result(timeout=stretched(120)) == [expected[tuple(prompt)] for prompt in some]
        finally:
            over.set()
        stepping.result(timeout=stretched(60))
    assert one.unfinished == []
    one.check()


def test_over_ranks_a_second_thread_is_refused_by_name():
    def rank(world):
        one, refusals = Engine(tiny("Llama"), mesh=world, pages=40, page_size=4), []
        request = one.add([5], SamplingParams(max_new_tokens=2))

        def meddle():
            for call in (one.step, lambda: one.add([6]), lambda: one.cancel(request)):
                with pytest.raises(EngineError) as refusal:
                    call()
                refusals.append(str(refusal.value))
            assert one.unfinished == [request]

        other = threading.Thread(target=meddle, name="another")
        other.start()
        other.join()
        drive(one)
        assert len(refusals) == 3
        return refusals[0], request.token_ids

    for refusal, tokens in loopback(2).run(rank):
        assert refusal.startswith(
            "step was called in thread 'another', and over ranks an engine belongs to the first thread that calls it"
        )
        assert tokens == greedy(tiny("Llama"), [5], 2)
