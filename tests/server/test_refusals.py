"""Whatever arrives gets the right status and OpenAI's error object, nothing is given away, and the engine goes on."""

import asyncio
import json
import math
import re
import signal
import time
from contextlib import closing

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.engine import AsyncEngine
from attnspan.server import ServerConfig, create_app
from attnspan.server.requests import chat_schema, completion_schema
from tests.engine.models import tokenizer as without_template
from tests.server.servers import (
    MODEL,
    ask,
    chatting,
    client_of,
    connected,
    engine,
    expected,
    is_idle,
    llama,
    post,
    running,
    until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "the cat"}


@pytest.fixture(scope="module")
def server():
    with running(max_body=1 << 16, max_grammar=1000) as found:
        yield found


def is_error(body):
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert len(body["error"]["message"]) < 1000
    for secret in ("Traceback", 'File "', "site-packages", "/work", "object at 0x"):
        assert secret not in body["error"]["message"]
    return True


def is_well(server):
    """The server answers as if nothing had happened."""
    status, _, body = ask(server, "POST", COMPLETIONS, {"model": MODEL, "prompt": "the cat", "max_tokens": 4})
    assert (status, body["choices"][0]["text"]) == (200, expected("the cat", max_new_tokens=4).text)
    until(lambda: is_idle(server))
    return True


def completion(**fields):
    return {"model": MODEL, "prompt": "the cat", "max_tokens": 4} | fields


