"""An engine for asyncio: any number of coroutines, one thread that steps (stepping_thread.py)::

    async with AsyncEngine(Engine(model, pages=1024, tokenizer=tokenizer)) as engine:
        async for token in engine.stream("Once upon a time", SamplingParams(max_new_tokens=100)):
            print(token.text, end="")

A stream belongs to the coroutine that reads it. If it is closed, dropped or cancelled, its requests are cancelled, and
the next step frees their pages. Unread tokens are buffered in the stream; their number is bounded by `max_new_tokens`.

The queue is bounded by `max_waiting` samples, besides running ones. Calls that do not fit raise EngineBusy at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable
from types import TracebackType
from typing import Self
from weakref import finalize

from attnspan.engine.llm_engine import LLMEngine, Params
from attnspan.engine.prompts import Prompt, one_or_several, params_for_each, several
from attnspan.engine.request import Request
from attnspan.engine.stats import EngineStats, Histogram
from attnspan.engine.stepping_thread import AsyncCall, Delivery, SteppingThread, StreamedToken
from attnspan.errors import EngineClosed, EngineError, integer


class AsyncEngine:
    """An engine that is stepped by a thread of its own, for coroutines of any event loop.

    From then on the engine is used through this object alone. Over ranks it is rank 0's; every other rank calls
    `follow(engine)`.
    """

    def __init__(self, engine: LLMEngine, *, max_waiting: int = 256) -> None:
        transport = engine.transport
        if transport is not None and transport.rank != 0:
            raise EngineError(f"AsyncEngine is for rank 0, this is rank {transport.rank}; call follow(engine) here")
        max_waiting = integer("max_waiting", max_waiting, error=EngineError)
        self.engine = engine
        self._thread = SteppingThread(engine, engine.limits.max_sequences + max_waiting)
        finalize(self, self._thread.stop)  # the thread knows nothing of this object, and ends with it

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, salt: Hashable = None, priority: int = 0
    ) -> AnswerStream:
        """The tokens of one prompt, or of several, as they come; arguments are those of `LLMEngine.stream`.

        EngineBusy if the queue is full, EngineClosed if the engine is shutting down. Whatever else is refused is raised
        by the stream itself, before its first token.
        """
        listed = one_or_several(prompts)
        each = params_for_each(params, len(listed))
        mailbox = Mailbox(asyncio.get_running_loop())
        call = self._thread.submit(listed, each, salt, priority, mailbox.deliver)
        return AnswerStream(self._thread, call, mailbox)

    async def generate(
        self, prompts: Iterable[Prompt], params: Params = None, *, salt: Hashable = None, priority: int = 0
    ) -> list[Request]:
        """Continue every prompt; the finished requests in the order of the prompts."""
        listed = several(prompts)
        if not listed:
            return []
        async with self.stream(listed, params, salt=salt, priority=priority) as stream:
            requests = await stream.added()
            async for _ in stream:
                pass
        return requests

    async def shutdown(self, drain: float = 30.0) -> None:
        """Take no more requests, and end when all have ended, at the latest after `drain` seconds.

        Streams that are not finished by then raise EngineClosed after the tokens they have. Over ranks, the others'
        `follow` returns. A second call awaits the same end.
        """
        self._thread.close("the engine is shutting down; try another, or try again later")
        try:
            await asyncio.to_thread(self._thread.idle.wait, drain)
        finally:
            self._thread.stop()
        await asyncio.to_thread(self._thread.ended.wait)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(drain=0.0 if kind else 30.0)

    # ---- what is going on --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine in numbers, as of its last step. Waits for nothing."""
        return self._thread.stats

    @property
    def open_calls(self) -> int:
        """Streams that have not ended, those that are not yet added included."""
        return self._thread.open_calls

    @property
    def refused_calls(self) -> int:
        """Calls that found the queue full."""
        return self._thread.refused

    @property
    def failed_steps(self) -> int:
        """Steps that raised."""
        return self._thread.failed_steps

    @property
    def durations(self) -> Histogram:
        """How long calls took that ended by themselves."""
        return self._thread.durations

    @property
    def taking(self) -> bool:
        """Whether requests are taken: it is neither shutting down nor has it failed."""
        return self._thread.taking

    @property
    def failure(self) -> BaseException | None:
        """Why the engine takes no more requests; None while it does."""
        return self._thread.failure

    async def ended(self) -> None:
        """Wait until the engine has ended: it was shut down, or it failed (`failure`)."""
        await asyncio.to_thread(self._thread.ended.wait)


class Mailbox:
    """Where deliveries of the stepping thread wait for a coroutine of `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.requests: list[Request] | None = None
        self.tokens: deque[StreamedToken] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self._news = asyncio.Event()

    def deliver(self, delivery: Delivery) -> None:
        """From the stepping thread. A loop that is closed has no readers."""
        try:
            self.loop.call_soon_threadsafe(self._take, delivery)
        except RuntimeError:
            self.ended = True

    def _take(self, delivery: Delivery) -> None:
        self.requests = self.requests or delivery.requests
        self.tokens.extend(delivery.tokens)
        if delivery.ended:
            self.ended, self.error = True, delivery.error
        self._news.set()

    async def wait(self) -> None:
        """Until there is something new."""
        self._news.clear()
        await self._news.wait()


class AnswerStream(AsyncIterator[StreamedToken]):
    """The tokens of a call, as they come. To leave it early is to end its requests: `aclose()`, or `async with`.

    An error ends the stream: EngineError for a request that is refused, EngineClosed at a shutdown, and whatever made
    a step of the engine fail.
    """

    def __init__(self, thread: SteppingThread, call: AsyncCall, mailbox: Mailbox) -> None:
        self._mailbox, self._closed = mailbox, False
        self._cancel = finalize(self, thread.cancel, call)  # a stream that is dropped ends its requests
        self._cancel.atexit = False

    async def added(self) -> list[Request]:
        """The requests, once they are in the engine; raises what refuses them."""
        while self._mailbox.requests is None:
            if self._mailbox.ended:
                raise self._reason()
            await self._wait()
        return self._mailbox.requests

    @property
    def requests(self) -> list[Request]:
        """The requests; none until they are in the engine."""
        return self._mailbox.requests or []

    async def __anext__(self) -> StreamedToken:
        if self._closed:
            raise StopAsyncIteration
        while not self._mailbox.tokens:
            if self._mailbox.ended:
                self._cancel.detach()
                if self._mailbox.error is not None:
                    raise self._mailbox.error
                raise StopAsyncIteration
            await self._wait()
        return self._mailbox.tokens.popleft()

    def waiting(self) -> list[StreamedToken]:
        """All tokens that have come and are not yet read; they are read now."""
        tokens = list(self._mailbox.tokens)
        self._mailbox.tokens.clear()
        return tokens

    async def aclose(self) -> None:
        """End what is left. The stream gives no more tokens."""
        self.cancel()

    def cancel(self) -> None:
        """As `aclose`, from a function that cannot await."""
        self._closed = True
        if not self._mailbox.ended:
            self._cancel()

    async def _wait(self) -> None:
        try:
            await self._mailbox.wait()
        except BaseException:
            self.cancel()
            raise

    def _reason(self) -> BaseException:
        return self._mailbox.error or EngineClosed("the call was cancelled")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
