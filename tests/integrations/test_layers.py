"""Layers are told as the model hands them to attention, and what cannot be served is refused by layer and feature."""

import re
import warnings

import pytest
import transformers
from torch import nn

from attnspan.errors import AttnspanError, ModelError
from attnspan.integrations.huggingface import attention_layers
from tests.integrations.families import BIASED, SIZES, SPECS, VOCAB, family


def told(name):
    return [str(layer).partition(": ")[2] for layer in attention_layers(family(name))]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("llama", ["4 query heads, 2 key heads of 8, scale 0.354, causal"] * 2),
        ("mistral", ["4 query heads, 2 key heads of 8, scale 0.354, causal, window 5"] * 2),
        (
            "gemma3",
            [
                "4 query heads, 2 key heads of 8, scale 0.354, causal, window 5",
                "4 query heads, 2 key heads of 8, scale 0.354, causal",
            ],
        ),
        (
            "gemma2",
            [
                "4 query heads, 2 key heads of 8, scale 1, causal, window 5, soft-cap 0.5",
                "4 query heads, 2 key heads of 8, scale 1, causal, soft-cap 0.5",
            ],
        ),
        (
            "gpt-oss",
            [
                "4 query heads, 2 key heads of 8, scale 0.354, causal, window 5, sinks",
                "4 query heads, 2 key heads of 8, scale 0.354, causal, sinks",
            ],
        ),
        (
            "llama4",
            [
                "4 query heads, 2 key heads of 8, scale 0.354, causal, chunks of 5",
                "4 query heads, 2 key heads of 8, scale 0.354, causal, temperature 0.7 for every 4 positions",
            ],
        ),
        ("phi3", ["4 query heads, 1 key heads of 8, scale 0.354, causal"] * 2),
        ("bert", ["4 query heads, 4 key heads of 8, scale 0.354, both ways"] * 2),
        (
            "modernbert",
            [
                "4 query heads, 4 key heads of 8, scale 0.354, both ways",
                "4 query heads, 4 key heads of 8, scale 0.354, both ways, window 5",
            ],
        ),
        (
            "bart",
            ["4 query heads, 4 key heads of 8, scale 0.354, both ways"] * 2
            + [
                "2 query heads, 2 key heads of 16, scale 0.25, causal",
                "2 query heads, 2 key heads of 16, scale 0.25, cross",
            ]
            * 2,
        ),
    ],
)
def test_layers_say_what_they_ask_for(name, lines):
    assert told(name) == lines


def test_a_layer_knows_its_module_and_its_place_in_a_cache():
    model = family("qwen3")
    layers = attention_layers(model)
    assert [layer.index for layer in layers] == [0, 1]
    assert [layer.module for layer in layers] == [each.self_attn for each in model.model.layers]
    assert [layer.name for layer in layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_what_a_layer_has_but_does_not_hand_on_is_not_told():
    """Gemma 3 keeps the attribute of Gemma 2's soft-cap, and computes without."""
    model = family("gemma3")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 50.0
    assert [layer.softcap for layer in attention_layers(model)] == [None, None]


def test_values_of_two_sizes_and_dropout_are_told():
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    config = transformers.DeepseekV3Config(
        **SIZES | sizes | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "attention_dropout": 0.1}
    )
    layer = attention_layers(transformers.DeepseekV3Model(config))[0]
    assert (layer.kv_heads, layer.head_dim, layer.value_dim, layer.dropout) == (4, 16, 12, 0.1)


# ---- refusals --------------------------------------------------------------------------------------------------------


def built(config, **sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModel.from_config(getattr(transformers, config)(**sizes))


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "sizes", "refusal"),
    [
        (
            "LongT5Config",
            {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
            "encoder.block.0.layer.0 (LongT5LayerLocalSelfAttention) has a way of its own to mix tokens (it does not "
            "ask the AttentionInterface), which is not served",
        ),
        (
            "FalconConfig",
            SMALL | {"alibi": True, "attn_implementation": "eager"},
            "h.0.self_attention (FalconAttention) has an ALiBi that transformers adds twice with "
            'attn_implementation="eager" (take "sdpa"), which is not served',
        ),
        (
            "CpmAntConfig",
            {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "dim_head": 8},
            "encoder.layers.0.self_att (CpmAntSelfAttentionBlock) has a way of its own to mix tokens (it does not ask "
            "the AttentionInterface), which is not served",
        ),
        (
            "MambaConfig",
            {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
            "MambaModel: layer 0 is of the type 'linear_attention', which is not served; those that are: "
            "chunked_attention, full_attention, sliding_attention",
        ),
        (
            "SiglipConfig",
            {
                "text_config": SMALL | {"intermediate_size": 32},
                "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
                | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            },
            "vision_model.encoder.layers.0.self_attn (SiglipAttention) has another sequence than the text's: it is "
            "part of the vision_config, which is not served",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("Config") else "",
)
def test_a_model_is_refused_by_layer_and_feature(config, sizes, refusal):
    with pytest.raises(ModelError, match=f"^{re.escape(refusal)}$"):
        attention_layers(built(config, **sizes))


def test_a_part_that_mixes_tokens_beside_attention_is_refused():
    model = family("llama")
    model.model.layers[1].conv = nn.Conv1d(32, 32, 3)
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.conv \(Conv1d\) has a way of its own to mix tokens"):
        attention_layers(model)


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(ModelError, match=r"^model must be a transformers model, with a config, got Linear$"):
        attention_layers(nn.Linear(2, 2))


def test_its_errors_are_ours():
    assert issubclass(ModelError, AttnspanError)


def test_every_family_of_the_tests_has_layers():
    assert all(attention_layers(family(name)) for name in SPECS | BIASED)


def test_a_layer_that_counts_positions_in_a_way_that_is_not_known_is_refused(monkeypatch):
    from attnspan.integrations.huggingface import layers

    monkeypatch.setattr(layers, "TUNED", (*layers.TUNED, "query_states = query_states * 2"))
    with pytest.raises(ModelError, match=r"layers.0.self_attn \(Llama4TextAttention\) has positions that it counts by"):
        attention_layers(family("llama4"))
