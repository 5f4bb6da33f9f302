"""An engine that is disturbed: calls that fail, interrupts and collections at any line. No answer is wrong or lost."""

import gc
import os
import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from attnspan.errors import EngineError, TransportError
from tests.engine.disturbed import (
    Fault,
    Faults,
    History,
    Lines,
    catalogue,
    interrupt,
    made,
    quick_collections,
    said,
    speaker,
)
from tests.pace import patiently, stretched
from tests.processes import spawn

FAMILIES = ["Llama", "Gemma3", "Qwen3Next"]  # Gemma3 has two pools, one of them windowed; Qwen3Next has states


def faulty(family, faults, seed, count, patience=30, **options):
    """A history with so many faults."""
    target = sum(faults.planted.values()) + count
    with faults.into(speaker(family)):
        one = made(family, **options)
        history = History(one, family, seed)
        while sum(faults.planted.values()) < target:
            faults.arm(least=faults.draw.random() < 0.5)
            for _ in range(patience):  # a call that does not come is given up
                if not history.turn() and faults.draw.random() < 0.3:
                    one.check()
                if faults.armed is None:
                    break
            faults.armed = None
        history.end()
    return history


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_fail_change_no_answer(family):
    faults = Faults(seed=1)
    history = faulty(family, faults, seed=2, count=20, patience=6)
    assert history.raised >= 15  # some fail where nobody is told: while an abandoned stream is ended
    assert history.finished > 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_fail_change_no_answer_ever(family):
    faults, finished = Faults(seed=3), 0
    for seed in range(50):
        options = {"host_pages": [0, 14][seed % 2], "prefix_cache": seed % 3 != 2, "pages": 12 + seed % 3}
        finished += faulty(family, faults, seed, count=25, **options).finished
    print(family, sum(faults.planted.values()), "faults,", finished, "answers")
    assert sum(faults.planted.values()) >= 1250
    assert finished > 500
    never = {name for name, times in faults.planted.items() if not times}
    unused = {"PageAllocator.release_window", "KVCacheManager.release_windows"} if family == "Llama" else set()
    if family != "Qwen3Next":
        unused |= {name for name in faults.names if name.startswith(("StatePool.", "PackedSequences."))}
    assert never <= unused


