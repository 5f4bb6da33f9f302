"""Any family of transformers, small: its default config with every size that is known by name made a few numbers.

``tiny(kind, name)`` is a model on the CPU with random weights, the same for the same `seed`, which also draws what may
vary: key heads, windows, chunks, layers. Layers keep their types, one or two of each.
"""

import contextlib
import random
import warnings

import torch
import transformers

from attnspan.integrations.huggingface import census
from tests.integrations.families import VOCAB

WIDTH, HEADS, HEAD_DIM, LAYERS = 32, 4, 8, 4
LARGEST = 4_000_000
SMALL = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "embedding_size": WIDTH,
    "emb_dim": WIDTH, "word_embed_proj_dim": WIDTH, "embedding_dim": WIDTH, "input_embedding_size": WIDTH,
    "output_embedding_size": WIDTH, "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "dff": 48, "dim_ff": 48, "n_inner": 48, "d_inner": 48, "ffn_hidden_size": 48,
    "feed_forward_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48, "expert_ffn_hidden_size": 16, "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "dense_intermediate_size": 48,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "attention_heads": HEADS,
    "num_encoder_attention_heads": HEADS, "num_decoder_attention_heads": HEADS, "swa_num_attention_heads": HEADS,
    "head_dim": HEAD_DIM, "global_head_dim": HEAD_DIM, "swa_head_dim": HEAD_DIM, "dim_head": HEAD_DIM,
    "d_head": HEAD_DIM, "kv_channels": HEAD_DIM, "attention_head_size": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM,
    "attention_head_dim": 2 * HEAD_DIM, "attention_hidden_size": 2 * WIDTH, "rotary_dim": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": HEAD_DIM, "qk_nope_head_dim": HEAD_DIM,
    "v_head_dim": 12, "o_lora_rank": 16, "qk_head_dim": 2 * HEAD_DIM,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "num_experts_per_tok": 2, "num_experts_per_token": 2,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "zero_expert_num": 2, "router_hidden_size": 16,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "context_length": 128,
    "max_target_positions": 128, "max_source_positions": 128, "model_max_length": 128,
    "original_max_position_embeddings": 128,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "mamba_d_ssm": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    "state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4, "mamba_headdim": 8, "n_mamba_heads": 8,
    "mamba_ngroups": 1, "adapter_rank": 4, "lru_width": WIDTH, "num_mem_blocks": 1, "block_size": 4,
    "index_head_dim": HEAD_DIM, "index_n_heads": 2, "gated_norm_rank": 4, "d_rel": 4, "rel_extent": 32,
    "prompt_mid_dim": 16, "prompt_length": 4, "pronunciation_embed_dim": WIDTH, "shape_embed_dim": WIDTH,
    "pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB, "decoder_vocab_size": VOCAB,
    "num_query_groups": HEADS, "hc_lowrank": 4, "ple_embed_dim": WIDTH, "floor_scale": 4, "attn_scale": 0.7,
    "block_multiple_of": 8,
    "image_size": 28, "patch_size": 14, "depth": 2, "num_channels": 3,
    "dim_model_base": 16, "keep_window_size": 2048,
}  # fmt: skip
"""Entries of configs, by name, and their sizes here."""

COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
TOKENS |= {"begin_suppress_tokens": [5, 7]}
SHARED = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
NEAR = ("sliding_window", "local_attention", "attention_window_size", "window_size", "sliding_window_size")
ALONE = {
    "afmoe": {"global_attn_every_n_layers": 2},
    "bamba": {"attn_layer_indices": [1]},  # by default there are none, and then transformers does not generate
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "dbrx": census.SMALL["dbrx"] | {"resid_pdrop": 0.0},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "exaone4": {"sliding_window_pattern": 2},
    "exaone_moe": {"sliding_window_pattern": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "llama4_text": {"no_rope_layer_interval": 2},
    "jetmoe": {"num_key_value_heads": 2},
    "longcat_flash": {"num_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
    | {"indexer_compress_ratio": 2},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "zaya": {"num_experts_per_tok": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}
"""What a family wants beside that."""


def tiny_config(config, seed=0, more=None):
    """A config like this one, small."""
    draw = random.Random(seed)
    given = config.to_dict()
    change = {name: size for name, size in SMALL.items() if isinstance(given.get(name), int | float)}
    layers = next((given[name] for name in COUNTS if isinstance(given.get(name), int)), None)
    kept = draw.choice([2, 3, LAYERS]) if given.get("layer_types") is None else LAYERS
    change |= {name: kept for name in COUNTS if isinstance(given.get(name), int)}
    for name, value in given.items():
        if isinstance(value, list) and layers is not None and len(value) == layers and name not in ("layer_types",):
            change[name] = _shortened(value, kept)
    kinds = given.get("layer_types")
    if kinds is not None and len(set(kinds)) > 1:
        change["layer_types"] = _shortened(kinds, kept)
    elif kinds is not None:
        change["layer_types"] = list(kinds[:1]) * kept
    heads = draw.choice([1, 2, HEADS])
    for name in SHARED:
        if isinstance(given.get(name), int) and not isinstance(given.get(name), bool):
            change[name] = HEADS if given[name] == given.get("num_attention_heads") else heads
    change |= {name: draw.choice([3, 5, 8]) for name in NEAR if isinstance(given.get(name), int)}
    if isinstance(given.get("attention_chunk_size"), int):
        change["attention_chunk_size"] = draw.choice([3, 5, 8])
    change |= {name: 0.0 for name, value in given.items() if isinstance(value, float) and _is_random(name)}
    change |= {name: token for name, token in TOKENS.items() if name in given}
    if given.get("max_window_layers") is not None:
        change["max_window_layers"] = 1
    inner = {name: getattr(config, name) for name in config.sub_configs}
    change |= {name: tiny_config(each, seed) for name, each in inner.items() if hasattr(each, "to_dict")}
    change |= more or {}
    change = {name: value for name, value in change.items() if name in given or name in (more or {})}
    rope = given.get("rope_parameters")
    if rope and "rope_parameters" not in change:
        change["rope_parameters"] = _short_rope(rope)
    return type(config)(**change)


def _is_random(name):
    return any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter", "drop_path"))


def _shortened(values, kept):
    """So many of the values, every one of them at least once if that is possible."""
    order = list(dict.fromkeys(map(str, values)))
    firsts = [next(value for value in values if str(value) == each) for each in order][:kept]
    return (firsts * kept)[:kept] if len(firsts) > 1 else [values[0]] * kept


def _short_rope(rope):
    if all(isinstance(value, dict) for value in rope.values()):
        return {kind: _short_rope(value) for kind, value in rope.items()}
    short = dict(rope)
    if "mrope_section" in short:
        short["mrope_section"] = [2, 1, 1]
    for name in ("short_factor", "long_factor"):
        if name in short:
            short[name] = [1.0] * (HEAD_DIM // 2)
    return short


def tiny(kind, name, seed=0):
    """A model of a family, small."""
    found = census.MAPPINGS[kind][name]
    cls = getattr(transformers, found if isinstance(found, str) else found[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = census.config_of(kind, name, cls)
        config = tiny_config(config, seed, ALONE.get(name) or ALONE.get(config.model_type))
        if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{name} has {size} parameters still")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = cls._from_config(config, attn_implementation="eager")
            with contextlib.suppress(ValueError, AttributeError):
                model.set_experts_implementation("eager")
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(0.0, 0.15)
                else:
                    parameter.data.add_(torch.randn_like(parameter) * 0.2)
    if name == "xmod":
        model.set_default_language(model.config.languages[0])
    return model.float().eval()
