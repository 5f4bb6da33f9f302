"""Over ranks: the tokens of one rank, prompts that no rank could hold alone, and what happens when a rank is lost."""

import copy
import os
import signal
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, ModelError, TransportError
from attnspan.testing import loopback
from tests.engine.models import FAMILIES, greedy, prompts, tiny
from tests.engine.test_cuda import check_said
from tests.pace import stretched
from tests.processes import Died, on_backends, spawn

DEAD = "the engine has lost a rank, or failed on this one, and takes no more requests; make a new one"


def drive(engine):
    while engine.unfinished:
        engine.step()


def answers(world, model, asked, params, **options):
    """What a rank's engine says, and what it counted."""
    engine = Engine(model, mesh=world, **({"pages": 40, "page_size": 4, "max_sequences": 4} | options))
    found = [answer.token_ids for answer in engine.generate(asked, params)]
    engine.check()
    return found, engine.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_say_what_one_rank_says(family):
    model, asked = tiny(family), prompts([40, 5, 23])
    expected = [greedy(model, prompt, 9) for prompt in asked]
    options = {
        "max_tokens": 16,
        "context_parallel_from": 20,
    }  # two prompts under context parallelism, one in chunks over pages
    for found, _ in loopback(3).run(lambda w: answers(w, model, asked, SamplingParams(max_new_tokens=9), **options)):
        assert found == expected


def test_ranks_are_warmed_up_together():
    model, asked = tiny("Llama"), prompts([40])

    def rank(world):
        engine = Engine(model, mesh=world, pages=40, page_size=4, context_parallel_from=20)
        engine.warm_up()
        engine.check()
        return engine.generate(asked, SamplingParams(max_new_tokens=4))[0].token_ids

    assert loopback(2).run(rank) == [greedy(model, asked[0], 4)] * 2


def test_a_model_in_training_is_refused_before_anything_is_sent():
    def rank(world):
        model = copy.deepcopy(tiny("Llama"))
        engine = Engine(model, mesh=world, pages=40, page_size=4, max_sequences=np.int64(8))
        model.train()
        with pytest.raises(EngineError, match="model is in training mode"):
            engine.warm_up()
        model.eval()
        engine.warm_up()
        return engine.generate([[5]], SamplingParams(max_new_tokens=2))[0].token_ids

    assert loopback(2).run(rank) == [greedy(tiny("Llama"), [5], 2)] * 2


def test_a_prompt_that_no_rank_holds_alone_is_continued_by_all():
    model, [prompt] = tiny("Llama"), prompts([150])
    with pytest.raises(EngineError, match="the request does not fit: 150 tokens of prompt and up to 7 more"):
        Engine(model, pages=40, page_size=1).generate([prompt], SamplingParams(max_new_tokens=8))
    for whole in (20, 1000):  # by shards, and in chunks
        options = {"pages": 40, "page_size": 1, "context_parallel_from": whole, "max_tokens": 64}
        runs = loopback(4).run(lambda w: answers(w, model, [prompt], SamplingParams(max_new_tokens=8), **options))  # noqa: B023
        assert {tuple(found[0]) for found, _ in runs} == {tuple(greedy(model, prompt, 8))}