def at_lines(family, action, seed, count, rarely=2500, **options):
    """A history with something done at so many lines."""
    one, draw = made(family, **options), random.Random(seed)
    history, lines = History(one, family, seed), Lines(action)
    with quick_collections():
        while lines.done < count:
            lines.arm(draw.randrange(1, rarely))
            try:
                history.turn()
            except Exception as error:
                raise AssertionError(f"after {lines.at}") from error
            finally:
                lines.off()
        history.end()
    return history


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_at_any_line_changes_no_answer(family):
    history = at_lines(family, interrupt, seed=4, count=60)
    assert history.raised >= 50
    assert history.finished > 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_at_any_line_changes_no_answer_ever(family):
    for seed in range(20):
        at_lines(family, interrupt, seed, count=30, rarely=[60, 300, 1500][seed % 3], host_pages=[0, 14][seed % 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_collection_at_any_line_changes_no_answer(family):
    history = at_lines(family, gc.collect, seed=5, count=60)
    assert history.raised == 0
    assert history.finished > 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_collection_at_any_line_changes_no_answer_ever(family):
    for seed in range(20):
        assert at_lines(family, gc.collect, seed, count=30, host_pages=[0, 14][seed % 2]).raised == 0


# ---- all of it at once -----------------------------------------------------------------------------------------------


def loaded(seconds, rarely, enough=None, seed=0):
    """Three threads with histories of their own on one engine, under faults, interrupts and collections."""
    faults, lines, until = Faults(seed), Lines(None), time.monotonic() + seconds
    draw, errors = random.Random(seed), []

    def goes_on():
        disturbances = sum(faults.planted.values()) + lines.done
        return time.monotonic() < until and not errors and (enough is None or disturbances < enough)

    def lives(history, disturb=lambda: None):
        try:
            while goes_on():
                disturb()
                history.turn()
        except BaseException as error:
            errors.append(error)
        finally:
            lines.off()

    def disturb():
        if draw.random() < 0.1:  # and what did not come is given up
            faults.arm(least=draw.random() < 0.5)
        if lines.left <= 0:
            lines.action = draw.choice([interrupt, gc.collect])
            lines.arm(draw.randrange(1, rarely))

    with faults.into(speaker("Llama")):
        one = made(pages=16)
        first, *others = histories = [History(one, seed=seed + number) for number in range(3)]
        threads = [threading.Thread(target=lives, args=(history,), daemon=True) for history in others]
        for thread in threads:
            thread.start()
        lives(first, disturb)
        for thread in threads:
            patiently(lambda seconds, thread=thread: thread.join(seconds) or not thread.is_alive(), 60)
        faults.armed = None
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    for history in histories:
        history.streams.clear()
    for history in histories:
        history.end()
    return sum(faults.planted.values()), lines.done, sum(history.finished for history in histories)


def test_threads_under_faults_interrupts_and_collections_get_what_they_asked_for():
    planted, lines, finished = loaded(stretched(600), rarely=3000, enough=12)
    assert planted + lines >= 12
    assert finished


@pytest.mark.slow
def test_ten_minutes_of_load_under_faults_interrupts_and_collections():
    seconds = int(os.environ.get("ATTNSPAN_LOAD_SECONDS", "600"))
    planted, lines, finished = loaded(seconds, rarely=20_000, seed=100)
    print(f"{seconds} s: {planted} faults, {lines} interrupts and collections, {finished} answers")
    assert finished > seconds / 2


# ---- over ranks ------------------------------------------------------------------------------------------------------


def disturbed_rank(world, trials):
    """Rank 1 is disturbed once in each trial, (kind, seed); what became of each, and how many answers there were."""
    rank = world.rank
    found, asked = [], catalogue("Llama")[:6]
    for kind, seed in trials:
        draw, faults, lines = random.Random(seed), Faults(seed), Lines(interrupt)
        group = dist.new_group(timeout=timedelta(seconds=stretched(3)))
        sizes = {
            "pages": 9,
            "page_size": 3,
            "max_sequences": 4,
            "max_tokens": 8,
            "host_pages": 7,
            "context_parallel_from": 12,
        }
        engine, requests, died = made(mesh=group, **sizes), [], False
        with faults.into(speaker("Llama")):
            if rank == 1 and kind == "faults":
                faults.arm()
            elif rank == 1:
                lines.arm(draw.randrange(1, 12_000))

            def tried(call, *args):
                while True:
                    try:
                        return call(*args)
                    except (Fault, KeyboardInterrupt):
                        continue  # as is done on one rank

            try:
                for prompt, params, expected in asked:
                    requests.append((tried(engine.add, prompt, params), expected))
                while tried(lambda: engine.unfinished):  # noqa: B023
                    tried(engine.step)
            except (EngineError, TransportError):
                died = True
            finally:
                lines.off()
                faults.armed = None
        engine.check()
        for request, expected in requests:
            for sample, must in zip(request.continuations, expected, strict=True):
                assert sample.token_ids == must[0][: len(sample.token_ids)], "a wrong token was told"
                assert said(sample) == must or (died and sample.finish_reason == "error"), "a request is lost"
        if died:
            refused = False
            try:
                engine.step()
            except (EngineError, TransportError):
                refused = True
            assert refused, "an engine goes on alone"
            assert engine.unfinished == []
        found.append((died, sum(request.finish_reason != "error" for request, _ in requests)))
        dist.barrier()
    return found


def test_over_ranks_a_disturbed_rank_tells_nothing_wrong_and_nobody_waits_for_ever():
    trials = [("faults", 0), ("interrupts", 0), ("interrupts", 1)]
    for found in spawn(2, disturbed_rank, trials, timeout=240, group_timeout=120):
        assert len(found) == len(trials)


@pytest.mark.slow
def test_over_ranks_a_disturbed_rank_tells_nothing_wrong_ever():
    trials = [(kind, seed) for kind in ("faults", "interrupts") for seed in range(60)]
    first, second = spawn(2, disturbed_rank, trials, timeout=2400, group_timeout=120)
    for kind, told in (("faults", slice(60)), ("interrupts", slice(60, None))):
        deaths = [sum(died for died, _ in found[told]) for found in (first, second)]
        print(f"{kind}: {deaths} of 60 died, by rank; {sum(count for _, count in second[told])} answers")
        assert 0 < deaths[1] < 60
