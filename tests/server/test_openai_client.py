"""The official client gets what the engine says: whole, streamed, in every option that it has."""

import json
import threading
from typing import Literal

import openai
import pydantic
import pytest

from attnspan import SamplingParams
from tests.server.servers import MODEL, ask, chatting, client_of, engine, expected, is_idle, running, templated, until

MESSAGES = [{"role": "system", "content": "that cat"}, {"role": "user", "content": "the hat and the dog"}]


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


@pytest.fixture
def client(server):
    with client_of(server) as found:
        yield found


OPTIONS = [
    ({}, {}),
    ({"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}),
    ({"temperature": 1.0, "seed": -3, "n": 3}, {"temperature": 1.0, "seed": 2**64 - 3, "n": 3}),
    ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}),
    ({"logit_bias": {"65": 5, "70": -100}}, {"logit_bias": {65: 5.0, 70: -100.0}}),
    (
        {"extra_body": {"top_k": 5, "min_p": 0.05, "min_tokens": 4}, "temperature": 2, "seed": 1},
        {"top_k": 5, "min_p": 0.05, "min_new_tokens": 4, "temperature": 2.0, "seed": 1},
    ),
    ({"extra_body": {"repetition_penalty": 1.2}}, {"repetition_penalty": 1.2}),
    ({"extra_body": {"bad_words": ["the"], "stop_token_ids": [70]}}, {"bad_words": ["the"], "stop_token_ids": [70]}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "params"), OPTIONS, ids=lambda each: "-".join(each) or "plain")
def test_a_completion_is_what_the_engine_says_whole_and_streamed(client, asked, params):
    answer = expected("the cat and", max_new_tokens=20, **params)
    whole = client.completions.create(model=MODEL, prompt="the cat and", max_tokens=20, **asked)
    assert [(each.index, each.text, each.finish_reason) for each in whole.choices] == [
        (place, sample.text, sample.finish_reason) for place, sample in enumerate(answer.continuations)
    ]
    generated = sum(len(sample.token_ids) for sample in answer.continuations)
    usage = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert usage == (len(answer.prompt), generated, len(answer.prompt) + generated)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model=MODEL, prompt="the cat and", max_tokens=20, **options, **asked))
    assert len(chunks) > 2
    texts, reasons = dict.fromkeys(range(len(answer.continuations)), ""), {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [sample.text for sample in answer.continuations]
    assert set(reasons.values()) == {sample.finish_reason for sample in answer.continuations}
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize(("asked", "params"), OPTIONS, ids=lambda each: "-".join(each) or "plain")
def test_a_chat_is_what_the_engine_says_of_the_template_whole_and_streamed(client, asked, params):
    answer = expected(templated(MESSAGES), max_new_tokens=20, **params)
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, **asked)
    assert [(each.message.role, each.message.content, each.finish_reason) for each in whole.choices] == [
        ("assistant", sample.text, sample.finish_reason) for sample in answer.continuations
    ]
    assert whole.usage.prompt_tokens == len(answer.prompt)
    parts = [{"role": "developer", "content": "that cat"}, {"role": "user", "content": [
        {"type": "text", "text": "the hat "}, {"type": "text", "text": "and the dog"}
    ]}]  # fmt: skip
    with client.chat.completions.stream(model=MODEL, messages=parts, max_completion_tokens=20, **asked) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert [each.message.content for each in final.choices] == [sample.text for sample in answer.continuations]
    assert [each.finish_reason for each in final.choices] == [sample.finish_reason for sample in answer.continuations]


