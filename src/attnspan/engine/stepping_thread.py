"""The one thread that owns an engine: it takes commands, steps while there is something to do, and delivers tokens.

    commands.py     AddCommand, CancelCommand, StopCommand: from any thread, by `put`
    engine_loop.py  a round, on every rank: commands, then a step
    SteppingThread  rounds on this rank, and what is told to those who wait

[Note: a step that fails] is a transaction that did not happen. If it ended requests by itself (their text cannot be
decoded), the others go on. Otherwise all open requests end with the error, and later ones find an engine that is as it
was. Over ranks a failed step ends the engine.

Knows nothing of asyncio: whoever waits is told by a function that may be called from any thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import NamedTuple, TypeVar

import torch

from attnspan.engine.commands import AddCommand, CancelCommand, Command, StopCommand, encode_commands
from attnspan.engine.engine_loop import EngineLoop
from attnspan.engine.llm_engine import LLMEngine
from attnspan.engine.params import SamplingParams
from attnspan.engine.prompts import Prompt
from attnspan.engine.request import Request, Token
from attnspan.engine.stats import Histogram
from attnspan.errors import EngineBusy, EngineClosed, EngineError, StepFailed, integers

E = TypeVar("E", bound=BaseException)

log = logging.getLogger("attnspan.engine")

HEARTBEAT = 5.0
"""Seconds between rounds of ranks that have nothing to do."""

MAX_WAIT = 60.0
"""Seconds: the longest time after which a caller is asked to try again."""


class StreamedToken(NamedTuple):
    """A token as a stream has it: of which prompt and sample, the text it adds, and why it is the last, if it is.

    Joined, the texts of a sample are its text. A sample whose logits are not numbers ends without a token: `token_id`
    is None and `finish_reason` is "error".
    """

    prompt: int
    sample_index: int
    token_id: int | None
    text: str
    finish_reason: str | None
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None


class Delivery(NamedTuple):
    """What a caller is told: its requests when they are added, tokens, and that nothing more comes."""

    requests: list[Request] | None = None
    tokens: Sequence[StreamedToken] = ()
    ended: bool = False
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class AsyncCall:
    """One call of `AsyncEngine`: its requests, and how to reach who waits for them."""

    number: int
    samples: int
    deliver: Callable[[Delivery], None]  # from the stepping thread
    since: float = field(default_factory=monotonic)
    requests: list[Request] = field(default_factory=list)
    delivered: Counter[tuple[int, int]] = field(default_factory=Counter)  # tokens, by request and sample

    def streamed(self, token: Token) -> StreamedToken:
        """A token of this call; each once, in order."""
        request, sample = token.request, token.sample_index
        continuation, index = request.continuations[sample], self.delivered[request.number, sample]
        prompt = next(number for number, each in enumerate(self.requests) if each is request)
        if token.token_id is None:
            return StreamedToken(prompt, sample, None, token.text, token.finish_reason)
        self.delivered[request.number, sample] = index + 1
        logprobs, top = continuation.logprobs, continuation.top_logprobs
        told = None if logprobs is None else logprobs[index], None if top is None else top[index]
        return StreamedToken(prompt, sample, token.token_id, token.text, token.finish_reason, *told)


class SteppingThread:
    """Rounds in a thread of its own, which is a daemon: a program that ends does not wait for it."""

    def __init__(self, engine: LLMEngine, max_samples: int) -> None:
        self.engine, self.max_samples = engine, max_samples
        self.stats = engine.stats()  # as of the last round
        self.failure: BaseException | None = None  # why no more rounds come, unless it was stopped
        self.failed_steps = 0
        self.refused = 0  # calls, because the queue was full
        self.durations = Histogram()  # of calls that ended by themselves
        self.idle, self.ended = Event(), Event()
        self.idle.set()
        self._closed: str | None = None
        self._lock = Lock()  # around the three below, and the count of refused calls
        self._open: dict[int, AsyncCall] = {}
        self._samples = self._next = 0
        self._added: dict[int, AsyncCall] = {}  # by request: calls that the engine has; the thread's own
        self._inbox: SimpleQueue[Command] = SimpleQueue()  # `put` may be called by a finalizer
        self._loop = EngineLoop(engine)
        Thread(target=copy_context().run, args=(self._run,), name="attnspan-engine", daemon=True).start()

    # ---- from any thread -------------------------------------------------------------------------------------------

    @property
    def open_calls(self) -> int:
        return len(self._open)

    @property
    def taking(self) -> bool:
        return self._closed is None and self.failure is None

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        salt: Hashable,
        priority: int,
        deliver: Callable[[Delivery], None],
    ) -> AsyncCall:
        """Queue a call. EngineBusy if there is no room for it, EngineClosed if no more are taken."""
        default = self.engine.default_params.n or 1
        if self.engine.transport is not None:
            prompts = _sendable(prompts, salt)
        samples = sum((each and each.n) or default for each in params)
        if samples > self.max_samples:
            raise EngineError(
                f"a call of {samples} samples is more than the queue ever holds, which is {self.max_samples}; ask for "
                "fewer prompts or a smaller n"
            )
        with self._lock:
            if not self.taking:
                raise self._closing()
            if self._samples + samples > self.max_samples:
                self.refused += 1
                raise EngineBusy(
                    f"the queue is full: {self._samples} samples run or wait, of at most {self.max_samples}; try again "
                    "later",
                    min(max(self.durations.mean, 1.0), MAX_WAIT),  # about how long a call takes
                )
            call = AsyncCall(self._next, samples, deliver)
            self._next += 1
            self._open[call.number] = call
            self._samples += samples
            self.idle.clear()
            self._inbox.put(AddCommand(call.number, prompts, params, salt, priority))
        return call

    def cancel(self, call: AsyncCall) -> None:
        """End what is left of a call. Does nothing if it has ended; any thread may, and so may a finalizer."""
        self._inbox.put(CancelCommand(call.number))

    def close(self, reason: str) -> None:
        """Take no more calls."""
        with self._lock:
            self._closed = self._closed or reason

    def stop(self) -> None:
        """End all calls, and the thread."""
        self._inbox.put(StopCommand())

    def _closing(self) -> EngineClosed:
        """Why there are no more tokens; a new error for each who is told."""
        if self.failure is None:
            return EngineClosed(self._closed or "the engine was shut down")
        return _caused(EngineClosed("the engine has failed, and takes no more requests; make a new one"), self.failure)

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cuda = self.engine.device.type == "cuda"
        try:
            with torch.cuda.device(self.engine.device) if cuda else nullcontext():
                while not self._loop.stopped:
                    self._round()
        except BaseException as error:
            log.exception("the engine has failed, and takes no more requests")
            self.failure = error
        finally:
            self._end_all()
            self.ended.set()

    def _round(self) -> None:
        commands = self._commands()
        if self.engine.transport is not None:
            self.engine.transport.all_gather_bytes(encode_commands(commands), "commands of an engine")
        done = self._loop.round(commands)
        self.stats = self.engine.stats()
        for number, refusal in done.refused.items():
            self._end(number, refusal)
        for number, requests in done.added.items():
            call = self._open.get(number)
            if call is not None:
                call.requests = requests
                self._added.update((request.number, call) for request in requests)
                call.deliver(Delivery(requests))
        for command in commands:
            if isinstance(command, CancelCommand):
                self._end(command.call, None)
        if done.failed is not None:
            self._failed(done.failed)
        self._deliver(done.tokens)
        if self.engine.failure is not None:
            raise self.engine.failure

    def _commands(self) -> list[Command]:
        """All that have come; it waits for one if there is nothing else to do."""
        found: list[Command] = []
        try:
            if not self._loop.requests:
                found.append(self._inbox.get(timeout=None if self.engine.transport is None else HEARTBEAT))
            while True:
                found.append(self._inbox.get_nowait())
        except Empty:
            return found

    def _deliver(self, tokens: Sequence[Token]) -> None:
        """Tokens to their calls. A call ends with the last token of its last sample."""
        by_call: dict[int, tuple[AsyncCall, list[StreamedToken]]] = {}
        for token in tokens:
            call = self._added.get(token.request.number)
            if call is not None:
                by_call.setdefault(call.number, (call, []))[1].append(call.streamed(token))
        for call, streamed in by_call.values():
            ended = all(request.finished for request in call.requests)
            if ended:
                self.durations = self.durations.plus([monotonic() - call.since])
                self._forget(call)  # first: who hears of the end may ask for more
            call.deliver(Delivery(tokens=streamed, ended=ended))

    def _failed(self, error: BaseException) -> None:
        """Tell those whose requests a failed step has ended. See [Note: a step that fails]."""
        self.failed_steps += 1
        log.error("a step of the engine has failed", exc_info=error)
        for call in set(self._added.values()):
            hit = any(request.error is error for request in call.requests)
            if hit or all(request.finished for request in call.requests):
                self._end(call.number, _caused(StepFailed("a step of the engine failed; the request was ended"), error))
                self._inbox.put(CancelCommand(call.number))  # what is left of it

    def _end(self, number: int, error: BaseException | None) -> None:
        call = self._open.get(number)
        if call is not None:
            self._forget(call)
            call.deliver(Delivery(ended=True, error=error))

    def _end_all(self) -> None:
        with self._lock:
            self._closed = self._closed or "the engine was shut down"
            numbers = list(self._open)
        for number in numbers:
            self._end(number, self._closing())

    def _forget(self, call: AsyncCall) -> None:
        for request in call.requests:
            self._added.pop(request.number, None)
        with self._lock:
            del self._open[call.number]
            self._samples -= call.samples
            if not self._open:
                self.idle.set()


def _sendable(prompts: Sequence[Prompt], salt: Hashable) -> list[Prompt]:
    """Prompts as texts and lists of ints; EngineError for what other ranks cannot be sent."""
    if salt is not None and type(salt) not in (str, int, float, bool):
        raise EngineError(f"over ranks salt must be a text or a number, got {salt!r}")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise EngineError(
            "over ranks a prompt must be a text or tokens; prompts with images are not sent to the others"
        )
    return [each if isinstance(each, str) else list(integers("prompt", each, error=EngineError)) for each in prompts]


def _caused(error: E, cause: BaseException) -> E:
    error.__cause__ = cause
    return error
