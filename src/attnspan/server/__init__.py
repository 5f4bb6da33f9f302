"""OpenAI's API over an `AsyncEngine`: HTTP in, tokens out.

    api.py             the endpoints: what a request asks of the engine, and what becomes of it
    requests.py        the fields of requests, as JSON schemas, and the params they stand for
    answers.py         the objects that are answered, whole or chunk by chunk
    chat.py            texts and messages to tokens
    schema.py          JSON that may hold anything, checked against a schema
    http_io.py         bodies, disconnects, event streams, slow readers
    api_errors.py      which status and which message
    config.py          keys and limits
    metrics.py         Prometheus' text
    openapi.py         the document of all this, from the same schemas
    page.html          a chat and the state of the engine, in one page
    server_process.py  uvicorn, signals, ranks

Needs starlette and uvicorn: the extra `[serve]`. Knows no model library.
"""

from attnspan.server.api import create_app
from attnspan.server.config import ServerConfig
from attnspan.server.server_process import Server

__all__ = ["Server", "ServerConfig", "create_app"]
