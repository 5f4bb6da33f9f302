"""Families that nobody looked at one by one: each answers as on one device, or is refused by name; none is wrong."""

import copy

import pytest
import torch
import transformers

from attnspan.errors import ModelError
from attnspan.testing import loopback
from tests.integrations.families import BART, NO_DROPOUT, SIZES, T5, VOCAB, answers, batch, enabled_answers, off

pytestmark = pytest.mark.usefixtures("quietly")

BOUND = 5e-5
"""As in families.py; weights are larger here, and so is rounding."""

HEAD, WINDOW = {"head_dim": 8}, {"sliding_window": 5}
ALL_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
LOW_RANK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
SMALL_OPT = {"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 2}
SMALL_OPT |= {"num_attention_heads": 4}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

SERVED = {
    "Arcee": SIZES,
    "BioGpt": ALL_HEADS | NO_DROPOUT | {"layerdrop": 0.0, "activation_dropout": 0.0},
    "CodeGen": GPT | {"rotary_dim": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Cohere2": SIZES | WINDOW,
    "DeepseekV3": SIZES | LOW_RANK | {"num_key_value_heads": 4, "first_k_dense_replace": 2},
    "Exaone4": SIZES | WINDOW | {"sliding_window_pattern": 2},
    "GPTBigCode": GPT | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "GPTNeoX": ALL_HEADS,
    "Gemma": SIZES | HEAD,
    "Gemma4Text": SIZES | HEAD | {"global_head_dim": 8},
    "Glm4": SIZES | HEAD,
    "Granite": SIZES | {"attention_multiplier": 0.2},
    "GraniteMoe": SIZES | {"num_local_experts": 4},
    "Helium": SIZES | HEAD,
    "Nemotron": SIZES,
    "OPT": SMALL_OPT | {"dropout": 0.0},
    "Olmo2": SIZES,
    "Olmo3": SIZES | WINDOW,
    "Persimmon": ALL_HEADS,
    "Phi": SIZES,
    "Qwen2": SIZES,
    "Qwen3Moe": SIZES | HEAD | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "SmolLM3": SIZES,
    "StableLm": SIZES,
    "Starcoder2": SIZES | WINDOW | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Electra": ALL_HEADS | NO_DROPOUT | {"embedding_size": 32},
    "DiffLlama": SIZES,
    "EuroBert": SIZES,
    "Roberta": ALL_HEADS | NO_DROPOUT,
    "MBart": BART,
    "Pegasus": BART,
}
REFUSED = {
    "SwitchTransformers": (T5, "the model must ask transformers for its mask, got Tensor of shape"),
    "DebertaV2": (ALL_HEADS, "DebertaV2Attention"),
    "Albert": (ALL_HEADS | NO_DROPOUT | {"embedding_size": 16}, "looks at tokens beside a token's own"),
    "DistilBert": (
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "labels: the loss of",
    ),
}


def built(name, sizes):
    """A model of a family, whatever its head, with weights that show."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM)
    auto = kinds[2] if config.is_encoder_decoder else kinds[name in MASKED]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.eval()


MASKED = ("Electra", "EuroBert", "DebertaV2", "Roberta", "Albert", "DistilBert")


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_family_answers_as_on_one_device(name):
    model = built(name, SERVED[name])
    given = batch("bart" if model.config.is_encoder_decoder else name)
    true = answers(copy.deepcopy(model), given)
    for found in loopback(2).run(lambda world: enabled_answers(world, copy.deepcopy(model), given)):
        assert off(found, true)[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_by_name(name):
    sizes, why = REFUSED[name]
    model = built(name, sizes)
    given = batch("t5" if model.config.is_encoder_decoder else name)
    with pytest.raises(ModelError, match=why):
        loopback(2).run(lambda world: enabled_answers(world, copy.deepcopy(model), given))
