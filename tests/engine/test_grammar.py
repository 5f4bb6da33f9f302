"""Answers of a JSON schema are JSON of that schema, and of all such answers the one that the model would give."""

import contextlib
import json
import random
import sys

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.engine import grammar, sampler
from attnspan.errors import EngineError
from attnspan.testing import loopback
from tests.engine.models import logprobs_of, tiny, tokenizer

END = tokenizer().eos_token_id
SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {"cat": {"type": "integer", "maximum": 99}, "hat": {"enum": ["the", "on", None]}},
        "required": ["cat", "hat"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "choice": {"anyOf": [{"const": "dog"}, {"type": "null"}]},
    "text": {"type": "string", "maxLength": 4},
    "nested": {"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": {"const": 7}}},
}


def holds(value, name):
    """Whether a value is of a schema, in Python's own words."""
    return {
        "object": lambda: (
            set(value) == {"cat", "hat"}
            and type(value["cat"]) is int
            and value["cat"] <= 99
            and value["hat"] in ("the", "on", None)
        ),
        "array": lambda: 1 <= len(value) <= 3 and set(map(type, value)) == {bool},
        "choice": lambda: value in ("dog", None),
        "text": lambda: len(value) <= 4,
        "nested": lambda: len(value) <= 2 and all(len(each) <= 2 and set(each) <= {7} for each in value),
    }[name]()


def engine(**options):
    return Engine(tiny("Llama", vocab_size=320), **({"pages": 128, "page_size": 8, "tokenizer": tokenizer()} | options))


def wishes(name, **more):
    return SamplingParams(**({"max_new_tokens": 300, "stop_token_ids": [END], "json_schema": SCHEMAS[name]} | more))


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_of_their_schema_beside_others_that_are_free(name):
    free = SamplingParams(max_new_tokens=30, temperature=1.0, seed=2)
    params = [wishes(name, temperature=1.5, seed=seed, n=2) for seed in range(4)] + [wishes(name), free]
    answers = engine().generate(["the cat"] * len(params), params)
    texts = [sample.text for answer in answers[:-1] for sample in answer.continuations]
    assert {sample.finish_reason for answer in answers[:-1] for sample in answer.continuations} == {"stop"}
    assert all(holds(json.loads(text), name) for text in texts), texts
    assert len(set(texts)) > 1
    assert answers[-1].token_ids == engine().generate(["the cat"], free)[0].token_ids


@pytest.mark.parametrize("values", [["dog", "cat", "cats"], [1, 12, -3, None], [True, "t"]], ids=str)
def test_the_answer_is_the_likeliest_token_by_token_of_those_that_lead_somewhere(values):
    """Of a few texts it can be said in plain Python which tokens lead to one of them."""
    served, whole = engine(), [json.dumps(value) for value in values]
    [answer] = served.generate(
        ["that mat"], SamplingParams(max_new_tokens=40, stop_token_ids=[END], json_schema={"enum": values})
    )
    assert answer.text in whole
    scores = logprobs_of(tiny("Llama", vocab_size=320), answer.prompt, answer.token_ids)
    pieces = [tokenizer().decode([token]) if token < len(tokenizer()) else None for token in range(320)]
    said = ""
    for place, token in enumerate(answer.token_ids):
        leads = [
            each for each, piece in enumerate(pieces) if piece and any(text.startswith(said + piece) for text in whole)
        ]
        allowed = [each for each in leads if each != END] + ([END] if said in whole else [])
        assert token == allowed[scores[place, allowed].argmax()]
        said += pieces[token] if token != END else ""


def test_preempted_answers_and_steps_that_fail_say_the_same(monkeypatch):
    params = [wishes(name, temperature=1.0, seed=seed, max_new_tokens=60) for seed, name in enumerate(SCHEMAS)]
    expected = [answer.token_ids for answer in engine().generate(["the cat"] * len(params), params)]
    small = engine(pages=16, page_size=4, max_sequences=5)
    generator, pending_tokens = random.Random(0), sampler.PendingTokens

    def sometimes(*args):
        """Fails after grammars have seen the tokens of the step."""
        if generator.random() < 0.3:
            raise ZeroDivisionError
        return pending_tokens(*args)

    monkeypatch.setattr(sampler, "PendingTokens", sometimes)
    requests = [small.add("the cat", each) for each in params]
    while small.unfinished:
        with contextlib.suppress(ZeroDivisionError):
            small.step()
    assert [request.token_ids for request in requests] == expected
    small.check()
    assert small.counts.preempted > 0
    assert not small._sampler.processor.grammars


