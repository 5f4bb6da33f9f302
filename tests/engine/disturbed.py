"""Random histories of an engine in a tight pool, and what disturbs them: faults, interrupts, collections.

A `History` adds requests, streams, generates, cancels and steps, by chance, and retries what a disturbance broke off.
It holds every answer to an oracle: `model.generate` for greedy ones, an undisturbed engine with room for all for drawn
ones. Prompts begin alike, have several samples and do not fit all at once, so that prefixes are found, pages are shared
and copied, and samples are swapped or computed again.
"""

import contextlib
import functools
import gc
import random
import sys
from dataclasses import replace
from pathlib import Path

import attnspan
from attnspan import Engine, SamplingParams
from attnspan.engine import sampler
from attnspan.engine.kv_cache_manager import KVCacheManager
from attnspan.engine.logits_processor import LogitsProcessor, NGrams, TokenCounts
from attnspan.engine.model_runner import ModelRunner
from attnspan.engine.sampler import Sampler
from attnspan.engine.scheduler import Scheduler
from attnspan.engine.stats import Meter
from attnspan.errors import UnknownRequest
from attnspan.integrations.huggingface import paged_attention
from attnspan.paged import PageAllocator, PagePool, PrefixCache, StatePool, StepPlan
from attnspan.recurrence import PackedSequences
from tests.engine.models import greedy, prompts, tiny, tokenizer

STEP_FILES = ("paged_attention.py", "transformers_model.py", "served_layers.py", "serving_binding.py")
PARTS = ("engine", "paged", *(f"integrations/huggingface/{name}" for name in STEP_FILES))
SOURCES = tuple(str(Path(attnspan.__file__).parent / part) for part in PARTS)


class Fault(Exception):
    """What is planted."""


def speaker(family):
    """Its model has more tokens than the tokenizer, so that some are no text."""
    return tiny(family, vocab_size=320)


@functools.cache
def catalogue(family):
    """(prompt, params, what each of its samples must say: tokens, text, and why it ends)."""
    model, draw = speaker(family), random.Random(0)
    stems = prompts([13, 17], seed=3)
    found = []
    for number in range(18):
        stem = stems[number % 2][: draw.choice([0, 6, 9, 13])]
        prompt = stem + prompts([draw.randrange(1, 7)], seed=number)[0]
        options = {"max_new_tokens": draw.choice([1, 3, 8, 12, 16])}
        if number % 3 == 0:
            options |= {"n": draw.choice([2, 3]), "temperature": 1.0, "seed": number}
        if number % 6 == 0:
            options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3}
        found.append((prompt, SamplingParams(**options)))
    roomy = Engine(model, pages=200, page_size=3, max_sequences=4, prefix_cache=False, tokenizer=tokenizer())
    answers = []
    for number, (prompt, params) in enumerate(found):
        [answer] = roomy.generate([prompt], params)
        if not params.temperature:
            assert answer.token_ids == greedy(model, prompt, params.max_new_tokens)
        if number % 4 == 1 and len(answer.text) > 3:
            params = replace(params, stop=(answer.text[2:4], answer.text + "never"))
            [answer] = roomy.generate([prompt], params)
        answers.append((prompt, params, [said(sample) for sample in answer.continuations]))
    assert {reason for _, _, samples in answers for _, _, reason in samples} == {"stop", "length"}
    return answers


def said(sample):
    return sample.token_ids, sample.text, sample.finish_reason


def made(family="Llama", **options):
    """An engine whose pages do not suffice for what comes."""
    tight = {"pages": 12, "page_size": 3, "max_sequences": 4, "max_tokens": 8, "host_pages": 14}
    tight |= {"states": 6, "state_every": 2}  # of models that have any
    return Engine(speaker(family), tokenizer=tokenizer(), **(tight | options))