def chat(**fields):
    return {"model": MODEL, "messages": [HELLO], "max_tokens": 4} | fields


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, completion(max_tokens="4"), "max_tokens must be a whole number, got '4'"),
        (COMPLETIONS, completion(max_tokens=4.5), "max_tokens must be a whole number, got 4.5"),
        (COMPLETIONS, completion(max_tokens=True), "max_tokens must be a whole number, got True"),
        (COMPLETIONS, completion(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (COMPLETIONS, completion(max_tokens=10**30), "max_tokens must be at most 4096, got 1000"),
        (COMPLETIONS, completion(temperature=-1), "temperature must be at least 0, got -1"),
        (COMPLETIONS, completion(top_p=0), "top_p must be above 0, got 0"),
        (COMPLETIONS, completion(n=100), "n must be at most 16, got 100"),
        (COMPLETIONS, completion(seed=2**63), "seed must be at most 9223372036854775807"),
        (COMPLETIONS, completion(stop=[""]), "stop[0] must be at least 1 characters long, got ''"),
        (COMPLETIONS, completion(stop=["a"] * 17), "stop must be an array of at most 16 items"),
        (COMPLETIONS, completion(stop=5), "stop must be a string or an array, got 5"),
        (COMPLETIONS, completion(logit_bias={"a": 1}), "logit_bias must have tokens as names"),
        (COMPLETIONS, completion(logit_bias={"²": 1}), "logit_bias must have tokens as names"),
        (COMPLETIONS, completion(logit_bias={"1": 101}), "logit_bias.1 must be at most 100, got 101"),
        (COMPLETIONS, completion(logit_bias={"320": 1}), "logit_bias must hold tokens below the model's 320, got 320"),
        (COMPLETIONS, completion(logprobs=21), "logprobs must be at most 20, got 21"),
        (COMPLETIONS, completion(prompt=[]), "prompt must be an array of at least 1 items, got []"),
        (COMPLETIONS, completion(prompt=""), "prompt must hold at least one token"),
        (COMPLETIONS, completion(prompt=[5, 320]), "prompt must hold tokens below the model's 320, got 320"),
        (COMPLETIONS, completion(prompt=[5, -1]), "prompt[1] must be at least 0, got -1"),
        (COMPLETIONS, completion(prompt=[[5], ["a"]]), "prompt[1][0] must be a whole number, got 'a'"),
        (COMPLETIONS, completion(prompt={"a": 1}), "prompt must be a string or an array or an array"),
        (COMPLETIONS, completion(prompt=None), "prompt is required"),
        (COMPLETIONS, completion(promt="the"), "promt is not a field known here; did you mean prompt?"),
        (COMPLETIONS, completion(suffix="end"), "suffix is not served: text is continued, not filled in; leave it out"),
        (COMPLETIONS, completion(best_of=3), "best_of must be n, which is 1, got 3"),
        (COMPLETIONS, completion(echo=True, logprobs=1), "echo with logprobs is not served"),
        (COMPLETIONS, completion(stream_options={}), "stream_options needs stream to be true"),
        (COMPLETIONS, completion(prompt=[5] * 509, max_tokens=5), "there is room for 512 tokens; the prompt has 509"),
        (COMPLETIONS, completion(prompt=[5] * 600), "there is room for 512 tokens; the prompt has 600"),
        (CHAT, chat(messages=[]), "messages must be an array of at least 1 items, got []"),
        (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content is required"),
        (CHAT, chat(messages=[{"role": "tool", "content": "a"}]), "messages[0].role must be one of 'system', "),
        (
            CHAT,
            chat(messages=[HELLO | {"content": [{"type": "image_url"}]}]),
            "messages[0].content[0].type must be one of",
        ),
        (CHAT, chat(messages=[HELLO | {"tool_calls": [1]}]), "messages[0].tool_calls is not a field known here"),
        (CHAT, chat(messages=[HELLO | {"role": "assistant"}]), "chat template refuses these messages: the user speaks"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools is not served: tools are not served; leave it out"),
        (CHAT, chat(max_completion_tokens=5), "max_tokens and max_completion_tokens are two names of one field"),
        (CHAT, chat(top_logprobs=2), "top_logprobs needs logprobs to be true"),
        (CHAT, chat(response_format={"type": "xml"}), "response_format.type must be one of 'text', 'json_object', "),
        (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema is required"),
        (
            CHAT,
            chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "b" * 1000}}}),
            "the schema must be at most 1000 characters long",
        ),
        (CHAT, chat(modalities=["audio"]), "modalities[0] must be one of 'text', got 'audio'"),
        (COMPLETIONS, [], "the body must be an object, got []"),
        (COMPLETIONS, None, "the body must be an object, got None"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_named(server, path, body, message):
    status, _, said = ask(server, "POST", path, raw=json.dumps(body), headers={"Content-Type": "application/json"})
    assert status == 400
    assert is_error(said)
    assert message in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"\xff\xfe", b"nul", b'{"model": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 10_000 + b"}", b"[" * 50_000, b'{"a":' * 10_000, b'{"prompt": "\\ud800"}', b'{"a" 1}',
        b'{"\\ud800": 1}', b"{} {}", b"\x00",
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_a_body_that_is_not_json_is_refused(server, raw):
    for path in (COMPLETIONS, CHAT):
        status, _, said = ask(server, "POST", path, raw=raw)
        assert status == 400
        assert is_error(said)
        assert said["error"]["code"] == "invalid_json"
    assert is_well(server)


def test_paths_methods_types_and_sizes_that_are_wrong_have_their_status(server):
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
        ("GET", "/v1/models/other/one", 404),
        ("GET", "/../../etc/passwd", 404),
    ):
        found, _, said = ask(server, method, path)
        assert found == status, path
        assert is_error(said)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        status, _, said = ask(server, "POST", COMPLETIONS, completion(), {"Content-Type": kind})
        assert (status, is_error(said)) == (415, True)
    status, _, said = ask(server, "POST", COMPLETIONS, completion(prompt="a" * (1 << 16)))
    assert (status, is_error(said)) == (413, True)
    assert said["error"]["message"] == "the body must be at most 65536 bytes long"
    assert is_well(server)


def test_a_name_of_another_machine_is_not_answered(server):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:80", ""):
        status, _, said = ask(server, "POST", COMPLETIONS, completion(), {"Host": host})
        assert (status, is_error(said)) == (403, True)
    for host in ("localhost:1234", "LOCALHOST", "[::1]:80", "127.0.0.1"):
        assert ask(server, "GET", "/v1/models", headers={"Host": host})[0] == 200
    with running(allowed_hosts=["tiny.example"]) as named:
        assert ask(named, "GET", "/v1/models", headers={"Host": "tiny.example"})[0] == 200


def test_keys_are_asked_for_and_have_prefixes_of_their_own():
    body = completion(prompt="the cat and the dog and the hat sat there on that mat", max_tokens=2)
    with running(api_keys=["one", "two"]) as server:
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "one"},
            {"Authorization": "Basic one"},
        ):
            for path in ("/v1/models", COMPLETIONS, "/metrics"):
                method = "POST" if path == COMPLETIONS else "GET"
                status, told, said = ask(server, method, path, body if method == "POST" else None, headers)
                assert (status, is_error(said), told["WWW-Authenticate"]) == (401, True, "Bearer")
        assert ask(server, "GET", "/health")[0] == ask(server, "GET", "/")[0] == 200
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()

        def hits(key):
            before = server.engine.stats().prefix_tokens
            assert ask(server, "POST", COMPLETIONS, body, {"Authorization": f"Bearer {key}"})[0] == 200
            until(lambda: is_idle(server))
            return server.engine.stats().prefix_tokens - before

        assert hits("one") == 0
        assert hits("two") == 0
        assert hits("one") > 0
        assert hits("two") > 0
    with running(api_keys=["one", "two"], shared_prefix_cache=True) as server:
        assert [hits(key) > 0 for key in ("one", "two")] == [False, True]


