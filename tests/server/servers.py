"""Servers of a tiny model in a thread, and clients of them that ask no proxy."""

import contextlib
import functools
import http.client
import json
import socket
import time
import warnings
from urllib.parse import urlsplit

import openai

from attnspan import Engine, SamplingParams
from attnspan.server import Server, ServerConfig
from tests.engine.models import tiny, tokenizer

MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def chatting():
    """The tests' tokenizer, with a chat template."""
    found = tokenizer()
    found.chat_template = TEMPLATE
    return found


def llama():
    return tiny("Llama", vocab_size=320)


def engine(**options):
    return Engine(llama(), **({"pages": 512, "page_size": 8, "tokenizer": chatting()} | options))


@contextlib.contextmanager
def running(*, max_waiting=256, tokenizer=None, options=None, model=None, **config):
    """A server of an engine of its own; afterwards no page is lost."""
    made = engine(**(options or {})) if model is None else Engine(model, pages=512, page_size=8, tokenizer=chatting())
    wishes = {"model": MODEL, "port": 0, "drain": 5.0} | config
    with Server(made, tokenizer or chatting(), ServerConfig(**wishes), max_waiting=max_waiting) as server:
        yield server
    made.check()
    assert made.stats().pages_used == 0


@contextlib.contextmanager
def client_of(server, key="none", **options):
    """The official client."""
    with warnings.catch_warnings(), openai.DefaultHttpxClient(trust_env=False) as plain:
        wishes = {"max_retries": 0, "timeout": 60} | options
        yield openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, http_client=plain, **wishes)


def expected(prompt, **wishes):
    """What the engine says, without a server."""
    [answer] = engine().generate([prompt], SamplingParams(**wishes))
    return answer


def templated(messages):
    return chatting().encode(
        chatting().apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )


def ask(server, method, path, body=None, headers=None, raw=None):
    """A request by the standard library: status, headers, and the body, of JSON if it is."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    with contextlib.closing(connection):
        sent = raw if raw is not None else None if body is None else json.dumps(body)
        kind = {} if sent is None else {"Content-Type": "application/json"}
        connection.request(method, path, sent, {**kind, **(headers or {})})
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text.decode()


def connected(server):
    """A plain socket."""
    parts = urlsplit(server.address)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def post(path, body, **headers):
    """A request as bytes on the wire."""
    content = json.dumps(body).encode()
    lines = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def is_idle(server):
    return server.engine.open_calls == 0 and server.engine.stats().pages_used == 0
