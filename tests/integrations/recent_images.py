"""Tiny models with towers of 2025 and 2026: as `images.SPECS`, with the tokens of an image and the images of each."""

import torch

from tests.integrations.sizes import IMAGE, MIXED, MROPE, QWEN, TEXT, TOKENS, VIDEO, VIT, VOCAB, of

LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GLM_VIT = QWEN | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "image_size": 16}
GLM_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SAM = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 4}
SAM |= {"output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "downsample_channels": [12, 16]}
QUERIES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MINI_VIT = VIT | {"image_size": 32, "num_hidden_layers": 3}
NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 8}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
NEMOTRON |= {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
GEMMA4 = {"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0, "sliding_window": 5}
QFORMER = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
QFORMER |= {"num_attention_heads": 2, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
QFORMER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
OPT = {"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0}
OPT |= {"bos_token_id": None, "eos_token_id": None}
AUDIO = {"num_mel_bins": 8, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}

SPECS = {
    "glm4.6v": (
        "Glm46VForConditionalGeneration",
        TOKENS
        | {
            "image_start_token_id": 61,
            "image_end_token_id": 62,
            "vision_config": of("glm4v_vision", GLM_VIT),
            "text_config": of("glm4v_text", TEXT | {"rope_parameters": MROPE}),
        },
    ),
    "glm4.5v": (
        "Glm4vMoeForConditionalGeneration",
        TOKENS
        | {
            "image_start_token_id": 61,
            "image_end_token_id": 62,
            "vision_config": GLM_VIT,
            "text_config": TEXT
            | EXPERTS
            | GLM_EXPERTS
            | {"head_dim": 8, "rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        },
    ),
    "hunyuan-vl": (
        "HunYuanVLForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "im_start_id": 61,
            "im_end_id": 62,
            "im_newline_id": 57,
            "vision_config": VIT | {"max_image_size": 8, "out_hidden_size": 32, "text_hidden_size": 32},
            "text_config": TEXT | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_section": [1, 1, 1, 1]}},
        },
    ),
    "step3.7": (
        "Step3p7ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "vision_config": VIT | {"image_size": 16, "patch_size": 2, "mlp_ratio": 1.5},
            "text_config": TEXT
            | MIXED
            | EXPERTS
            | {"head_dim": 8, "n_routed_experts": 4, "share_expert_dim": 16}
            | {"mlp_layer_types": ["dense", "sparse"], "num_sliding_attention_heads": 2},
        },
    ),
    "deepseek-ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "vision_config": {"sam_config": SAM, "encoder_config": QUERIES | {"num_key_value_heads": 1}},
            "text_config": TEXT
            | EXPERTS
            | {"n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        },
    ),
    "unlimited-ocr": (
        "UnlimitedOcrForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "vision_config": {
                "sam_config": SAM | {"image_size": 16, "mlp_dim": 24},
                "encoder_config": QUERIES | {"image_size": 4, "patch_size": 4},
            },
            "text_config": TEXT
            | EXPERTS
            | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "sliding_window": 3},
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
            | {"output_proj_dims": 16},
            "text_config": TEXT | MIXED | GEMMA4,
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": 58,
        },
    ),
    "molmo2": (
        "Molmo2ForConditionalGeneration",
        {
            "image_patch_id": IMAGE,
            "image_start_token_id": 61,
            "image_end_token_id": 62,
            "low_res_image_start_token_id": 57,
            "vision_config": VIT | {"image_size": [8, 8], "head_dim": 8, "num_key_value_heads": 2},
            "adapter_config": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
            | {"vision_feature_layer": [-1, 0], "intermediate_size": 24, "text_hidden_size": 32},
            "text_config": TEXT | {"head_dim": 8, "additional_vocab_size": 8, "rope_scaling_layers": [0]},
        },
    ),
    "nemotron-omni": (
        "NemotronH_Omni_Reasoning_V3",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": 58,
            "projector_hidden_size": 24,
            "vision_hidden_size": 16,
            "vision_config": of(
                "radio",
                {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1.5}
                | {"patch_size": 4, "image_size": 16, "max_img_size": 32, "video_temporal_patch_size": 2},
            ),
            "text_config": of("nemotron_h", TEXT | NEMOTRON | {"num_hidden_layers": 4}),
        },
    ),
    "minicpm4.6": (
        "MiniCPMV4_6ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "insert_layer_id": 1,
            "vision_config": MINI_VIT,
            "text_config": of("qwen3_5_text", TEXT | LINEAR | {"rope_parameters": MROPE}),
        },
    ),
    "minicpm4.7": (
        "MiniCPMV4_7ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "insert_layer_id": 1,
            "vision_config": MINI_VIT,
            "text_config": of("qwen3_5_text", TEXT | LINEAR | {"rope_parameters": MROPE}),
        },
    ),
    "minicpm-ocr": (
        "MiniCPMOcrForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "insert_layer_id": 1,
            "vision_config": MINI_VIT,
            "text_config": of("qwen3_5_text", TEXT | LINEAR | {"rope_parameters": MROPE}),
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForConditionalGeneration",
        TOKENS
        | {
            "vision_config": QWEN
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16},
            "text_config": TEXT
            | LINEAR
            | EXPERTS
            | {"num_experts": 4, "rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        },
    ),
    "video-llama3": (
        "VideoLlama3ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_config": VIT,
            "text_config": of("qwen2", TEXT),
        },
    ),
    "qwen2.5-omni": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        TOKENS
        | {
            "audio_token_id": 58,
            "audio_start_token_id": 57,
            "audio_end_token_id": 56,
            "audio_config": AUDIO | {"max_source_positions": 8, "n_window": 2, "output_dim": 32},
            "vision_config": QWEN
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16}
            | {"fullatt_block_indexes": [1]},
            "text_config": TEXT | {"rope_parameters": MROPE},
        },
    ),
    "qwen3-omni": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        TOKENS
        | {
            "audio_token_id": 58,
            "audio_start_token_id": 57,
            "audio_end_token_id": 56,
            "audio_config": AUDIO
            | {"max_source_positions": 8, "n_window": 2, "output_dim": 32}
            | {"downsample_hidden_size": 8},
            "vision_config": QWEN
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16}
            | {"deepstack_visual_indexes": [0, 1]},
            "text_config": TEXT
            | EXPERTS
            | {"num_experts": 4, "head_dim": 8, "rope_parameters": MROPE, "num_hidden_layers": 3},
        },
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": VIT,
            "qformer_config": QFORMER,
            "text_config": of("opt", OPT),
            "image_token_index": IMAGE,
            "num_query_tokens": 4,
        },
    ),
    "instructblip": (
        "InstructBlipForConditionalGeneration",
        {
            "vision_config": VIT,
            "qformer_config": QFORMER,
            "text_config": of("llama", TEXT),
            "image_token_index": IMAGE,
            "num_query_tokens": 4,
        },
    ),
    "instructblipvideo": (
        "InstructBlipVideoForConditionalGeneration",
        {
            "vision_config": VIT,
            "qformer_config": QFORMER,
            "text_config": of("llama", TEXT),
            "video_token_index": IMAGE,
            "num_query_tokens": 2,
        },
    ),
    "paligemma1": (
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": of("siglip_vision_model", VIT | {"vision_use_head": False}),
            "text_config": of("gemma", TEXT | {"head_dim": 8}),
            "image_token_index": IMAGE,
            "projection_dim": 32,
        },
    ),
}
assert VOCAB == 64

