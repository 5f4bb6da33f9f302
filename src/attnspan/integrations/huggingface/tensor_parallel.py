"""Tensor parallel models: layers whose heads lie on several ranks, by the `tp_plan` of transformers.

transformers makes weights DTensors, of which each rank has a shard, and wraps the forward of their modules: a
column-wise layer gives the features of this rank, a row-wise one adds up the results of all. In between, attention sees
the heads of this rank. `load_tensor_parallel` loads a model so, on one axis of a mesh. A model is recognised by its
DTensors, whoever made them.

An engine needs to know which ranks compute the model together, and how many key heads this one has. The second is
noted where heads are seen, in a probe of the model. Refused by name is what a head must know of its place among all
heads, such as ALiBi, and what is cut otherwise than into whole heads.

[Note: one key head] Each rank needs all of a single key head: its projections stay whole, and each rank's pages hold
it. That is for generation; in training its gradient would be a sum over ranks.

[Note: loading] `from_pretrained` reads of each file what belongs to this rank, and makes a mesh of all processes. A
subclass, which the model leaves when it is loaded, hands it the mesh that is meant.

[Note: fused weights] Some families have files in which several weights are one tensor. `from_pretrained` takes this
rank's part of that tensor, and divides it afterwards: the parts are rows of other weights (found with HrmText of 5.22).
Such a family is refused. Weights that are joined, as those of experts are, are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnspan.errors import AttnspanError, ModelError
from attnspan.integrations.huggingface.adapters import adapted, adapters_in_use
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.parallel.dtensors import PLAIN, is_dtensor

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.served_layers import ServedLayers

AXIS = "tp"
"""The axis of a mesh that heads are spread over."""

KEYS = ("k_proj", "v_proj")
"""Projections to keys and values, by their names in the plans of transformers."""


def load_tensor_parallel(
    name: str, mesh: DeviceMesh, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal model from a folder, or from the Hub, tensor parallel over the axis "tp" of a mesh.

    ::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "tp"))
        engine = Engine(load_tensor_parallel("./my-model", mesh), mesh=mesh)

    Each rank reads its part of the weights from their files, and none has all of them. The model is in eval mode.
    ModelError for a model without a plan, or one whose heads cannot be dealt to so many ranks.
    """
    from transformers.distributed import DistributedConfig

    names = mesh.mesh_dim_names or ()
    if AXIS not in names:
        raise ModelError(f"mesh must have an axis {AXIS!r}, got {mesh!r}")
    axis = mesh[AXIS]
    config = _config_for(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code), trust_remote_code)
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    sharded = DistributedConfig(tp_size=axis.size(), tp_plan=_plan_for(empty, axis.size()) or None)
    own = type(empty)
    bases, entries = (_OnAxis, own), {"__module__": own.__module__, "axis": axis}
    on_axis = cast("type[PreTrainedModel]", type(own.__name__, bases, entries))  # see [Note: loading]
    model: PreTrainedModel = on_axis.from_pretrained(name, config=config, dtype=dtype, distributed_config=sharded)
    model.__class__ = own
    model.eval()
    return model


def _config_for(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedConfig:
    """What a causal model is made of: a config, or the text's in it. ModelError for a config of other models."""
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            return config
        raise ModelError(
            f"a {kind.__name__} is not of a causal model, by transformers' AutoModelForCausalLM, and others are not "
            "loaded tensor parallel; load it whole, and spread pages over the ranks"
        )
    wanted = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[kind], "config_class", kind)
    if wanted != config.sub_configs.get("text_config"):
        return config
    text = config.get_text_config()
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised  # as AutoModelForCausalLM does; it is refused next
    return text


class _OnAxis:
    """What loads a model on an axis of a mesh that is there already. See [Note: loading]."""

    axis: DeviceMesh

    @classmethod
    def prepare_distribute_model(cls, config: object, device_map: object) -> tuple[object, torch.device, _Axis]:
        """The config, where weights go, and the mesh."""
        return config, torch.empty(0, device=cls.axis.device_type).device, _Axis(cls.axis)


class _Axis:
    """A mesh of one axis in the place of transformers' meshes of several."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def get_mesh(self, dims: object) -> DeviceMesh:
        """The one axis, whatever is asked for."""
        return self.mesh


def _plan_for(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """What is other than in the model's own plan; ModelError if it cannot be applied to so many ranks."""
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    name, plan = type(model).__name__, model.tp_plan
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{name} has quantised weights, which are not loaded tensor parallel")
    if not any(key.rpartition(".")[2] != "lm_head" for key in plan):
        raise ModelError(
            f"{name} has no tp_plan in transformers, by which its layers would be dealt to ranks; load it whole, and "
            "spread pages over the ranks"
        )
    _check_files(model, plan)
    changed: dict[str, str] = {}
    for path, module, heads in _key_heads(model):
        wanted = f"{replace_layer_number_by_wildcard(path)}."
        if plan.get(f"{wanted}k_proj") != "colwise":
            continue
        if heads == 1:
            changed |= {f"{wanted}{each}": "replicate" for each in KEYS if f"{wanted}{each}" in plan}
        elif heads % ranks:
            raise ModelError(
                f"{path} ({type(module).__name__}) has {heads} key heads, which cannot be dealt to {ranks} ranks; take "
                f"a mesh whose axis {AXIS!r} divides them"
            )
    return changed


