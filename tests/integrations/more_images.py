"""More tiny models with towers, as `recent_images.SPECS`; most are tried under `slow` alone."""

import torch

from tests.integrations.sizes import END, IMAGE, MIXED, MROPE, QWEN, START, TEXT, TOKENS, VIDEO, VIT, VOCAB, of

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
KEYED = of("clip_vision_model", VIT | {"projection_dim": 16})
SIGLIP = of("siglip_vision_model", VIT | {"vision_use_head": False})
GRID = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
DEEP = QWEN | GRID | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
WINDOWED = QWEN | GRID | {"window_size": 16, "fullatt_block_indexes": [1]}
SPAN = {"image_start_token_id": START, "image_end_token_id": END}
MUSE_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MUSE_VIT |= {"patch_size": 4, "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4}
WIDE = {"hidden_size": 64, "num_attention_heads": 2}
QUERIES = {"intermediate_size": 24, "num_hidden_layers": 1, "cross_attention_frequency": 1}
QUERIES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_qformer_text_input": False}
QUERIES |= {"max_position_embeddings": 16}

SPECS = {
    "kimi-k2.5": (
        "Kimi_K25ForConditionalGeneration",
        TOKENS
        | {
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
            "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
            "text_config": of("deepseek_v3", TEXT | MLA | EXPERTS | {"num_key_value_heads": 4}),
        },
    ),
    "cohere-compass": (
        "CohereCompassForConditionalGeneration",
        TOKENS
        | {
            "vision_config": DEEP,
            "text_config": TEXT
            | MIXED
            | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
            | {"logit_scale": 0.5}
            | {
                "rope_parameters": {
                    "sliding_attention": MROPE,
                    "full_attention": MROPE | {"rope_theta": 5000.0},
                }
            },
        },
    ),
    "exaone4.5": (
        "Exaone4_5_ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_config": WINDOWED | {"num_key_value_heads": 1},
            "text_config": of("exaone4", TEXT | MIXED | {"head_dim": 8}),
        },
    ),
    "hyperclovax": (
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
            "vision_config": of("qwen2_5_vl_vision", WINDOWED | {"out_hidden_size": 24}),
            "text_config": of("hyperclovax", TEXT | {"head_dim": 8}),
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        TOKENS
        | {
            "vision_config": DEEP,
            "text_config": TEXT
            | {"rope_parameters": MROPE, "head_dim": 8, "num_hidden_layers": 3}
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
    ),
    "cosmos3-omni": (
        "Cosmos3OmniForConditionalGeneration",
        TOKENS
        | {
            "vision_config": of("qwen3_vl_vision", DEEP),
            "text_config": of(
                "qwen3_vl_text", TEXT | {"rope_parameters": MROPE, "head_dim": 8, "num_hidden_layers": 3}
            ),
        },
    ),
    "glm-ocr": (
        "GlmOcrForConditionalGeneration",
        TOKENS
        | SPAN
        | {
            "vision_config": QWEN | GRID | {"image_size": 16},
            "text_config": TEXT | {"head_dim": 8, "rope_parameters": MROPE},
        },
    ),
    "paddleocr-vl": (
        "PaddleOCRVLForConditionalGeneration",
        TOKENS
        | {
            "tie_word_embeddings": False,
            "vision_config": VIT | {"image_size": 16},
            "text_config": TEXT | {"head_dim": 8, "rope_parameters": MROPE},
        },
    ),
    "ernie4.5-vl": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        TOKENS
        | SPAN
        | {
            "tie_word_embeddings": False,
            "vision_config": {key: value for key, value in QWEN.items() if key != "temporal_patch_size"}
            | {"hidden_size": 16, "intermediate_size": 24},
            "text_config": TEXT
            | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}, "moe_num_experts": 4, "moe_k": 2}
            | {"moe_num_shared_experts": 1, "moe_intermediate_size": [16, 24], "num_hidden_layers": 3}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        },
    ),
    "muse-glimmer": (
        "MuseGlimmerForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "out_hidden_size": 64,
            "projector_hidden_size": 24,
            "vision_config": MUSE_VIT,
            "text_config": TEXT | MIXED | {"head_dim": 8},
        },
    ),
    "cohere2-vision": (
        "Cohere2VisionForConditionalGeneration",
        {
            "vision_config": SIGLIP | {"image_size": 16},
            "text_config": of("cohere2", TEXT | MIXED),
            "image_token_id": IMAGE,
            "alignment_intermediate_size": 48,
        },
    ),
    "vip-llava": (
        "VipLlavaForConditionalGeneration",
        {
            "vision_config": KEYED,
            "text_config": of("llama", TEXT),
            "image_token_index": IMAGE,
            "vision_feature_layers": [-1, -2],
        },
    ),
    "llava-next": (
        "LlavaNextForConditionalGeneration",
        {
            "vision_config": KEYED | {"patch_size": 8},
            "text_config": of("llama", TEXT),
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "image_grid_pinpoints": [[8, 16], [16, 8]],
        },
    ),
    "llava-next-video": (
        "LlavaNextVideoForConditionalGeneration",
        {
            "vision_config": KEYED | {"patch_size": 8},
            "text_config": of("llama", TEXT),
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "vision_feature_layer": -1,
            "image_grid_pinpoints": [[8, 16], [16, 8]],
        },
    ),
    "llava-onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {
            "vision_config": SIGLIP | {"patch_size": 8},
            "text_config": of("qwen2", TEXT),
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[8, 16], [16, 8]],
        },
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        {
            "vision_config": VIT,
            "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1}
            | {"resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1},
            "text_config": of("mistral", TEXT | {"sliding_window": 5, "head_dim": 8}),
            "image_token_id": IMAGE,
        },
    ),
    "fuyu": (
        "FuyuForCausalLM",
        {"text_config": of("persimmon", TEXT), "image_token_id": IMAGE, "patch_size": 4, "image_size": 8},
    ),
    "aria": (
        "AriaForConditionalGeneration",
        {
            "vision_config": of("idefics3_vision", VIT),
            "text_config": TEXT | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            "image_token_index": IMAGE,
            "projector_patch_to_query_dict": {4: 4},
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "vision_config": {key: value for key, value in VIT.items() if key != "projection_dim"}
            | {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
            | {"image_size": 16, "rope_parameters": ROPE},
            "text_config": TEXT
            | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
            | {"no_rope_layer_interval": 2, "attention_chunk_size": 5, "floor_scale": 4},
            "image_token_index": IMAGE,
        },
    ),
    "muse-spark": (
        "MuseSparkForConditionalGeneration",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "out_hidden_size": 64,
            "projector_hidden_size": 24,
            "vision_config": MUSE_VIT,
            "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1]}
            | {"num_hidden_layers": 2, "conv_kernel_size": 3, "out_hidden_size": 32},
            "text_config": TEXT
            | MIXED
            | {"head_dim": 8, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {"moe_hidden_size": 16, "mlp_layer_types": ["dense", "sparse"]},
        },
    ),
    "janus": (
        "JanusForConditionalGeneration",
        {
            "vision_config": VIT | {"mlp_ratio": 1.5, "projection_dim": 32, "num_image_tokens": 4},
            "vq_config": {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32}
            | {"channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 16, "image_token_embed_dim": 16},
            "text_config": of("llama", TEXT),
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
        },
    ),
    "emu3": (
        "Emu3ForConditionalGeneration",
        {
            "vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": 57}
            | {f"<|visual token {code:06}|>": 30 + code for code in range(16)},
            "vq_config": {"codebook_size": 16, "latent_channels": 4, "embed_dim": 4, "base_channels": 32}
            | {"channel_multiplier": [1, 1], "num_res_blocks": 1, "hidden_size": 32},
            "text_config": TEXT | {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "deepseek-vl-hybrid": (
        "DeepseekVLHybridForConditionalGeneration",
        {
            "vision_config": SIGLIP,
            "high_res_vision_config": of(
                "sam_vision_model",
                {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
                | {"patch_size": 4, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 24},
            ),
            "text_config": of("llama", TEXT),
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
        },
    ),
    "granite4-vision": (
        "Granite4VisionForConditionalGeneration",
        {
            "vision_config": SIGLIP | WIDE,
            "qformer_config": of("blip_2_qformer", QUERIES),
            "text_config": of(
                "granite4_vision_text",
                TEXT | {"num_hidden_layers": 6, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            ),
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[8, 16], [16, 8]],
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 0], [-1, 1]],
            "spatial_target_layers": [2, 3, 4, 5],
            "projector_dropout": 0.0,
        },
    ),
}
REFUSED = {
    "kosmos-2.5": (
        "Kosmos2_5ForConditionalGeneration",
        {
            "text_config": {"vocab_size": VOCAB, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4}
            | {"max_position_embeddings": 64, "dropout": 0.0},
            "vision_config": {"hidden_size": 16, "patch_embed_hidden_size": 48, "intermediate_size": 24}
            | {"head_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_num_patches": 4},
            "latent_query_num": 4,
            "tie_word_embeddings": False,
        },
    ),
}
"""Families whose decoder puts images among the tokens by itself."""

QWENS = ("cohere-compass", "qwen3-vl-moe", "cosmos3-omni", "glm-ocr", "paddleocr-vl", "ernie4.5-vl")
"""Families whose images lie between two tokens, and are counted in three dimensions."""

GRIDDED = ("exaone4.5", "hyperclovax", "muse-glimmer", "muse-spark")
"""Families whose images come as Qwen's do, of which positions know nothing."""

TILED = ("llava-next", "llava-next-video", "llava-onevision", "granite4-vision")
DAILY = ("kimi-k2.5", "cohere-compass")
SELDOM = tuple(name for name in SPECS if name not in DAILY)

COUNTS = dict.fromkeys(SPECS, 4)


def inputs(name, many, noise):
    """Images, as a family's processor gives them."""
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * many)}
    if name in ("kimi-k2.5", "paddleocr-vl"):
        return {"pixel_values": noise(many * 16, 3, 4, 4)} | grid
    if name == "ernie4.5-vl":
        return {"pixel_values": noise(many * 16, 48)} | grid
    if name in (*QWENS, *GRIDDED):
        return {"pixel_values": noise(many * 16, 96)} | grid
    if name in ("cohere2-vision", "llama4"):
        return {"pixel_values": noise(many, 3, 16, 16)}
    if name in TILED:
        return {"pixel_values": noise(many, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16]] * many)}
    if name == "emu3":
        return {"pixel_values": noise(many, 3, 4, 2), "image_sizes": torch.tensor([[4, 2]] * many)}
    if name == "deepseek-vl-hybrid":
        return {"pixel_values": noise(many, 3, 8, 8), "high_res_pixel_values": noise(many, 3, 16, 16)}
    if name == "fuyu":
        return {"pixel_values": noise(many * 4, 48)}
    return None