QWENS = ("glm4.6v", "glm4.5v", "qwen3.5-moe", "qwen2.5-omni", "qwen3-omni")
"""Families whose images lie between two tokens, and come as Qwen's do."""

COUNTS = dict.fromkeys(SPECS, 4) | {"deepseek-ocr2": 5, "unlimited-ocr": 3, "minicpm4.6": 1, "minicpm4.7": 1}
ALWAYS = ("blip-2", "instructblip", "instructblipvideo")
"""Families that must have an image in every call, of which no engine is."""

TYPED = ("hunyuan-vl", "gemma4-unified", "molmo2", "minicpm4.7")
"""Families that are told which tokens are of images."""


def tweaked(name, model):
    """A model whose sizes are not all in its config."""
    if name == "deepseek-ocr2":
        model.model.vision_tower.query_768_resolution = torch.nn.Embedding(4, 16)
    return model


def inputs(name, many, noise):
    """Images, as a family's processor gives them."""
    if name == "hunyuan-vl":
        return {"pixel_values": noise(many * 4, 48), "image_grid_thw": torch.tensor([[1, 2, 2]] * many)}
    if name in ALWAYS:
        pixels = noise(many, *([2] if name == "instructblipvideo" else []), 3, 8, 8)
        asked = {} if name == "blip-2" else {"qformer_input_ids": torch.arange(many * 5).view(many, 5) % 50 + 3}
        return {"pixel_values": pixels} | asked
    if name == "step3.7":
        return {"pixel_values": noise(many, 3, 16, 16)}
    if name == "unlimited-ocr":
        return {"pixel_values": noise(many, 3, 16, 16)}
    if name == "deepseek-ocr2":
        return {"pixel_values": noise(many, 3, 32, 32)}
    if name == "gemma4-unified":
        places = torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(many, 4, 2)
        return {"pixel_values": noise(many, 4, 48), "image_position_ids": places}
    if name == "molmo2":
        pooled = torch.arange(many * 4).view(-1, 1).expand(-1, 2).clone()
        pooled[::3, 1] = -1
        pooled[1::3, 1] -= 1
        grids = {"image_token_pooling": pooled, "image_grids": torch.tensor([[1, 2, 1, 2]] * many)}
        return {"pixel_values": noise(many, 4, 48), "image_num_crops": torch.ones(many).long()} | grids
    if name == "nemotron-omni":
        return {"pixel_values": noise(many * 16, 48), "image_grid_hw": torch.tensor([[4, 4]] * many)}
    if name.startswith("minicpm"):
        return {"pixel_values": noise(1, 3, 4, many * 16 * 4), "target_sizes": torch.tensor([[4, 4]] * many)}
    if name == "video-llama3":
        grids = {"image_grid_thw": torch.tensor([[1, 4, 4]] * many), "image_merge_sizes": torch.tensor([2] * many)}
        return {"pixel_values": noise(many * 16, 48)} | grids
    return None
