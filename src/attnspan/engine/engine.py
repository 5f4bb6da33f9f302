"""The engine: requests in, tokens out, over one pool of pages.

    engine = Engine(model, pages=1024)
    for answer in engine.generate(prompts, SamplingParams(max_new_tokens=100)):
        print(answer.token_ids)

or by hand: `add` requests at any time, call `step` as long as there is something to do, and look at the requests, which
fill as it goes. A step is one call of the model for whatever is due, prompts and single tokens together (scheduler.py),
and then a token for every sample that was fed all it has (sampler.py).

[Note: after an error] A step that fails takes back the room that it had made; nothing else has changed, so that it can
be tried again. Over ranks it cannot: whether a rank does not answer, or fails by itself, the others cannot know how far
it came, and what it sends next would be taken for what it owes. Every request ends with that error, all pages are given
back, the engine takes no more, and nothing else is sent on that group (attention/unbroken.py).

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
from types import TracebackType
from typing import Any

import torch
from torch import nn

from attnspan.engine.accord import Accord, OutOfStep
from attnspan.engine.bar import Bar
from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.known import (
    check_dtype,
    check_evaluates,
    device_of,
    end_tokens_of,
    positions_of,
    tell_unused,
    vocabulary_of,
)
from attnspan.engine.look import looked_over
from attnspan.engine.params import SamplingParams
from attnspan.engine.rehearsal import rehearse, rehearsed
from attnspan.engine.request import Continuation, Request, Token
from attnspan.engine.room import Room, Store
from attnspan.engine.runner import Runner, Sizes, pools_of
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import Chosen, Draw, chosen, uniform
from attnspan.engine.scheduler import Counts, Limits, Scheduler
from attnspan.engine.served import layers_of, served
from attnspan.engine.speech import Speech, Tokenizer
from attnspan.errors import EngineError, ModelError, TransportError, UnknownRequest, one_of, whole, whole_list
from attnspan.paged import PrefixCache
from attnspan.paged.kernels import KERNELS
from attnspan.transports.group import Group, transport_of

Prompt = str | Sequence[int]


class Engine:
    """Generation with a model of transformers over `pages` pages of `page_size` tokens.

    `host_pages` more on the host take samples that must wait; without, they are computed again. A step has at most
    `max_sequences` samples and `max_tokens` tokens. With `mesh` (a DeviceMesh, a process group, a virtual world) every
    rank has that many pages, and prompts of `whole_prompts` tokens or more are computed by all together (ranks.py).
    `cuda_graphs` decodes by CUDA graphs (graphs.py).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int,
        page_size: int = 16,
        mesh: Group = None,
        tokenizer: Tokenizer | None = None,
        host_pages: int = 0,
        max_sequences: int = 64,
        max_tokens: int = 512,
        whole_prompts: int = 256,
        prefix_cache: bool = True,
        kernel: str = "auto",
        cuda_graphs: bool = False,
    ) -> None:
        pages = whole("pages", pages, at_least=1, error=EngineError)
        page_size = whole("page_size", page_size, at_least=1, error=EngineError)
        host_pages = whole("host_pages", host_pages, error=EngineError)
        whole_prompts = whole("whole_prompts", whole_prompts, at_least=1, error=EngineError)
        one_of("kernel", kernel, ["auto", *KERNELS], error=EngineError)
        layers = layers_of(model)
        self._asked = [str(layer) for layer in layers]  # what pages and plans were made for
        device = device_of(model)
        layers = looked_over(model, layers)
        self.model, self.tokenizer = model, tokenizer
        self.vocabulary = vocabulary_of(model, tokenizer)
        self.end_tokens = end_tokens_of(model)
        tell_unused(model)
        self._accord = Accord(None if mesh is None else transport_of(mesh))
        ranks = self._accord.ranks
        self.limits = Limits(max_sequences, max_tokens, max(whole_prompts, 2 * ranks) if ranks > 1 else None)
        options = {"kernel": kernel, "cuda_graphs": cuda_graphs, "prefix_cache": prefix_cache}
        options |= {"max_sequences": self.limits.max_sequences, "max_tokens": self.limits.max_tokens}
        sizes = Sizes(pages, page_size, host_pages, ranks)
        self._accord.on_options(options | {"whole_prompts": self.limits.whole} | sizes._asdict())
        self._fingerprint = ModelFingerprint(model)
        self._accord.on_model(self._fingerprint)
        dtype = next(model.parameters()).dtype
        with torch.inference_mode(False):  # what is made within could not be written to without
            self._pools = pools_of(layers, sizes, dtype=dtype, device=device)
        stores = [
            Store(pool.allocator, pool, window, PrefixCache(pool.allocator) if prefix_cache else None)
            for pool, window in zip(self._pools.pools, self._pools.windows, strict=True)
        ]
        self.max_length = self._longest(pages * page_size * ranks)
        self._scheduler = Scheduler(Room(stores), self.limits, self._version)
        most = {"max_sequences": max_sequences, "max_tokens": max_tokens, "max_length": self.max_length}
        with torch.inference_mode(False):
            self._runner = self._made_runner(mesh, ranks, most | {"kernel": kernel, "cuda_graphs": cuda_graphs})
        self._requests: dict[int, Request] = {}
        self._samples: dict[int, dict[int, Sample]] = {}  # by request and sample: what still runs or queues
        self._speeches: dict[tuple[int, int], Speech] = {}
        self._streams: dict[int, deque[Token]] = {}  # by request: tokens that its stream has yet to tell
        self._is_known = True  # whether the model, as it is, was looked at
        self._added_since = False  # whether requests came since contents were last compared
        self._next = 0
        self._dead: BaseException | None = None

    def _made_runner(self, mesh: Group, ranks: int, options: dict[str, Any]) -> Runner:
        if ranks == 1:
            return Runner(self.model, self._pools, **options)
        if options["cuda_graphs"]:
            raise EngineError("cuda_graphs=True is for one rank: messages between ranks are not part of a graph")
        from attnspan.engine.ranks import RanksRunner

        options["max_tokens"] = max(options["max_tokens"], self.max_length)
        assert self.limits.whole is not None, "there are ranks"
        return RanksRunner(self.model, self._pools, **options, mesh=mesh, accord=self._accord, whole=self.limits.whole)

    def _longest(self, held: int) -> int:
        """The most tokens of a sample: what the model has positions for, and unless all layers are windowed, pages."""
        known = positions_of(self.model)
        if None in self._pools.windows:
            return min(held, known) if known else held
        return known or 64 * held

    def warm_up(self) -> None:
        """Do now what would be done when it is first met: compile kernels, note graphs of every size.

        Over ranks, on all of them. Nothing of it is counted or kept, but kept prefixes may have to make room for it.
        EngineError while there are requests.
        """
        self._check_alive()
        if self._requests:
            raise EngineError(f"warm_up is for an engine without requests, got {len(self._requests)} unfinished")
        self._check_ready()
        self._look()
        with served(self.model), self._together():
            for lengths in rehearsed(self._runner):
                fitting = [length for length in (min(each, self.max_length - 1) for each in lengths) if length]
                rehearse(self._runner, Scheduler(self._scheduler.room, self.limits), fitting)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: Hashable = None) -> Request:
        """A new request. What it computes can be found by later prompts that begin alike and have the same salt."""
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
        with self._hearing():
            told = self._accord.on_request((tokens, params, salt, number), seed)
        seed = told if params.seed is None else seed
        # The last token is never fed, so that it needs no room.
        sample = Sample(number, array("Q", tokens), most - 1, forks=params.n - 1, salt=salt)
        self._scheduler.add(sample)
        self._next, self._added_since = self._next + 1, True
        request = Request(number, tokens, params, seed, salt)
        for _ in range(params.n):
            noted = params.logprobs or params.top_logprobs
            continuation = Continuation(logprobs=[] if noted else None)
            if params.top_logprobs:
                continuation.top_logprobs = []
            request.samples.append(continuation)
        self._requests[number] = request
        self._samples[number] = {0: sample}
        return request

    def _look(self) -> None:
        """Notice a model whose parts are not what they were. See [Note: a model that changes]."""
        if self._fingerprint.look():
            self._runner.forget_graphs()
            self._is_known = False
        if not self._is_known:
            if [str(layer) for layer in layers_of(self.model)] != self._asked:
                raise ModelError(
                    "the attention layers of model are others than when the engine was made; make a new one"
                )
            self._is_known = True

    def _version(self, found: bool) -> int:
        """Of the model, for a request that begins, on pages that were `found` or not."""
        read = (found or self._added_since) and self._fingerprint.compare_content()
        self._accord.on_version(self._fingerprint, again=read)
        self._added_since = False
        return self._fingerprint.version

    def cancel(self, request: Request) -> None:
        """End a request: its pages are given back, and it keeps what it has. UnknownRequest if it has ended."""
        if self._requests.get(getattr(request, "number", -1)) is not request:
            ended = isinstance(request, Request) and request.finished
            raise UnknownRequest(
                f"request {request.number} has ended ({request.finish_reason}) and cannot be cancelled"
                if ended
                else f"request must be one that add() of this engine returned, got {request!r}"
            )
        self._ended(request, "cancelled")

    def _ended(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """End what is left of a request."""
        if reason == "cancelled":
            self._accord.cancelled(request.number)
        for sample in self._samples.pop(request.number, {}).values():
            self._scheduler.remove(sample, keep=error is None)
        held: list[tuple[Continuation, Speech]] = []
        for number, continuation in enumerate(request.samples):
            speech = self._speeches.pop((request.number, number), None)
            if speech is not None:
                held.append((continuation, speech))
            if continuation.finish_reason is None:
                continuation.finish_reason = reason
        self._streams.pop(request.number, None)
        request.error = error
        del self._requests[request.number]
        for continuation, speech in held if error is None else ():  # at last: a tokenizer may fail
            continuation.text += speech.end()

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have not ended, oldest first."""
        return list(self._requests.values())

    @property
    def counts(self) -> Counts:
        """What was computed, found, swapped and computed again so far."""
        return self._scheduler.counts

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Token]:
        """Call the model once for what is due; the tokens that came of it. Empty if there is nothing to do, or while
        a long prompt is computed in chunks."""
        self._check_alive()
        with served(self.model):
            return self._step()

    def _step(self) -> list[Token]:
        self._check_ready()
        self._look()
        scheduler = self._scheduler
        with self._hearing():
            batch = scheduler.step()
        if not batch:
            return []
        samples = [chunk.sample for chunk in batch if chunk.last]
        with self._together():
            try:
                answers = self._chosen(samples, self._runner.run(batch))
                self._fingerprint.ran()
            except BaseException:
                scheduler.undo(batch)  # see [Note: after an error]
                raise
            scheduler.computed(batch)
            return self._noted(samples, answers)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, ranks do the same, and whoever fails ends it for all. See [Note: after an error]."""
        try:
            with self._accord.under_way():
                yield
        except BaseException as error:
            if self._accord.ranks > 1:
                self._die(error)
            raise

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Inside, ranks compare what they were told; one that does not answer is lost."""
        try:
            yield
        except (TransportError, OutOfStep) as error:
            self._die(error)
            raise

    def _chosen(self, samples: list[Sample], logits: torch.Tensor) -> list[Chosen]:
        """A token for each sample whose logits these are, and for those that will be split off from it."""
        rows = [row for row, sample in enumerate(samples) for _ in range(1 + sample.forks)]
        if not rows:
            return []
        if len(rows) > len(samples):
            logits = logits[torch.tensor(rows, device=logits.device)]
        draws = [self._draw(sample, sample.number + fork) for sample in samples for fork in range(1 + sample.forks)]
        return chosen(logits, draws, [self._wants(samples[row]) for row in rows])

    def _noted(self, samples: list[Sample], answers: list[Chosen]) -> list[Token]:
        """Split off what waited for its prompt, and give everyone its token.

        Where a text cannot be decoded, its request ends, and whoever was not given a token yet is computed again.
        """
        left = []
        for sample in samples:
            group = [sample]
            if sample.forks:
                group += self._scheduler.fork(sample)
                self._samples[sample.arrival] |= {each.number: each for each in group}
            left += group
        left.reverse()
        tokens = []
        for answer in answers:
            sample = left.pop()
            try:
                tokens.append(self._told(sample, answer))
            except BaseException as error:
                self._ended(self._requests[sample.arrival], "error", error)
                for untold in left:
                    if untold.arrival != sample.arrival:
                        self._scheduler.restart(untold)
                raise
        return tokens

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

    def _told(self, sample: Sample, answer: Chosen) -> Token:
        """Note a sample's new token, and end the sample where it ends."""
        request = self._requests[sample.arrival]
        params, continuation = request.params, request.samples[sample.number]
        if answer.token is None:
            return self._senseless(sample)
        sample.tokens.append(answer.token)
        continuation.token_ids.append(answer.token)
        if continuation.logprobs is not None and answer.logprob is not None:
            continuation.logprobs.append(answer.logprob)
        if continuation.top_logprobs is not None and answer.top is not None:
            continuation.top_logprobs.append(answer.top)
        reason = None
        if answer.token in params.stop_token_ids or (answer.token in self.end_tokens and not params.ignore_eos):
            reason = "stop"
        elif len(continuation.token_ids) == params.max_new_tokens:
            reason = "length"
        text, reason = self._spoken(request, sample.number, answer.token, reason)
        return self._handed_on(sample, Token(request, sample.number, answer.token, text, reason))

    def _senseless(self, sample: Sample) -> Token:
        """End a sample whose logits are not numbers. What it computed is not found by others."""
        request = self._requests[sample.arrival]
        speech = self._speeches.pop((request.number, sample.number), None)
        request.error = EngineError(
            f"sample {sample.number} of request {request.number} ended after {len(sample.tokens)} tokens: the model's "
            "logits are NaN or infinite there; look for such numbers in its weights, or for a dtype that is too narrow"
        )
        text = "" if speech is None else speech.end()
        return self._handed_on(sample, Token(request, sample.number, None, text, "error"))

    def _handed_on(self, sample: Sample, token: Token) -> Token:
        """Give a token to whoever waits for it, and end the sample if it is the last."""
        request, reason = token.request, token.finish_reason
        continuation = request.samples[sample.number]
        continuation.text += token.text
        if reason is not None:
            continuation.finish_reason = reason
            self._scheduler.remove(sample, keep=reason != "error")
            del self._samples[request.number][sample.number]
        if request.number in self._streams:
            self._streams[request.number].append(token)
        if request.finished:
            del self._requests[request.number], self._samples[request.number]
            self._streams.pop(request.number, None)
        return token

    def _spoken(self, request: Request, number: int, token: int, reason: str | None) -> tuple[str, str | None]:
        """What the text grew by, and why the sample ends, if it does: texts to stop at are found here."""
        if self.tokenizer is None:
            return "", reason
        key = (request.number, number)
        if key not in self._speeches:
            self._speeches[key] = Speech(self.tokenizer, request.params.stop, request.prompt)
        speech = self._speeches[key]
        text = speech.push(token)
        if speech.stopped:
            reason = "stop"
        elif reason is not None:
            text += speech.end()
            reason = "stop" if speech.stopped else reason
        if reason is not None:
            del self._speeches[key]
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
        requests = self._added(prompts, params, salt)
        try:
            with served(self.model), Bar(requests, progress) as bar:
                while not all(request.finished for request in requests):
                    self._check_alive()
                    bar.advance(sum(token.finish_reason is not None for token in self._step()))
        finally:
            self._forget(requests)
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
        stream = self._streamed(self._added(several, params, salt))
        next(stream)  # as far as its first yield: a stream that nobody reads ends its requests too
        return stream

    def _streamed(self, requests: list[Request]) -> Iterator[Any]:
        """Nothing at first, then tokens."""
        told: deque[Token] = deque()
        self._streams |= dict.fromkeys((request.number for request in requests), told)
        try:
            yield None
            while told or not all(request.finished for request in requests):
                if told:
                    yield told.popleft()
                else:
                    self.step()
        finally:
            self._forget(requests)

    def _added(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, salt: Hashable
    ) -> list[Request]:
        """All of the requests, or none."""
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
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, one, salt=salt))
        except BaseException:
            self._forget(requests)
            raise
        return requests

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            if request.number in self._requests:
                self._ended(request, "cancelled")

    # ---- checks ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Hold pages, queues and requests to what must be true of them; AssertionError if anything is not."""
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
        for request in self.unfinished:
            self._ended(request, "error", error)

    def _check_ready(self) -> None:
        """EngineError for a model that is trained, or of another dtype than its pages by now."""
        check_evaluates(self.model)
        check_dtype(self.model, self._pools.pools[0].layers[0].dtype)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(
                "the engine has lost a rank, or failed on this one, and takes no more requests; make a new one, of a "
                f"new group ({self._dead})"
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget(self.unfinished)

    def __repr__(self) -> str:
        scheduler, store = self._scheduler, self._scheduler.room.stores[0]
        return (
            f"Engine({type(self.model).__name__}, {store.pages} pages of {store.allocator.page_size} tokens, "
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
