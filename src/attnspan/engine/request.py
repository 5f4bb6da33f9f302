"""The objects that callers hold: requests, their continuations, which grow with every step, and tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnspan.engine.params import SamplingParams


@dataclass(slots=True, eq=False)
class Continuation:
    """One sample: what was generated so far.

    `finish_reason` is None while it runs; then "length" (as many tokens as asked for), "stop" (an end token, or a text
    or token to stop at), "cancelled" or "error" (`error` of its request says which). An end token is among
    `token_ids`, as are the tokens of a text to stop at; that text itself is not in `text`.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None

    @classmethod
    def empty(cls, params: SamplingParams) -> Continuation:
        """One with room for what the params ask for."""
        wanted = params.logprobs or params.top_logprobs
        return cls(logprobs=[] if wanted else None, top_logprobs=[] if params.top_logprobs else None)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and a continuation for each of its `n` samples. Attributes such as `text` are those of the first."""

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    salt: Hashable = None
    decoder_prompt: tuple[int, ...] = ()  # what the samples begin with, if `prompt` is for an encoder
    continuations: list[Continuation] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(each.finish_reason is not None for each in self.continuations)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first sample."""
        return self.continuations[0].token_ids

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.continuations[0].text

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probabilities of the first sample's tokens, if they were asked for."""
        return self.continuations[0].logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """The likeliest tokens at each of the first sample's places with theirs, if they were asked for."""
        return self.continuations[0].top_logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended."""
        return self.continuations[0].finish_reason

    def __repr__(self) -> str:
        ends = ", ".join(each.finish_reason or f"{len(each.token_ids)} tokens so far" for each in self.continuations)
        return f"Request({self.number}, prompt of {len(self.prompt)} tokens, {ends})"


class Token(NamedTuple):
    """A token that a step gave: which continuation it is of, the text that it adds, and why it is the last, if it is.

    `sample_index` is the index of its continuation in `request.continuations`. A sample that ends because its logits
    are not numbers is reported without a token: `token_id` is None.
    """

    request: Request
    sample_index: int
    token_id: int | None
    text: str
    finish_reason: str | None
