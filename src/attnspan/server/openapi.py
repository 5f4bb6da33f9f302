"""The OpenAPI document, from the schemas by which requests are checked."""

from __future__ import annotations

from typing import Any

from attnspan._version import __version__
from attnspan.server.config import ServerConfig
from attnspan.server.schema import Schema

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

REFUSALS = {
    "400": "The request cannot be served as asked.", "401": "No key, or a wrong one.", "403": "An unknown host name.",
    "404": "An unknown model.", "408": "The body came too slowly.", "413": "The body is too long.",
    "415": "The body is not JSON.", "429": "The queue is full.", "500": "The request failed.",
    "503": "The server is shutting down, or its engine has failed.",
}  # fmt: skip


def document(config: ServerConfig, completion: Schema, chat: Schema) -> dict[str, Any]:
    """OpenAPI 3.1."""
    model = _reply("A model.", _objects(id="string", object="string", created="integer", owned_by="string"))
    models = _reply("The models.", {"type": "object", "required": ["object", "data"]})
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(config.models)}}
    health = _reply("The engine.", _objects(status="string"))
    text = _reply("Prometheus' text.", {"type": "string"}, "text/plain")
    return {
        "openapi": "3.1.0",
        "info": {"title": f"attnspan: {config.model}", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _generation("completions", "Continue texts.", completion)},
            "/v1/chat/completions": {"post": _generation("chat", "Answer messages.", chat)},
            "/v1/models": {"get": _operation("models", {"200": models})},
            "/v1/models/{model}": {"get": _operation("model", {"200": model}) | {"parameters": [name]}},
            "/health": {"get": {"operationId": "health", "responses": dict.fromkeys(("200", "503"), health)}},
            "/metrics": {"get": _operation("metrics", {"200": text})},
        },
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    } | ({"security": [{"key": []}]} if config.api_keys else {})


def _operation(name: str, replies: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {code: {"description": text, "content": error} for code, text in REFUSALS.items()}
    return {"operationId": name, "responses": refusals | replies}


def _generation(name: str, text: str, schema: Schema) -> dict[str, Any]:
    answer = _objects(id="string", object="string", created="integer", model="string", choices="array", usage="object")
    reply = _reply("The answer; with stream, server-sent events.", answer)
    reply["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _nullable(schema)}}}
    return {"summary": text, "requestBody": body} | _operation(name, {"200": reply})


def _nullable(schema: Schema) -> dict[str, Any]:
    """Members that are not required may be null, which stands for what is left out."""
    members = {
        name: each if name in schema["required"] or not each else {"anyOf": [each, {"type": "null"}]}
        for name, each in schema["properties"].items()
    }
    return {**schema, "properties": members}


def _reply(text: str, schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {media: {"schema": schema}}}


def _objects(**members: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in members.items()},
        "required": list(members),
    }
