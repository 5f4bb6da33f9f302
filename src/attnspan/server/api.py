"""The endpoints: what a request asks of the engine, and what becomes of it.

| | |
|---|---|
| POST /v1/completions, /v1/chat/completions | generate |
| GET /v1/models, /v1/models/{model} | what is served |
| GET /health | 200 while the engine takes requests, else 503 |
| GET /metrics | Prometheus' text |
| GET /openapi.json, / | the document of the interface; a page to try it |

Where there are keys, /v1 and /metrics ask for one.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from attnspan.engine import AsyncEngine, SamplingParams
from attnspan.server.answers import Answer, ChatAnswer, CompletionAnswer, Usage
from attnspan.server.api_errors import ApiError, Json, api_error_of
from attnspan.server.chat import ChatTokenizer
from attnspan.server.config import ServerConfig
from attnspan.server.http_io import ClientGone, EventStream, Timed, read_json, unless_gone
from attnspan.server.metrics import ServerMetrics
from attnspan.server.openapi import document
from attnspan.server.requests import (
    ParsedRequest,
    chat_schema,
    completion_schema,
    parse_chat,
    parse_completion,
    sampling_params,
)

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(engine: AsyncEngine, tokenizer: Any, config: ServerConfig) -> ASGIApp:
    """An ASGI app that answers as OpenAI's API does, with an engine that somebody else starts and shuts down.

    ::

        app = create_app(AsyncEngine(engine), tokenizer, ServerConfig(model="llama"))
    """
    return Timed(Api(engine, ChatTokenizer(tokenizer), config).app(), config.send_timeout)


class Api:
    """The endpoints of one server."""

    def __init__(self, engine: AsyncEngine, tokenizer: ChatTokenizer, config: ServerConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.metrics, self.created = ServerMetrics(), int(time.time())
        self.completion_schema, self.chat_schema = completion_schema(config), chat_schema(config)
        self._keys = [key.encode() for key in config.api_keys]
        self._page = files("attnspan.server").joinpath("page.html").read_text(encoding="utf-8")

    def app(self) -> Starlette:
        routes = [
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/models/{model:path}", self.one_model, "GET"),
            self._route("/health", self.health, "GET"),
            self._route("/metrics", self.prometheus, "GET"),
            self._route("/openapi.json", self.openapi, "GET"),
            self._route("/", self.page, "GET"),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})

    def _route(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                self._check_host(request)
                if path.startswith(("/v1", "/metrics")):
                    self._check_key(request)
                response = await handler(request)
            except ClientGone:
                response = Response(status_code=499)  # which nobody reads
            except Exception as error:
                response = api_error_of(error).response()
            if not isinstance(response, EventStream):
                self.metrics.responses[path, response.status_code] += 1
            return response

        return Route(path, endpoint, methods=[method])

    def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        self.metrics.responses["other", status] += 1
        reason = {404: "there is nothing at this path", 405: "this path does not take this method"}
        headers = dict(getattr(error, "headers", None) or {})
        return ApiError(status, reason.get(status, "the request is not served"), headers=headers).response()

    # ---- who may ask -------------------------------------------------------------------------------------------------

    def _check_host(self, request: Request) -> None:
        """See `ServerConfig`, `allowed_hosts`."""
        hosts, host = self.config.hosts, request.headers.get("host", "")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.split(":")[0]
        if hosts is not None and name.lower() not in hosts:
            raise ApiError(403, "this server is not known by this host name; see --allowed-host", code="unknown_host")

    def _check_key(self, request: Request) -> None:
        """Every key is compared, so that the time taken tells nothing."""
        if not self._keys:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(
                401, "an API key is needed, as in: Authorization: Bearer KEY", code="invalid_api_key", headers=challenge
            )
        request.state.salt = None if self.config.shared_prefix_cache else f"key {matches.index(True)}"

    # ---- generation --------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        parsed = parse_completion(await self._body(request), self.completion_schema)
        return await self._generate(request, parsed, CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        parsed = parse_chat(await self._body(request), self.chat_schema)
        return await self._generate(request, parsed, ChatAnswer)

    async def _body(self, request: Request) -> Any:
        body = await read_json(request, self.config)
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            self._check_model(body["model"])
        return body

    async def _generate(self, request: Request, parsed: ParsedRequest, kind: type[Answer]) -> Response:
        prompts = await unless_gone(request.receive, self._tokens(parsed))
        room = self.engine.engine.max_length + 1 - max(map(len, prompts))  # the last token is never fed
        longest = parsed.max_tokens or max(1, min(room, self.config.max_new_tokens))
        if longest > room:
            raise ApiError(
                400,
                f"there is room for {self.engine.engine.max_length} tokens; the prompt has "
                f"{max(map(len, prompts))}, and max_tokens asks for {longest} more",
                param="prompt" if parsed.messages is None else "messages",
                code="context_length_exceeded",
            )
        params = sampling_params(parsed, longest, self.config)
        await unless_gone(request.receive, self._compile(params))
        answer = kind(parsed.model, params.n or 1, self.tokenizer, Usage(sum(map(len, prompts))))
        if isinstance(answer, CompletionAnswer) and parsed.echo:
            answer.echoes = [
                text if isinstance(text, str) else await self.tokenizer.decode(text) for text in parsed.prompts
            ]
        stream = self.engine.stream(prompts, params, salt=getattr(request.state, "salt", None))
        try:
            await unless_gone(request.receive, stream.added())
            if parsed.stream:
                path = request.url.path
                return EventStream(
                    answer.events(stream, parsed.include_usage), lambda status: self._count(path, status)
                )
            body = await unless_gone(request.receive, answer.complete(stream, len(prompts) * answer.samples))
        except BaseException:
            stream.cancel()
            raise
        return Json(body)

    async def _tokens(self, parsed: ParsedRequest) -> list[list[int]]:
        if parsed.messages is not None:
            return [await self.tokenizer.apply_template(parsed.messages)]
        return [await self.tokenizer.encode(each) if isinstance(each, str) else each for each in parsed.prompts]

    async def _compile(self, params: SamplingParams) -> None:
        """Compile a grammar before the engine is asked, so that nobody else waits for it."""
        if params.json_schema is None:
            return
        if len(str(params.json_schema)) > self.config.max_grammar:
            reason = f"the schema must be at most {self.config.max_grammar} characters long"
            raise ApiError(400, reason, param="response_format")
        try:
            async with asyncio.timeout(self.config.grammar_timeout):
                await asyncio.to_thread(self.engine.engine.compile_grammar, params.over(SamplingParams()))
        except TimeoutError:
            raise ApiError(
                400, "the schema takes too long to compile; ask for a simpler one", param="response_format"
            ) from None

    def _count(self, path: str, status: int) -> None:
        self.metrics.responses[path, status] += 1

    # ---- everything else ---------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._model(name) for name in self.config.models]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return Json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        longest = self.engine.engine.max_length
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "attnspan",
            "max_model_len": longest,
        }  # fmt: skip

    def _check_model(self, name: str) -> None:
        if name not in self.config.models:
            raise ApiError(
                404,
                f"no model is served by this name; there is {', '.join(map(repr, self.config.models))}",
                param="model",
                code="model_not_found",
            )

    async def health(self, request: Request) -> Response:
        healthy = self.engine.taking
        return Json({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    async def prometheus(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(self.engine), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return Json(document(self.config, self.completion_schema, self.chat_schema))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(
            self._page, headers={"Content-Security-Policy": PAGE_POLICY, "Referrer-Policy": "no-referrer"}
        )
