"""What is answered: OpenAI's objects, whole or chunk by chunk, of the tokens of a stream.

A choice is a sample of a prompt; they are numbered prompt by prompt. Chunks carry what has come since the last one, so
a slow reader gets fewer and longer ones. Joined, their texts are the text of the whole answer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnspan.engine import AnswerStream, StreamedToken
from attnspan.engine.sampler import NONE_LEFT
from attnspan.server.api_errors import ApiError
from attnspan.server.chat import ChatTokenizer

log = logging.getLogger("attnspan.server")


@dataclass(slots=True)
class ChoicePiece:
    """What has come of one choice."""

    text: str = ""
    tokens: list[StreamedToken] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def scored(self) -> list[StreamedToken]:
        """The tokens that have a log-probability."""
        return [token for token in self.tokens if token.logprob is not None and token.token_id is not None]

    def add(self, token: StreamedToken) -> None:
        self.text += token.text
        self.tokens.append(token)
        self.finish_reason = token.finish_reason


@dataclass(slots=True)
class Usage:
    """How many tokens were fed and generated."""

    prompt: int
    generated: int = 0

    @property
    def body(self) -> dict[str, int]:
        total = self.prompt + self.generated
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}


class Answer:
    """What the answers to one request have in common; subclasses are the two kinds of choices."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, model: str, samples: int, tokenizer: ChatTokenizer, usage: Usage) -> None:
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.samples, self.tokenizer, self.usage = samples, tokenizer, usage

    def choice(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, index: int, piece: ChoicePiece, first: bool) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    async def complete(self, stream: AnswerStream, choices: int) -> dict[str, Any]:
        """All of it, when all of it is there."""
        pieces = [ChoicePiece() for _ in range(choices)]
        async for token in stream:
            _check_token(stream, token)
            pieces[self._index(token)].add(token)
            self.usage.generated += 1
        found = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        return {**self.head, "object": self.kind, "choices": found, "usage": self.usage.body}

    async def events(self, stream: AnswerStream, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks as tokens come."""
        head = {**self.head, "object": self.chunk_kind}
        extra = {"usage": None} if include_usage else {}
        begun = set[int]()
        async with stream:
            async for token in stream:
                pieces: dict[int, ChoicePiece] = {}
                for each in (token, *stream.waiting()):
                    _check_token(stream, each)
                    pieces.setdefault(self._index(each), ChoicePiece()).add(each)
                    self.usage.generated += 1
                for index, piece in pieces.items():
                    for choice in self.chunks(index, piece, index not in begun):
                        yield {**head, "choices": [choice], **extra}
                    begun.add(index)
        if include_usage:
            yield {**head, "choices": [], "usage": self.usage.body}

    def _index(self, token: StreamedToken) -> int:
        return token.prompt * self.samples + token.sample_index

    def _piece(self, token: int) -> str:
        return self.tokenizer.piece(token)[0]


class CompletionAnswer(Answer):
    """Of /v1/completions. `echoes` are texts that answers begin with, by prompt."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    echoes: Sequence[str] = ()

    def choice(self, index: int, piece: ChoicePiece, first: bool = True) -> dict[str, Any]:
        before = self.echoes[index // self.samples] if self.echoes and first else ""
        logprobs = self._logprobs(piece, len(before))
        return {
            "index": index, "text": before + piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason,
        }  # fmt: skip

    def chunks(self, index: int, piece: ChoicePiece, first: bool) -> Iterable[dict[str, Any]]:
        choice = self.choice(index, piece, first)
        if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
            yield choice

    def _logprobs(self, piece: ChoicePiece, offset: int) -> dict[str, Any] | None:
        scored = piece.scored
        if not scored:
            return None
        texts = [self._piece(token.token_id or 0) for token in scored]
        tops = [
            None if token.top_logprobs is None
            else {self._piece(each): _number(value) for each, value in token.top_logprobs.items()}
            for token in scored
        ]  # fmt: skip
        offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
        numbers = [_number(token.logprob) for token in scored]
        return {"tokens": texts, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def chunks(self, index: int, piece: ChoicePiece, first: bool) -> Iterable[dict[str, Any]]:
        def chunk(delta: dict[str, str], logprobs: object = None, reason: str | None = None) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

        if first:
            yield chunk({"role": "assistant", "content": ""})
        logprobs = self._logprobs(piece)
        if piece.text or logprobs:
            yield chunk({"content": piece.text}, logprobs)
        if piece.finish_reason:
            yield chunk({}, None, piece.finish_reason)

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any] | None:
        entries = [
            self._named(token.token_id or 0, token.logprob)
            | {"top_logprobs": [self._named(each, value) for each, value in (token.top_logprobs or {}).items()]}
            for token in piece.scored
        ]
        return {"content": entries, "refusal": None} if entries else None

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, encoded = self.tokenizer.piece(token)
        return {"token": text, "logprob": _number(logprob), "bytes": encoded}


def _check_token(stream: AnswerStream, token: StreamedToken) -> None:
    """A ApiError for a sample that has no next token: its options leave none, or the model's logits are not numbers."""
    if token.finish_reason != "error":
        return
    reason = str(stream.requests[token.prompt].error)
    if NONE_LEFT in reason:
        raise ApiError(400, f"no token may come next: {NONE_LEFT}", code="no_token_left")
    log.error("a request has failed: %s", reason)
    raise ApiError(500, "the model's logits are not numbers", code="engine_error")


def _number(logprob: float | None) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(-9999.0, -9999.0 if logprob is None else logprob)
