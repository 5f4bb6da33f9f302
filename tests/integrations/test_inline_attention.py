"""Layers that write their attention out: each class is the one known, and its model answers as on one device."""

import copy
import importlib
import re

import pytest
import torch
import transformers

from attnspan import Engine
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import attention_layers, enable, inline_attention
from attnspan.testing import loopback
from tests.integrations.families import (
    BART,
    BOUND,
    INLINE,
    answers,
    batch,
    enabled_answers,
    family,
    gradients,
    off,
    on_ranks,
    one_device,
)
from tests.integrations.test_families import packed, padded
from tests.turns import in_turn

CAUSAL = [name for name in INLINE if name != "mvp"]


def class_of(key):
    folder, _, name = key.partition(".")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


@pytest.mark.parametrize("key", inline_attention.FAMILIES)
def test_a_class_computes_what_its_row_says(key):
    assert inline_attention._agrees(class_of(key))


def scaled(module, hidden_states, *args, **kwargs):
    return type(module).__mro__[1].forward(module, 1.5 * hidden_states, *args, **kwargs)


def unscaled(module, query, *args, **kwargs):
    return type(module).__mro__[1]._attn(module, 1.5 * query, *args, **kwargs)


@pytest.mark.parametrize("key", inline_attention.CLASSES)
def test_twin_a_class_that_computes_something_else_is_told(key):
    cls, row = class_of(key), inline_attention.CLASSES[key]
    other = {"_attn": unscaled} if row.method == "_attn" else {"forward": scaled}
    assert not inline_attention._agrees(type(cls.__name__, (cls,), {"__module__": cls.__module__, **other}))


def test_a_window_that_is_another_than_the_row_says_is_told():
    cls = class_of("gpt_neo.GPTNeoSelfAttention")

    class GPTNeoSelfAttention(cls):
        def __init__(self, config, attention_type, layer_id=None):
            super().__init__(config, "global", layer_id)
            self.attention_type = attention_type

    GPTNeoSelfAttention.__module__ = cls.__module__
    assert not inline_attention._agrees(GPTNeoSelfAttention)


def test_nothing_is_drawn_from_the_random_numbers_of_the_process():
    before = torch.get_rng_state()
    for key in inline_attention.FAMILIES:
        cls = class_of(key)
        inline_attention._agrees(type(cls.__name__, (cls,), {"__module__": cls.__module__}))
    assert torch.equal(before, torch.get_rng_state())


def test_a_layer_whose_class_is_another_is_refused(monkeypatch):
    model = family("gpt-j")
    name, layer = next((name, module) for name, module in model.named_modules() if name.endswith(".attn"))
    inline_attention._agrees.cache_clear()
    monkeypatch.setattr(type(layer), "_attn", lambda self, query, key, value, mask=None: (query, None))
    wanted = (
        f"{name} (GPTJAttention) has an attention of its own that is not the one known here (transformers 5.22), which "
        "is not served"
    )
    try:
        with pytest.raises(ModelError, match=f"^{re.escape(wanted)}$"):
            attention_layers(model)
    finally:
        inline_attention._agrees.cache_clear()


# ---- models ----------------------------------------------------------------------------------------------------------


def test_layers_say_what_they_want():
    said = [str(layer).partition(": ")[2] for layer in attention_layers(family("gpt-neo"))]
    assert said == [
        "4 query heads, 4 key heads of 8, scale 1, causal",
        "4 query heads, 4 key heads of 8, scale 1, causal, window 5",
    ]


@pytest.mark.parametrize(("name", "ranks"), in_turn(INLINE, [3, 2, 1]))
def test_a_family_answers_as_on_one_device(name, ranks):
    given = batch(name)
    true = one_device(name, given)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(("name", "side"), in_turn(INLINE, ["left", "both", "right"]))
def test_rows_with_padding_of_their_own(name, side):
    given, padding = padded(name, side)
    true = one_device(name, given)
    for found in on_ranks(name, given, 2):
        assert off(found, true, valid=None if name == "mvp" else padding)[0] < BOUND


@pytest.mark.parametrize("name", ["gpt-neo", "gpt-j"])
def test_documents_by_their_positions(name):
    given = packed(name)
    true = one_device(name, given, use_cache=False)
    for found in on_ranks(name, given, 2):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(("name", "reentrant"), in_turn(["gpt-neo", "roformer", "mvp"], [True, False]))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing(name, reentrant):
    given = batch(name)
    true = one_device(name, given)

    def rank(world):
        model = family(name)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return enabled_answers(world, model, given)

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_answers_as_on_one_device(name):
    given = batch(name)
    true = one_device(name, given)

    def rank(world):  # one: dynamo is not for threads
        model = family(name)
        with enable(model, world) as handle:
            out = torch.compile(model, backend="aot_eager")(**given)
            out.loss.backward()
            return out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)

    for found in loopback(1).run(rank):
        assert off(found, true)[0] < BOUND
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gpt-neo", "roformer"])
def test_a_model_that_is_disabled_is_as_before(name):
    model = family(name)
    before = [dict(vars(module)) for module in model.modules()]
    with enable(model, loopback(1).run(lambda world: world)[0]):
        pass
    after = [dict(vars(module)) for module in model.modules()]
    for module in (*before, *after):
        module.pop("config", None)  # a copy
    assert [module.keys() for module in before] == [module.keys() for module in after]
    assert off(answers(model, batch(name)), one_device(name, batch(name)))[0] == 0


def test_a_prompt_of_keys_is_refused():
    config = transformers.MvpConfig(**BART, use_prompt=True, prompt_length=4, prompt_mid_dim=8)
    model = transformers.MvpForConditionalGeneration(config)
    with pytest.raises(ModelError, match=r"^MvpAttention is given attn_prompt, which is not served"):
        loopback(1).run(lambda world: enabled_answers(world, model, batch("mvp")))


def test_no_engine_serves_cross_attention_that_is_written_out():
    with pytest.raises(ModelError, match=r"encoder_attn has cross-attention that it writes out by itself; an engine "):
        Engine(copy.deepcopy(family("mvp")).eval(), pages=20)


def test_a_window_that_is_in_the_config_alone_is_refused():
    model = family("gpt-neo")
    window = model.config.window_size
    model.config.window_size = window - 1  # on one device, layers hide what they were made with
    with pytest.raises(ModelError, match=f"was made with a window of {window}, and config.window_size is {window - 1}"):
        loopback(1).run(lambda world: enable(model, world))
    with pytest.raises(ModelError, match="which it does not follow"):
        Engine(model.requires_grad_(False), pages=8)