class History:
    """A caller who does as chance has it, and is told of every disturbance by an exception of these kinds."""

    def __init__(self, engine, family="Llama", seed=0, kinds=(Fault, KeyboardInterrupt)):
        self.engine, self.asked, self.draw, self.kinds = engine, catalogue(family), random.Random(seed), kinds
        self.requests = []  # (request, what it must say), of add and of streams that are read
        self.streams = []  # (stream, tokens read, place in the catalogue)
        self.raised = self.finished = 0

    def turn(self):
        """One call; False if it was disturbed."""
        one = self.draw.choices(
            [self.add, self.step, self.cancel, self.open, self.read, self.abandon, self.generate],
            [8, 20, 1, 1, 6, 1, 1],
        )[0]
        try:
            one()
            return True
        except self.kinds:
            self.raised += 1
            return False

    def some(self):
        return self.draw.randrange(len(self.asked))

    def add(self):
        if len(self.requests) < 7:
            prompt, params, expected = self.asked[self.some()]
            self.requests.append((self.engine.add(prompt, params), expected))

    def step(self):
        self.engine.step()
        self.look()

    def cancel(self):
        if self.requests and self.draw.random() < 0.5:
            request, _ = self.draw.choice(self.requests)
            with contextlib.suppress(UnknownRequest):
                self.engine.cancel(request)
            self.look()

    def generate(self):
        places = [self.some() for _ in range(self.draw.randrange(1, 3))]
        asked = [self.asked[place] for place in places]
        answers = self.engine.generate([prompt for prompt, _, _ in asked], [params for _, params, _ in asked])
        for answer, (_, _, expected) in zip(answers, asked, strict=True):
            assert [said(sample) for sample in answer.continuations] == expected
            self.finished += 1
        self.look()

    def open(self):
        if len(self.streams) < 2:
            place = self.some()
            prompt, params, _ = self.asked[place]
            self.streams.append((self.engine.stream(prompt, params), [], place))

    def read(self):
        """A token of a stream; one that a disturbance has ended is let go of."""
        if self.streams:
            stream, tokens, place = entry = self.draw.choice(self.streams)
            expected = self.asked[place][2]
            try:
                token = next(stream, None)
            except self.kinds:
                self.streams.remove(entry)
                raise
            if token is not None:
                tokens.append(token)
                mine = [each.token_id for each in tokens if each.sample_index == token.sample_index]
                assert mine == expected[token.sample_index][0][: len(mine)], "a stream told a wrong token"
            else:
                self.streams.remove(entry)
                for number, (ids, text, reason) in enumerate(expected):
                    mine = [each for each in tokens if each.sample_index == number]
                    assert [each.token_id for each in mine] == ids, "a stream lost a token"
                    assert ("".join(each.text for each in mine), mine[-1].finish_reason) == (text, reason)
                self.finished += 1

    def abandon(self):
        """Leave a stream to the collector."""
        if self.streams:
            cycle = [self.streams.pop(self.draw.randrange(len(self.streams)))]
            cycle.append(cycle)

    def look(self):
        """Hold what has ended, and what has not, to the oracle."""
        for request, expected in list(self.requests):
            for sample, must in zip(request.continuations, expected, strict=True):
                if sample.finish_reason in ("length", "stop"):  # asked first: another thread may step
                    assert said(sample) == must
                assert sample.token_ids == must[0][: len(sample.token_ids)], "a wrong token was told"
            if request.finished:
                reasons = {sample.finish_reason for sample in request.continuations}
                assert reasons <= {"length", "stop", "cancelled"}
                self.finished += "cancelled" not in reasons
                self.requests.remove((request, expected))

    def end(self):
        """Finish everything, undisturbed; in so many steps, or something hangs."""
        self.streams.clear()
        gc.collect()
        for _ in range(600):
            if not self.engine.unfinished:
                break
            self.engine.step()
        assert self.engine.unfinished == [], "a request never ends"
        self.look()
        assert self.requests == [], "a request is lost"
        check_empty(self.engine)


