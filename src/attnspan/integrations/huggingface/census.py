"""What becomes of every family of the installed transformers: whether it is trained over ranks, and generated with.

A family is a model type of transformers. It is built from its default config on the meta device, in its real size and
without weights, and asked what a user would ask: `enable` on one rank, an engine's model, and a forward pass in which
attention computes nothing (probe.py). What is raised is the reason; None means served. A check that breaks off with an
error of another kind is a defect here, and its reason begins with "check failed".

>>> family("causal", "mistral")
FamilyReport(name='mistral', kind='causal', model='MistralForCausalLM', training=None, generation=None)

[Note: questions] Models ask a few questions about numbers, which meta tensors do not have: whether positions go up by
one, whether an attention_mask is all ones. Of the two tokens of a probe the answer is the ordinary one: ``all`` and
``<=`` are True, ``any`` is False (`_Ordinary`). The families of `SMALL` ask for more; they are built small, on the CPU.

[Note: default configs] Some defaults lack what their models need, as a number of experts; transformers does not build
them either. `LACKING` completes those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
import transformers
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from attnspan.errors import AttnspanError, ModelError, one_of
from attnspan.integrations.huggingface.enabling import enable
from attnspan.integrations.huggingface.probe import probe_pass
from attnspan.integrations.huggingface.transformers_model import TransformersModel
from attnspan.testing import loopback

Kind = Literal["causal", "image-text"]

MAPPINGS: Mapping[Kind, Mapping[str, str | tuple[str, ...]]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""The families of each kind, and the names of their classes."""

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_COMPASS = {"rope_parameters": {"full_attention": _ROPE}}
_INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 16}
_GLM_ROPE = _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_GLM = {"text_config": {"rope_parameters": _GLM_ROPE}}
_HUNYUAN_ROPE = _ROPE | {"mrope_section": [16, 16, 16, 16]}
_QWEN4 = {f"indexer_{name}": value for name, value in _INDEXER.items()}

LACKING: dict[str, Mapping[str, object]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "blip-2": {"image_token_index": 50265},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31, "num_experts_per_tok": 6}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "emu3": {"vocabulary_map": {"<image>": 151859, "<|extra_200|>": 151848, "<|extra_201|>": 151849}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glmga": _GLM,
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-19, 9], [-13, 6], [-7, 3], [-1, 0]]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _HUNYUAN_ROPE}},
    "instructblip": {"image_token_index": 50265},
    "instructblipvideo": {"video_token_index": 50265},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
}
"""See [Note: default configs]."""

_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
_STEP: dict[str, object] = {"intermediate_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
_STEP |= {"moe_intermediate_size": 16, "share_expert_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_STEP |= {"sliding_window": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3]}
_STEP_VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 2}
_EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2}

SMALL: dict[str, Mapping[str, object]] = {
    "dbrx": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    | {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}}
    | {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48} | _EXPERTS},
    "jetmoe": _SIZES | {"num_hidden_layers": 2, "intermediate_size": 48, "kv_channels": 8, "num_key_value_heads": 2},
    "longcat_flash": _SIZES
    | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2},
    "step3p7": {"vision_config": _STEP_VIT, "text_config": _SIZES | _STEP},
    "xmod": _SIZES | {"num_hidden_layers": 2, "intermediate_size": 48, "default_language": "en_XX"},
}
"""See [Note: questions]."""


_IMAGE = (1, 3, 224, 224)

NEEDED: dict[str, dict[str, tuple[int, ...]]] = {
    "blip-2": {"pixel_values": _IMAGE},
    "instructblip": {"pixel_values": _IMAGE, "qformer_input_ids": (1, 2)},
    "instructblipvideo": {"pixel_values": (1, 2, 3, 224, 224), "qformer_input_ids": (1, 2)},
    "kosmos-2": {"pixel_values": _IMAGE},
}
"""What models must be given beside tokens, by its shape; of two dims it is tokens."""


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """What becomes of a family in training and in generation: None if it is served, or the reason why not."""

    name: str
    kind: Kind
    model: str
    training: str | None
    generation: str | None