def test_pages_that_run_out_change_nothing_over_ranks_either():
    model, asked = tiny("Llama"), prompts([3, 9, 1, 20, 14, 6], seed=1)
    expected = [greedy(model, prompt, 16) for prompt in asked]
    for host_pages in (0, 30):
        options = {"pages": 7, "page_size": 3, "context_parallel_from": 10, "max_tokens": 8, "host_pages": host_pages}
        runs = loopback(2).run(lambda w: answers(w, model, asked, SamplingParams(max_new_tokens=16), **options))  # noqa: B023
        for found, counts in runs:
            assert found == expected
            assert counts.swapped_out if host_pages else counts.recomputed


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_that_failed_over_ranks_is_never_tried_again(alone):
    """The other rank waits for what this one owes, and would take anything that looks like it."""
    [prompt] = prompts([20])
    expected, ended = greedy(tiny("Llama"), prompt, 8), []

    def rank(world):
        model, passes = copy.deepcopy(tiny("Llama")), []

        def fails_once(*_):
            passes.append(None)
            if len(passes) == 4:  # one of them is the look that is taken when the engine is made
                raise MemoryError("planted")

        if world.rank == 1 or not alone:
            model.model.layers[1].register_forward_pre_hook(fails_once)
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        request = engine.add(prompt, SamplingParams(max_new_tokens=8))
        with pytest.raises((MemoryError, TransportError)):
            drive(engine)
        engine.check()
        for again in (engine.step, lambda: engine.add([5])):
            with pytest.raises(EngineError, match=DEAD):
                again()
        with pytest.raises(TransportError, match="broke off here"):
            Engine(model, mesh=world, pages=40)
        assert request.finish_reason == "error"
        assert request.token_ids == expected[: len(request.token_ids)]
        ended.append(world.rank)

    lost = pytest.raises(TransportError, match="some messages never arrived") if alone else nullcontext()
    with lost:
        loopback(2, timeout=stretched(5)).run(rank)
    assert sorted(ended) == [0, 1]


def test_samples_are_the_same_on_every_rank_also_without_a_seed():
    model, params = tiny("Llama"), SamplingParams(max_new_tokens=10, temperature=1.0, n=2)

    def rank(world):
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        [answer] = engine.generate(prompts([12]), params)
        return [tuple(sample.token_ids) for sample in answer.continuations]

    first, second = loopback(2).run(rank)
    assert first == second
    assert len(set(first)) == 2


def test_requests_that_differ_between_ranks_are_refused_on_all_of_them():
    model = tiny("Llama")

    def rank(world):
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        with pytest.raises(EngineError, match=r"requests differ between rank 0 and ranks \[1\]; every rank adds the"):
            engine.add([5 + world.rank])
        engine.check()
        return engine.generate([[5]], SamplingParams(max_new_tokens=2))[0].token_ids  # and it goes on

    assert loopback(2).run(rank) == [greedy(model, [5], 2)] * 2


def test_engines_that_differ_between_ranks_are_refused_on_all_of_them():
    def other_pages(world):
        Engine(tiny("Llama"), mesh=world, pages=40 + world.rank)

    with pytest.raises(EngineError, match=r"pages must be the same on every rank, got \[40, 41, 42\], by rank"):
        loopback(3).run(other_pages)

    def other_weights(world):
        model = copy.deepcopy(tiny("Llama"))
        if world.rank == 2:
            model.lm_head.weight[3, 4] += 1e-6
        Engine(model, mesh=world, pages=40)

    with pytest.raises(ModelError, match=r"weights or buffers differ between rank 0 and ranks \[2\]"):
        loopback(3).run(other_weights)


def test_weights_that_change_while_a_request_queues_are_compared_when_it_begins():
    [prompt] = prompts([30])

    def rank(world, everywhere):
        model = copy.deepcopy(tiny("Llama"))
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        engine.generate([prompt], SamplingParams(max_new_tokens=4))
        request = engine.add(prompt, SamplingParams(max_new_tokens=4))
        if everywhere or world.rank:
            model.lm_head.weight.neg_()
        if not everywhere:
            with pytest.raises(
                EngineError,
                match=r"the model was changed in another way, or at another time, on rank 0 than on ranks \[1\]",
            ):
                engine.step()
            return None
        drive(engine)
        return request.token_ids == greedy(model, prompt, 4)

    assert loopback(2).run(lambda world: rank(world, True)) == [True, True]
    loopback(2).run(lambda world: rank(world, False))


def test_weights_change_on_all_ranks_or_the_next_request_is_refused():
    asked, params = prompts([30]), SamplingParams(max_new_tokens=4)

    def rank(world):
        model = copy.deepcopy(tiny("Llama"))
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        engine.generate(asked, params)
        if world.rank == 0:
            model.lm_head.weight.neg_()
        with pytest.raises(EngineError, match="change it on all ranks alike, between the same calls of the engine"):
            engine.generate(asked, params)
        if world.rank == 1:
            model.lm_head.weight.neg_()
        return engine.generate(asked, params)[0].token_ids, engine.counts.cached, greedy(model, asked[0], 4)

    for found, known, expected in loopback(2).run(rank):
        assert found == expected
        assert known == 0