def test_a_full_queue_answers_429_and_says_when_to_come_back():
    with running(max_waiting=1, options={"max_sequences": 1}) as server:
        with client_of(server) as client:
            streams = [client.completions.create(**completion(max_tokens=400), stream=True) for _ in range(2)]
            status, headers, said = ask(server, "POST", COMPLETIONS, completion())
            assert (status, is_error(said)) == (429, True)
            assert int(headers["Retry-After"]) >= 1
            assert (said["error"]["type"], said["error"]["code"]) == ("rate_limit_error", "queue_full")
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**completion())
            for stream in streams:
                stream.close()
        until(lambda: is_idle(server))
        assert is_well(server)
        status, _, said = ask(server, "POST", COMPLETIONS, completion(n=3))
        assert (status, is_error(said)) == (400, True)


def test_a_step_that_fails_answers_500_and_gives_nothing_away(server):
    handle = llama().lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("secret place")))
    try:
        status, _, said = ask(server, "POST", COMPLETIONS, completion())
        assert (status, is_error(said)) == (500, True)
        assert "secret" not in json.dumps(said)
        with client_of(server) as client, pytest.raises(openai.APIError, match="the request failed in the engine"):
            for _ in client.completions.create(**completion(), stream=True):
                pass
    finally:
        handle.remove()
    assert is_well(server)
    assert ask(server, "GET", "/health")[0] == 200


def test_logits_that_are_not_numbers_answer_500(server):
    handle = llama().lm_head.register_forward_hook(lambda *args: args[-1] * math.nan)
    try:
        status, _, said = ask(server, "POST", COMPLETIONS, completion(n=2))
        assert (status, is_error(said)) == (500, True)
        with client_of(server) as client, pytest.raises(openai.APIError, match="not numbers"):
            list(client.completions.create(**completion(), stream=True))
    finally:
        handle.remove()
    assert is_well(server)


def test_options_that_leave_no_token_answer_400(server):
    """The request is wrong there, and not the model."""
    fields = {"allowed_token_ids": [5], "bad_words": [chatting().decode([5])]}
    status, _, said = ask(server, "POST", COMPLETIONS, completion(**fields))
    assert (status, is_error(said), said["error"]["code"]) == (400, True, "no_token_left")
    with client_of(server) as client, pytest.raises(openai.APIError, match="no token may come next"):
        list(client.completions.create(**completion(), stream=True, extra_body=fields))
    assert is_well(server)


