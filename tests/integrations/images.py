"""Tiny models with towers, one of each family, and batches of text and images (or sounds) for them."""

import copy
import functools
import warnings

import torch
import transformers

from tests.integrations import more_images, recent_images
from tests.integrations.families import BUILDING
from tests.integrations.sizes import AUDIO, END, IMAGE, MIXED, MROPE, QWEN, START, TEXT, TOKENS, VIDEO, VIT, VOCAB, of

SPECS = (
    {
        "llava": (
            "LlavaForConditionalGeneration",
            {
                "vision_config": of("clip_vision_model", VIT | {"projection_dim": 16}),
                "text_config": of("llama", TEXT),
                "image_token_index": IMAGE,
                "vision_feature_layer": -1,
            },
        ),
        "paligemma": (
            "PaliGemmaForConditionalGeneration",
            {
                "vision_config": of("siglip_vision_model", VIT | {"vision_use_head": False}),
                "text_config": of("gemma2", TEXT | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
                "image_token_index": IMAGE,
                "projection_dim": 32,
            },
        ),
        "gemma3": (
            "Gemma3ForConditionalGeneration",
            {
                "vision_config": of("siglip_vision_model", VIT | {"vision_use_head": False}),
                "text_config": of("gemma3_text", TEXT | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
                "image_token_index": IMAGE,
                "mm_tokens_per_image": 4,
            },
        ),
        "qwen2-vl": (
            "Qwen2VLForConditionalGeneration",
            TOKENS
            | {
                "vision_config": QWEN | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
                "text_config": TEXT | {"rope_parameters": MROPE},
            },
        ),
        "qwen2.5-vl": (
            "Qwen2_5_VLForConditionalGeneration",
            TOKENS
            | {
                "vision_config": QWEN
                | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16}
                | {"fullatt_block_indexes": [1]},
                "text_config": TEXT | {"rope_parameters": MROPE},
            },
        ),
        "qwen3-vl": (
            "Qwen3VLForConditionalGeneration",
            TOKENS
            | {
                "vision_config": QWEN
                | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16}
                | {"deepstack_visual_indexes": [0, 1]},
                "text_config": TEXT | {"rope_parameters": MROPE, "head_dim": 8, "num_hidden_layers": 3},
            },
        ),
        "qwen3.5": (
            "Qwen3_5ForConditionalGeneration",
            TOKENS
            | {
                "vision_config": QWEN
                | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16},
                "text_config": TEXT
                | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}, "head_dim": 8}
                | {"layer_types": ["linear_attention", "full_attention"]}
                | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
                | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            },
        ),
        "smolvlm": (
            "SmolVLMForConditionalGeneration",
            {
                "vision_config": of("smolvlm_vision", VIT),
                "text_config": of("llama", TEXT),
                "image_token_id": IMAGE,
                "scale_factor": 2,
            },
        ),
        "internvl": (
            "InternVLForConditionalGeneration",
            {
                "vision_config": VIT | {"image_size": [8, 8], "patch_size": [4, 4]},
                "text_config": of("qwen2", TEXT),
                "image_token_id": IMAGE,
                "downsample_ratio": 0.5,
            },
        ),
        "mistral3": (
            "Mistral3ForConditionalGeneration",
            {
                "vision_config": of("pixtral", VIT | {"head_dim": 8, "image_size": 16}),
                "text_config": of("mistral", TEXT | {"sliding_window": None, "head_dim": 8}),
                "image_token_index": IMAGE,
                "vision_feature_layer": -1,
                "spatial_merge_size": 2,
            },
        ),
        "aya": (
            "AyaVisionForConditionalGeneration",
            {
                "vision_config": of("siglip_vision_model", VIT | {"vision_use_head": False}),
                "text_config": of("cohere2", TEXT | MIXED),
                "image_token_index": IMAGE,
                "downsample_factor": 2,
                "adapter_layer_norm_eps": 1e-5,
            },
        ),
        "glm4v": (
            "Glm4vForConditionalGeneration",
            TOKENS
            | {
                "image_start_token_id": START,
                "image_end_token_id": END,
                "vision_config": QWEN
                | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "image_size": 16},
                "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
            },
        ),
        "gemma4": (
            "Gemma4ForConditionalGeneration",
            {
                "vision_config": of(
                    "gemma4_vision",
                    {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
                    | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
                    | {"global_head_dim": 8, "position_embedding_size": 16},
                ),
                "text_config": of(
                    "gemma4_text",
                    TEXT
                    | MIXED
                    | {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
                    | {"vocab_size_per_layer_input": VOCAB, "use_bidirectional_attention": "vision"},
                ),
                "audio_config": None,
                "image_token_id": IMAGE,
                "video_token_id": VIDEO,
                "audio_token_id": AUDIO,
            },
        ),
        "qwen2-audio": (
            "Qwen2AudioForConditionalGeneration",
            {
                "audio_config": of(
                    "qwen2_audio_encoder",
                    {"num_mel_bins": 8, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2}
                    | {"encoder_ffn_dim": 24, "max_source_positions": 8},
                ),
                "text_config": of("qwen2", TEXT),
                "audio_token_index": AUDIO,
            },
        ),
        "voxtral": (
            "VoxtralForConditionalGeneration",
            {
                "audio_config": of(
                    "voxtral_encoder",
                    {"num_mel_bins": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
                    | {"intermediate_size": 64, "max_source_positions": 8},
                ),
                "text_config": of("llama", TEXT),
                "audio_token_id": AUDIO,
            },
        ),
    }
    | recent_images.SPECS
    | more_images.SPECS
)


@functools.cache
def _built(name):
    transformers.logging.set_verbosity_error()
    model, sizes = (SPECS | more_images.REFUSED)[name]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        cls = getattr(transformers, model)
        built = cls(cls.config_class(**copy.deepcopy(sizes), attn_implementation="eager"))
        built = recent_images.tweaked(name, built)
        for parameter in built.parameters():  # zeros and ones would hide what is left out
            torch.nn.init.normal_(
                parameter, std=0.2
            ) if parameter.dim() < 2 or not parameter.any() else parameter.data.mul_(5)
    return built


def family(name):
    """A model, in training mode, of its own."""
    with BUILDING:
        return copy.deepcopy(_built(name)).train()


QWENS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "glm4v", *recent_images.QWENS, *more_images.QWENS)
COUNTS = {"llava": 4, "paligemma": 4, "gemma3": 4, "smolvlm": 1, "internvl": 1, "aya": 1, "gemma4": 4}
COUNTS |= (
    {"qwen2-audio": 4, "voxtral": 2, "mistral3": 2}
    | dict.fromkeys(QWENS, 4)
    | recent_images.COUNTS
    | more_images.COUNTS
)