def kinds(wanted: str = "all") -> list[Kind]:
    """The kinds that are meant by a name, or by "all"."""
    one_of("kind", wanted, [*MAPPINGS, "all"], error=ModelError)
    return [kind for kind in MAPPINGS if wanted in (kind, "all")]


def families(kind: Kind) -> list[str]:
    """The names of all families of a kind."""
    return sorted(MAPPINGS[kind])


def family(kind: Kind, name: str) -> FamilyReport:
    """A family of the installed transformers, checked."""
    mapping = MAPPINGS[kind]
    found = mapping[one_of("name", name, list(mapping), error=ModelError)]
    model = found if isinstance(found, str) else found[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built: list[PreTrainedModel] = []
        failed = _reason(lambda: built.append(_built(kind, name, model)), "not built")
        training = failed or _reason(lambda: _check_training(built[0].train()))
        generation = failed or _reason(lambda: _check_generation(built[0].eval()))
    return FamilyReport(name, kind, model, training, generation)


def default_config(name: str) -> PreTrainedConfig:
    """The default config of a model type, complete. See [Note: default configs]."""
    build: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[name]
    return build(**(LACKING | SMALL).get(name, {}))


def config_of(kind: Kind, name: str, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """The default config of a family for a class of models: that of its text, for one that is of text alone."""
    config, wanted = default_config(name), cls.config_class
    if kind != "causal" or wanted is None or isinstance(config, wanted):
        return config
    part = config.get_text_config(decoder=True)
    return default_config(part.model_type) if part.model_type in CONFIG_MAPPING else part


def _built(kind: Kind, name: str, model: str) -> PreTrainedModel:
    """A family's model on the meta device."""
    cls = getattr(transformers, model)
    config = config_of(kind, name, cls)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder and kind == "causal":
        config.is_decoder = True  # BERT and its kin, of which a causal model asks it
    device = "cpu" if name in SMALL else "meta"
    with torch.device(device):
        built: PreTrainedModel = cls._from_config(config).to(device)
    built.set_experts_implementation("batched_mm")  # which does not look at numbers
    return built


def _reason(check: Callable[[], object], failed: str = "check failed") -> str | None:
    """Why a check refuses, in one line; None if it does not."""
    try:
        check()
    except AttnspanError as refusal:
        return " ".join(str(refusal).removesuffix("on virtual rank 0").split())
    except Exception as error:
        said = " ".join(str(error).split())
        return f"{failed}: {type(error).__name__}: {said[:200]}"
    return None


def _check_training(model: PreTrainedModel) -> None:
    """Refuse a model that `enable` refuses, when it begins or in a pass."""
    (handle,) = loopback(1).run(lambda world: enable(model, world))
    handle.disable()
    device = next(model.parameters()).device
    shapes = NEEDED.get(model.config.model_type, {})
    tokens, numbers = torch.int64, torch.float32
    with _Ordinary():
        beside = {
            name: torch.zeros(shape, dtype=tokens if len(shape) == 2 else numbers, device=device)
            for name, shape in shapes.items()
        }
        probe_pass(model, handle.layers, **beside)


def _check_generation(model: PreTrainedModel) -> None:
    """Refuse a model that an engine refuses."""
    with _Ordinary():
        TransformersModel(model)


class _Ordinary(TorchDispatchMode):
    """See [Note: questions]."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.answers: MutableMapping[object, bool] = WeakTensorKeyDictionary()  # of tensors without numbers

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if torch.Tag.data_dependent_output in func.tags and args[0] in self.answers:
            return self.answers[args[0]]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.all, torch.ops.aten.le, torch.ops.aten.any) and out.is_meta:
            self.answers[out] = func.overloadpacket is not torch.ops.aten.any
        return out
