"""What HTTP may do to a request: bodies too long or too slow, clients that go away, event streams, slow readers.

`unless_gone` runs a coroutine as long as the client is there. `EventStream` sends server-sent events, each
``data: JSON``, the last ``data: [DONE]``; while nothing happens it sends a comment every `PING` seconds, so that
proxies keep the connection. `Timed` ends a response whose reader takes nothing for `send_timeout` seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnspan.server.api_errors import ApiError, api_error_of
from attnspan.server.config import ServerConfig
from attnspan.server.schema import parse

T = TypeVar("T")

log = logging.getLogger("attnspan.server")

PING = 15.0


class ClientGone(Exception):
    """Nobody waits for an answer."""


async def read_json(request: Request, config: ServerConfig) -> Any:
    """The value that a request's body is."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(config.receive_timeout):
            async for part in request.stream():
                body += part
                if len(body) > config.max_body:
                    raise ApiError(413, f"the body must be at most {config.max_body} bytes long", headers=CLOSE)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {config.receive_timeout:g} seconds", headers=CLOSE
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return parse(bytes(body))


CLOSE = {"Connection": "close"}


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns; it is cancelled if the client goes away, or this is cancelled."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events of an async generator as they come. An error among them is the last event but one."""

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], ended: Callable[[int], None]) -> None:
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers)
        self._events, self._ended = events, ended
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # as nginx calls it: the client went away
        try:
            await unless_gone(receive, self._send(send))
            status = 200
        except ClientGone:
            pass
        finally:
            self._ended(status)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._pinged()) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _pinged(self) -> AsyncGenerator[bytes, None]:
        """Events as lines, and comments where none comes for long."""
        events = self._events
        try:
            while True:
                following = asyncio.ensure_future(anext(events))
                try:
                    while not (await asyncio.wait((following,), timeout=PING))[0]:
                        yield b": waiting\n\n"
                    yield _line(following.result())
                finally:
                    following.cancel()
        except StopAsyncIteration:
            pass
        except Exception as error:
            yield _line(api_error_of(error).body)
        finally:
            await events.aclose()


def _line(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class Timed:
    """An app whose responses end if nobody reads them."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            try:
                async with asyncio.timeout(self.seconds):
                    await send(message)
            except TimeoutError:
                raise SlowReader from None

        try:
            await self.app(scope, receive, timed)
        except SlowReader:
            log.warning("a response was ended: its reader took nothing for %g seconds", self.seconds)


class SlowReader(Exception):
    """A reader does not read."""