def check_empty(engine):
    """Nothing is left of what an engine was asked."""
    engine.check()
    for group in engine._scheduler.kv_cache.groups:
        stats = group.allocator.stats()
        assert (stats.sequences, stats.used, stats.host_free) == (0, 0, stats.host_pages), "a page is lost"
    left = (
        engine._caller_refs,
        engine._to_cancel,
        engine._outputs.detokenizers,
        engine._table.streams,
        engine._table.samples,
    )
    assert not any(left), f"something is left: {left}"
    assert paged_attention._CALL.get() is None, "the attention of a broken-off call is left"


# ---- faults ----------------------------------------------------------------------------------------------------------

CALLS = [
    (PageAllocator, "add fork trim release_window free may_swap_out may_swap_in swap_out swap_in needs make_room "
     "commit prepare adopt keep evict _drop _take _needed _sharing _reclaimed"),
    (PrefixCache, "add insert _reclaim _append _touch _on_idle _match _evict _victims"),
    (PagePool, "write attend copy swap_out swap_in write_slots partial _to_host _from_host"),
    (StepPlan, "step _fill"),
    (StatePool, "step read write copy swap_out swap_in _to_host _from_host"),
    (PackedSequences, "run conv1d"),
    (KVCacheManager, "add make_room fork cache_prefix release_windows trim free swap_out swap_in"),
    (Scheduler, "add remove fork schedule mark_computed _cache_prefix _drop_pages _preempt _admit"),
    (ModelRunner, "prepare run _logits keep_states"),
    (sampler, "draw_tokens uniforms PendingTokens"),
    (Sampler, "_metadata_of"),
    (TokenCounts, "of _fill _places _add discard"),
    (NGrams, "bans"),
    (LogitsProcessor, "_biased"),
    (Meter, "add after"),
]  # fmt: skip


class Faults:
    """One call after another fails, before it does anything or after it did, of engines that are made within `into`."""

    def __init__(self, seed=0):
        self.draw = random.Random(seed)
        self.names = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, names in CALLS for name in names.split()]
        self.names.append("model.forward")
        self.planted = dict.fromkeys(self.names, 0)
        self.armed = None

    @contextlib.contextmanager
    def into(self, model):
        before = []
        for owner, names in CALLS:
            for name in names.split():
                function = getattr(owner, name)
                before.append((owner, name, function))
                setattr(owner, name, self.wrapped(function, f"{getattr(owner, '__name__', owner)}.{name}"))
        handle = model.register_forward_hook(lambda *_: self.met("model.forward"))
        try:
            yield self
        finally:
            handle.remove()
            for owner, name, function in before:
                setattr(owner, name, function)

    def wrapped(self, function, name):
        @functools.wraps(function)
        def call(*args, **named):
            if self.armed is not None and self.armed[0] == name:
                after = self.armed[2]
                if not after:
                    self.met(name)
                    return function(*args, **named)
                result = function(*args, **named)
                self.met(name)
                return result
            return function(*args, **named)

        return call

    def met(self, name):
        if self.armed is not None and self.armed[0] == name:
            if self.armed[1]:
                self.armed = (name, self.armed[1] - 1, self.armed[2])
            else:
                self.armed = None
                self.planted[name] += 1
                raise Fault(name)

    def arm(self, least=False):
        """The next fault: of any call, or of those that failed least."""
        names = self.names
        if least:
            fewest = min(self.planted.values())
            names = [name for name in names if self.planted[name] == fewest]
        self.armed = (self.draw.choice(names), self.draw.randrange(3), self.draw.random() < 0.5)


# ---- interrupts and collections --------------------------------------------------------------------------------------


class Lines:
    """Does something at one line of the engine's and the pages' sources, in so many lines from now."""

    def __init__(self, action):
        self.action, self.left, self.at, self.done = action, 0, None, 0

    def arm(self, lines):
        self.left = lines
        sys.settrace(self.called)

    def off(self):
        sys.settrace(None)

    def called(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(SOURCES) else None

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                self.done += 1
                self.action()
        return self.line


def interrupt():
    raise KeyboardInterrupt


@contextlib.contextmanager
def quick_collections():
    """Only what is made within is looked at when garbage is collected."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
