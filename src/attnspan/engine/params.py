"""The options of a request: length, sampling, penalties, bans, and stopping conditions.

A field that is None is what the model asks for (`ModelInfo.defaults`: of a transformers model its generation_config),
else neutral. So a request says what `model.generate` says with the same options: it is greedy unless a temperature is
given, or the model's generation_config says do_sample. What is drawn depends on the seed, the sample and the position
alone, so that a request gets the same tokens whatever else is in the batch.

Names and meanings are those of transformers' GenerationConfig, except for `presence_penalty`, `frequency_penalty` and
`logit_bias`, which are OpenAI's, and for `bad_words`, `allowed_tokens` and `adapter`. The order in which they act is in
logits_processor.py and draws.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from attnspan.engine.grammar import schema_text
from attnspan.errors import EngineError, integer, integers

Tokens = Sequence[int]
Pairs = Mapping[Any, float] | Iterable[Sequence[Any]]
"""A dict, or pairs."""

NEUTRAL: dict[str, Any] = {
    "max_new_tokens": 16, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "n": 1, "stop": (), "min_p": 0.0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "no_repeat_ngram_size": 0, "logit_bias": (),
    "sequence_bias": (), "bad_words": (), "suppress_tokens": (), "begin_suppress_tokens": (), "min_new_tokens": 0,
    "min_length": 0,
}  # fmt: skip
"""Fields that may be left to the model, with what they are where it says nothing. Others that are None stay None."""

_WHOLE = {
    "max_new_tokens": 1, "top_k": 0, "n": 1, "top_logprobs": 0, "no_repeat_ngram_size": 0, "min_new_tokens": 0,
    "min_length": 0, "forced_bos_token_id": 0,
}  # fmt: skip
"""Whole numbers, and the least that each may be."""

_NUMBERS: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "temperature": ("of at least 0", lambda x: 0 <= x < math.inf, "; 0 is greedy"),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1, ""),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1, ""),
    "typical_p": ("above 0 and at most 1", lambda x: 0 < x <= 1, ""),
    "epsilon_cutoff": ("of at least 0 and below 1", lambda x: 0 <= x < 1, ""),
    "eta_cutoff": ("of at least 0 and below 1", lambda x: 0 <= x < 1, ""),
    "top_h": ("from 0 to 1", lambda x: 0 <= x <= 1, "; 0 leaves it out"),
    "repetition_penalty": ("above 0", lambda x: 0 < x < math.inf, "; 1 leaves it out"),
    "presence_penalty": ("that is finite", math.isfinite, ""),
    "frequency_penalty": ("that is finite", math.isfinite, ""),
}
"""Numbers: what each must be."""

_LISTS = ("stop_token_ids", "allowed_tokens", "suppress_tokens", "begin_suppress_tokens")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to do with a prompt. None: as the model asks for, else neutral.

    `temperature` 0 takes the likeliest token. `top_k` and `top_p` leave the likeliest tokens, 0 and 1 all of them.
    `seed` None draws one. `n` samples share the prompt's pages. A sample ends after `max_new_tokens`, at an end token
    of the model (unless `ignore_eos`), at one of `stop_token_ids`, or where one of the texts `stop` appears: the text
    is cut before it. `logprobs` records the log-probability of every token, under the model's own distribution, and
    `top_logprobs` also those of the likeliest ones. `adapter` names the adapter of the model that computes it. All
    other fields are described in docs/engine.md.

    >>> SamplingParams(max_new_tokens=8, temperature=0.7, stop="end").stop
    ('end',)
    >>> SamplingParams(logit_bias={7: -1}).logit_bias
    ((7, -1.0),)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    attnspan.errors.EngineError: top_p must be a number above 0 and at most 1, got 1.5
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Tokens = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_h: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Pairs | None = None
    sequence_bias: Pairs | None = None
    bad_words: Sequence[str | Tokens] | None = None
    allowed_tokens: Tokens | None = None
    suppress_tokens: Tokens | None = None
    begin_suppress_tokens: Tokens | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Tokens | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    json_schema: str | Mapping[str, Any] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), at_least=least, error=EngineError))
        for name, (rule, holds, hint) in _NUMBERS.items():
            if getattr(self, name) is not None:
                number = _number(name, getattr(self, name))
                if not holds(number):
                    raise EngineError(f"{name} must be a number {rule}, got {number}{hint}")
                self._set(name, number)
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, error=EngineError))
            if self.seed >= 1 << 64:
                raise EngineError(f"seed must be below 2**64, got {self.seed}")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise EngineError(f"adapter must be the name of an adapter, got {self.adapter!r}")
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Texts, tokens and what is added to them, in one form: tuples."""
        if self.stop is not None:
            self._set("stop", _texts("stop", self.stop))
        for name in _LISTS:
            if getattr(self, name) is not None:
                self._set(name, integers(name, getattr(self, name), error=EngineError))
        if self.allowed_tokens == ():
            raise EngineError("allowed_tokens must hold at least one token, got none; None allows all")
        if self.bad_words is not None:
            self._set("bad_words", _words(self.bad_words))
        if self.logit_bias is not None:
            tokens = {_token("logit_bias", token): bias for token, bias in _pairs("logit_bias", self.logit_bias)}
            self._set("logit_bias", tuple(tokens.items()))
        if self.sequence_bias is not None:
            pairs = _pairs("sequence_bias", self.sequence_bias)
            self._set("sequence_bias", tuple({_sequence("sequence_bias", key): bias for key, bias in pairs}.items()))
        ends = self.forced_eos_token_id
        if ends is not None:
            name = "forced_eos_token_id"
            self._set(name, integers(name, ends if isinstance(ends, Iterable) else [ends], error=EngineError))
        if self.json_schema is not None:
            self._set("json_schema", schema_text(self.json_schema))
        if self.exponential_decay_length_penalty is not None:
            self._set("exponential_decay_length_penalty", _decay(self.exponential_decay_length_penalty))
        self._check_forced()

    def _check_forced(self) -> None:
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = getattr(self, name)
            forced = {forced} if isinstance(forced, int) else set(forced or ())
            if forced and forced <= {*(self.suppress_tokens or ())}:
                raise EngineError(
                    f"{name}={getattr(self, name)} is also in suppress_tokens, which leaves no token there"
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These, with what is None taken from `defaults`, and else neutral.

        >>> params = SamplingParams(top_k=5).over(SamplingParams(top_k=3, temperature=0.6))
        >>> params.top_k, params.temperature, params.top_p
        (5, 0.6, 1.0)
        """
        merged = object.__new__(SamplingParams)  # of values that are in order
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                value = getattr(defaults, name)
            merged._set(name, NEUTRAL.get(name) if value is None else value)
        if (self.min_new_tokens, defaults.min_new_tokens) != (None, None):
            merged._set("min_length", 0)  # as in `model.generate`
        merged._check_forced()
        return merged

    def tokens(self) -> dict[str, list[int]]:
        """All tokens that are named, by field; texts of `bad_words` are none."""
        found = {name: list(getattr(self, name) or ()) for name in (*_LISTS, "forced_eos_token_id")}
        found["forced_bos_token_id"] = [] if self.forced_bos_token_id is None else [self.forced_bos_token_id]
        found["logit_bias"] = [token for token, _ in self.logit_bias or ()]
        found["sequence_bias"] = [token for tokens, _ in self.sequence_bias or () for token in tokens]
        found["bad_words"] = [token for word in self.bad_words or () if not isinstance(word, str) for token in word]
        return found


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise EngineError(f"{name} must be a number, got {value!r}")
    return float(value)


def _texts(name: str, texts: object) -> tuple[str, ...]:
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, Iterable):
        raise EngineError(f"{name} must be a text, or a list of them, got {texts!r}")
    found = tuple(texts)
    for text in found:
        if not isinstance(text, str) or not text:
            raise EngineError(f"{name} must be a text, or a list of them, none empty, got {text!r} among them")
    return found


def _words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str | bytes | Mapping) or not isinstance(words, Iterable):
        raise EngineError(f"bad_words must be a list of texts or of lists of tokens, got {words!r}")
    found = [word if isinstance(word, str) else _sequence("bad_words", word) for word in words]
    if not all(found):
        raise EngineError("bad_words must be a list of texts or of lists of tokens, none empty, got '' among them")
    return tuple(found)


def _token(name: str, value: object) -> int:
    return integer(f"a token of {name}", value, error=EngineError)


def _sequence(name: str, values: object) -> tuple[int, ...]:
    tokens = integers(f"a sequence of {name}", values, error=EngineError)
    if not tokens:
        raise EngineError(f"{name} must hold sequences of at least one token, got an empty one")
    return tokens


def _pairs(name: str, values: object) -> list[tuple[Any, float]]:
    """What a dict or a list of pairs adds to what; minus infinity is a number here, and infinity is not."""
    pairs: Iterable[Any] = values.items() if isinstance(values, Mapping) else [values]
    if _is_listed(values):
        pairs = values
    found = []
    for pair in pairs:
        if not _is_listed(pair) or len(pair) != 2:
            raise EngineError(f"{name} must be a dict of numbers, or pairs, got {pair!r}")
        bias = _number(f"{name}[{pair[0]!r}]", pair[1])
        if bias == math.inf:
            raise EngineError(f"{name}[{pair[0]!r}] must be a number below infinity, got {bias}; see allowed_tokens")
        found.append((pair[0], bias))
    return found


def _is_listed(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _decay(value: object) -> tuple[int, float]:
    name = "exponential_decay_length_penalty"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise EngineError(f"{name} must be (tokens before it begins, factor), got {value!r}")
    factor = _number(f"{name}[1]", value[1])
    if not 0 < factor < math.inf:
        raise EngineError(f"{name}[1] must be a number above 0, got {factor}")
    return integer(f"{name}[0]", value[0], error=EngineError), factor
