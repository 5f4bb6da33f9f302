"""`AsyncEngine` says what the engine says, to any number of coroutines; pages of those that leave are free again."""

import asyncio
import gc
import re
import threading

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine import AsyncEngine, follow
from attnspan.engine.commands import AddCommand, CancelCommand, StopCommand, decode_commands, encode_commands
from attnspan.errors import EngineBusy, EngineClosed, EngineError, StepFailed, TransportError
from attnspan.testing import loopback
from tests.engine.models import prompts, tiny, tokenizer

PROMPTS = prompts([5, 40, 1, 23, 90, 12])
SEVERAL = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, n=3),
    SamplingParams(max_new_tokens=1, logprobs=True, top_logprobs=2),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=5, temperature=0.7, seed=1, logprobs=True),
    SamplingParams(max_new_tokens=7, stop_token_ids=list(range(40, 60))),
]
FOREVER = SamplingParams(max_new_tokens=400)


def engine(**options):
    return Engine(tiny("Llama"), **({"pages": 128, "page_size": 8} | options))


def said(request):
    return [(each.token_ids, each.text, each.finish_reason) for each in request.continuations]


def joined(tokens):
    """What a stream said, by prompt and sample."""
    found = {}
    for token in tokens:
        ids, text, _ = found.get((token.prompt, token.sample_index), ([], "", None))
        found[token.prompt, token.sample_index] = ([*ids, token.token_id], text + token.text, token.finish_reason)
    return found


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def used_pages(served):
    return served.stats().pages_used


def test_calls_at_the_same_time_get_the_answers_of_generate():
    expected = [said(each) for each in engine().generate(PROMPTS, SEVERAL)]

    async def main():
        async with AsyncEngine(engine()) as served:
            calls = (served.generate([prompt], params) for prompt, params in zip(PROMPTS, SEVERAL, strict=True))
            alone = [said(request) for [request] in await asyncio.gather(*calls)]
            together = [said(each) for each in await served.generate(PROMPTS, SEVERAL)]
            assert await served.generate([]) == []
            assert used_pages(served) == served.open_calls == 0
            served.engine.check()
            return alone, together

    assert asyncio.run(main()) == (expected, expected)


def test_a_stream_has_every_token_once_with_its_log_probabilities():
    texts = ["the cat", "the hat and"]
    params = [SamplingParams(max_new_tokens=15, n=2, seed=5, temperature=1.0, logprobs=True, top_logprobs=2), FOREVER]
    model = tiny("Llama", vocab_size=320)

    async def main():
        async with AsyncEngine(Engine(model, pages=128, tokenizer=tokenizer())) as served:
            stream = served.stream(texts, params)
            tokens = [token async for token in stream]
            return tokens, await stream.added()

    tokens, requests = asyncio.run(main())
    expected = Engine(model, pages=128, tokenizer=tokenizer()).generate(texts, params)
    assert [said(each) for each in requests] == [said(each) for each in expected]
    assert joined(tokens) == {
        (place, number): (sample.token_ids, sample.text, sample.finish_reason)
        for place, request in enumerate(expected)
        for number, sample in enumerate(request.continuations)
    }
    second, sample = (
        [token for token in tokens if (token.prompt, token.sample_index) == (0, 1)],
        requests[0].continuations[1],
    )
    assert (
        [token.logprob for token in second] == sample.logprobs == pytest.approx(expected[0].continuations[1].logprobs)
    )
    assert [token.top_logprobs for token in second] == sample.top_logprobs


def leave_by_cancelling(task, stream):
    task.cancel()


def leave_by_closing(task, stream):
    stream.cancel()


