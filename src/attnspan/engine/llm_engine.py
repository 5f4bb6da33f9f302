"""The engine: requests in, tokens out, over one pool of pages.

    engine = Engine(model, pages=1024)
    for answer in engine.generate(prompts, SamplingParams(max_new_tokens=100)):
        print(answer.token_ids)

or by hand: `add` requests at any time, call `step` as long as there is something to do, and look at the requests, which
fill as it goes. A step is one call of the model for whatever is due, prompts and single tokens together (scheduler.py),
and then a token for every sample that was fed all it has (sampler.py).

[Note: after an error] A step is a transaction (journal.py): whatever fails, and whatever interrupts it, the engine is
afterwards as before, so that it can be tried again, or as after, if tokens were about to be told. Over ranks it cannot
be tried again: whether a rank does not answer, or fails by itself, the others cannot know how far it came, and what it
sends next would be taken for what it owes. Every request ends with that error, all pages are given back, the engine
takes no more, and nothing else is sent on that group (attention/unbroken.py).

[Note: threads] One call is under way at a time, and calls of other threads wait for it; over ranks they are refused.
Callers that go away leave notes (owner.py).

[Note: the same on every rank] With a mesh, every rank makes its engine of the same model and gives it the same requests
in the same order; seeds that nobody chose are rank 0's. Requests are compared when they come, and logits are the same
bits on every rank, so that all choose the same tokens.

[Note: a model that changes] What another model computed must not be found by later prompts. A model that was trained,
loaded anew, or is otherwise not what it was, is known by its fingerprint (fingerprint.py): how often it was found
changed is part of the salt, and captured graphs go with its parts. A request that is on its way goes on with what it
has, and leaves nothing to be found.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from attnspan.engine.config import EngineConfig
from attnspan.engine.detokenizer import Detokenizer, Tokenizer, check_tokenizer
from attnspan.engine.journal import Journal
from attnspan.engine.model import ServedModel
from attnspan.engine.outcome import Commit, Outcome
from attnspan.engine.owner import Hold, Note, Owned, Owner, entered, exclusive
from attnspan.engine.params import SamplingParams
from attnspan.engine.pools import PoolSizes, pools_of
from attnspan.engine.progress import ProgressBar
from attnspan.engine.rank_consensus import RankConsensus, RanksDiverged
from attnspan.engine.request import Continuation, Request, Token
from attnspan.engine.room import Room, Store
from attnspan.engine.runner import PlanSizes, Runner
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import ChosenToken, Draw, choose_tokens, uniform
from attnspan.engine.scheduler import Chunk, Counts, Limits, Scheduler
from attnspan.engine.warmup import run_warmup, warmup_batches
from attnspan.errors import EngineError, ModelError, UnknownRequest, whole_list
from attnspan.paged import PrefixCache
from attnspan.transports.group import Group, transport_of

Prompt = str | Sequence[int]


class LLMEngine(Owned):
    """Requests and tokens over pages, with any `ServedModel`; `attnspan.Engine` takes transformers models too."""

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        *,
        mesh: Group = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        info = model.info()
        check_tokenizer(tokenizer, info.vocabulary)
        self.model: object = model
        self.tokenizer, self.vocabulary, self.end_tokens = tokenizer, info.vocabulary, info.end_tokens
        self._model, self._layers = model, info.layers
        self._consensus = RankConsensus(None if mesh is None else transport_of(mesh))
        ranks = self._consensus.ranks
        whole_prompts = max(config.whole_prompts, 2 * ranks) if ranks > 1 else None
        self.limits = Limits(config.max_sequences, config.max_tokens, whole_prompts)
        self._consensus.compare_options(asdict(config) | {"whole_prompts": whole_prompts, "ranks": ranks})
        self._fingerprint = model.fingerprint()
        self._consensus.compare_model(self._fingerprint)
        sizes = PoolSizes(config.pages, config.page_size, config.host_pages, ranks)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            self._pools = pools_of(info, sizes)
        stores = [
            Store(pool.allocator, pool, window, PrefixCache(pool.allocator) if config.prefix_cache else None)
            for pool, window in zip(self._pools.pools, self._pools.windows, strict=True)
        ]
        self.max_length = self._longest(info.max_positions, config.pages * config.page_size * ranks)
        self._scheduler = Scheduler(Room(stores), self.limits, self._version)
        with torch.inference_mode(False):
            self._runner = self._runner_for(mesh, config)
        self._requests: dict[int, Request] = {}
        self._samples: dict[int, dict[int, Sample]] = {}  # by request and sample: what still runs or queues
        self._detokenizers: dict[tuple[int, int], Detokenizer] = {}
        self._streams: dict[int, list[Token]] = {}  # by request: all that its stream has to tell
        self._untold: list[Token] = []  # tokens of a step that was interrupted when they had been noted
        self._journal = Journal(self._scheduler, self._live)
        self._owner = Owner(ranks)
        self._holds: dict[int, Note] = {}  # by id, as not every note can be hashed once its hold is gone
        self._notes: deque[Note | Request] = deque()  # see owner.py, [Note: finalisers]
        self._known_changes = 0  # how often the parts of the model had changed when it was last looked at
        self._added_since = False  # whether requests came since contents were last compared
        self._next = 0
        self._dead: BaseException | None = None

    def _runner_for(self, mesh: Group, config: EngineConfig) -> Runner:
        sizes = PlanSizes(max_sequences=config.max_sequences, max_tokens=config.max_tokens, max_length=self.max_length)
        if self._consensus.ranks == 1:
            return Runner(self._model, self._pools, sizes, kernel=config.kernel, cuda_graphs=config.cuda_graphs)
        if config.cuda_graphs:
            raise EngineError("cuda_graphs=True is for one rank: messages between ranks are not part of a graph")
        from attnspan.engine.ranks_runner import RanksRunner

        sizes["max_tokens"] = max(config.max_tokens, self.max_length)
        assert self.limits.whole is not None, "there are ranks"
        return RanksRunner(
            self._model, self._pools, sizes, mesh=mesh, consensus=self._consensus, whole=self.limits.whole,
            kernel=config.kernel,
        )  # fmt: skip

    def _longest(self, positions: int | None, held: int) -> int:
        """The most tokens of a sample: what the model has positions for, and unless all layers are windowed, pages."""
        if None in self._pools.windows:
            return min(held, positions) if positions else held
        return positions or 64 * held

    @exclusive
    def warm_up(self) -> None:
        """Do now what would be done when it is first met: compile kernels, note graphs of every size.

        Over ranks, on all of them. Nothing of it is counted or kept, but kept prefixes may have to make room for it.
        EngineError while there are requests.
        """
        self._settle()
        self._check_alive()
        if self._requests:
            raise EngineError(f"warm_up is for an engine without requests, got {len(self._requests)} unfinished")
        self._model.check_ready()
        self._look()
        self._journal.begin()
        with self._together():
            for lengths in warmup_batches(self._runner):
                fitting = [length for length in (min(each, self.max_length - 1) for each in lengths) if length]
                run_warmup(self._runner, Scheduler(self._scheduler.room, self.limits), fitting)
        self._journal.end()

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: Hashable = None) -> Request:
        """A new request. What it computes can be found by later prompts that begin alike and have the same salt."""
        return self._add(prompt, params, salt, [])

    @exclusive
    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        salt: Hashable,
        into: list[Request],
        stream: list[Token] | None = None,
    ) -> Request:
        """A new request, appended to a list before it is added; `stream` is where its tokens are told."""
        self._settle()
        self._check_alive()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise EngineError(f"params must be SamplingParams(...), got {params!r}")
        tokens = self._tokens(prompt)
        try:
            hash(salt)
        except TypeError:
            raise EngineError(f"salt must be hashable, such as a text or a number, got {salt!r}") from None
        most = len(tokens) + params.max_new_tokens
        if max(params.stop_token_ids, default=0) >= self.vocabulary or params.top_logprobs > self.vocabulary:
            raise EngineError(
                f"stop_token_ids must be tokens of the model's {self.vocabulary}, and top_logprobs at most so many, "
                f"got {params.stop_token_ids} and {params.top_logprobs}"
            )
        if params.stop and self.tokenizer is None:
            raise EngineError(f"stop={params.stop!r} needs a tokenizer; give the engine one, or use stop_token_ids")
        if most - 1 > self.max_length and self._scheduler.room.refusal(most - 1, self._scheduler.chunk) is None:
            raise EngineError(
                f"the model has positions for {self.max_length} tokens; the prompt has {len(tokens)} and "
                f"max_new_tokens={params.max_new_tokens} more are asked for"
            )
        number, seed = self._next, secrets.randbits(63) if params.seed is None else params.seed
        # The last token is never fed, so that it needs no room.
        sample = Sample(number, array("Q", tokens), most - 1, forks=params.n - 1, salt=salt)
        self._scheduler.check_fits(sample)
        with self._hearing():
            told = self._consensus.compare_request((tokens, params, salt, number), seed)
            request = Request(number, tokens, params, told if params.seed is None else seed, salt)
            for _ in range(params.n):
                noted = params.logprobs or params.top_logprobs
                continuation = Continuation(logprobs=[] if noted else None)
                if params.top_logprobs:
                    continuation.top_logprobs = []
                request.samples.append(continuation)
            into.append(request)
            self._journal.begin(mend=partial(self._discard, request))  # what is broken off here was never added
            self._next, self._added_since = number + 1, True
            if stream is not None:
                self._streams[number] = stream
            self._samples[number] = {0: sample}
            self._requests[number] = request
            self._scheduler.add(sample)
            self._journal.end()
        return request

    def _look(self) -> None:
        """Notice a model whose parts are not what they were. See [Note: a model that changes]."""
        self._fingerprint.look()
        changes = self._fingerprint.changes
        if changes != self._known_changes:
            self._runner.forget_graphs()
            if self._model.info().layers != self._layers:
                raise ModelError(
                    "the attention layers of model are others than when the engine was made; make a new one"
                )
            self._known_changes = changes

    def _version(self, found: bool) -> int:
        """Of the model, for a request that begins, on pages that were `found` or not."""
        read = (found or self._added_since) and self._fingerprint.compare_content()
        self._consensus.compare_version(self._fingerprint, again=read)
        self._added_since = False
        return self._fingerprint.version

    def cancel(self, request: Request) -> None:
        """End a request: its pages are given back, and it keeps what it has. UnknownRequest if it has ended.

        In the middle of a step (by a hook, or a finaliser) it is noted, and ends when the next call begins.
        """
        with self._owner.lock: self._cancel(request)  # fmt: skip  # noqa: E701

    def _cancel(self, request: Request) -> None:
        if self._owner.reentered:
            self._check_known(request)
            self._notes.append(request)
        else:
            entered(self, LLMEngine._cancelled, (request,), {})

    def _cancelled(self, request: Request) -> None:
        self._settle()
        self._check_known(request)
        failed = self._end(request, "cancelled")
        if failed is not None:
            raise failed

    def _check_known(self, request: Request) -> None:
        if self._requests.get(getattr(request, "number", -1)) is not request:
            ended = isinstance(request, Request) and request.finished
            raise UnknownRequest(
                f"request {request.number} has ended ({request.finish_reason}) and cannot be cancelled"
                if ended
                else f"request must be one that add() of this engine returned, got {request!r}"
            )

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> Exception | None:
        """End what is left of a request; why the end of its text could not be decoded, if it could not."""
        left, failed = [], None
        if reason == "cancelled":
            self._consensus.cancelled(request.number)
        for number, continuation in enumerate(request.samples):
            if continuation.finish_reason is None:
                text = continuation.text
                try:
                    text += self._held_back(request, number) if error is None else ""
                except Exception as failure:
                    failed = failure
                left.append((continuation, text))
        samples = list(self._samples[request.number].values())

        def tell() -> None:
            for continuation, text in left:
                continuation.text = text
                continuation.finish_reason = reason
            request.error = error
            self._discard(request)

        def book() -> None:
            for sample in samples:
                self._scheduler.remove(sample, keep=error is None)

        self._journal.commit(tell, book)
        return failed

    def _discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        for number in range(len(request.samples)):
            self._detokenizers.pop((request.number, number), None)
        self._streams.pop(request.number, None)
        self._samples.pop(request.number, None)
        self._requests.pop(request.number, None)

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have not ended, oldest first."""
        with self._owner.lock: return self._unfinished()  # fmt: skip  # noqa: E701

    def _unfinished(self) -> list[Request]:
        if self._owner.may_act:
            entered(self, LLMEngine._settle, (), {})
        return list(self._requests.values())

    def _live(self) -> Iterator[Sample]:
        return (sample for samples in self._samples.values() for sample in samples.values())

    @property
    def counts(self) -> Counts:
        """What was computed, found, swapped and computed again so far."""
        return self._scheduler.counts

    # ---- steps -----------------------------------------------------------------------------------------------------

    @exclusive
    def step(self) -> list[Token]:
        """Call the model once for what is due; the tokens that came of it. Empty if there is nothing to do, or while
        a long prompt is computed in chunks.

        Tokens of a step that was interrupted after they had been noted come with the next.
        """
        self._settle()
        self._check_alive()
        self._model.check_ready()
        self._look()
        batch = self._planned()
        if not batch:
            self._journal.end()
        else:
            with self._together():
                self._runner.prepare(batch)
                self._journal.planned(batch)
                samples = [chunk.sample for chunk in batch if chunk.last]
                answers = self._choose(samples, self._runner.run(batch))
                self._fingerprint.ran()
                commit = self._outcomes(samples, answers)
                self._journal.commit(partial(self._tell, commit), partial(self._book, batch, commit))
        told, self._untold = self._untold, []
        return told

    def _planned(self) -> list[Chunk]:
        """The next batch. The journal has begun."""
        self._journal.begin()
        with self._hearing():
            batch = self._scheduler.step()
        if not batch and self._samples:  # rather than to be asked again and again
            raise EngineError("the scheduler has lost a sample; the next call computes all requests again")
        return batch

    def _settle(self) -> None:
        """Carry through or roll back what an earlier call left, and act on notes. Every call begins with it."""
        if not self._journal.settled:
            self._detokenizers.clear()  # they may have read tokens that nobody was told, and are made again
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize(self._runner.device)  # buffers that are still being sent are not to be filled
            if self._consensus.ranks > 1 and self._dead is None:
                self._dead = EngineError("a call was interrupted on this rank, and others cannot know how far it came")
            self._journal.settle()
        if self._dead is not None and self._requests:
            self._die(self._dead)
        while self._notes:
            note = self._notes[0]
            for request in note.requests if isinstance(note, Note) else [note]:
                if self._requests.get(request.number) is request:
                    self._end(request, "cancelled")
            self._holds.pop(id(note), None)
            self._notes.popleft()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, ranks do the same, and whoever fails ends it for all. See [Note: after an error]."""
        try:
            with self._consensus.under_way():
                yield
        except BaseException as error:
            if self._consensus.ranks > 1:
                self._die(error)
            raise

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Inside, ranks compare what they were told. What they refuse together has not happened, and whatever else
        breaks off ends it for all."""
        if self._consensus.ranks == 1:
            yield
            return
        self._journal.begin()
        try:
            yield
        except BaseException as error:
            if isinstance(error, EngineError) and not isinstance(error, RanksDiverged):
                self._journal.settle()
                raise
            self._die(error)
            raise

    def _choose(self, samples: list[Sample], logits: torch.Tensor) -> list[ChosenToken]:
        """A token for each sample whose logits these are, and for those that will be split off from it."""
        rows = [row for row, sample in enumerate(samples) for _ in range(1 + sample.forks)]
        if not rows:
            return []
        if len(rows) > len(samples):
            logits = logits[torch.tensor(rows, device=logits.device)]
        draws = [self._draw(sample, sample.number + fork) for sample in samples for fork in range(1 + sample.forks)]
        return choose_tokens(logits, draws, [self._wants(samples[row]) for row in rows])

    def _outcomes(self, samples: list[Sample], answers: list[ChosenToken]) -> Commit:
        """What everyone will be told; nobody is, yet. Where a text cannot be decoded, its request ends."""
        outcomes: list[Outcome] = []
        splits = [(sample, sample.split()) for sample in samples if sample.forks]
        forks = {id(sample): group for sample, group in splits}
        left = iter(answers)
        for sample in samples:
            for each in (sample, *forks.get(id(sample), ())):
                try:
                    outcomes.append(self._outcome(each, next(left)))
                except Exception as error:
                    self._journal.settle()  # to the others, the step did not happen
                    self._detokenizers.clear()
                    self._end(self._requests[each.arrival], "error", error)
                    raise
        return Commit(
            outcomes, splits, [*self._untold, *(outcome.token for outcome in outcomes)], self._places(outcomes)
        )

    def _places(self, outcomes: list[Outcome]) -> list[tuple[list[Token], int, Token]]:
        """Where in which stream each token will be."""
        found, ends = [], dict[int, int]()
        for outcome in outcomes if self._streams else ():
            stream = self._streams.get(outcome.token.request.number)
            if stream is not None:
                place = ends.get(id(stream), len(stream))
                found.append((stream, place, outcome.token))
                ends[id(stream)] = place + 1
        return found

    def _tell(self, commit: Commit) -> None:
        """Note everyone's token, and end samples where they end. Whatever was noted already stays as it is."""
        for sample, forks in commit.splits:
            sample.forks = 0
            if sample.arrival in self._samples:
                self._samples[sample.arrival].update({fork.number: fork for fork in forks})
        for outcome in commit.outcomes:
            outcome.note()
        for stream, place, token in commit.places:
            if len(stream) == place:
                stream.append(token)
        for outcome in commit.outcomes:
            request, number, _, _, reason = outcome.token
            if reason is not None:
                self._samples.get(request.number, {}).pop(number, None)
                outcome.continuation.finish_reason = reason
                if request.finished:
                    self._discard(request)
        self._untold = commit.told

    def _book(self, batch: Sequence[Chunk], commit: Commit) -> None:
        """The same in the books: keys are in pages, samples run beside the one they split from, some have ended."""
        scheduler = self._scheduler
        scheduler.computed(batch)
        for sample, forks in commit.splits:
            scheduler.fork(sample, forks)
        for outcome in commit.outcomes:
            reason = outcome.token.finish_reason
            if reason is not None:
                scheduler.remove(outcome.sample, keep=reason != "error")

    def _draw(self, sample: Sample, of: int) -> Draw:
        request = self._requests[sample.arrival]
        params = request.params
        if not params.temperature:
            return _GREEDY
        number = uniform(request.seed, of, len(sample.tokens))
        return Draw(params.temperature, params.top_k, params.top_p, number)

    def _wants(self, sample: Sample) -> int | None:
        params = self._requests[sample.arrival].params
        return params.top_logprobs if params.logprobs or params.top_logprobs else None

    def _outcome(self, sample: Sample, answer: ChosenToken) -> Outcome:
        """What a sample will be told, and whether it then ends."""
        request = self._requests[sample.arrival]
        params, continuation = request.params, request.samples[sample.number]
        place = len(continuation.token_ids)
        if answer.token is None:
            return self._senseless(sample, answer, place)
        reason = None
        if answer.token in params.stop_token_ids or (answer.token in self.end_tokens and not params.ignore_eos):
            reason = "stop"
        elif place + 1 == params.max_new_tokens:
            reason = "length"
        text, reason = self._detokenized(request, sample.number, answer.token, reason)
        token = Token(request, sample.number, answer.token, text, reason)
        return Outcome(sample, continuation, answer, place, continuation.text + text, token)

    def _senseless(self, sample: Sample, answer: ChosenToken, place: int) -> Outcome:
        """The end of a sample whose logits are not numbers. What it computed is not found by others."""
        request = self._requests[sample.arrival]
        continuation = request.samples[sample.number]
        error = EngineError(
            f"sample {sample.number} of request {request.number} ended after {len(sample.tokens)} tokens: the model's "
            "logits are NaN or infinite there; look for such numbers in its weights, or for a dtype that is too narrow"
        )
        text = self._held_back(request, sample.number)
        token = Token(request, sample.number, None, text, "error")
        return Outcome(sample, continuation, answer, place, continuation.text + text, token, error)

    def _detokenizer(self, request: Request, number: int) -> Detokenizer:
        """The text of a sample so far; read again from its tokens, where that was broken off."""
        found = self._detokenizers.get((request.number, number))
        if found is None:
            assert self.tokenizer is not None, "there is text"
            found = Detokenizer(self.tokenizer, request.params.stop, request.prompt)
            for token in request.samples[number].token_ids:
                found.push(token)
            self._detokenizers[request.number, number] = found
        return found

    def _held_back(self, request: Request, number: int) -> str:
        """The text that might have become one to stop at."""
        if self.tokenizer is None or not request.samples[number].token_ids:
            return ""
        detokenizer = self._detokenizer(request, number)
        del self._detokenizers[request.number, number]  # it has ended, and the request not yet
        return detokenizer.end()

    def _detokenized(self, request: Request, number: int, token: int, reason: str | None) -> tuple[str, str | None]:
        """What the text grew by, and why the sample ends, if it does: texts to stop at are found here."""
        if self.tokenizer is None:
            return "", reason
        detokenizer = self._detokenizer(request, number)
        text = detokenizer.push(token)
        if detokenizer.stopped:
            reason = "stop"
        elif reason is not None:
            text += detokenizer.end()
            reason = "stop" if detokenizer.stopped else reason
        return text, reason

    # ---- all at once -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Hashable = None,
        progress: bool = False,
    ) -> list[Request]:
        """Continue every prompt; the finished requests in the order of the prompts.

        `params` is one for all, or one for each. If anything goes wrong, none of these requests is left behind.
        """
        requests: list[Request] = []
        hold = self._held(requests)  # should the `finally` be interrupted
        try:
            self._add_all(requests, prompts, params, salt)
            with ProgressBar(requests, progress) as bar:
                while not all(request.finished for request in requests):
                    bar.advance(sum(token.finish_reason is not None for token in self.step()))
        finally:
            self._forget(requests)
            del hold
        return requests

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Hashable = None,
    ) -> Iterator[Token]:
        """The tokens of one prompt, or of several, as they come. Whoever stops asking ends the requests.

        Whoever steps: several streams, `generate` and `step` may take turns, and each stream tells all of its tokens.
        """
        several = [prompts] if isinstance(prompts, str) else _listed(prompts)
        if not isinstance(prompts, str) and not any(map(_is_prompt, several)):
            several = [several]  # tokens
        stream = self._streamed(several, params, salt)
        next(stream)  # as far as its first yield: requests are added now, and end if nobody reads the stream
        return stream

    def _streamed(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, salt: Hashable
    ) -> Iterator[Any]:
        """Nothing at first, then tokens. Whoever goes away drops the hold, which leaves a note, and that is all."""
        requests: list[Request] = []
        told: list[Token] = []
        hold = self._held(requests)
        try:
            self._add_all(requests, prompts, params, salt, told)
            yield None
            read = 0
            while True:
                done = all(request.finished for request in requests)  # first: another thread may step in between
                if read < len(told):
                    read += 1
                    yield told[read - 1]
                elif done:
                    break
                else:
                    try:
                        self.step()
                    except BaseException:
                        self._forget(requests)
                        raise
        finally:
            del hold  # close() of Python 3.12 keeps what a generator holds, unless there is something to be done

    def _held(self, requests: list[Request]) -> Hold:
        """What the caller's frame must keep while it wants these requests. See owner.py, [Note: finalisers]."""
        hold = Hold()
        note = Note(hold, self._notes.append)
        note.requests = requests
        self._holds[id(note)] = note
        return hold

    def _add_all(
        self,
        requests: list[Request],
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: Hashable,
        told: list[Token] | None = None,
    ) -> None:
        """Add all of the requests, or none."""
        if isinstance(prompts, str):
            raise EngineError("prompts must be a list of prompts, got a text; as in generate([prompt])")
        prompts = _listed(prompts)
        if prompts and not any(map(_is_prompt, prompts)):
            raise EngineError(
                f"prompts must be a list of texts or of lists of tokens, got one that begins with {prompts[0]!r}; as "
                "in generate([prompt])"
            )
        if params is None or isinstance(params, SamplingParams):
            each: list[Any] = [params] * len(prompts)
        elif isinstance(params, Sequence):
            each = list(params)
        else:
            raise EngineError(f"params must be SamplingParams(...), or a list of them, got {params!r}")
        if len(each) != len(prompts):
            raise EngineError(f"params must be one for all {len(prompts)} prompts, or one for each, got {len(each)}")
        try:
            for prompt, one in zip(prompts, each, strict=True):
                self._add(prompt, one, salt, requests, told)
        except BaseException:
            self._forget(requests)
            raise

    def _forget(self, requests: list[Request]) -> None:
        """End those that have not ended."""
        if not all(request.finished for request in requests):
            self._forgotten(requests)

    @exclusive
    def _forgotten(self, requests: list[Request]) -> None:
        self._settle()
        failures = [
            self._end(request, "cancelled") for request in requests if self._requests.get(request.number) is request
        ]
        for failed in filter(None, failures):
            raise failed

    # ---- checks ----------------------------------------------------------------------------------------------------

    @exclusive
    def check(self) -> None:
        """Hold pages, queues and requests to what must be true of them; AssertionError if anything is not."""
        self._settle()
        scheduler = self._scheduler
        scheduler.room.check()
        held = {id(sample) for samples in self._samples.values() for sample in samples.values()}
        assert held == {id(sample) for sample in (*scheduler.running, *scheduler.queued)}, "a sample is lost"
        assert set(self._samples) == set(self._requests), "a request is lost"

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise EngineError("prompt is a text, which needs a tokenizer; give the engine one, or tokens")
            tokens = list(self.tokenizer.encode(prompt))
        else:
            plain = isinstance(prompt, list | tuple) and set(map(type, prompt)) <= {int} and min(prompt, default=0) >= 0
            tokens = list(prompt if plain else whole_list("prompt", prompt, error=EngineError))
        if not tokens:
            raise EngineError("prompt must hold at least one token, got none; begin with the model's first token")
        if max(tokens) >= self.vocabulary:
            raise EngineError(f"prompt must hold tokens below the model's {self.vocabulary}, got {max(tokens)}")
        return tokens

    def _die(self, error: BaseException) -> None:
        """See [Note: after an error]."""
        self._dead = error

        def tell() -> None:
            for request in list(self._requests.values()):
                for continuation in request.samples:
                    continuation.finish_reason = continuation.finish_reason or "error"
                request.error = error
                self._discard(request)

        self._journal.commit(tell, partial(self._scheduler.reset, ()))

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(
                "the engine has lost a rank, or failed on this one, and takes no more requests; make a new one, of a "
                f"new group ({self._dead})"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget(self.unfinished)

    def __repr__(self) -> str:
        scheduler, store = self._scheduler, self._scheduler.room.stores[0]
        kind, model, size = type(self).__name__, type(self.model).__name__, store.allocator.page_size
        return (
            f"{kind}({model}, {store.pages} pages of {size} tokens, "
            f"{len(scheduler.running)} running, {len(scheduler.queued)} queued)"
        )


_GREEDY = Draw()


def _listed(prompts: Any) -> list[Any]:
    """Prompts as a list. Of a dict, such as a tokenizer returns, the keys would be taken for texts."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise EngineError(
            f"prompts must be a list of texts or of lists of tokens, got {type(prompts).__name__}; of what a tokenizer "
            'returns, take its "input_ids"'
        )
    return list(prompts)


def _is_prompt(one: Any) -> bool:
    """Whether this is a prompt and not a token: a tensor of no dimensions can be asked for its items, and has none."""
    return isinstance(one, Iterable) and getattr(one, "ndim", 1) > 0
