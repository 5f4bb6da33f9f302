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


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _number(least: float, most: float, minimum: str = "minimum") -> dict[str, Any]:
    return {"type": "number", minimum: least, "maximum": most}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _array(items: Schema, most: int, **least: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **least, "maxItems": most}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False}


TOKEN = _integer(0, 2**31 - 1)
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}


def _sampling(config: ServerConfig) -> dict[str, Schema]:
    """The fields that both endpoints have."""
    text = {"type": "string", "minLength": 1, "maxLength": 1000}
    tokens = _array(TOKEN, 1000)
    json_schema = {
        "name": {"type": "string", "maxLength": 100}, "description": STRING, "schema": {"type": "object"},
        "strict": BOOLEAN,
    }  # fmt: skip
    response_format = {
        "type": _one_of("text", "json_object", "json_schema"), "json_schema": _object(json_schema, "name", "schema")
    }  # fmt: skip
    biases = {"type": "object", "additionalProperties": _number(-100, 100), "maxProperties": 1000}
    return {
        "model": _one_of(*config.models),
        "n": _integer(1, config.max_n),
        "temperature": _number(0, 100),
        "top_p": _number(0, 1, "exclusiveMinimum"),
        "seed": _integer(-(2**63), 2**63 - 1),
        "stop": {"anyOf": [text, _array(text, config.max_stop)]},
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "logit_bias": biases,
        "max_tokens": _integer(1, config.max_new_tokens),
        "stream": BOOLEAN,
        "stream_options": _object({"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN}),
        "response_format": _object(response_format, "type"),
        "top_k": _integer(0, 2**31 - 1),
        "min_p": _number(0, 1),
        "repetition_penalty": _number(0, 100, "exclusiveMinimum"),
        "no_repeat_ngram_size": _integer(0, 1000),
        "min_tokens": _integer(0, config.max_new_tokens),
        "stop_token_ids": tokens,
        "ignore_eos": BOOLEAN,
        "bad_words": _array(text, 100),
        "allowed_token_ids": tokens | {"minItems": 1},
        **{name: {} for name in IGNORED},
    }


def _body(config: ServerConfig, own: dict[str, Any], prompt: str) -> dict[str, Any]:
    """The schema of a request: fields of its own beside those of sampling."""
    return _object(dict(sorted((_sampling(config) | own).items())), "model", prompt)


def completion_schema(config: ServerConfig) -> dict[str, Any]:
    """Of /v1/completions."""
    one = {"type": "array", "items": TOKEN, "minItems": 1}
    several = [_array(each, config.max_prompts, minItems=1) for each in (STRING, one)]
    own = {
        "prompt": {"anyOf": [STRING, one, *several]},
        "logprobs": _integer(0, 20),
        "echo": BOOLEAN,
        "best_of": _integer(1, config.max_n),
    }
    return _body(config, own, "prompt")


def chat_schema(config: ServerConfig) -> dict[str, Any]:
    """Of /v1/chat/completions."""
    part = _object({"type": _one_of("text"), "text": STRING}, "type", "text")
    fields = {
        "role": _one_of("system", "developer", "user", "assistant"),
        "content": {"anyOf": [STRING, _array(part, 1000, minItems=1)]},
        "name": {"type": "string", "maxLength": 100},
    }
    own = {
        "messages": _array(_object(fields, "role", "content"), 2000, minItems=1),
        "max_completion_tokens": _integer(1, config.max_new_tokens),
        "logprobs": BOOLEAN,
        "top_logprobs": _integer(0, 20),
        "modalities": _array(_one_of("text"), 1, minItems=1),
    }
    return _body(config, own, "messages")


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
