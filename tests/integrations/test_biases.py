"""Models that add numbers to scores: T5 and kin learn them by distance, Bloom, MPT and Falcon have ALiBi."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import attnspan as span
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import attention_layers, enable
from attnspan.integrations.huggingface.biases import ScoreBias, distance_table, relative_bias
from attnspan.testing import loopback
from tests.integrations.families import (
    BIASED,
    BOUND,
    answers,
    batch,
    enabled_answers,
    family,
    gradients,
    off,
    on_ranks,
    one_device,
)
from tests.integrations.test_families import LENGTHS, packed, padded, summed
from tests.turns import in_turn

ALIBI = ("bloom", "mpt", "falcon")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "ranks"), in_turn(BIASED, [3, 2, 1]))
def test_a_family_answers_as_on_one_device(name, ranks):
    given = batch(name)  # 23 tokens: longer than the reach of a bias by distance, 18
    true = one_device(name, given)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(("name", "side"), in_turn(["t5", *ALIBI], ["both", "left", "right"]))
def test_rows_with_padding_of_their_own(name, side):
    given, padding = padded(name, side)
    true = one_device(name, given)
    for found in on_ranks(name, given, 2):
        assert off(found, true, valid=None if name == "t5" else padding)[0] < BOUND


@pytest.mark.parametrize("name", ALIBI)
def test_documents_answer_as_each_alone(name):
    """Falcon rounds its numbers to bfloat16, so that a document farther along would have others."""
    given = packed(name)
    given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)
    apart = [
        {key: given[key][row : row + 1, start : start + length] for key in ("input_ids", "labels")}
        for row, lengths in enumerate(LENGTHS)
        for start, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False)
    ]
    true = summed(name, apart)
    for loss, logits, grads in on_ranks(name, given, 2):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


def test_documents_of_a_session_count_as_those_of_a_batch():
    given, documents = packed("falcon"), span.Documents([list(row) for row in LENGTHS])
    alone = {name: given[name] for name in ("input_ids", "labels")}

    def rank(world):
        cp = span.ContextParallel(world, seq_len=23, mask=span.Causal() & documents)
        return enabled_answers(cp, family("falcon"), alone)

    for found, true in zip(loopback(2).run(rank), on_ranks("falcon", given, 2), strict=True):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(("name", "reentrant"), in_turn(["t5", "bloom"], [True, False]))
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
@pytest.mark.parametrize("name", ["t5", *ALIBI])
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


def no_table(model):
    for stack in (model.encoder, model.decoder):
        nn.init.zeros_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight)


def no_slopes(model):
    model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: torch.zeros(heads, 1, length)


@pytest.mark.parametrize(("name", "change"), [("t5", no_table), ("mpt", no_slopes)])
def test_twin_what_is_added_shows_in_the_answers(name, change):
    model = family(name)
    change(model)
    assert off(answers(model, batch(name)), one_device(name, batch(name)))[0] > 100 * BOUND


@pytest.mark.parametrize("name", ["t5", "falcon"])
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


# ---- what goes by distance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decodes", [False, True])
def test_a_table_by_distance_says_what_the_layer_computes(decodes):
    model = family("t5")
    layer = (model.decoder if decodes else model.encoder).block[0].layer[0].SelfAttention
    bias = relative_bias(layer)
    assert bias == ScoreBias("distance", heads=4, reach=18)
    with torch.no_grad():
        table, whole = distance_table(layer.compute_bias, bias.reach, CPU), layer.compute_bias(60, 60)
    q, k = torch.arange(60)[:, None], torch.arange(60)
    torch.testing.assert_close(table[:, (k - q).clamp(-18, 18) + 18][None], whole, rtol=0, atol=0)


class ByPlace(T5Attention):
    """A bias that also knows where the query is."""

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        return super().compute_bias(query_length, key_length, device, past_seen_tokens) + past_seen_tokens


class Unending(T5Attention):
    """A bias that does not level off."""

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        away = torch.arange(key_length) - torch.arange(query_length)[:, None] - past_seen_tokens
        return super().compute_bias(query_length, key_length, device, past_seen_tokens) + away


@pytest.mark.parametrize("other", [ByPlace, Unending])
def test_a_bias_that_does_not_go_by_distance_is_refused(other):
    model = family("t5")
    model.encoder.block[0].layer[0].SelfAttention.__class__ = other
    wanted = (
        f"encoder.block.0.layer.0.SelfAttention ({other.__name__}) has a relative position bias (position_bias), which "
        "is not served"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(wanted)}$"):
        attention_layers(model)


def test_a_bias_that_is_made_elsewhere_is_refused_before_anything_travels():
    def rank(world):
        model = family("t5")
        layer = model.decoder.block[1].layer[0].SelfAttention

        def other(module, args, kwargs):
            return args, kwargs | {"position_bias": torch.zeros(1, 4, 10, 10)}

        layer.register_forward_pre_hook(other, with_kwargs=True)
        return enabled_answers(world, model, batch("t5"))

    wanted = (
        "decoder.block.1.layer.0.SelfAttention: position_bias must be that of the layer (bias by distance up to 18), "
        "got one of shape (1, 4, 10, 10)"
    )
    with pytest.raises(ModelError, match=re.escape(wanted)):
        loopback(2).run(rank)


@pytest.mark.parametrize("name", ALIBI)
def test_a_model_that_makes_other_numbers_than_its_family_is_refused(name):
    """Such as a subclass of it."""

    def rank(world):
        model = family(name)

        def other(module, args, kwargs):
            which = "position_bias" if name == "mpt" else "alibi"
            return args, kwargs | {which: 2 * kwargs[which]}

        for layer in attention_layers(model):
            layer.module.register_forward_pre_hook(other, with_kwargs=True)
        return enabled_answers(world, model, batch(name))

    with pytest.raises(
        ModelError, match=r"(h|blocks)\.0\.\w+: the model's ALiBi is not that of its family, which is not"
    ):
        loopback(2).run(rank)


# ---- attention that is written out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_a_layer_whose_forward_is_another_is_refused(name, monkeypatch):
    """As in a version of transformers that has changed it."""
    from attnspan.integrations.huggingface import inline_attention

    model = family(name)
    layer = attention_layers(model)[0]
    cls, original = type(layer.module), type(layer.module).forward

    def scaled(self, hidden_states, *args, **kwargs):
        return original(self, 2 * hidden_states, *args, **kwargs)

    inline_attention._agrees.cache_clear()
    monkeypatch.setattr(cls, "forward", scaled)
    wanted = (
        f"{layer.name} ({cls.__name__}) has an attention of its own that is not the one known here "
        "(transformers 5.22), which is not served"
    )
    try:
        with pytest.raises(ModelError, match=f"^{re.escape(wanted)}$"):
            attention_layers(model)
    finally:
        inline_attention._agrees.cache_clear()


def test_a_subclass_of_elsewhere_is_refused():
    model = family("bloom")
    attention = model.transformer.h[0].self_attention

    class MyAttention(type(attention)):
        pass

    attention.__class__ = MyAttention
    with pytest.raises(
        ModelError, match=r"^transformer\.h\.0\.self_attention \(MyAttention\) has a way of its own to mix "
    ):
        attention_layers(model)


def test_another_model_of_the_process_is_not_touched():
    one, other = family("mpt"), family("mpt")
    given, true = batch("mpt"), one_device("mpt", batch("mpt"))

    def rank(world):
        with enable(copy.deepcopy(one), world):
            return off(answers(other, given), true)[0]

    assert loopback(1).run(rank) == [0.0]
