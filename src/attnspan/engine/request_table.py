"""The unfinished requests of an engine: their running and queued samples, and the streams that read their tokens.

This is the state that callers see. Changes are idempotent assignments, so that an interrupted change is completed by
applying it again (journal.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from attnspan.engine.output_processor import Commit, Outcome
from attnspan.engine.request import Request, Token
from attnspan.engine.sample import Sample
from attnspan.errors import UnknownRequest


class RequestTable:
    """Requests by number, oldest first."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.samples: dict[int, dict[int, Sample]] = {}  # by request and sample: those that run or queue
        self.streams: dict[int, list[Token]] = {}  # by request: all tokens of its stream

    def add(self, request: Request, sample: Sample, stream: list[Token] | None) -> None:
        if stream is not None:
            self.streams[request.number] = stream
        self.samples[request.number] = {sample.number: sample}
        self.requests[request.number] = request

    def discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        self.streams.pop(request.number, None)
        self.samples.pop(request.number, None)
        self.requests.pop(request.number, None)

    def request_of(self, sample: Sample) -> Request:
        return self.requests[sample.request_number]

    def holds(self, request: Request) -> bool:
        """Whether this very request is unfinished."""
        return self.requests.get(getattr(request, "number", -1)) is request

    def check(self, request: Request) -> None:
        """UnknownRequest unless it is unfinished."""
        if not self.holds(request):
            ended = isinstance(request, Request) and request.finished
            raise UnknownRequest(
                f"request {request.number} has ended ({request.finish_reason}) and cannot be cancelled"
                if ended
                else f"request must be one that add() of this engine returned, got {request!r}"
            )

    def live(self) -> Iterator[Sample]:
        """All samples that run or queue."""
        return (sample for samples in self.samples.values() for sample in samples.values())

    def stream_entries(self, outcomes: list[Outcome]) -> list[tuple[list[Token], int, Token]]:
        """The tokens that streams get: (stream, index in it, token)."""
        found, ends = [], dict[int, int]()
        for outcome in outcomes if self.streams else ():
            stream = self.streams.get(outcome.token.request.number)
            if stream is not None:
                index = ends.get(id(stream), len(stream))
                found.append((stream, index, outcome.token))
                ends[id(stream)] = index + 1
        return found

    def apply(self, commit: Commit) -> None:
        """Append every token, and end samples where they end. What was appended before stays as it is."""
        for sample, forks in commit.splits:
            sample.forks = 0
            if sample.request_number in self.samples:
                self.samples[sample.request_number].update({fork.number: fork for fork in forks})
        for outcome in commit.outcomes:
            outcome.apply()
        for stream, index, token in commit.stream_entries:
            if len(stream) == index:
                stream.append(token)
        for outcome in commit.outcomes:
            request, number, _, _, reason = outcome.token
            if reason is not None:
                self.samples.get(request.number, {}).pop(number, None)
                outcome.continuation.finish_reason = reason