def batch(name, *, images=((2, 11), (6,)), length=23, seed=0):
    """A batch of text with the images of each row at some places."""
    drawn = torch.Generator().manual_seed(seed)
    if name in recent_images.ALWAYS and not any(images):
        images = ((2,), *images[1:])
    rows = len(images)
    tokens = torch.randint(1, 50, (rows, length), generator=drawn)
    special, count = AUDIO if name in ("qwen2-audio", "voxtral") else IMAGE, COUNTS[name]
    for row, places in enumerate(images):
        for place in places:
            tokens[row, place : place + count] = special
            if name in QWENS:
                tokens[row, place - 1], tokens[row, place + count] = START, END
    labels = tokens.masked_fill(tokens >= 50, -100)
    given = {"input_ids": tokens, "labels": labels}
    many = sum(map(len, images))
    types = (tokens == special).long()
    if name in (*QWENS, "gemma4", *recent_images.TYPED) and name not in ("qwen2.5-omni", "qwen3-omni"):
        given["mm_token_type_ids"] = types
    if name == "ernie4.5-vl":
        given["moe_mm_token_type_ids"] = types | (tokens == START) | (tokens == END)
    if name == "gemma3":
        given["token_type_ids"] = types
    if name.startswith("paligemma"):
        given["token_type_ids"] = (torch.arange(length) >= 17).long().expand(rows, length).clone()
    return given | (inputs(name, images, many, drawn) if many else {})


def inputs(name, images, many, drawn):
    """Images, as a family's processor gives them."""

    def noise(*shape):
        return torch.randn(*shape, generator=drawn)

    more = more_images.inputs(name, many, noise)
    if more is not None:
        return more
    if name in QWENS:
        return {
            "pixel_values": noise(many * 16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * many),
        }
    recent = recent_images.inputs(name, many, noise)
    if recent is not None:
        return recent
    if name in ("smolvlm", "idefics2"):
        most = max(map(len, images))
        pixels = torch.zeros(len(images), most, 3, 8, 8)
        for row, places in enumerate(images):
            pixels[row, : len(places)] = noise(len(places), 3, 8, 8)
        return {"pixel_values": pixels}
    if name == "mistral3":
        return {"pixel_values": noise(many, 3, 8, 16), "image_sizes": torch.tensor([[8, 16]] * many)}
    if name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(many, 16, 2)
        return {"pixel_values": noise(many, 16, 48).sigmoid(), "image_position_ids": places}
    if name == "qwen2-audio":
        return {"input_features": noise(many, 8, 16), "feature_attention_mask": torch.ones(many, 16).long()}
    if name == "voxtral":
        return {"input_features": noise(many, 8, 16)}
    return {"pixel_values": noise(many, 3, 8, 8)}
