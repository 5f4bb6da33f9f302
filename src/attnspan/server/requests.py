"""The fields of requests: JSON schemas, from which requests are checked and the OpenAPI document is made.

OpenAI's fields have OpenAI's meaning. What is left out is what the model's generation_config asks for, else neutral:
greedy, as in docs/engine.md. A field that would change the answer and is not served is refused by name; one that is not
known at all is refused too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.engine import SamplingParams
from attnspan.server.api_errors import ApiError
from attnspan.server.config import ServerConfig
from attnspan.server.schema import Schema, check

TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}

PARAMS = {
    "temperature": "temperature", "top_p": "top_p", "presence_penalty": "presence_penalty", "n": "n",
    "frequency_penalty": "frequency_penalty", "stop": "stop", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_tokens": "min_new_tokens", "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
    "bad_words": "bad_words", "allowed_token_ids": "allowed_tokens",
}  # fmt: skip
"""Fields of requests, and those of SamplingParams that they are."""

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls")
"""Fields that do not change an answer."""

REFUSED = {
    "tools": "tools are not served", "tool_choice": "tools are not served", "functions": "tools are not served",
    "function_call": "tools are not served", "audio": "answers are texts", "prediction": "it is not served",
    "reasoning_effort": "it is not served", "web_search_options": "it is not served",
    "verbosity": "it is not served", "suffix": "text is continued, not filled in", "store": "nothing is stored",
}  # fmt: skip
"""Fields of OpenAI's that would change an answer or what becomes of it, and why they are not served."""

NEUTRAL: tuple[object, ...] = (None, [], "", False, "none")
"""Values by which a refused field asks for nothing."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a request asks for: prompts (texts or tokens), or messages; and how to answer."""

    model: str
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, Any]] | None
    params: dict[str, Any]  # of SamplingParams
    max_tokens: int | None
    stream: bool
    include_usage: bool
    echo: bool = False


def _sampling(config: ServerConfig) -> dict[str, Schema]:
    text = {"type": "string", "minLength": 1, "maxLength": 1000}
    tokens = {"type": "array", "items": TOKEN, "maxItems": 1000}
    return {
        "model": {"type": "string", "enum": list(config.models)},
        "n": {"type": "integer", "minimum": 1, "maximum": config.max_n},
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": config.max_stop}]},
        "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "logit_bias": {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": 1000,
        },
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": config.max_new_tokens},
        "stream": {"type": "boolean"},
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
            "additionalProperties": False,
        },
        "response_format": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 100},
                        "description": {"type": "string"},
                        "schema": {"type": "object"},
                        "strict": {"type": "boolean"},
                    },
                    "required": ["name", "schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
        "top_k": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "no_repeat_ngram_size": {"type": "integer", "minimum": 0, "maximum": 1000},
        "min_tokens": {"type": "integer", "minimum": 0, "maximum": config.max_new_tokens},
        "stop_token_ids": tokens,
        "ignore_eos": {"type": "boolean"},
        "bad_words": {"type": "array", "items": text, "maxItems": 100},
        "allowed_token_ids": tokens | {"minItems": 1},
        **{name: {} for name in IGNORED},
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    ordered = dict(sorted(properties.items()))
    return {"type": "object", "properties": ordered, "required": list(required), "additionalProperties": False}


def completion_schema(config: ServerConfig) -> dict[str, Any]:
    """Of /v1/completions."""
    one = {"type": "array", "items": TOKEN, "minItems": 1}
    several: list[Schema] = [
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": config.max_prompts},
        {"type": "array", "items": one, "minItems": 1, "maxItems": config.max_prompts},
    ]
    own: dict[str, Any] = {
        "prompt": {"anyOf": [{"type": "string"}, one, *several]},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "echo": {"type": "boolean"},
        "best_of": {"type": "integer", "minimum": 1, "maximum": config.max_n},
    }
    return _object(_sampling(config) | own, "model", "prompt")


def chat_schema(config: ServerConfig) -> dict[str, Any]:
    """Of /v1/chat/completions."""
    part = {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    message = {
        "type": "object",
        "properties": {
            "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": part, "minItems": 1, "maxItems": 1000}]
            },
            "name": {"type": "string", "maxLength": 100},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    own: dict[str, Any] = {
        "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": 2000},
        "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": config.max_new_tokens},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "modalities": {"type": "array", "items": {"type": "string", "enum": ["text"]}, "minItems": 1, "maxItems": 1},
    }
    return _object(_sampling(config) | own, "model", "messages")


