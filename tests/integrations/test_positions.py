"""Positions over ranks: what is taken of the last one, and what batches say of them beside documents."""

import copy

import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.integrations.families import BART, BOUND, SIZES, answers, batch, enabled_answers, family, off
from tests.integrations.test_enabling import refusal

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16} | FACTORS
STRETCHED = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}


def built(name, sizes):
    """A model whose attention shows: with weights as transformers draws them, every token sees all alike."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES | sizes, attn_implementation="eager")
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.mul_(5) if parameter.dim() > 1 else None
    return model.eval()


# ---- frequencies by length -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC}),
        ("Llama", {"rope_parameters": LONG}),
        ("Llama", {"max_position_embeddings": 8, "rope_parameters": STRETCHED}),
        ("Phi3", {"num_key_value_heads": 1, "rope_parameters": LONG, "original_max_position_embeddings": 16}),
    ],
    ids=["dynamic", "longrope", "yarn", "phi3 longrope"],
)
def test_rotary_frequencies_are_those_of_the_whole_length(name, sizes, ranks):
    """A long sequence, a longer one, and one within the length that the model was made for: dynamic ones keep count."""
    model = built(name, sizes)
    givens = [batch(length=length) for length in (23, 37, 6)]
    alone = copy.deepcopy(model)
    true = [answers(alone, given) for given in givens]

    def rank(world):
        own = copy.deepcopy(model)
        return [enabled_answers(world, own, given) for given in givens]

    for found in loopback(ranks).run(rank):
        assert max(off(each, other)[0] for each, other in zip(found, true, strict=True)) < BOUND


def test_the_last_position_is_that_of_the_longest_document():
    given = batch(rows=1) | {"position_ids": torch.cat([torch.arange(9), torch.arange(14)])[None]}
    model = built("Llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC})
    true = answers(copy.deepcopy(model), given, use_cache=False)
    for found in loopback(2).run(lambda world: enabled_answers(world, copy.deepcopy(model), given)):
        assert off(found, true)[0] < BOUND


def test_a_disabled_model_counts_by_itself_again():
    model = built("Llama", {"rope_parameters": LONG})
    true = answers(copy.deepcopy(model), batch())

    def rank(world):
        own = copy.deepcopy(model)
        enable(own, world).disable()
        return answers(own, batch())

    assert off(loopback(1).run(rank)[0], true)[0] < BOUND


def test_frequencies_by_length_are_refused_where_there_are_two_sequences():
    def rank(world):
        model = family("bart")
        model.model.encoder.rope_type = "dynamic"  # as a rotary embedding has it
        enable(model, world)

    assert refusal(rank, ranks=1) == (
        "model.encoder (BartEncoder) has frequencies that depend on the length of a sequence (rope_type), which is not "
        "served where there are two"
    )


# ---- positions of padding --------------------------------------------------------------------------------------------


def padded(side):
    """A batch of two lengths and the positions that its attention_mask tells, as `generate` would count them."""
    there = torch.ones(2, 23, dtype=torch.int64)
    there[0, 15:] = 0
    there = there.flip(1) if side == "left" else there
    given = batch()
    given["labels"][:, 0] = -100
    given["labels"][0, 8] = -100  # with padding on the left, the first token
    given["labels"].masked_fill_(there == 0, -100)
    return given | {"attention_mask": there, "position_ids": (there.cumsum(1) - 1).masked_fill(there == 0, 1)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_jump_in_padding_tell_of_no_documents(side):
    given, model = padded(side), built("Llama", {})
    true = answers(copy.deepcopy(model), given)
    for found in loopback(2).run(lambda world: enabled_answers(world, copy.deepcopy(model), given)):
        assert off(found, true, valid=given["attention_mask"])[0] < BOUND


def test_positions_that_begin_anew_between_tokens_are_refused_with_a_mask():
    given = padded("right")
    given["position_ids"][0, 9:15] = torch.arange(6)

    def rank(world):
        model = built("Llama", {})
        enable(model, world)
        model(**given)

    assert refusal(rank).startswith("position_ids start again inside a row, which means documents, and attention_mask")


# ---- several positions of a token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_of_four_positions_the_texts_tell_of_documents(packed):
    """As models of text and images have them: three to rotate by, and before them, perhaps, that in the text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLTextConfig(**SIZES, rope_parameters=rope, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2_5_VLTextModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5) if parameter.dim() > 1 else None
    turned = torch.stack([torch.arange(23), torch.arange(23) // 2, torch.arange(23) // 3])[:, None].expand(3, 2, 23)
    text = torch.cat([torch.arange(9), torch.arange(14)]).expand(1, 2, 23)
    given = {"input_ids": batch()["input_ids"], "position_ids": torch.cat([text, turned]) if packed else turned}
    true = model(**given, use_cache=False).last_hidden_state

    def rank(world):
        own = copy.deepcopy(model)
        enable(own, world, outputs="whole")
        return own(**given).last_hidden_state

    for found in loopback(2).run(rank):
        torch.testing.assert_close(found, true, rtol=0, atol=BOUND * true.abs().max().item())


# ---- positions by content --------------------------------------------------------------------------------------------


def roberta():
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes))
    for parameter in model.parameters():
        parameter.data.mul_(5) if parameter.dim() > 1 else None
    return model.eval()


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_are_not_padding_are_counted_in_the_whole_row(padded):
    given = batch()
    given["input_ids"][0, 5:8] = 0  # among others
    if padded:
        given["input_ids"][1, 15:] = 0
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, 15:] = 0
        given["labels"][1, 15:] = -100
    model, valid = roberta(), given.get("attention_mask")
    true = answers(copy.deepcopy(model), given)
    for found in loopback(3).run(lambda world: enabled_answers(world, copy.deepcopy(model), given)):
        assert off(found, true, valid=valid)[0] < BOUND


