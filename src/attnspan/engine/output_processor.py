"""Turns a sampled token into an outcome: the text that it adds, whether the sample ends, and why.

All outcomes of a step are computed before any of them is reported. A commit may be interrupted and completed later
(journal.py), so it holds states instead of actions: the position of a token, the whole text. Applying it is idempotent.

Detokenizers are a cache. After an interrupted step, a new one reads the tokens of its sample again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnspan.engine.detokenizer import Detokenizer, Tokenizer
from attnspan.engine.request import Continuation, Request, Token
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import SampledToken
from attnspan.errors import EngineError

if TYPE_CHECKING:
    from attnspan.engine.stats import Totals


class Outcome(NamedTuple):
    """The next token of a sample, its position in the answer, and the answer's text with it."""

    sample: Sample
    continuation: Continuation
    sampled: SampledToken
    position: int
    text: str
    token: Token
    error: EngineError | None = None  # where there is no next token

    def goes_on_with(self, proposed: int) -> bool:
        """Whether the sample continues, and its token is the one that the draft proposed."""
        return self.sampled.token == proposed and self.token.finish_reason is None

    def apply(self) -> None:
        """Write it to the sample and its continuation, unless it is there already."""
        sample, continuation, (token, logprob, top, _), position, text, reported, error = self
        continuation.text = text
        if token is None:
            reported.request.error = error
            return
        if len(sample.tokens) == sample.prompt_length + position:
            sample.tokens.append(token)
        if len(continuation.token_ids) == position:
            continuation.token_ids.append(token)
        if logprob is not None and continuation.logprobs is not None and len(continuation.logprobs) == position:
            continuation.logprobs.append(logprob)
        if top is not None and continuation.top_logprobs is not None and len(continuation.top_logprobs) == position:
            continuation.top_logprobs.append(top)


class Commit(NamedTuple):
    """The result of a step: outcomes, new forks, the tokens for `step` and for streams, and the totals."""

    outcomes: list[Outcome]
    splits: list[tuple[Sample, list[Sample]]]
    tokens: list[Token]
    stream_entries: list[tuple[list[Token], int, Token]]
    totals: Totals


class OutputProcessor:
    """The text of every unfinished sample, and the outcomes of its tokens."""

    def __init__(self, tokenizer: Tokenizer | None, end_tokens: frozenset[int]) -> None:
        self.tokenizer, self.end_tokens = tokenizer, end_tokens
        self.detokenizers: dict[tuple[int, int], Detokenizer] = {}  # by request and sample

    def outcome(self, request: Request, sample: Sample, sampled: SampledToken, after: Outcome | None = None) -> Outcome:
        """What a sample's next token comes to, `after` another of the same step; nothing is reported yet."""
        params, continuation, token_id = request.params, request.continuations[sample.number], sampled.token
        position, before = len(continuation.token_ids), continuation.text
        if after is not None:
            position, before = after.position + 1, after.text
        if token_id is None:
            return self._without_token(request, sample, sampled, position, before)
        reason = None
        if token_id in params.stop_token_ids or (token_id in self.end_tokens and not params.ignore_eos):
            reason = "stop"
        elif position + 1 == params.max_new_tokens:
            reason = "length"
        text = ""
        if self.tokenizer is not None:
            text, reason = self._text(request, sample.number, token_id, reason)
        token = Token(request, sample.number, token_id, text, reason)
        return Outcome(sample, continuation, sampled, position, before + text, token)

    def _without_token(
        self, request: Request, sample: Sample, sampled: SampledToken, position: int, before: str
    ) -> Outcome:
        """The end of a sample without a next token, whose pages are not cached."""
        continuation = request.continuations[sample.number]
        error = EngineError(
            f"sample {sample.number} of request {request.number} ended after {sample.prompt_length + position} tokens: "
            f"{sampled.failure}"
        )
        text = self.flush(request, sample.number) if position else ""
        token = Token(request, sample.number, None, text, "error")
        return Outcome(sample, continuation, sampled, position, before + text, token, error)

    def flush(self, request: Request, number: int) -> str:
        """The rest of a sample's text, held back because it could have become a stop string."""
        if self.tokenizer is None:
            return ""
        detokenizer = self._detokenizer(request, number)
        del self.detokenizers[request.number, number]  # the sample has ended, and its request not yet
        return detokenizer.end()

    def discard(self, request: Request) -> None:
        """A request has ended."""
        for number in range(len(request.continuations)):
            self.detokenizers.pop((request.number, number), None)

    def reset(self) -> None:
        """Drop all detokenizers, which may have read tokens that were never reported."""
        self.detokenizers.clear()

    def _text(self, request: Request, number: int, token: int, reason: str | None) -> tuple[str, str | None]:
        """What a token adds to the text, and why the sample ends, if it does: stop strings are found here."""
        detokenizer = self._detokenizer(request, number)
        text = detokenizer.push(token)
        if detokenizer.stopped:
            reason = "stop"
        elif reason is not None:
            text += detokenizer.end()
            reason = "stop" if detokenizer.stopped else reason
        return text, reason

    def _detokenizer(self, request: Request, number: int) -> Detokenizer:
        """That of a sample, after all of its tokens."""
        found = self.detokenizers.get((request.number, number))
        if found is None:
            assert self.tokenizer is not None, "there is text"
            found = Detokenizer(self.tokenizer, request.params.stop or (), request.decoder_prompt or request.prompt)
            for token in request.continuations[number].token_ids:
                found.push(token)
            self.detokenizers[request.number, number] = found
        return found
