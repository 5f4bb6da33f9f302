"""What a step came to, worked out in full before anyone is told of it.

A commit may be interrupted and carried through later (journal.py), so that everything in it says what must be, not
what is to be done: at which place a token stands, what the whole text is. To note it twice is to note it once.
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

    def note(self) -> None:
        """Write it where it is looked for, unless it is there."""
        sample, continuation, (token, logprob, top), place, text, told, error = self
        continuation.text = text
        if token is None:
            told.request.error = error
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
    """All of a step: every outcome, samples that split off others, what `step` returns, and places in streams."""

    outcomes: list[Outcome]
    splits: list[tuple[Sample, list[Sample]]]
    told: list[Token]
    places: list[tuple[list[Token], int, Token]]
