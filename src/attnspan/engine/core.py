"""The core of the engine: add requests, step, and read tokens from them.

Call `add` at any time, and `step` as long as there are unfinished requests; their `continuations` grow. A step is a
batch that is computed by one call of the model, prompts and decoding together (scheduler.py), and then one token for
every sample with no tokens left to compute (sampler.py).

[Note: after an error] A step is a transaction (journal.py): after an error or an interrupt, the engine is as it was
before the step, which can be retried, or as after it, if tokens were already being reported. Over ranks a step cannot
be retried: if a rank fails or does not answer, the others do not know how far it came, and would mistake its next
messages for missing ones. Then every request ends with that error, all pages are freed, the engine takes no more
requests, and its group is not used again (transports/abort.py).

[Note: threads] One call runs at a time. Calls from other threads wait for it; over ranks they are refused. Callers that
are garbage collected have their requests cancelled by the next call (call_lock.py).

[Note: the same on every rank] With a mesh, every rank makes its engine with the same model and adds the same requests
in the same order; seeds that are not given are drawn by rank 0. Requests are compared when they are added, and logits
have the same bits on every rank, so that all ranks choose the same tokens.

[Note: a model that changes] Later prompts must not find pages that another version of the model computed. A model that
was trained, reloaded, or changed otherwise is detected by its fingerprint (fingerprint.py). Its version is part of the
salt, and captured graphs are dropped when its parts change. A request in progress continues with the keys that it has,
and its pages are not found by others.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnspan.engine.call_lock import CallerRef, CallLock, HasCallLock, call_exclusively, exclusive, locked
from attnspan.engine.config import EngineConfig
from attnspan.engine.detokenizer import Tokenizer, check_tokenizer
from attnspan.engine.engine_ranks import engine_ranks
from attnspan.engine.grammar import Grammars
from attnspan.engine.in_flight import InFlight
from attnspan.engine.journal import Journal
from attnspan.engine.kv_cache_manager import KVCacheManager
from attnspan.engine.logits_processor import ends_of
from attnspan.engine.memory import pages_that_fit
from attnspan.engine.model import EmbeddedPrompt, EmbedsPrompts, ModelInfo, NamesAdapters, ServedModel
from attnspan.engine.model_runner import ModelRunner
from attnspan.engine.output_processor import Commit, Outcome, OutputProcessor
from attnspan.engine.params import SamplingParams
from attnspan.engine.pools import UNBOUNDED, pools_of
from attnspan.engine.prompt_lookup import PromptLookup
from attnspan.engine.prompts import Prompt, complete_params, encode_prompt
from attnspan.engine.rank_consensus import RankConsensus, RanksDiverged
from attnspan.engine.request import Continuation, Request, Token
from attnspan.engine.request_table import RequestTable
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import PendingTokens, SampledToken, Sampler
from attnspan.engine.scheduler import Chunk, Counts, Limits, Scheduler
from attnspan.engine.stats import EngineStats, Meter, Totals
from attnspan.engine.warmup import run_warmup
from attnspan.errors import EngineError, ModelError, integer
from attnspan.transports import Transport
from attnspan.transports.abort import abort_on_error
from attnspan.transports.group import Group

if TYPE_CHECKING:
    from llguidance import LLMatcher


class EngineCore(HasCallLock):
    """Requests in, tokens out, for any `ServedModel`; the base of `generate` and `stream`."""

    def __init__(
        self, model: ServedModel, config: EngineConfig, *, mesh: Group = None, tokenizer: Tokenizer | None = None
    ) -> None:
        info = model.info()
        check_tokenizer(tokenizer, info.vocabulary)
        self.model: object = model  # as the caller knows it: `attnspan.Engine` puts the transformers model here
        self._served_model, self._layers = model, (info.layers, info.states)
        self._decoder_start, self._max_prompt = info.decoder_start, info.max_prompt
        self.vocabulary, self._outputs = info.vocabulary, OutputProcessor(tokenizer, info.end_tokens)
        self._grammars = Grammars(tokenizer, info.vocabulary)
        groups = engine_ranks(mesh, info)
        self._consensus = RankConsensus(groups)
        ranks = self._consensus.page_ranks
        config = _config_for(config, info, ranks)
        context_parallel_from = config.context_parallel_from if ranks > 1 else None
        self.limits = Limits(config.max_sequences, config.max_tokens, context_parallel_from)
        self._lookup_tokens = config.prompt_lookup_num_tokens
        self._consensus.compare_options(asdict(config) | {"ranks": ranks, "tp": len(info.tp_ranks)})
        self._fingerprint = model.fingerprint()
        self._consensus.compare_model(self._fingerprint)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            pages = config.pages or pages_that_fit(info, config, self._consensus)
            config = replace(config, pages=pages, memory_share=None)
            self._pools = pools_of(info, config, ranks)
            self.max_length = self._max_length(info.max_positions, pages * config.page_size * ranks)
            self._runner = self._runner_for(groups.pages, config)
        kv_cache = KVCacheManager(self._pools.groups(config.prefix_cache))
        self._scheduler = Scheduler(kv_cache, self.limits, self._version)
        self._table = RequestTable()
        self.default_params = info.defaults  # what requests' params leave to the model
        self._sampler, self._meter = Sampler(), Meter()
        self._unreported: list[Token] = []  # tokens of a step that was interrupted while it was reported
        self._journal = Journal(self._scheduler, self._table.live)
        self._call_lock = CallLock(self._consensus.ranks)
        self._caller_refs: dict[int, CallerRef] = {}  # by id: not each can be hashed once its handle is gone
        self._to_cancel: deque[CallerRef | Request] = deque()  # see call_lock.py, [Note: finalizers]
        self._known_changes = 0  # how often the parts of the model had changed at the last step
        self._added_since = False  # whether requests came since contents were last compared
        self._next = 0
        self._failure: BaseException | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What prompts are encoded and answers are decoded with."""
        return self._outputs.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._outputs.tokenizer, self._grammars = tokenizer, Grammars(tokenizer, self.vocabulary)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a sample, unless `ignore_eos`."""
        return self._outputs.end_tokens

    @end_tokens.setter
    def end_tokens(self, tokens: frozenset[int]) -> None:
        self._outputs.end_tokens = tokens

    def compile_grammar(self, params: SamplingParams) -> LLMatcher | None:
        """Compile and cache the grammar of params; EngineError if it is not supported. From any thread."""
        if params.json_schema is None:
            return None
        if self.tokenizer is None:
            raise EngineError("json_schema needs a tokenizer; give the engine one")
        assert isinstance(params.json_schema, str), "params are in one form"
        return self._grammars.compiled(params.json_schema, sorted(ends_of(params, self.end_tokens)))

    @property
    def transport(self) -> Transport | None:
        """The engine's group of ranks; None for one rank."""
        return self._consensus.transport

    @property
    def device(self) -> torch.device:
        """Where pages are."""
        return self._runner.device

    @property
    def failure(self) -> BaseException | None:
        """Why the engine takes no more requests; None while it does. See [Note: after an error]."""
        return self._failure

    def _runner_for(self, pages: Group, config: EngineConfig) -> ModelRunner:
        if self._consensus.ranks == 1:
            return ModelRunner(self._served_model, self._pools, config, self.max_length)
        if config.cuda_graphs:
            raise EngineError("cuda_graphs=True is for one rank: messages between ranks are not part of a graph")
        from attnspan.engine.context_parallel_runner import ContextParallelRunner

        if self._consensus.page_ranks > 1:
            config = replace(config, max_tokens=max(config.max_tokens, self.max_length))  # a whole prompt is one step
        return ContextParallelRunner(
            self._served_model, self._pools, config, self.max_length, mesh=pages, consensus=self._consensus
        )

    def _max_length(self, positions: int | None, held: int) -> int:
        """The most tokens of a sample: what the model has positions for, and unless no layer sees all, pages."""
        if None in self._pools.windows:
            return min(held, positions) if positions else held
        return positions or (64 * held if self._pools.windows else UNBOUNDED - 1)

    @exclusive
    def warm_up(self) -> None:
        """Compile kernels and capture graphs of every size now, so that the first request does not wait for them.

        Over ranks, to be called on all of them. Leaves no counts and no pages, but may evict cached prefixes.
        EngineError while there are requests.
        """
        self._settle()
        self._check_alive()
        if self._table.requests:
            raise EngineError(f"warm_up is for an engine without requests, got {len(self._table.requests)} unfinished")
        self._served_model.check_ready()
        self._check_changes()
        self._journal.drop_ahead()
        self._journal.begin()
        with self._on_all_ranks():
            run_warmup(self._runner, Scheduler(self._scheduler.kv_cache, self.limits), self.max_length)
        self._journal.end()

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: Hashable = None, priority: int = 0
    ) -> Request:
        """A new request. Later prompts with a common prefix and the same salt can reuse its pages.

        Requests of a higher `priority` are admitted first and preempted last (scheduler.py, [Note: order]).
        """
        return self._add(prompt, params, salt, [], priority=priority)

    @exclusive
    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        salt: Hashable,
        into: list[Request],
        stream: list[Token] | None = None,
        priority: int = 0,
    ) -> Request:
        """A new request, appended to `into` before it is added; its tokens are appended to `stream`."""
        self._settle()
        self._check_alive()
        params = complete_params(params, self.default_params, self.tokenizer, self.vocabulary)
        if params.adapter is not None:
            if isinstance(prompt, Mapping):
                name = params.adapter
                raise EngineError(f"adapter={name!r}: a prompt with images is computed by the model as it is set")
            self.check_adapter(params.adapter)
        grammar = self.compile_grammar(params)
        sample = self._sample(prompt, params, salt, priority)
        self._check_request(sample, params)
        with self._consensus_or_rollback():
            request = self._request(sample, params)
            into.append(request)
            self._journal.begin(redo=partial(self._take_back, request, self._meter.totals))
            self._next, self._added_since = request.number + 1, True
            self._sampler.add(request, self.end_tokens, grammar)
            if self._lookup_tokens and sample.embedded is None and self._sampler.may_draft(request):
                sample.lookup = PromptLookup(self._lookup_tokens)
            self._table.add(request, sample, stream)
            self._scheduler.add(sample)
            self._meter.add(request)
            self._journal.end()
        return request

    def _sample(self, prompt: Prompt, params: SamplingParams, salt: Hashable, priority: int) -> Sample:
        """The scheduler's sample of a prompt."""
        embedded = self._embedded(prompt) if isinstance(prompt, Mapping) else None
        text = prompt if embedded is None else embedded.tokens
        assert not isinstance(text, Mapping), "it was embedded"
        encoder_prompt, tokens = self._for_encoder(encode_prompt(text, self.tokenizer, self.vocabulary))
        priority = integer("priority", priority, at_least=-(2**31), error=EngineError)
        fed = len(tokens) + (params.max_new_tokens or 1) - 1  # the last token is never fed, and needs no room
        sample = Sample(
            self._next, array("Q", tokens), fed, forks=(params.n or 1) - 1, salt=salt, priority=priority,
            encoder_prompt=encoder_prompt, adapter=params.adapter,
        )  # fmt: skip
        if embedded is not None and embedded.content is not None:
            sample.embedded, sample.atomic_spans = embedded, embedded.atomic_spans
        return sample

    def _request(self, sample: Sample, params: SamplingParams) -> Request:
        """The request of a sample, compared between ranks, with a seed that is the same on all."""
        number, salt, source, tokens = sample.request_number, sample.salt, sample.encoder_prompt, list(sample.tokens)
        own = secrets.randbits(63) if params.seed is None else params.seed
        compared = source, list(sample.content_ids), params, salt, sample.priority, number
        common = self._consensus.compare_request(compared, own)
        seed = common if params.seed is None else own
        samples = [Continuation.empty(params) for _ in range(1 + sample.forks)]
        return Request(number, list(source) or tokens, params, seed, salt, tuple(tokens) if source else (), samples)

    def _take_back(self, request: Request, totals: Totals) -> None:
        """Undo the addition of a request that was interrupted."""
        self._discard(request)
        self._meter.totals = totals

    def _for_encoder(self, tokens: list[int]) -> tuple[tuple[int, ...], list[int]]:
        """The tokens for the encoder, and those for the decoder; without an encoder, all are for the decoder."""
        if self._decoder_start is None:
            return (), tokens
        if self._max_prompt is not None and len(tokens) > self._max_prompt:
            raise EngineError(
                f"the model's encoder has positions for {self._max_prompt} tokens, and the prompt has {len(tokens)}"
            )
        return tuple(tokens), [self._decoder_start]

    def _embedded(self, inputs: Mapping[str, Any]) -> EmbeddedPrompt:
        """A prompt with images or sounds, run up to its embeddings."""
        model = self._served_model
        if not isinstance(model, EmbedsPrompts):
            raise EngineError(
                f"prompt must be a text or tokens, got {type(inputs).__name__}: the model takes tokens alone; of what "
                'a tokenizer returns, give its "input_ids"'
            )
        model.check_ready()
        return model.embed(inputs)

    def check_adapter(self, name: str) -> None:
        """Raise an EngineError with the reason, if requests cannot name this adapter."""
        if not isinstance(self._served_model, NamesAdapters):
            raise EngineError(f"adapter={name!r}: the model is served without adapters; leave adapter out")
        self._served_model.check_adapter(name)

    def _check_request(self, sample: Sample, params: SamplingParams) -> None:
        """EngineError for a request that this engine can never serve."""
        try:
            hash(sample.salt)
        except TypeError:
            raise EngineError(f"salt must be hashable, such as a text or a number, got {sample.salt!r}") from None
        self._scheduler.check_fits(sample)
        if sample.max_length > self.max_length:
            raise EngineError(
                f"the model has positions for {self.max_length} tokens; the prompt has {sample.prompt_length} and "
                f"max_new_tokens={params.max_new_tokens} more are asked for"
            )

    def _check_changes(self) -> None:
        """Detect a change of the model's parts. See [Note: a model that changes]."""
        self._fingerprint.compare_parts()
        changes = self._fingerprint.changes
        if changes != self._known_changes:
            self._journal.drop_ahead()
            self._runner.forget_graphs()
            info = self._served_model.info()
            if (info.layers, info.states) != self._layers:
                raise ModelError("the layers of model have changed since the engine was made; make a new one")
            self._known_changes = changes

    def _version(self, found: bool) -> int:
        """The version of the model for a sample that starts, on `found` cached pages or on none."""
        read = (found or self._added_since) and self._fingerprint.compare_content()
        self._consensus.compare_version(self._fingerprint, again=read)
        self._added_since = False
        return self._fingerprint.version

    @locked
    def cancel(self, request: Request) -> None:
        """Cancel a request: its pages are freed, and its tokens so far stay. UnknownRequest if it has ended.

        Called during a step (by a hook or a finalizer), it takes effect when the next call begins.
        """
        if self._call_lock.reentered:
            self._table.check(request)
            self._to_cancel.append(request)
        else:
            call_exclusively(self, EngineCore._cancelled, (request,), {})

    def _cancelled(self, request: Request) -> None:
        self._settle()
        self._table.check(request)
        failed = self._end(request, "cancelled")
        if failed is not None:
            raise failed

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> Exception | None:
        """End the unfinished samples of a request; the error, if the end of a text could not be decoded."""
        left, failed = [], None
        if reason == "cancelled":
            self._consensus.cancelled(request.number)
        for number, continuation in enumerate(request.continuations):
            if continuation.finish_reason is None:
                text = continuation.text
                try:
                    if error is None and continuation.token_ids:
                        text += self._outputs.flush(request, number)
                except Exception as failure:
                    failed = failure
                left.append((continuation, text))
        samples = list(self._table.samples[request.number].values())
        totals = self._meter.totals.ended([reason] * len(left))

        def publish() -> None:
            self._meter.totals = totals
            for continuation, text in left:
                continuation.text = text
                continuation.finish_reason = reason
            request.error = error
            self._discard(request)

        def update_scheduler() -> None:
            for sample in samples:
                self._scheduler.remove(sample, cache=error is None)

        self._journal.commit(publish, update_scheduler)
        return failed

    def _discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        self._outputs.discard(request)
        self._sampler.discard(request)
        self._meter.discard(request)
        self._table.discard(request)
        self._runner.forget_encoded(request.number)

    @property
    @locked
    def unfinished(self) -> list[Request]:
        """Requests that have not ended, oldest first."""
        if self._call_lock.may_act:
            call_exclusively(self, EngineCore._settle, (), {})
        return list(self._table.requests.values())

    @property
    def counts(self) -> Counts:
        """Counts of tokens and samples that were computed, found in the cache, swapped and recomputed."""
        return self._scheduler.counts

    @locked
    def stats(self) -> EngineStats:
        """Statistics between two steps. From any thread; waits for a running step."""
        if self._call_lock.may_act and self._consensus.ranks == 1:
            call_exclusively(self, EngineCore._settle, (), {})
        return self._meter.stats(self._scheduler)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @exclusive
    def step(self) -> list[Token]:
        """Run one batch; the tokens that it generated. Empty if nothing is scheduled, or while a long prompt is
        computed in chunks.

        Tokens of a step that was interrupted while reporting are returned by the next one.
        """
        self._settle()
        self._check_alive()
        self._served_model.check_ready()
        self._check_changes()
        in_flight = self._adopt_ahead()
        batch = self._schedule() if in_flight is None else in_flight.batch
        if not batch:
            self._journal.end()
        else:
            with self._on_all_ranks():
                in_flight = in_flight or self._launch(batch)
                ahead = self._launch_ahead(in_flight)  # before `read`, which waits for the device
                self._fingerprint.accept_own_writes()
                commit = self._outcomes(in_flight.token_chunks, in_flight.read())
                publish = partial(self._publish, commit)
                self._journal.commit(publish, partial(self._update_scheduler, batch, commit, ahead))
        tokens, self._unreported = self._unreported, []
        return tokens

    def _schedule(self) -> list[Chunk]:
        """The next batch. The journal has begun."""
        self._journal.begin()
        with self._consensus_or_rollback():
            batch = self._scheduler.schedule()
        if not batch and self._table.samples:  # an error, or callers would step for ever
            raise EngineError("the scheduler has lost a sample; the next call computes all requests again")
        return batch

    def _launch(self, batch: Sequence[Chunk]) -> InFlight:
        """Launch a batch: the device computes it while the host goes on."""
        self._runner.prepare(batch)
        self._journal.planned(batch)
        token_chunks = [chunk for chunk in batch if chunk.gets_token]
        return InFlight(batch, token_chunks, self._sample_tokens(token_chunks, self._runner.run(batch)))

    def _launch_ahead(self, in_flight: InFlight) -> InFlight | None:
        """Launch the step after one whose tokens the host has not read, if it is known already. See in_flight.py."""
        if not self._runner.runs_ahead or not self._sampler.may_run_ahead(in_flight.batch):
            return None
        self._journal.begin()
        batch = self._scheduler.ahead(in_flight.batch)
        if batch:
            self._runner.prepare(batch, ahead=True)
        self._journal.planned(in_flight.batch)  # its samples are those of the batch ahead: a rollback undoes both
        if not batch:
            return None
        logits = self._runner.run_decode(batch, in_flight.inputs_of(batch))
        return InFlight(batch, batch, self._sampler.sample(logits, batch, unread=1))

    def _adopt_ahead(self) -> InFlight | None:
        """The step that an earlier call launched ahead, without samples that have ended since; None if there is none.

        It is the batch of this call from now on.
        """
        ahead = self._journal.ahead
        if ahead is None:
            return None
        in_flight = ahead.only(self._scheduler.still_running(ahead.batch))
        if not in_flight.batch:
            self._journal.drop_ahead()
            return None
        self._journal.adopt_ahead(in_flight)
        return in_flight

    def _settle(self) -> None:
        """Complete or roll back an interrupted call, and cancel what is due. The first thing in every call."""
        if not self._journal.settled:
            self._outputs.reset()
            self._sampler.processor.reset()
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize(self._runner.device)  # buffers that are still being sent are not to be filled
            if self._consensus.ranks > 1 and self._failure is None:
                self._failure = EngineError(
                    "a call was interrupted on this rank, and others cannot know how far it came"
                )
            self._journal.settle()
        if self._failure is not None and self._table.requests:
            self._fail(self._failure)
        while self._to_cancel:
            due = self._to_cancel[0]
            for request in due.requests if isinstance(due, CallerRef) else [due]:
                if self._table.holds(request):
                    self._end(request, "cancelled")
            self._caller_refs.pop(id(due), None)
            self._to_cancel.popleft()

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """A block in which an error of one rank ends the engine on all ranks. See [Note: after an error]."""
        if self.transport is None:
            yield
            return
        try:
            with abort_on_error(self.transport, except_for=(RanksDiverged,)):
                yield
        except BaseException as error:
            self._fail(error)
            raise

    @contextmanager
    def _consensus_or_rollback(self) -> Iterator[None]:
        """A block in which ranks compare what they are about to do. A refusal by all ranks is rolled back; any other
        error ends the engine on all ranks."""
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
            self._fail(error)
            raise

    def _sample_tokens(self, chunks: list[Chunk], logits: torch.Tensor) -> PendingTokens | None:
        """A token for each row of logits, and for each fork that a sample will have."""
        if not chunks:
            return None
        if any([chunk.sample.forks for chunk in chunks]):  # noqa: C419  # twice as fast
            rows = (chunk.sample.forks for chunk in chunks for _ in range(1 + len(chunk.draft)))
            repeated = [row for row, forks in enumerate(rows) for _ in range(1 + forks)]
            logits = logits[torch.tensor(repeated, device=logits.device)]
        return self._sampler.sample(logits, chunks)

    def _outcomes(self, chunks: Sequence[Chunk], sampled: list[SampledToken]) -> Commit:
        """The outcomes of a step, before anything is reported. A request whose text cannot be decoded ends."""
        outcomes: list[Outcome] = []
        splits = [(chunk.sample, chunk.sample.split()) for chunk in chunks if chunk.sample.forks]
        forks = {id(sample): group for sample, group in splits}
        row = 0
        for sample, _, draft in chunks:
            for each in (sample, *forks[id(sample)]) if sample.forks else (sample,):
                request = self._table.request_of(each)
                try:
                    outcome = self._outputs.outcome(request, each, sampled[row])
                    outcomes.append(outcome)
                    for offset, proposed in enumerate(draft, 1):
                        if not outcome.goes_on_with(proposed):
                            break
                        outcome = self._outputs.outcome(request, each, sampled[row + offset], outcome)
                        outcomes.append(outcome)
                except Exception as error:
                    self._journal.settle()  # to the others, the step did not happen
                    self._outputs.reset()
                    self._end(request, "error", error)
                    raise
                row += 1 + len(draft)
        return Commit(
            outcomes,
            splits,
            self._unreported + [outcome.token for outcome in outcomes],
            self._table.stream_entries(outcomes),
            self._meter.after(outcomes),
        )

    def _publish(self, commit: Commit) -> None:
        """Make a step visible to callers; may run twice."""
        self._table.apply(commit)
        self._meter.totals = commit.totals
        for outcome in commit.outcomes:
            if outcome.token.finish_reason is not None and outcome.token.request.finished:
                self._discard(outcome.token.request)
        self._unreported = commit.tokens

    def _update_scheduler(self, batch: Sequence[Chunk], commit: Commit, ahead: InFlight | None) -> None:
        """Update the scheduler: keys and states are in pages, forks run, some samples have ended."""
        scheduler = self._scheduler
        self._runner.keep_states()
        scheduler.mark_computed(batch)
        for sample, forks in commit.splits:
            scheduler.fork(sample, forks)
        for outcome in commit.outcomes:
            reason = outcome.token.finish_reason
            if reason is not None:
                scheduler.remove(outcome.sample, cache=reason != "error")
        self._journal.ahead = ahead

    # ---- checks ----------------------------------------------------------------------------------------------------

    @exclusive
    def check(self) -> None:
        """Check the invariants of pages, queues and requests; AssertionError if one is violated."""
        self._settle()
        scheduler = self._scheduler
        scheduler.kv_cache.check()
        held = {id(sample) for sample in self._table.live()}
        assert held == {id(sample) for sample in (*scheduler.running, *scheduler.queued)}, "a sample is lost"
        assert set(self._table.samples) == set(self._table.requests), "a request is lost"

    def _fail(self, error: BaseException) -> None:
        """See [Note: after an error]."""
        self._failure = error
        requests = list(self._table.requests.values())
        left = sum(continuation.finish_reason is None for request in requests for continuation in request.continuations)
        totals = self._meter.totals.ended(["error"] * left)

        def publish() -> None:
            self._meter.totals = totals
            for request in list(self._table.requests.values()):
                for continuation in request.continuations:
                    continuation.finish_reason = continuation.finish_reason or "error"
                request.error = error
                self._discard(request)

        self._journal.commit(publish, partial(self._scheduler.reset, ()))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(
                "the engine has lost a rank, or failed on this one, and takes no more requests; make a new one, of a "
                f"new group ({self._failure})"
            )

    def __repr__(self) -> str:
        scheduler, group = self._scheduler, self._scheduler.kv_cache.groups[0]
        kind, model, size = type(self).__name__, type(self.model).__name__, group.allocator.page_size
        return (
            f"{kind}({model}, {group.num_pages} {'states' if group.states else f'pages of {size} tokens'}, "
            f"{len(scheduler.running)} running, {len(scheduler.queued)} queued)"
        )


def _config_for(config: EngineConfig, info: ModelInfo, ranks: int) -> EngineConfig:
    """The config for a model, with the shortest prompt that ranks compute together."""
    if config.prompt_lookup_num_tokens and info.states:
        raise EngineError(
            f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}: the model has recurrent layers, whose states "
            "cannot be trimmed; leave prompt_lookup_num_tokens out"
        )
    if ranks == 1 or config.kv_dtype is not None:  # tokens would see keys as they were before rounding
        return replace(config, context_parallel_from=UNBOUNDED)
    return replace(config, context_parallel_from=max(config.context_parallel_from, 2 * ranks))