def test_several_prompts_are_answered_in_order_texts_and_tokens(client):
    prompts = ["the cat", "that mat sat", "and"]
    answers = engine().generate(prompts, SamplingParams(max_new_tokens=9, n=2, temperature=1.0, seed=1))
    texts = [sample.text for answer in answers for sample in answer.continuations]
    options = {"max_tokens": 9, "n": 2, "temperature": 1, "seed": 1}
    for asked in (prompts, [chatting().encode(prompt) for prompt in prompts]):
        whole = client.completions.create(model=MODEL, prompt=asked, **options)
        assert [choice.text for choice in whole.choices] == texts
        found = [""] * 6
        for chunk in client.completions.create(model=MODEL, prompt=asked, stream=True, **options):
            for choice in chunk.choices:
                found[choice.index] += choice.text
        assert found == texts
    alone = client.completions.create(model=MODEL, prompt=chatting().encode("the cat"), **options)
    assert [choice.text for choice in alone.choices] == texts[:2]
    echoed = client.completions.create(model=MODEL, prompt=prompts, echo=True, **options)
    assert [each.text for each in echoed.choices] == [prompts[place // 2] + text for place, text in enumerate(texts)]


def test_a_stop_string_ends_a_text_and_is_not_in_it(client):
    plain = expected("the cat and", max_new_tokens=30).text
    stop = plain[5:8]
    answer = expected("the cat and", max_new_tokens=30, stop=stop)
    for asked in (stop, ["never said", stop]):
        [choice] = client.completions.create(model=MODEL, prompt="the cat and", max_tokens=30, stop=asked).choices
        assert (choice.text, choice.finish_reason) == (answer.text, "stop")
        chunks = client.completions.create(model=MODEL, prompt="the cat and", max_tokens=30, stop=asked, stream=True)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer.text


def test_log_probabilities_are_those_of_the_engine(client):
    answer = expected("the cat", max_new_tokens=6, logprobs=True, top_logprobs=3)
    names = [chatting().decode([token]) for token in answer.token_ids]
    [choice] = client.completions.create(model=MODEL, prompt="the cat", max_tokens=6, logprobs=3).choices
    assert choice.logprobs.tokens == names
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert [len(each) for each in choice.logprobs.top_logprobs] == [
        len({chatting().decode([token]) for token in each}) for each in answer.top_logprobs
    ]
    [choice] = client.completions.create(model=MODEL, prompt="the cat", max_tokens=6, logprobs=0).choices
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    chat = expected(templated(MESSAGES), max_new_tokens=6, logprobs=True, top_logprobs=2)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    [choice] = client.chat.completions.create(**asked).choices
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in chunk.choices
        if part.logprobs
        for entry in part.logprobs.content
    ]
    for entries in (choice.logprobs.content, streamed):
        assert [entry.logprob for entry in entries] == pytest.approx(chat.logprobs, abs=1e-4)
        assert [entry.token for entry in entries] == [chatting().decode([token]) for token in chat.token_ids]
        for entry, top in zip(entries, chat.top_logprobs, strict=True):
            assert [each.logprob for each in entry.top_logprobs] == pytest.approx(list(top.values()), abs=1e-4)
            assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_without_max_tokens_a_chat_may_say_all_that_there_is_room_for(client, server):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    room = server.engine.engine.max_length + 1 - answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == room
    assert answer.choices[0].finish_reason == "length"
    assert client.completions.create(model=MODEL, prompt="the cat").usage.completion_tokens == 16


def test_fields_that_change_nothing_are_taken(client):
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    told = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, user="me", metadata={"a": "b"}, store=False, tools=[], stop=None,
        response_format={"type": "text"}, temperature=None, modalities=["text"],
    )  # fmt: skip
    assert told.choices[0].message.content == plain.choices[0].message.content
    again = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, told.choices[0].message.model_dump(), MESSAGES[1]], max_tokens=4
    )  # a message as the client has it, with all that is null
    assert again.choices[0].finish_reason == "length"


def test_answers_in_json_are_json_of_their_schema(client):
    class Cat(pydantic.BaseModel):
        name: Literal["mat", "hat"]
        age: int

    options = {"max_tokens": 200, "temperature": 1, "extra_body": {"stop_token_ids": [chatting().eos_token_id]}}
    for seed in range(3):
        told = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Cat, seed=seed, **options)
        assert told.choices[0].finish_reason == "stop"
        assert told.choices[0].message.parsed.name in ("mat", "hat")
    plain = {"type": "json_schema", "json_schema": {"name": "truth", "schema": {"type": "boolean"}}}
    for asked in (client.completions, client.chat.completions):
        prompt = {"messages": MESSAGES} if asked is client.chat.completions else {"prompt": "the cat"}
        choice = asked.create(
            model=MODEL, **prompt, **{**options, "extra_body": {**options["extra_body"], "response_format": plain}}
        ).choices[0]
        text = choice.text if hasattr(choice, "text") else choice.message.content
        assert json.loads(text) in (True, False)
    with pytest.raises(openai.BadRequestError, match="json_schema needs an end token, which the model has not"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema is not served: Invalid type: nonsense"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=bad, **options)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "attnspan"
    with pytest.raises(openai.NotFoundError, match="no model is served by this name; there is 'tiny'"):
        client.models.retrieve("gpt-7")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-7", prompt="the")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_requests_at_the_same_time_are_answered_as_alone(server):
    prompts = [f"the cat and the {word}" for word in ("dog", "hat", "mat", "cat sat", "th", "that", "on", "a b c")] * 3
    said = {prompt: expected(prompt, max_new_tokens=12).text for prompt in prompts}
    found, failed = [], []

    def talk(prompt):
        try:
            with client_of(server) as client:
                answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12)
                found.append(answer.choices[0].text == said[prompt])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, found) == ([], [True] * len(prompts))


def test_a_stream_that_is_left_gives_its_pages_back(client, server):
    stream = client.completions.create(model=MODEL, prompt="the cat", max_tokens=400, stream=True)
    next(iter(stream))
    assert server.engine.open_calls == 1
    stream.close()
    until(lambda: is_idle(server))


def test_health_and_metrics_say_what_happened(server, client):
    client.completions.create(model=MODEL, prompt="the cat", max_tokens=3)
    assert ask(server, "GET", "/health")[::2] == (200, {"status": "ok"})
    until(lambda: is_idle(server))
    status, headers, text = ask(server, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    stats = server.engine.stats()
    assert values["attnspan_generated_tokens_total"] == stats.generated_tokens
    assert values["attnspan_prefix_hit_tokens_total"] == stats.prefix_tokens
    assert values['attnspan_pages{state="free"}'] == stats.pages_free
    assert values['attnspan_http_responses_total{path="/v1/completions",status="200"}'] >= 1
    assert values['attnspan_time_to_first_token_seconds_bucket{le="+Inf"}'] == stats.time_to_first_token.count
    assert values["attnspan_request_seconds_count"] >= 1
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    buckets = [values[name] for name in values if name.startswith("attnspan_time_per_token_seconds_bucket")]
    assert buckets == sorted(buckets)
