"""Constrains answers to JSON of a schema: a grammar bans the tokens that cannot continue the text.

llguidance compiles a schema for a tokenizer, consumes a sample's tokens, and computes which tokens may come next,
including end tokens where the text is complete. A grammar's state is a cache: it counts the tokens that it has
consumed, and can be rebuilt from the tokens of its sample.

Compiling takes milliseconds, and more for a large schema; `Grammars.compiled` may be called from any thread beforehand.
llguidance's own limits bound how large a grammar may become and how long a step of it may take. Whitespace between
tokens of JSON is at most `SPACES` long, or a model could go on with it for ever.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnspan.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACES = 16
KEPT = 64
"""Compiled grammars, the least recently used of which goes first."""


def schema_text(schema: object) -> str:
    """A JSON schema as text, of a dict or a text; EngineError for what is none. Whether it can be served is seen when
    it is compiled."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            return schema if isinstance(schema, str) else json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"json_schema must be a JSON schema, a dict or its text ({error})") from None
    raise EngineError(f"json_schema must be a JSON schema, a dict or its text, got {type(found).__name__}")


class Grammars:
    """The grammars of an engine, compiled when they are first asked for. Threads may share it."""

    def __init__(self, tokenizer: object, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = Lock()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # by end tokens
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()

    def compiled(self, schema: str, ends: Sequence[int]) -> LLMatcher:
        """The grammar of a schema, at its beginning; `ends` may follow a complete text. Not to be written to: copy it.

        EngineError for a schema that cannot be served, or where llguidance is not there.
        """
        key = schema, tuple(sorted(ends))
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            tokenizer = self._of(key[1])
        matcher = _compile(schema, tokenizer)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _of(self, ends: tuple[int, ...]) -> LLTokenizer:
        """The tokenizer as llguidance knows it."""
        if ends in self._tokenizers:
            return self._tokenizers[ends]
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise EngineError('json_schema needs llguidance; run pip install "attnspan[grammar]"') from None
        if not ends:
            raise EngineError("json_schema needs an end token, which the model has not; give stop_token_ids")
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise EngineError(
                "json_schema needs a tokenizer of the tokenizers library, as the fast ones of transformers are, got "
                f"{type(self._tokenizer).__name__}"
            )
        try:
            made = LLTokenizer(backend.to_str(), n_vocab=self._vocabulary, eos_token=list(ends))
        except Exception as error:
            raise EngineError(f"json_schema is not served with this tokenizer: {error}") from None
        while len(self._tokenizers) > 4:
            del self._tokenizers[next(iter(self._tokenizers))]
        self._tokenizers[ends] = made
        return made


def _compile(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{SPACES}}}"}
    matcher, reason = None, ""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        reason = matcher.get_error()
    except Exception as error:
        reason = str(error)
    if matcher is None or reason:
        first = " ".join(reason.partition("<state>")[0].partition("<grammar>")[0].split())[:300]
        raise EngineError(f"json_schema is not served: {first}")
    return matcher


class GrammarState:
    """Where a sample is in its grammar."""

    def __init__(self, beginning: LLMatcher) -> None:
        self._beginning, self._matcher, self._seen = beginning, beginning.deep_copy(), 0

    def mask(self, generated: Sequence[int]) -> bytes:
        """One bit for each token, the lowest first: whether it may come next. Nothing may after a text that breaks the
        grammar, or where a limit is reached."""
        if len(generated) < self._seen:
            self._matcher, self._seen = self._beginning.deep_copy(), 0
        new = list(generated[self._seen :])
        self._seen = len(generated)
        if new:
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            return b""
        mask = self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() else mask


def allowed_by(masks: Sequence[bytes], vocabulary: int, device: torch.device) -> Tensor:
    """(R, V) bool, of masks of bits; an empty one allows nothing."""
    size = -(-vocabulary // 8)
    packed = bytearray().join(mask[:size].ljust(size, b"\0") for mask in masks)
    bits = torch.frombuffer(packed, dtype=torch.uint8).view(len(masks), size).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (bits.unsqueeze(-1) >> places & 1).view(len(masks), -1)[:, :vocabulary].bool()