@pytest.mark.parametrize("leave", [leave_by_cancelling, leave_by_closing])
def test_a_reader_that_leaves_gives_its_pages_back(leave):
    async def main():
        async with AsyncEngine(engine()) as served:
            stream = served.stream(PROMPTS[1], FOREVER)

            async def read():
                return [token async for token in stream]

            task = asyncio.create_task(read())
            await until(lambda: used_pages(served) > 0)
            leave(task, stream)
            await until(lambda: used_pages(served) == served.open_calls == 0)
            assert served.stats().finished == {"cancelled": 1}
            [answer] = await served.generate([PROMPTS[0]], SEVERAL[0])  # the others are served as before
            assert answer.finish_reason == "length"
            task.cancel()

    asyncio.run(main())


def test_a_stream_that_is_dropped_gives_its_pages_back():
    async def main():
        async with AsyncEngine(engine()) as served:
            stream = served.stream(PROMPTS[1], FOREVER)
            await anext(stream)
            del stream
            gc.collect()
            await until(lambda: used_pages(served) == served.open_calls == 0)

    asyncio.run(main())


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    async def main():
        async with AsyncEngine(engine(max_sequences=2), max_waiting=3) as served:
            streams = [served.stream(PROMPTS[0], FOREVER) for _ in range(3)]
            both = served.stream(PROMPTS[:2], FOREVER)
            with pytest.raises(EngineBusy, match=r"the queue is full: 5 samples run or wait, of at most 5") as busy:
                served.stream(PROMPTS[0], FOREVER)
            assert 1 <= busy.value.retry_after <= 60
            assert served.refused_calls == 1
            with pytest.raises(EngineError, match=r"a call of 6 samples is more than the queue ever holds, which is 5"):
                served.stream(PROMPTS[0], SamplingParams(n=6))
            await both.aclose()
            await until(lambda: served.open_calls == 3)
            streams += [served.stream(PROMPTS[0], FOREVER) for _ in range(2)]
            for stream in streams:
                stream.cancel()

    asyncio.run(main())


def test_what_the_engine_refuses_its_caller_hears_and_nobody_else():
    async def main():
        async with AsyncEngine(engine()) as served:
            going = asyncio.create_task(served.generate([PROMPTS[1]], SEVERAL[1]))
            for prompt, params, reason in (
                ([], None, "prompt must hold at least one token"),
                ([1000], None, "tokens below the model's 97"),
                ("text", None, "needs a tokenizer"),
                ([5], SamplingParams(max_new_tokens=10_000), "the request does not fit"),
            ):
                with pytest.raises(EngineError, match=reason):
                    await served.generate([[5], prompt], params)
                stream = served.stream([[5], prompt], params)
                with pytest.raises(EngineError, match=reason):
                    await anext(stream)
            with pytest.raises(EngineError, match="one for all 2 prompts"):
                served.stream([[5], [6]], [None])
            await going
            assert used_pages(served) == served.open_calls == 0

    asyncio.run(main())


def test_a_step_that_fails_ends_every_request_and_leaves_an_engine_that_works():
    model = tiny("Llama")

    async def main():
        async with AsyncEngine(engine()) as served:
            tasks = [asyncio.create_task(served.generate([prompt], FOREVER)) for prompt in PROMPTS[:3]]
            await until(lambda: served.stats().running == 3)
            handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                for failed in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(failed, StepFailed)
                    assert isinstance(failed.__cause__, ZeroDivisionError)
            finally:
                handle.remove()
            await until(lambda: used_pages(served) == served.open_calls == 0)
            assert served.failed_steps >= 1
            assert served.failure is None
            [answer] = await served.generate([PROMPTS[0]], SEVERAL[0])
            return said(answer)

    assert asyncio.run(main()) == said(engine().generate([PROMPTS[0]], SEVERAL[0])[0])