def parse_completion(body: Any, schema: Schema) -> ParsedRequest:
    """What a body of /v1/completions asks for."""
    body = check(_served(body), schema)
    prompt, n = body["prompt"], body.get("n", 1)
    if body.get("best_of", n) != n:
        raise ApiError(400, f"best_of must be n, which is {n}, got {body['best_of']}", param="best_of")
    single = isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int))
    logprobs: dict[str, Any] = {}
    if "logprobs" in body:
        logprobs = {"logprobs": True, "top_logprobs": body["logprobs"]}
    if body.get("echo") and logprobs:
        raise ApiError(400, "echo with logprobs is not served: prompts have no log-probabilities", param="echo")
    return ParsedRequest(
        body["model"], (prompt,) if single else tuple(prompt), None,
        _params(body) | logprobs, body.get("max_tokens", 16),
        *_streamed(body), body.get("echo", False),
    )  # fmt: skip


def parse_chat(body: Any, schema: Schema) -> ParsedRequest:
    """What a body of /v1/chat/completions asks for."""
    body = check(_served(body), schema)
    if "top_logprobs" in body and not body.get("logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    longest = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(longest) > 1:
        raise ApiError(
            400, "max_tokens and max_completion_tokens are two names of one field, and differ", param="max_tokens"
        )
    told = {"logprobs": body.get("logprobs", False), "top_logprobs": body.get("top_logprobs", 0)}
    messages = [_message(each) for each in body["messages"]]
    return ParsedRequest(body["model"], (), messages, _params(body) | told, next(iter(longest), None), *_streamed(body))


def _served(body: Any) -> Any:
    """The body without fields that ask for nothing."""
    if not isinstance(body, dict):
        return body
    for name, reason in REFUSED.items():
        if name in body and body[name] not in NEUTRAL:
            raise ApiError(400, f"{name} is not served: {reason}; leave it out", param=name, code="unsupported_field")
    return {name: value for name, value in body.items() if name not in REFUSED}


def _streamed(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = body.get("stream", False)
    if "stream_options" in body and not stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    return stream, body.get("stream_options", {}).get("include_usage", False)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates know it."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": text}


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a body stands for; max_new_tokens is not known yet."""
    found = {ours: body[theirs] for theirs, ours in PARAMS.items() if theirs in body}
    found["n"] = body.get("n", 1)
    if "seed" in body:
        found["seed"] = body["seed"] % 2**64
    if body.get("response_format", {}).get("type", "text") != "text":
        found["json_schema"] = _json_schema(body["response_format"])
    if "logit_bias" in body:
        found["logit_bias"] = _biases(body["logit_bias"])
    return found


def _json_schema(wanted: Mapping[str, Any]) -> str:
    """The schema of a response_format, as text."""
    if wanted["type"] == "json_object":
        return '{"type": "object"}'
    if "json_schema" not in wanted:
        raise ApiError(400, "response_format.json_schema is required", param="response_format", code="missing_field")
    return json.dumps(wanted["json_schema"]["schema"])


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(
                400, f'logit_bias must have tokens as names, such as "50256", got {token[:20]!r}', param="logit_bias"
            )
    return {int(token): bias for token, bias in biases.items()}


def sampling_params(parsed: ParsedRequest, max_new_tokens: int, config: ServerConfig) -> SamplingParams:
    """The params of a request; EngineError, which names the field, for what they cannot be."""
    params = parsed.params | {"adapter": config.models[parsed.model]}
    if isinstance(params.get("stop"), Sequence) and not params["stop"]:
        del params["stop"]
    return SamplingParams(max_new_tokens=max_new_tokens, **params)
