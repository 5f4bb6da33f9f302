"""`generate` and `stream`, built on the core's `add` and `step`::

    engine = attnspan.Engine(model, pages=1024)
    for answer in engine.generate(prompts, SamplingParams(max_new_tokens=100)):
        print(answer.token_ids)

Requests belong to the call that made them: they are cancelled if it fails, or if its stream is closed or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from attnspan.engine.call_lock import CallerHandle, CallerRef, exclusive
from attnspan.engine.core import EngineCore
from attnspan.engine.params import SamplingParams
from attnspan.engine.prompts import Prompt, one_or_several, params_for_each, several
from attnspan.engine.request import Request, Token
from attnspan.errors import EngineError

Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each; None for the defaults."""


class LLMEngine(EngineCore):
    """Generation with any `ServedModel`; `attnspan.Engine` takes transformers models too."""

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        *,
        salt: Hashable = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Request]:
        """Generate a continuation of every prompt; the finished requests, in the order of the prompts.

        `params` is one for all prompts, or a list with one for each. After an error none of these requests is left.
        """
        requests: list[Request] = []
        handle = self._caller_handle(requests)  # in case the `finally` is interrupted
        try:
            self._add_all(requests, prompts, params, salt, priority)
            with _progress_bar(requests, progress) as advance:
                while not all(request.finished for request in requests):
                    advance(sum(token.finish_reason is not None for token in self.step()))
        finally:
            self._cancel_all(requests)
            del handle
        return requests

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        salt: Hashable = None,
        priority: int = 0,
    ) -> Iterator[Token]:
        """The tokens of one prompt, or of several, as they are generated. Closing or dropping the stream cancels them.

        Several streams, `generate` and `step` may be interleaved on one engine: each stream gets all of its own tokens.
        """
        stream = self._streamed(one_or_several(prompts), params, salt, priority)
        next(stream)  # run to the first yield: requests are added now, and cancelled if the stream is dropped unread
        return stream

    def _streamed(self, prompts: Iterable[Prompt], params: Params, salt: Hashable, priority: int) -> Iterator[Any]:
        """None first, then tokens. If the reader drops the generator, its requests are cancelled."""
        requests: list[Request] = []
        tokens: list[Token] = []
        handle = self._caller_handle(requests)
        try:
            self._add_all(requests, prompts, params, salt, priority, tokens)
            yield None
            read = 0
            while True:
                done = all(request.finished for request in requests)  # first: another thread may step in between
                if read < len(tokens):
                    read += 1
                    yield tokens[read - 1]
                elif done:
                    break
                else:
                    try:
                        self.step()
                    except BaseException:
                        self._cancel_all(requests)
                        raise
        finally:
            del handle  # close() of Python 3.12 keeps what a generator holds, unless there is something to be done

    def _caller_handle(self, requests: list[Request]) -> CallerHandle:
        """What the caller's frame keeps while it wants these requests. See call_lock.py, [Note: finalizers]."""
        handle = CallerHandle()
        caller = CallerRef(handle, self._to_cancel.append)
        caller.requests = requests
        self._caller_refs[id(caller)] = caller
        return handle

    def _add_all(
        self,
        requests: list[Request],
        prompts: Iterable[Prompt],
        params: Params,
        salt: Hashable,
        priority: int,
        stream: list[Token] | None = None,
    ) -> None:
        """Add all of the requests, or none."""
        prompts = several(prompts)
        each = params_for_each(params, len(prompts))
        try:
            for prompt, one in zip(prompts, each, strict=True):
                self._add(prompt, one, salt, requests, stream, priority)
        except BaseException:
            self._cancel_all(requests)
            raise

    def _cancel_all(self, requests: list[Request]) -> None:
        """Cancel those that have not ended."""
        if not all(request.finished for request in requests):
            self._cancel_unfinished(requests)

    @exclusive
    def _cancel_unfinished(self, requests: list[Request]) -> None:
        self._settle()
        failures = [self._end(request, "cancelled") for request in requests if self._table.holds(request)]
        for failed in filter(None, failures):
            raise failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_all(self.unfinished)


@contextmanager
def _progress_bar(requests: list[Request], wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar of finished samples: call what it gives with the number of samples that have finished since."""
    if not wanted:
        yield lambda count: None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        raise EngineError('progress=True needs rich; run pip install "attnspan[cli]"') from None
    with Progress() as bar:
        task = bar.add_task("generating", total=sum(len(request.continuations) for request in requests))
        yield lambda count: bar.advance(task, count)