def test_over_ranks_the_answer_is_that_of_one():
    def rank(world):
        return engine(mesh=world).generate(["the cat"], wishes("object", temperature=1.0, seed=3))[0].text

    assert set(loopback(2).run(rank)) == {
        engine().generate(["the cat"], wishes("object", temperature=1.0, seed=3))[0].text
    }


def test_other_options_act_too_and_a_place_without_a_token_is_an_error():
    dog = wishes("choice", temperature=2.0, seed=1, bad_words=["null"], suppress_tokens=tokenizer().encode("n"))
    assert [each.text for each in engine().generate(["the"] * 2, dog)] == ['"dog"'] * 2
    quote = wishes("choice", suppress_tokens=[*tokenizer().encode('"'), *tokenizer().encode("n")])
    [answer] = engine().generate(["the"], quote)
    assert answer.finish_reason == "error"
    assert "leave no token there" in str(answer.error)
    [cut] = engine().generate(["the"], wishes("object", max_new_tokens=3))
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (5, "json_schema must be a JSON schema, a dict or its text, got int"),
        ("{", "json_schema must be a JSON schema, a dict or its text"),
        ({"type": {1, 2}}, "json_schema must be a JSON schema, a dict or its text"),
        ({"type": "nonsense"}, "json_schema is not served: Invalid type: nonsense"),
        ({"not": {}}, "json_schema is not served: Unimplemented keys"),
        ({"enum": []}, "json_schema is not served: Unsatisfiable schema"),
        ({"$ref": "http://127.0.0.1:1/"}, "json_schema is not served: "),
        ({"pattern": "(((("}, "json_schema is not served: regex parse error"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_served_is_refused(schema, message):
    served = engine()
    with pytest.raises(EngineError, match="json_schema") as refused:
        served.add("the cat", SamplingParams(json_schema=schema, stop_token_ids=[END]))
    assert str(refused.value).startswith(message)
    assert not served.unfinished


def test_what_a_grammar_needs_is_named(monkeypatch):
    with pytest.raises(EngineError, match="json_schema needs an end token, which the model has not"):
        engine().add("the cat", SamplingParams(json_schema={}))
    with pytest.raises(EngineError, match="json_schema needs a tokenizer; give the engine one"):
        engine(tokenizer=None).add([5], wishes("array"))

    class Letters:
        def encode(self, text):
            return [ord(letter) for letter in text]

        def decode(self, token_ids, skip_special_tokens=True):
            return "".join(map(chr, token_ids))

    with pytest.raises(EngineError, match=r"needs a tokenizer of the tokenizers library.*got Letters"):
        engine(tokenizer=Letters()).add("the", wishes("array"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match=r'json_schema needs llguidance; run pip install "attnspan\[grammar\]"'):
        engine().add("the", wishes("array"))


def test_grammars_are_compiled_once_and_some_are_kept():
    served = engine()
    ends = [END]
    first = served._grammars.compiled('{"const": 0}', ends)
    assert served._grammars.compiled('{"const": 0}', ends) is first
    for number in range(1, grammar.KEPT + 1):
        served._grammars.compiled(json.dumps({"const": number}), ends)
    assert served._grammars.compiled('{"const": 0}', ends) is not first
    assert len(served._grammars._compiled) == grammar.KEPT


def test_masks_are_bits_the_lowest_first():
    allowed = grammar.allowed_by([bytes([0b101, 0b10, 0xFF]), b"", b"\xff"], 12, torch.device("cpu"))
    assert allowed.shape == (3, 12)
    assert [row.nonzero().flatten().tolist() for row in allowed] == [[0, 2, 9], [], list(range(8))]