def generated(world, family):
    """Every token that an engine over real ranks says is the likeliest by the plain model: see test_cuda.py."""
    with torch.device("cpu"):  # where models are made; the engine's is the world's
        model, asked = copy.deepcopy(tiny(family)).to(world.device), prompts([5, 17, 40])
        engine = Engine(
            model, mesh=world, pages=40, page_size=16, max_tokens=16, max_sequences=4, context_parallel_from=20
        )
        engine.warm_up()
        requests = engine.generate(asked, SamplingParams(logprobs=True, max_new_tokens=9))
        engine.check()
        check_said(family, requests)
        return [request.token_ids for request in requests]


@on_backends(slow=(2, 3, 4))
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_engines_over_real_ranks_say_what_the_plain_model_says(family, ranks, backend):
    first, *others = spawn(ranks, generated, family, backend=backend, timeout=240)
    assert others == [first] * (ranks - 1)


def over_gloo(world):
    """The same in real processes; then one dies while the others generate."""
    rank = world.rank
    model, asked = tiny("Llama"), prompts([40, 5])
    group = dist.new_group(timeout=timedelta(seconds=stretched(30)))
    engine = Engine(model, mesh=group, pages=40, page_size=4, context_parallel_from=20)
    found = [answer.token_ids for answer in engine.generate(asked, SamplingParams(max_new_tokens=6))]
    request = engine.add(asked[0], SamplingParams(max_new_tokens=100))
    waiting = engine.add(asked[1], SamplingParams(max_new_tokens=100))
    error = None
    try:
        for step in range(200):
            if rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
    except TransportError as lost:
        error = str(lost)
    engine.check()
    stats = engine._scheduler.kv_cache.groups[0].allocator.stats()
    refused = None
    try:
        engine.add([1, 2])
    except EngineError as dead:
        refused = str(dead)
    ends = [(r.finish_reason, type(r.error).__name__, len(r.token_ids) > 0) for r in (request, waiting)]
    return found, error, refused, ends, (stats.sequences, stats.used), engine.unfinished


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_every_request_with_an_error_that_says_so(ranks):
    model, asked = tiny("Llama"), prompts([40, 5])
    expected = [greedy(model, prompt, 6) for prompt in asked]
    first, second, *others = spawn(ranks, over_gloo, may_die=True, timeout=240)
    assert second == Died("SIGKILL")
    for found, error, refused, ends, left, unfinished in (first, *others):
        assert found == expected
        assert error is not None
        assert "partial attention" in error or "records of an engine" in error
        assert refused.startswith(DEAD)
        assert ends == [("error", "TransportError", True)] * 2
        assert (left, unfinished) == ((0, 0), [])


# ---- what ranks compare while they run -------------------------------------------------------------------------------


def test_ranks_that_cancel_different_requests_are_told_so_before_anything_is_computed():
    model, asked = tiny("Llama"), prompts([12, 9, 20])

    def rank(world):
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        requests = [engine.add(prompt, SamplingParams(max_new_tokens=20)) for prompt in asked]
        for _ in range(3):
            engine.step()
        before = [len(request.token_ids) for request in requests]
        engine.cancel(requests[world.rank])
        with pytest.raises(EngineError, match=r"steps differ between rank 0 and ranks \[1\]: they cancelled other"):
            engine.step()
        engine.check()
        for request, tokens in zip(requests, before, strict=True):
            assert request.finish_reason in ("cancelled", "error")
            assert len(request.token_ids) == tokens
        with pytest.raises(EngineError, match=DEAD):
            engine.add([5])
        # Nothing is under way on the group, which another engine may use.
        return Engine(model, mesh=world, pages=40).generate([[5]], SamplingParams(max_new_tokens=2))[0].token_ids

    assert loopback(2).run(rank) == [greedy(model, [5], 2)] * 2


