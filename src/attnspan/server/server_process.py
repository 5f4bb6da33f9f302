"""A server from start to end: uvicorn on one address, an engine of its own, and a shutdown that ends streams properly.

SIGINT or SIGTERM: no new requests are taken, those that are open may end for `drain` seconds, then streams end with an
error and ``[DONE]``. A second signal ends the process at once. An engine that fails for good ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from threading import Thread
from types import FrameType, TracebackType
from typing import Any, Self

import uvicorn

from attnspan.engine import AsyncEngine, LLMEngine
from attnspan.errors import EngineError
from attnspan.server.api import create_app
from attnspan.server.config import ServerConfig

log = logging.getLogger("attnspan.server")

LAST_WORDS = 1.0
"""Seconds in which responses that a second signal ends may send what they have."""


class Server:
    """An engine behind OpenAI's API, at `address`: `run()` until a signal comes, or within ``with``, in a thread.

    Over ranks this is rank 0's; the others call `attnspan.engine.follow(engine)`.

    ::

        with Server(engine, tokenizer, ServerConfig(model="tiny", port=0)) as server:
            print(httpx.get(f"{server.address}/v1/models").json())
    """

    def __init__(self, engine: LLMEngine, tokenizer: Any, config: ServerConfig, *, max_waiting: int = 256) -> None:
        if tokenizer is None:
            raise EngineError("a server needs a tokenizer; give it the one that the model was trained with")
        for name in config.adapters:
            engine.check_adapter(name)
        self._socket = _bind_socket(config)  # first: an engine whose thread runs must be shut down
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            self.engine = AsyncEngine(engine, max_waiting=max_waiting)
        except BaseException:
            self._socket.close()
            raise
        self._process = ServerProcess(self.engine, create_app(self.engine, tokenizer, config), config)
        self._thread: Thread | None = None

    def run(self) -> None:
        """Serve until a signal comes, `stop` is called, or the engine fails: that is an EngineError."""
        with self._socket:
            self._process.run(sockets=[self._socket])
        if self.engine.failure is not None:
            raise EngineError("the engine has failed, and the server has ended") from self.engine.failure

    def stop(self) -> None:
        """End as after a signal; any thread may call."""
        self._process.should_exit = True

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._run_in_thread, name="attnspan-server", daemon=True)
        self._thread.start()
        return self

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except EngineError:
            log.exception("the server has ended")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()


def _bind_socket(config: ServerConfig) -> socket.socket:
    """A socket on the address, which nobody else has."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(1024)  # who connects before the loop runs is answered then
        except BaseException:
            found.close()
            raise
        return found
    except OSError as error:
        raise EngineError(f"cannot listen on host {config.host!r}, port {config.port}: {error}") from None


class ServerProcess(uvicorn.Server):
    """uvicorn, with an engine that is shut down before open connections are awaited."""

    def __init__(self, engine: AsyncEngine, app: Any, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(config.drain) + 10,
            )
        )
        self.engine, self.drain = engine, config.drain
        self._signalled = False
        self._watch: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal is an end like any other: uvicorn would raise it again afterwards."""
        log.info("ending, by signal %d", sig)
        self.force_exit, self._signalled = self._signalled, True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.create_task(self._exit_with_the_engine())

    async def _exit_with_the_engine(self) -> None:
        await self.engine.ended()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.engine.shutdown(self.drain))
        await asyncio.sleep(0)  # so that requests of open connections are refused from now on
        forcing = asyncio.create_task(self._end_streams_when_forced())
        await super().shutdown(sockets)
        if self.force_exit:
            await forcing
        forcing.cancel()
        await ending
        if self.server_state.tasks:  # uvicorn does not await them when it is forced
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS)

    async def _end_streams_when_forced(self) -> None:
        """At a second signal, whatever uvicorn awaits at that time: from Python 3.12 on it awaits open connections."""
        while not self.force_exit:
            await asyncio.sleep(0.1)
        await self.engine.shutdown(0)
