"""LoRA adapters are models to clients: the name that a request gives is the adapter that computes it."""

import openai
import pytest

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError
from attnspan.server import Server, ServerConfig
from tests.engine.test_adapters_by_name import adapted
from tests.server.servers import MODEL, chatting, client_of, llama, running

PROMPT = "the cat and"


def said_by(model, adapter):
    [answer] = Engine(model, pages=64, tokenizer=chatting()).generate(
        [PROMPT], SamplingParams(max_new_tokens=24, adapter=adapter)
    )
    return answer.text


def test_each_name_is_answered_by_its_adapter_and_the_models_by_the_base():
    model = adapted("Llama", vocab_size=320)
    model.set_adapter("c")  # how the model is set is no matter
    said = {name: said_by(model, adapter) for name, adapter in {MODEL: "__base__", "a": "a", "b": "b"}.items()}
    assert len(set(said.values())) == 3
    with running(model=model, adapters=("a", "b")) as server, client_of(server) as client:
        assert [each.id for each in client.models.list()] == [MODEL, "a", "b"]
        assert client.models.retrieve("b").id == "b"
        for name in (MODEL, "a", "b", "a"):  # again: what is cached of one is not found by another
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=24)
            assert (answer.model, answer.choices[0].text) == (name, said[name])
            chunks = list(client.completions.create(model=name, prompt=PROMPT, max_tokens=24, stream=True))
            assert {chunk.model for chunk in chunks} == {name}
            assert "".join(chunk.choices[0].text for chunk in chunks) == said[name]
        with pytest.raises(openai.NotFoundError, match="there is 'tiny', 'a', 'b'"):
            client.completions.create(model="c", prompt=PROMPT)


def test_a_server_without_adapters_named_is_of_the_model_as_it_is_set():
    model = adapted("Llama", vocab_size=320)
    model.set_adapter("b")
    with running(model=model) as server, client_of(server) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24)
    assert answer.choices[0].text == said_by(model, "b")


def test_adapters_that_cannot_be_named_are_refused_at_the_start():
    engine = Engine(llama(), pages=64, tokenizer=chatting())
    with pytest.raises(EngineError, match="adapter must be one that the model has, none"):
        Server(engine, chatting(), ServerConfig(MODEL, adapters=("a",), port=0))
    for names in ((MODEL,), ("a", "a"), ("",)):
        with pytest.raises(EngineError, match="must have names of their own"):
            ServerConfig(MODEL, adapters=names)
