"""The outcome of a step, computed in full before any of it is reported.

A commit may be interrupted and completed later (journal.py), so everything in it is a state and not an action: the
place of a token, the whole text. To apply it twice is to apply it once.
"""

from __future__ import annotations

from typing import NamedTuple

from attnspan.engine.request import Continuation, Token
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import ChosenToken
from attnspan.errors import EngineError


class Outcome(NamedTuple):
    """The next token of a sample, its place in the answer, and the answer's text with it."""

    sample: Sample
    continuation: Continuation
    answer: ChosenToken
    place: int
    text: str
    token: Token
    error: EngineError | None = None  # where there is no next token

    def apply(self) -> None:
        """Write it to the sample and its continuation, unless it is there."""
        sample, continuation, (token, logprob, top), place, text, reported, error = self
        continuation.text = text
        if token is None:
            reported.request.error = error
            return
        if len(sample.tokens) == sample.prompt + place:
            sample.tokens.append(token)
        if len(continuation.token_ids) == place:
            continuation.token_ids.append(token)
        if logprob is not None and continuation.logprobs is not None and len(continuation.logprobs) == place:
            continuation.logprobs.append(logprob)
        if top is not None and continuation.top_logprobs is not None and len(continuation.top_logprobs) == place:
            continuation.top_logprobs.append(top)


class Commit(NamedTuple):
    """All of a step: every outcome, samples that fork, what `step` returns, and places in streams."""

    outcomes: list[Outcome]
    splits: list[tuple[Sample, list[Sample]]]
    tokens: list[Token]
    places: list[tuple[list[Token], int, Token]]