def test_the_document_has_every_path_and_the_schemas_that_bodies_are_checked_by(server):
    status, _, document = ask(server, "GET", "/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found = ask(server, method.upper(), path.replace("{model}", MODEL), {} if method == "post" else None)[0]
            assert str(found) in operation["responses"], path
    for path, make in ((COMPLETIONS, completion_schema), (CHAT, chat_schema)):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"].keys() == make(ServerConfig(model=MODEL))["properties"].keys()
        assert body["properties"]["model"]["enum"] == [MODEL]
        assert body["additionalProperties"] is False


def test_a_tokenizer_without_a_template_refuses_chats_by_name():
    plain = without_template()
    bare = type(plain)(tokenizer_object=plain.backend_tokenizer, eos_token="<end>")
    with running(tokenizer=bare) as server:
        status, _, said = ask(server, "POST", CHAT, chat())
        assert (status, said["error"]["code"]) == (400, "no_chat_template")
        assert is_well(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_is_dropped_gives_pages_back(server, stream):
    with closing(connected(server)) as wire:
        wire.sendall(post(COMPLETIONS, completion(max_tokens=450, stream=stream)))
        until(lambda: server.engine.stats().running)
    until(lambda: is_idle(server))
    assert server.engine.stats().finished["cancelled"] >= 1
    assert is_well(server)


def test_half_a_request_does_no_harm(server):
    whole = post(COMPLETIONS, completion())
    for size in (1, 10, len(whole) // 2, len(whole) - 1):
        with closing(connected(server)) as wire:
            wire.sendall(whole[:size])
    with closing(connected(server)) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nHost: " + b"a" * 100_000)
        assert b"400" in wire.recv(4096).split(b"\r\n")[0]
    with closing(connected(server)) as wire:
        wire.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        assert b"400" in wire.recv(4096).split(b"\r\n")[0]
    assert is_well(server)


def test_a_body_that_does_not_come_is_not_awaited_for_ever():
    with running(receive_timeout=0.2) as server:
        with closing(connected(server)) as wire:
            wire.sendall(post(COMPLETIONS, completion())[:-5])
            answer = wire.recv(4096)
            assert answer.startswith(b"HTTP/1.1 408")
        assert is_well(server)


def test_a_stream_that_a_second_signal_ends_says_so_to_its_end(caplog):
    with running(drain=1000.0) as server:
        assert is_well(server)  # its app is loaded
        config = server._process.config
        config.loaded_app = slow_to_end(config.loaded_app)
        with closing(connected(server)) as wire:
            wire.sendall(post(COMPLETIONS, completion(max_tokens=450, stream=True)))
            said = wire.recv(4096)
            for _ in range(2):
                server._process.handle_exit(signal.SIGINT, None)
                time.sleep(0.2)
            while part := wire.recv(65536):
                said += part
    *_, last, end = re.findall(rb"data: (.*)\n\n", said)
    assert (json.loads(last)["error"]["code"], end) == ("unavailable", b"[DONE]")
    assert "Exception" not in caplog.text


def slow_to_end(app):
    """An app that hesitates before the end of a stream."""

    async def slow(scope, receive, send):
        async def late(message):
            await asyncio.sleep(0.3 * message.get("body", b"").endswith(b"[DONE]\n\n"))
            await send(message)

        await app(scope, receive, late)

    return slow


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_does_not_read_is_left(caplog, stream):
    """By the app's own interface: how much a socket takes before it blocks is the system's to say."""
    body = json.dumps(completion(max_tokens=450, stream=stream)).encode()
    sent = []

    async def main():
        async with AsyncEngine(engine()) as served:
            app = create_app(served, chatting(), ServerConfig(model=MODEL, send_timeout=0.2))
            arriving = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                return arriving.pop() if arriving else await asyncio.Event().wait()

            async def send(message):
                sent.append(message["type"])
                if len(sent) == 2:
                    await asyncio.Event().wait()

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "query_string": b""}
            async with asyncio.timeout(30):
                await app(scope | {"app": None, "server": ("127.0.0.1", 80), "scheme": "http"}, receive, send)
                while served.open_calls:
                    await asyncio.sleep(0.01)
            return served.stats()

    stats = asyncio.run(main())
    assert sent == ["http.response.start", "http.response.body"]
    assert "its reader took nothing for 0.2 seconds" in caplog.text
    assert stats.pages_used == 0
    assert stats.finished == ({"cancelled": 1} if stream else {"length": 1})


def test_requests_on_one_connection_are_answered_in_turn(server):
    with closing(connected(server)) as wire:
        wire.sendall(post(COMPLETIONS, completion()) + post(COMPLETIONS, {"model": "other"}) + post(CHAT, chat()))
        said = b""
        while said.count(b"HTTP/1.1 ") < 3 or not said.endswith(b"}"):
            said += wire.recv(65536)
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"404", b"200"]


def test_a_shutdown_ends_streams_properly_and_takes_no_more():
    with running(drain=0.3, options={"max_sequences": 2}) as server, closing(connected(server)) as wire:
        wire.sendall(post(COMPLETIONS, completion(max_tokens=450, stream=True)))
        until(lambda: server.engine.stats().running)
        slow = llama().register_forward_pre_hook(lambda *_: time.sleep(0.02))
        try:
            server.stop()
            said = b""
            while part := wire.recv(65536):
                said += part
        finally:
            slow.remove()
        assert b"data: [DONE]" in said
        last = said.split(b"data: ")[-2].split(b"\r\n")[0]
        assert json.loads(last)["error"]["code"] == "unavailable"


def test_a_shutdown_lets_answers_end_that_are_under_way():
    with running(drain=30) as server, closing(connected(server)) as wire:
        wire.sendall(post(COMPLETIONS, completion(max_tokens=100)))
        until(lambda: server.engine.stats().running)
        server.stop()
        said = b""
        while part := wire.recv(65536):
            said += part
        assert said.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"length"' in said


# ---- anything at all -------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=10), each, max_size=3),
    max_leaves=8,
)
NAMES = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "seed", "stop",
    "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty",
    "echo", "best_of", "response_format", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size", "min_tokens",
    "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "tools", "user", "suffix",
]  # fmt: skip
LIKELY = {
    "max_tokens": st.integers(-1, 5), "n": st.integers(0, 4), "temperature": st.floats(-1, 3), "top_p": st.floats(0, 1),
    "seed": st.integers(), "stop": st.lists(st.text(max_size=3), max_size=3), "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-5, 330).map(str), st.floats(-150, 150), max_size=4),
    "logprobs": st.integers(0, 22) | st.booleans(), "stop_token_ids": st.lists(st.integers(-1, 330), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 330), max_size=3),
    "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "top_k": st.integers(-1, 500), "min_tokens": st.integers(0, 9), "echo": st.booleans(),
    "no_repeat_ngram_size": st.integers(0, 4), "repetition_penalty": st.floats(0, 3),
    "prompt": (
        st.text(max_size=30) | st.lists(st.integers(-1, 325), max_size=6) | st.lists(st.text(max_size=9), max_size=3)
    ),
    "messages": st.lists(st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=20)}
    ), max_size=3),
}  # fmt: skip


@st.composite
def bodies(draw):
    names = draw(st.lists(st.sampled_from(NAMES), max_size=6, unique=True))
    body = {"model": MODEL, "max_tokens": 3}
    body["prompt" if draw(st.booleans()) else "messages"] = draw(st.sampled_from(["the cat", [HELLO], [5, 6]]))
    for name in names:
        body[name] = draw(st.one_of(LIKELY.get(name, JSON), JSON) if draw(st.booleans()) else LIKELY.get(name, JSON))
    return body


@given(body=bodies(), path=st.sampled_from([COMPLETIONS, CHAT]))
@settings(deadline=None)
def test_any_body_is_answered_or_refused_and_never_an_accident(server, body, path):
    status, headers, said = ask(server, "POST", path, body)
    assert status in (200, 400, 404), (status, said)
    if status != 200:
        assert is_error(said)
    elif headers.get_content_type() == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        assert all("choices" in json.loads(line) or is_error(json.loads(line)) for line in lines[:-1])
    else:
        assert said["choices"]


def test_after_all_that_the_server_is_well(server):
    assert is_well(server)
    assert chatting().chat_template
