"""How a request is continued: how far, how randomly, and where it stops.

Greedy unless a temperature is given. What is drawn depends on the seed, the sample and the position alone, so that a
request gets the same tokens whatever else is in the batch. Of a transformers model's `generation_config` only the end
tokens are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnspan.errors import EngineError, integer, integers


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to do with a prompt.

    `temperature` 0 takes the likeliest token. `top_k` and `top_p` leave the likeliest tokens, 0 and 1 all of them.
    `seed` None draws one. `n` samples share the prompt's pages. A sample ends after `max_new_tokens`, at an end token
    of the model (unless `ignore_eos`), at one of `stop_token_ids`, or where one of the texts `stop` appears: the text
    is cut before it. `logprobs` records the log-probability of every token, under the model's own distribution, and
    `top_logprobs` also those of the likeliest ones.

    >>> SamplingParams(max_new_tokens=8, temperature=0.7, stop="end").stop
    ('end',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    attnspan.errors.EngineError: top_p must be a number above 0 and at most 1, got 1.5
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("n", 1), ("top_logprobs", 0)):
            self._set(name, integer(name, getattr(self, name), at_least=least, error=EngineError))
        for name in ("temperature", "top_p"):
            self._set(name, _number(name, getattr(self, name)))
        if self.temperature < 0 or math.isinf(self.temperature):
            raise EngineError(f"temperature must be a number of at least 0, got {self.temperature}; 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise EngineError(f"top_p must be a number above 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, error=EngineError))
            if self.seed >= 1 << 64:
                raise EngineError(f"seed must be below 2**64, got {self.seed}")
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, Iterable):
            raise EngineError(f"stop must be a text, or a list of them, got {texts!r}")
        self._set("stop", tuple(texts))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise EngineError(f"stop must be a text, or a list of them, none empty, got {text!r} among them")
        self._set("stop_token_ids", integers("stop_token_ids", self.stop_token_ids, error=EngineError))
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise EngineError(f"{name} must be a number, got {value!r}")
    return float(value)
