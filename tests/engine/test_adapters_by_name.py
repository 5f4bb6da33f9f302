"""Adapters by name: rows of several in one step, and each answer is that of the peft model with its adapter active."""

import copy
import random
import warnings

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, ModelError
from attnspan.testing import loopback
from tests.engine.models import FAMILIES, greedy, prompts, tiny
from tests.engine.test_served_model import Plain

peft = pytest.importorskip("peft")

BASE = "__base__"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def randomised(model, seed=0):
    """With adapters that change every token: as they begin, they change none."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def adapted(family="Llama", *configs, **changes):
    """A model with adapters a, b, ... of these options."""
    configs = configs or ({"r": 4}, {"r": 2, "lora_alpha": 3}, {"r": 3, "target_modules": ["q_proj"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = copy.deepcopy(tiny(family, **changes))
        for name, options in zip("abcdef", configs, strict=False):
            config = peft.LoraConfig(**({"task_type": "CAUSAL_LM", "target_modules": ALL} | options))
            if name == "a":
                model = peft.get_peft_model(model, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    return randomised(model)


def engine(model, **options):
    return Engine(model, **({"pages": 80, "page_size": 4, "max_sequences": 8} | options))


def active(model, name, prompt, new):
    """The oracle: `generate` of the peft model with that adapter active."""
    given, before = torch.tensor([prompt]), model.active_adapters
    inner = model.get_base_model()
    implementation = inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    options = {"attention_mask": torch.ones_like(given), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    try:
        if name == BASE:
            with model.disable_adapter():
                out = model.generate(input_ids=given, **options)
        else:
            model.set_adapter(name)
            out = model.generate(input_ids=given, **options)
    finally:
        model.base_model.set_adapter(before)
        inner.set_attn_implementation(implementation)
    return out[0, len(prompt) :].tolist()


def params(name=None, new=8, **options):
    return SamplingParams(max_new_tokens=new, adapter=name, **options)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("Phi3", "GptOss")])
def test_answers_are_those_of_the_peft_model_with_the_adapter_active(family):
    model = adapted(family)
    names, asked = ["a", BASE, "b", "c", None, "a", "b"], prompts([9, 9, 5, 1, 9, 14, 30])
    asked[1] = asked[4] = asked[0]
    one = engine(model, max_tokens=16)
    answers = one.generate(asked, [params(name) for name in names])
    expected = [active(model, name or "a", prompt, 8) for name, prompt in zip(names, asked, strict=True)]
    assert [answer.token_ids for answer in answers] == expected
    assert answers[1].token_ids == greedy(tiny(family), asked[1], 8)
    assert family == "Gemma3" or answers[1].token_ids != answers[0].token_ids
    assert answers[0].token_ids == answers[4].token_ids  # a is active
    one.check()


def test_rows_that_name_no_adapter_follow_the_model_as_it_is_set():
    model, [prompt] = adapted(), prompts([9])
    one = engine(model)

    def said():
        return [answer.token_ids for answer in one.generate([prompt] * 3, [params(), params("b"), params(BASE)])]

    alone = {name: active(model, name, prompt, 8) for name in ("a", "b", "c", BASE)}
    assert said() == [alone["a"], alone["b"], alone[BASE]]
    model.set_adapter("c")
    assert said() == [alone["c"], alone["b"], alone[BASE]]
    with model.disable_adapter():
        assert said() == [alone[BASE], alone["b"], alone[BASE]]
    model.base_model.set_adapter(["a", "b"])
    both = said()
    assert both[1:] == [alone["b"], alone[BASE]]
    given = torch.tensor([prompt])
    together = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False)
    assert both[0] == together[0, 9:].tolist()


def test_prefixes_of_one_adapter_are_not_found_by_another():
    model, [prompt] = adapted(), prompts([20])
    expected, found = {name: active(model, name or "a", prompt, 8) for name in ("a", "b", BASE, None)}, []
    one = engine(model)
    for name in (*expected, *expected):
        before = one.counts.cached
        [answer] = one.generate([prompt], params(name))
        assert answer.token_ids == expected[name]
        found.append(one.counts.cached - before)
    assert found[:4] == [0] * 4
    assert min(found[4:]) >= 16


def test_samples_are_preempted_forked_and_drafted_as_ever():
    model, asked = adapted(), [prompt * 2 for prompt in prompts([7, 4, 9, 5])]
    names = ["a", "b", BASE, "c"]
    drawn = [params(name, 20, n=2, temperature=1.0, seed=number) for number, name in enumerate(names)]
    roomy = [engine(model).generate([prompt], one)[0] for prompt, one in zip(asked, drawn, strict=True)]
    options = {"pages": 30, "page_size": 3, "max_tokens": 12, "prompt_lookup_num_tokens": 3}
    for host_pages in (0, 20):
        tight = engine(model, **options, host_pages=host_pages)
        answers = tight.generate(asked, drawn)
        assert tight.counts.preempted
        for answer, alone in zip(answers, roomy, strict=True):
            assert [sample.token_ids for sample in answer.continuations] == [
                sample.token_ids for sample in alone.continuations
            ]
        tight.check()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_serve_adapters_alike(ranks):
    model, asked, names = adapted(), prompts([40, 5, 23]), ["a", "b", BASE]
    expected = [active(model, name, prompt, 6) for name, prompt in zip(names, asked, strict=True)]

    def rank(world):
        one = engine(model, mesh=world, max_tokens=16, context_parallel_from=20)
        return [answer.token_ids for answer in one.generate(asked, [params(name, 6) for name in names])]

    assert loopback(ranks).run(rank) == [expected] * ranks


def test_ranks_that_name_different_adapters_are_refused():
    model = adapted()

    def rank(world):
        one = engine(model, mesh=world)
        with pytest.raises(EngineError, match="requests differ between rank 0 and ranks \\[1\\]"):
            one.add([5, 6], params("ab"[world.rank]))
        return one.generate([[5, 6]], params("a", 3))[0].token_ids

    assert loopback(2).run(rank) == [active(model, "a", [5, 6], 3)] * 2


def test_an_adapter_of_the_head_is_applied_where_logits_are_wanted():
    model = adapted("Llama", {"target_modules": ["lm_head"]}, {"target_modules": ["lm_head", "q_proj"]})
    names, asked = ["a", BASE, "b"], prompts([9, 12, 5])
    answers = engine(model).generate(asked, [params(name) for name in names])
    expected = [active(model, name, prompt, 8) for name, prompt in zip(names, asked, strict=True)]
    assert [answer.token_ids for answer in answers] == expected


def test_an_adapter_that_comes_changes_or_goes_is_noticed():
    model, [prompt] = adapted("Llama", {"r": 4}), prompts([17])
    one = engine(model)
    with pytest.raises(EngineError, match="adapter must be one that the model has, 'a', '__base__', got 'b'"):
        one.add(prompt, params("b"))
    first = one.generate([prompt], params("a"))[0].token_ids
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=ALL, task_type="CAUSAL_LM"))
    randomised(model, seed=1)
    for name in ("a", "b"):
        assert one.generate([prompt], params(name))[0].token_ids == active(model, name, prompt, 8) != first
    request = one.add(prompt, params("b"))
    one.step()
    model.delete_adapter("b")
    for _ in range(2):
        with pytest.raises(EngineError, match="adapter must be one that the model has, 'a', '__base__', got 'b'"):
            one.step()
    one.cancel(request)
    assert one.generate([prompt], params("a"))[0].token_ids == active(model, "a", prompt, 8)
    one.check()


REFUSED = [
    ("b", ({"r": 2}, {"r": 2, "use_dora": True}), "has it as Dora, another kind of LoRA"),
    ("a", ({"r": 2, "target_modules": ["embed_tokens"]},), "adapter must be one that the model has, none"),
    (
        "a",
        ({"r": 2, "target_modules": ["q_proj", "embed_tokens"]},),
        r"embed_tokens \(Embedding\) is not a Linear layer with LoRA adapters",
    ),
    ("a", ({"r": 2, "modules_to_save": ["lm_head"]},), "has weights of its own for each adapter"),
    (BASE, ({"r": 2, "trainable_token_indices": [3]},), "has weights of its own for each adapter"),
]


@pytest.mark.parametrize(("name", "configs", "message"), REFUSED)
def test_adapters_of_other_kinds_are_refused_by_name_and_served_when_active(name, configs, message):
    model, [prompt] = adapted("Llama", *configs), prompts([9])
    one = engine(model)
    with pytest.raises(EngineError, match=message):
        one.add(prompt, params(name))
    assert one.generate([prompt], params())[0].token_ids == active(model, "a", prompt, 8)


def test_what_cannot_be_named_is_refused():
    plain, model, [prompt] = engine(tiny("Llama")), adapted(), prompts([9])
    with pytest.raises(EngineError, match="none: the model has no LoRA adapters, got 'a'"):
        plain.add(prompt, params("a"))
    for wrong in ("", 3, ["a"]):
        with pytest.raises(EngineError, match="adapter must be the name of an adapter, got"):
            SamplingParams(adapter=wrong)
    one = engine(model)
    request = one.add(prompt, params("a", 12))
    one.step()
    model.merge_adapter(["b"])
    with pytest.raises(EngineError, match=r"has b merged into its weights; call model.unmerge_adapter\(\) first"):
        one.step()
    model.unmerge_adapter()
    while one.unfinished:
        one.step()
    assert len(request.token_ids) == 12


def test_a_model_of_ones_own_without_adapters_says_so():
    one = Engine(Plain(), pages=20, page_size=4)
    with pytest.raises(EngineError, match="adapter='a': the model is served without adapters; leave adapter out"):
        one.add([1, 2], params("a"))


def test_layers_that_are_given_a_choice_of_rows_are_refused_when_that_happens():
    model, [prompt] = adapted(), prompts([9])
    layer = model.get_base_model().model.layers[0].mlp
    own = type(layer).forward
    layer.forward = lambda x: own(layer, x.flatten(0, 1).flip(0)).flip(0).view_as(x)
    one = engine(model)
    one.generate([prompt], params())
    with pytest.raises(ModelError, match=r"Linear has LoRA adapters and is given \(9, 32\) in a step of 9 tokens"):
        one.generate([prompt], params("b"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_of_adapters(seed):
    draw = random.Random(seed)
    family = draw.choice(["Llama", "Gemma3", "Qwen3"])
    model, names = adapted(family), ["a", "b", "c", BASE, None]
    stem = prompts([20], seed=seed)[0]
    one = engine(
        model, pages=draw.randrange(20, 60), page_size=draw.choice([1, 3, 4]), max_tokens=draw.randrange(8, 30),
        host_pages=draw.choice([0, 30]), prompt_lookup_num_tokens=draw.choice([0, 4]),
    )  # fmt: skip
    wanted = []
    for _ in range(40):
        if draw.random() < 0.4 and len(stem) > 1:
            prompt = [*stem[: draw.randrange(1, 12)], draw.randrange(2, 90)]
            name, new = draw.choice(names), draw.randrange(1, 8)
            wanted.append((one.add(prompt, params(name, new)), name, prompt, new))
        one.step()
    while one.unfinished:
        one.step()
    one.check()
    for request, name, prompt, new in wanted:
        assert request.token_ids == active(model, name or "a", prompt, new)