def _check_files(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """ModelError for a model with a weight that would be cut before it is made. See [Note: fused weights]."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    cut = []
    for name, _ in model.named_parameters():
        path = replace_layer_number_by_wildcard(name)
        if path in plan or path.rpartition(".")[0] in plan:
            cut.append(name)
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        if all(isinstance(each, Concatenate | MergeModulelist) for each in converter.operations):
            continue
        made = re.compile("|".join(_as_pattern(each) for each in converter.target_patterns))
        found = next(filter(made.search, cut), None)
        if found is not None:
            raise ModelError(
                f"{type(model).__name__} has files in which {found} is not a tensor of its own, and transformers cuts "
                "that before it divides it; load it whole, and spread pages over the ranks"
            )


def _as_pattern(target: str) -> str:
    """The names that a conversion of transformers may give, as a regular expression."""
    return re.sub(r"\\\*|\\\\\d", ".*", re.escape(target.strip("^$")))


def _key_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules that project to keys, their paths, and how many key heads they have."""
    for path, module in model.named_modules():
        key, dim = getattr(module, "k_proj", None), getattr(module, "head_dim", None)
        if isinstance(key, nn.Linear) and isinstance(dim, int):
            yield path, module, key.out_features // dim


# ---- what is found ---------------------------------------------------------------------------------------------------


def tensor_parallel_mesh(module: nn.Module) -> DeviceMesh | None:
    """The mesh of the DTensors of a module; None if it has none."""
    for parameter in module.parameters():
        if type(parameter) not in PLAIN and is_dtensor(parameter):
            return parameter.device_mesh
    return None


def on_this_rank(layer: AttentionLayer, query_heads: int, kv_heads: int, trains: bool) -> AttentionLayer:
    """A layer with the heads that it has here; ModelError unless its key heads are those of its query heads."""
    if (query_heads, kv_heads) == (layer.query_heads, layer.kv_heads):
        return layer
    check_heads(layer, query_heads, kv_heads, trains)
    return replace(layer, query_heads=query_heads, kv_heads=kv_heads)


def check_heads(layer: AttentionLayer, query_heads: int, kv_heads: int, trains: bool) -> None:
    """ModelError for heads on this rank, other than all of a layer, with which attention would be another."""
    in_step = query_heads * layer.kv_heads == kv_heads * layer.query_heads
    if not in_step and (trains or kv_heads != 1):  # see [Note: one key head]
        raise ModelError(
            f"{layer.name} has {query_heads} of its {layer.query_heads} query heads on this rank and {kv_heads} of its "
            f"{layer.kv_heads} key heads, which is not served: ranks that divide the key heads have those of their "
            "queries, and in training a single key head is on one rank"
        )
    for what, found in (("a bias by the number of a head", layer.bias), ("sinks", layer.sinks)):
        if found:
            raise ModelError(f"{layer.name} has {what}, which is not served where heads are on several ranks")


def check_tensor_parallel(model: PreTrainedModel, layers: ServedLayers) -> tuple[int, ...]:
    """The ranks that compute a model together, none if it is whole here; ModelError for what is not served so."""
    mesh = tensor_parallel_mesh(model)
    if mesh is None or _is_fully_sharded(model):
        return ()
    name = type(adapted(model)).__name__
    refused = {
        "recurrent layers": layers.mixers,
        "adapters of peft": getattr(model, "peft_config", None) or any(map(adapters_in_use, model.modules())),
        "an encoder": model.config.is_encoder_decoder,
        "quantised weights": getattr(adapted(model), "hf_quantizer", None),
    }
    found = next((what for what, has in refused.items() if has), None)
    if found is not None:
        raise ModelError(f"{name} is tensor parallel and has {found}, which an engine does not serve; load it whole")
    if mesh.ndim > 1 or any(is_dtensor(each) and each.device_mesh != mesh for each in model.parameters()):
        raise ModelError(
            f"{name} has weights on several meshes, or on one of several axes; an engine serves models that are "
            "tensor parallel over one axis, and not sharded otherwise"
        )
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


@contextmanager
def naming_failures(model: PreTrainedModel, tp_ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, a tensor parallel model is probed: what its own code raises there is a ModelError that names it."""
    try:
        yield
    except Exception as error:
        if not tp_ranks or isinstance(error, AttnspanError):
            raise
        raise ModelError(
            f"{type(adapted(model)).__name__} does not run tensor parallel over {len(tp_ranks)} ranks: {error}; load "
            "it whole, or take another number of ranks"
        ) from error


def _is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded it, which gathers weights before they are used: it computes all heads."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