def test_a_text_that_cannot_be_decoded_ends_its_own_call_alone():
    class Letters:
        def encode(self, text):
            return [ord(letter) % 90 for letter in text]

        def decode(self, token_ids, skip_special_tokens=True):
            if 13 in token_ids:
                raise KeyError("thirteen")
            return "".join(chr(65 + token) for token in token_ids)

    async def main():
        async with AsyncEngine(engine(tokenizer=Letters())) as served:
            going = asyncio.create_task(
                served.generate([PROMPTS[1]], SamplingParams(max_new_tokens=40, bad_words=[[13]]))
            )
            bad = SamplingParams(max_new_tokens=40, allowed_tokens=[13])
            with pytest.raises(StepFailed) as failed:
                await served.generate([[5], [6]], [bad, FOREVER])
            assert isinstance(failed.value.__cause__, KeyError)
            [answer] = await going
            assert answer.finish_reason == "length"
            await until(lambda: used_pages(served) == served.open_calls == 0)

    asyncio.run(main())


def test_a_shutdown_lets_requests_end_and_takes_no_more():
    async def main():
        served = AsyncEngine(engine())
        going = asyncio.create_task(served.generate([PROMPTS[1]], SamplingParams(max_new_tokens=50)))
        await until(lambda: served.open_calls)
        stopping = asyncio.create_task(served.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="is shutting down"):
            await served.generate([PROMPTS[0]])
        [answer] = await going
        await stopping
        await served.shutdown()
        return answer.finish_reason, len(answer.token_ids)

    assert asyncio.run(main()) == ("length", 50)


def test_a_shutdown_that_does_not_wait_ends_streams_with_an_error():
    async def main():
        served = AsyncEngine(engine())
        stream = served.stream(PROMPTS[0], FOREVER)
        await anext(stream)
        await served.shutdown(drain=0)
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass
        assert used_pages(served) == 0
        served.engine.check()

    asyncio.run(main())


def test_an_engine_that_nobody_keeps_ends_its_thread():
    before = threading.active_count()
    served = AsyncEngine(engine())
    thread = served._thread
    assert threading.active_count() == before + 1
    del served
    gc.collect()
    assert thread.ended.wait(30)


