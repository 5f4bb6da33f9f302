"""Checks and normalizes the prompts and params of callers: lists of tokens, with one params each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnspan.engine.detokenizer import Tokenizer
from attnspan.engine.params import SamplingParams
from attnspan.errors import EngineError, integers

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, tokens, or what a processor returns for one prompt with images or sounds."""


def encode_prompt(prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """The tokens of a prompt, at least one, all known to the model."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise EngineError("prompt is a text, which needs a tokenizer; give the engine one, or tokens")
        tokens = list(tokenizer.encode(prompt))
    else:
        plain = isinstance(prompt, list | tuple) and set(map(type, prompt)) <= {int} and min(prompt, default=0) >= 0
        tokens = list(prompt if plain else integers("prompt", prompt, error=EngineError))
    if not tokens:
        raise EngineError("prompt must hold at least one token, got none; begin with the model's first token")
    if max(tokens) >= vocabulary:
        raise EngineError(f"prompt must hold tokens below the model's {vocabulary}, got {max(tokens)}")
    return tokens


def one_or_several(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, made of several or of one."""
    if isinstance(prompts, str):
        return [prompts]
    several = listed(prompts)
    return several if any(map(_is_prompt, several)) else [several]


def several(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts; one prompt alone is refused."""
    if isinstance(prompts, str):
        raise EngineError("prompts must be a list of prompts, got a text; as in generate([prompt])")
    found = listed(prompts)
    if found and not any(map(_is_prompt, found)):
        raise EngineError(
            f"prompts must be a list of texts or of lists of tokens, got one that begins with {found[0]!r}; as "
            "in generate([prompt])"
        )
    return found


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Prompts as a list. The keys of a dict, such as a tokenizer returns, would be taken for texts: it is refused."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise EngineError(
            f"prompts must be a list of texts or of lists of tokens, got {type(prompts).__name__}; of what a tokenizer "
            'returns, take its "input_ids"; what a processor returns for one prompt with images is one of a list'
        )
    return list(prompts)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """One params for each of `count` prompts, of one for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise EngineError(f"params must be SamplingParams(...), or a list of them, got {params!r}")
    if len(params) != count:
        raise EngineError(f"params must be one for all {count} prompts, or one for each, got {len(params)}")
    return params


def complete_params(
    params: SamplingParams | None, defaults: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int
) -> SamplingParams:
    """Params with nothing left to the model, and no texts among the bad words; EngineError if an engine cannot serve
    them."""
    if not isinstance(params, SamplingParams | None):
        raise EngineError(f"params must be SamplingParams(...), got {params!r}")
    if not isinstance(defaults, SamplingParams):
        raise EngineError(f"the engine's default_params must be SamplingParams(...), got {defaults!r}")
    params = (params or SamplingParams()).over(defaults)
    if params.stop and tokenizer is None:
        raise EngineError(f"stop={params.stop!r} needs a tokenizer; give the engine one, or use stop_token_ids")
    if any(isinstance(word, str) for word in params.bad_words or ()):
        if tokenizer is None:
            raise EngineError(f"bad_words={params.bad_words!r} needs a tokenizer; give the engine one, or tokens")
        params = replace(
            params, bad_words=[each for word in params.bad_words or () for each in _spelt(word, tokenizer)]
        )
    for name, tokens in params.tokens().items():
        if max(tokens, default=0) >= vocabulary:
            raise EngineError(f"{name} must hold tokens below the model's {vocabulary}, got {max(tokens)}")
    if params.top_logprobs > vocabulary:
        raise EngineError(f"top_logprobs must be at most the model's {vocabulary} tokens, got {params.top_logprobs}")
    return params


def _spelt(word: str | Sequence[int], tokenizer: Tokenizer) -> list[Sequence[int]]:
    """The tokens of a bad word: of a text, as it is and after a space, without what a tokenizer puts around a text."""
    if not isinstance(word, str):
        return [word]
    around, found = list(tokenizer.encode("")), []
    for text in (word, f" {word}"):
        tokens, begin = list(tokenizer.encode(text)), 0
        while begin < len(around) and tokens[begin : begin + 1] == [around[begin]]:
            begin += 1
        end = around[begin:]
        tokens = tokens[begin : len(tokens) - len(end) if end and tokens[-len(end) :] == end else None]
        if not tokens:
            raise EngineError(f"bad_words must hold texts that have tokens, got {word!r}")
        found.append(tuple(tokens))
    return list(dict.fromkeys(found))


def _is_prompt(one: object) -> bool:
    """Whether this is a prompt and not a token; a tensor of no dimensions is iterable, and yet a token."""
    return isinstance(one, Iterable) and getattr(one, "ndim", 1) > 0
