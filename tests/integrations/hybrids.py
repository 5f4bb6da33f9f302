"""Tiny hybrid models of transformers with random weights, one of each family, as families.py has the others.

Layers are recurrent and attention in turn, short chunks make several of a sequence, and weights of recurrences are
drawn so that states live for some tokens: what is lost between ranks shows.
"""

import copy
import functools
import warnings

import torch
import transformers

from attnspan.testing import loopback
from tests.integrations.families import BUILDING, SIZES, VOCAB, enabled_answers

BOUND = 2e-5
"""As in families.py."""

BOUNDS = {"recurrent-gemma": 6e-5}
"""Where eager attention in float32 is not that near to itself in float64: 2.6e-5 here, and so may ours be."""

BOTH = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HEAD = {"head_dim": 8}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_conv_kernel_dim": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LOW_RANK = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
SELECTIVE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
SELECTIVE |= {"pad_token_id": 0}
NO_KV = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

SPECS = {
    "qwen3-next": (
        "Qwen3NextConfig",
        SIZES | BOTH | HEAD | DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", SIZES | BOTH | HEAD | DELTA),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        SIZES | BOTH | HEAD | DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "olmo-hybrid": ("OlmoHybridConfig", SIZES | BOTH | DELTA),
    "kimi-linear": (
        "KimiLinearConfig",
        SIZES
        | BOTH
        | LOW_RANK
        | EXPERTS
        | {"num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "ling": (
        "BailingHybridConfig",
        SIZES
        | BOTH
        | LOW_RANK
        | EXPERTS
        | {"num_local_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8, "num_key_value_heads": 4}
        | {"num_mtp_layers": 0, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 2}
        | {"state_size": 8, "chunk_size": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        SIZES
        | HEAD
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}
        | {"num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
        | {"chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16}
        | {"moe_shared_expert_intermediate_size": 16},
    ),
    "granite": (
        "GraniteMoeHybridConfig",
        SIZES | BOTH | MAMBA | {"num_local_experts": 4, "shared_intermediate_size": 16, "attention_multiplier": 0.2},
    ),
    "bamba": ("BambaConfig", SIZES | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon-h1": (
        "FalconH1Config",
        SIZES | HEAD | MAMBA | {"mamba_d_ssm": 64, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8]},
    ),
    "zamba2": (
        "Zamba2Config",
        NO_KV
        | {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
        | {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8, "adapter_rank": 4, "use_mem_rope": True},
    ),
    "minimax": ("MiniMaxConfig", SIZES | BOTH | HEAD | {"num_local_experts": 4, "block_size": 4}),
    "lfm2": (
        "Lfm2Config",
        SIZES | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        SIZES
        | EXPERTS
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4}
        | {"num_dense_layers": 1},
    ),
    "jamba": (
        "JambaConfig",
        SIZES
        | {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}
        | {"mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "mamba": ("MambaConfig", SELECTIVE),
    "falcon-mamba": ("FalconMambaConfig", SELECTIVE),
    "zamba": (
        "ZambaConfig",
        SIZES
        | {"num_key_value_heads": 4, "num_hidden_layers": 4}
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 2,
        }
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        SIZES | HEAD | {"num_hidden_layers": 3, "lru_width": 32, "sliding_window": 8, "num_key_value_heads": 1},
    ),
    "zaya": (
        "ZayaConfig",
        SIZES
        | HEAD
        | {"num_experts_per_tok": 1, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 8},
    ),
}
REFUSED = {
    "rwkv": (
        "RwkvConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        "(RwkvForCausalLM) has a way of its own to mix tokens (it does not ask the AttentionInterface)",
    ),
    "qwen4-exp": (
        "Qwen4ExpTextConfig",
        SIZES
        | BOTH
        | HEAD
        | DELTA
        | EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 16, "hc_lowrank": 4, "indexer_n_heads": 2}
        | {"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4},
        "layer 1 is of the type 'indexed_attention', which is not served",
    ),
    "inkling": (
        "InklingTextConfig",
        SIZES | EXPERTS,
        "(InklingAttention) has a relative position bias (position_bias), which is not served",
    ),
}
"""Configs, sizes, and what is said of them."""


@functools.cache
def _built(name):
    transformers.logging.set_verbosity_error()
    config, sizes, *_ = (SPECS | REFUSED)[name]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = getattr(transformers, config)(**sizes)
        built = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
        for key, parameter in built.named_parameters():
            if key.endswith("A_log"):  # a state that forgets half within some tokens
                torch.nn.init.uniform_(parameter, -2.0, 0.0)
            elif parameter.dim() < 2:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.data.mul_(5)
    return built


def hybrid(name):
    """A model, in training mode, of its own."""
    with BUILDING:  # ranks are threads, and share torch's random numbers
        return copy.deepcopy(_built(name)).train()


def on_ranks(name, given, ranks, **options):
    """What every rank answers."""
    return loopback(ranks).run(lambda world: enabled_answers(world, hybrid(name), given, **options))