def test_calls_of_several_event_loops_are_served():
    expected = [said(each) for each in engine().generate(PROMPTS, SEVERAL)]
    served, found = AsyncEngine(engine()), {}

    def talk(place):
        async def main():
            [answer] = await served.generate([PROMPTS[place]], SEVERAL[place])
            found[place] = said(answer)

        asyncio.run(main())

    threads = [threading.Thread(target=talk, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(served.shutdown())
    assert [found[place] for place in range(len(PROMPTS))] == expected


def test_a_loop_that_is_gone_does_no_harm():
    served = AsyncEngine(engine())

    async def leave():
        await anext(served.stream(PROMPTS[0], FOREVER))

    kept = []

    async def keep():
        kept.append(served.stream(PROMPTS[1], SEVERAL[0]))

    asyncio.run(leave())
    asyncio.run(keep())

    async def main():
        await until(lambda: served.open_calls == 0)
        await served.shutdown()

    asyncio.run(main())


def test_over_ranks_rank_0_listens_and_the_others_follow():
    expected = [said(each) for each in engine().generate(PROMPTS, SEVERAL)]

    def rank(world):
        mine = engine(mesh=world, context_parallel_from=64)
        if world.rank:
            follow(mine)
            mine.check()
            return mine.stats().pages_used

        async def main():
            async with AsyncEngine(mine) as served:
                calls = (served.generate([prompt], params) for prompt, params in zip(PROMPTS, SEVERAL, strict=True))
                answers = [said(request) for [request] in await asyncio.gather(*calls)]
                with pytest.raises(EngineError, match="tokens below the model's 97"):
                    await served.generate([[5], [1000]])
                with pytest.raises(EngineError, match="over ranks salt must be a text or a number, got \\('a',\\)"):
                    served.stream([5], salt=("a",))
                with pytest.raises(EngineError, match="over ranks a prompt must be a text or tokens"):
                    served.stream([{"input_ids": [5]}])
                stream = served.stream(PROMPTS[1], FOREVER, salt="a", priority=1)
                await anext(stream)
                await stream.aclose()
                await until(lambda: used_pages(served) == 0)
                return answers

        return asyncio.run(main())

    answers, *pages = loopback(3).run(rank)
    assert answers == expected
    assert pages == [0, 0]


def test_over_ranks_a_failed_step_ends_the_engine_on_all():
    model, failed = tiny("Llama"), []

    def rank(world):
        mine = engine(mesh=world)
        if world.rank:
            with pytest.raises((ZeroDivisionError, TransportError)):  # as its own step fails, or rank 0's does first
                follow(mine)
            failed.append(world.rank)
            return

        async def main():
            served = AsyncEngine(mine)
            task = asyncio.create_task(served.generate([PROMPTS[0]], FOREVER))
            await until(lambda: served.stats().running)
            model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises((StepFailed, EngineClosed)):
                await task
            await served.ended()
            assert served.failure is not None
            with pytest.raises(EngineClosed, match="the engine has failed"):
                await served.generate([PROMPTS[0]])
            await served.shutdown()
            failed.append(world.rank)

        asyncio.run(main())

    try:
        loopback(2).run(rank)
    except TransportError as lost:  # the commands of the next round, for which one rank had posted its end by then
        if not re.search(r"never arrived: rank [01] did not wait for .*commands of an engine", str(lost)):
            raise
    finally:
        model.lm_head._forward_pre_hooks.clear()
    assert sorted(failed) == [0, 1]


def test_who_calls_the_wrong_side_is_told():
    def rank(world):
        mine = engine(mesh=world)
        if world.rank:
            with pytest.raises(EngineError, match=r"AsyncEngine is for rank 0, this is rank 1; call follow\(engine\)"):
                AsyncEngine(mine)
        else:
            with pytest.raises(EngineError, match="follow is for the ranks beside rank 0"):
                follow(mine)

    loopback(2).run(rank)
    with pytest.raises(EngineError, match="max_waiting must be a whole number >= 0"):
        AsyncEngine(engine(), max_waiting=-1)


def test_a_sample_without_numbers_ends_with_error_and_the_others_go_on():
    model = tiny("Llama")

    def poison(module, args, output):
        output[..., 0, :] = torch.nan
        return output

    async def main():
        async with AsyncEngine(engine()) as served:
            handle = model.lm_head.register_forward_hook(poison)
            try:
                stream = served.stream(PROMPTS[0], FOREVER)
                [token] = [token async for token in stream]
            finally:
                handle.remove()
            [request] = await stream.added()
            assert (token.token_id, token.finish_reason) == (None, "error")
            assert "NaN or infinite" in str(request.error)

    asyncio.run(main())


def test_commands_travel_as_they_are():
    biases = {"logit_bias": {3: float("-inf"), 4: 1.5}, "sequence_bias": {(5, 6): -2.0}, "bad_words": ["a", [5, 6]]}
    several = [*SEVERAL, None, SamplingParams(**biases, stop="end", exponential_decay_length_penalty=(3, 1.1))]
    commands = [
        AddCommand(7, ["text", [5, 6]], [params, None], salt, -1) for params in several for salt in (None, "a", 1)
    ]
    sent = [*commands, CancelCommand(3), StopCommand()]
    assert decode_commands(encode_commands(sent)) == sent


def test_what_other_threads_change_is_looked_through_under_the_lock_alone():
    """Or a call that comes at that moment would end the engine."""

    class Guarded(dict):
        def __iter__(self):
            assert served._thread._lock.locked()
            return super().__iter__()

        def values(self):
            assert served._thread._lock.locked()
            return super().values()

        items = values

    served = AsyncEngine(engine())
    served._thread._open = Guarded()

    async def main():
        await served.generate(PROMPTS[:2], SEVERAL[:2])
        stream = served.stream([5], FOREVER)
        await anext(stream)
        await served.shutdown(drain=0)

    asyncio.run(main())
    assert served.failure is None
    assert served.open_calls == 0