def test_ranks_that_cancel_the_same_go_on():
    model, asked = tiny("Llama"), prompts([12, 9])

    def rank(world):
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        first, second = [engine.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in asked]
        engine.step()
        engine.cancel(first)
        drive(engine)
        return second.token_ids

    assert loopback(2).run(rank) == [greedy(model, asked[1], 8)] * 2


def test_a_rank_that_does_something_else_is_told_so_and_nobody_waits():
    def rank(world):
        engine = Engine(tiny("Llama"), mesh=world, pages=40, page_size=4)
        engine.add([5, 6, 7], SamplingParams(max_new_tokens=20))
        for _ in range(2):
            engine.step()
        with pytest.raises(
            EngineError, match=r"rank 0 is adding a request while ranks \[1\] are not: rank 1 is making a step"
        ):
            engine.add([5]) if world.rank == 0 else engine.step()
        engine.check()
        with pytest.raises(EngineError, match=DEAD):
            engine.step()

    loopback(2, timeout=stretched(10)).run(rank)


def test_ranks_that_chose_other_tokens_are_told_so():
    """As on machines whose arithmetic differs; here by a hook on one rank, which is allowed to watch."""

    def rank(world):
        model = copy.deepcopy(tiny("Llama"))
        if world.rank == 1:
            model.lm_head.register_forward_hook(lambda module, given, out: -out)
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        engine.add([5, 6, 7], SamplingParams(max_new_tokens=20))
        with pytest.raises(EngineError, match="or chose other tokens; every rank adds, cancels and steps alike"):
            drive(engine)

    loopback(2).run(rank)


@pytest.mark.parametrize("when", ["before", "silently"])
def test_ranks_with_different_rotary_buffers_are_refused(when):
    [prompt] = prompts([30])

    def rank(world):
        model = copy.deepcopy(tiny("Llama"))

        def turn_faster():
            if world.rank == 1:
                model.model.rotary_emb.inv_freq.data.mul_(0.5)

        if when == "before":
            turn_faster()
        engine = Engine(model, mesh=world, pages=40, page_size=4)
        turn_faster()
        with pytest.raises(EngineError, match=r"the model was changed in another way, .* rank 0 than on ranks \[1\]"):
            engine.generate([prompt], SamplingParams(max_new_tokens=4))
        engine.check()
        if world.rank == 0:
            model.model.rotary_emb.inv_freq.data.mul_(0.5)
        return engine.generate([prompt], SamplingParams(max_new_tokens=4))[0].token_ids == greedy(model, prompt, 4)

    if when == "before":
        with pytest.raises(ModelError, match=r"weights or buffers differ between rank 0 and ranks \[1\]"):
            loopback(2).run(rank)
    else:
        assert loopback(2).run(rank) == [True, True]


def test_ranks_with_other_modules_are_refused():
    def rank(world):
        model = copy.deepcopy(tiny("Llama"))
        if world.rank == 1:
            model.model.layers[0].mlp.act_fn = nn.ReLU()
        Engine(model, mesh=world, pages=40)

    with pytest.raises(ModelError, match=r"modules or adapters differ between rank 0 and ranks \[1\]"):
        loopback(2).run(rank)


def test_a_change_on_one_rank_is_a_new_version_on_all_and_the_engine_goes_on():
    """A hook that only watches: rank 0 finds nothing of what it kept, and neither do the others."""
    model, asked, params = tiny("Llama"), prompts([30]), SamplingParams(max_new_tokens=4)

    def rank(world):
        own = copy.deepcopy(model)
        engine = Engine(own, mesh=world, pages=40, page_size=4)
        engine.generate(asked, params)
        if world.rank == 0:
            own.lm_head.register_forward_hook(lambda module, given, out: None)
        found = [engine.generate(asked, params)[0].token_ids for _ in range(2)]
        return found, engine.counts.cached

    assert loopback(2).run(rank) == [([greedy(model, asked[0], 4)] * 2, 29)] * 2