def test_embeddings_that_have_no_count_of_their_own_are_refused(monkeypatch):
    model = roberta()
    monkeypatch.delattr(type(model.roberta.embeddings), "create_position_ids_from_inputs_embeds")
    assert refusal(lambda world: enable(model, world)) == (
        "roberta.embeddings (RobertaEmbeddings) counts positions by what is in input_ids, which is not served"
    )


# ---- decoders without their encoder ----------------------------------------------------------------------------------


def test_cross_attention_of_a_decoder_without_its_encoder_is_refused_when_it_is_used():
    model = transformers.BartForCausalLM(transformers.BartConfig(**BART, is_decoder=True))

    def rank(world):
        own = copy.deepcopy(model)
        with enable(own, world):
            layer = own.model.decoder.layers[0].encoder_attn
            return layer(torch.zeros(1, 3, 32), key_value_states=torch.zeros(1, 3, 32))

    assert refusal(rank) == (
        "model.decoder.layers.0.encoder_attn attends to another sequence, and the model is enabled as a decoder "
        "without encoder"
    )


def test_packed_documents_are_refused_where_a_decoder_counts_the_tokens_of_a_row():
    model = transformers.BartForCausalLM(transformers.BartConfig(**BART, is_decoder=True))
    tokens, positions = torch.arange(8).view(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])

    def rank(world):
        own = copy.deepcopy(model)
        with enable(own, world):
            own(input_ids=tokens, position_ids=torch.arange(8).view(1, 8))
            return own(input_ids=tokens, position_ids=positions)

    assert refusal(rank) == (
        "position_ids start again inside a row, and BartForCausalLM takes none: it counts the tokens of a row; give "
        "each document a row of its own"
    )


def test_a_row_without_tokens_for_an_encoder_is_refused():
    def rank(world):
        model = family("bart")
        enable(model, world)
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[1] = 0
        return model(input_ids=torch.ones(2, 8).long(), attention_mask=mask, decoder_input_ids=torch.ones(2, 8).long())

    assert refusal(rank) == ("attention_mask has a row without tokens, to which a decoder cannot attend; leave it out")
