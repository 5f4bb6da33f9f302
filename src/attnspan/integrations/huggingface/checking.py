"""What of a model, or of a call of it, cannot be served, beside what its attention layers ask for (layers.py).

A rank has some of the tokens. So everything that is computed of one token by itself is right as it is, and the rest is
looked for here, by what transformers' classes are called and what their methods take::

    heads        that look at one token for all, such as the class of a text
    positions    must be told: a model that counts would count each rank's tokens from 0
    calls        that want what no rank has (weights of attention, the last logits), or a cache
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.attending import is_seated
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.parallel.attach import is_attached

HEADS = re.compile(r"((?<!PreTrained)Model|ForCausalLM|ForMaskedLM|ForTokenClassification|ForConditionalGeneration)$")
"""What is computed of each token by itself; other heads look at one token for all."""

REFUSED = {
    "output_attentions": "must be False: no rank has the weights of attention",
    "output_router_logits": "must be False: the balance of experts is a mean over all tokens, of which a rank has some",
    "logits_to_keep": "must be 0: which logits are the last is not the same on every rank",
}


def check_model(model: PreTrainedModel, layers: tuple[AttentionLayer, ...]) -> None:
    """Refuse a model for what it is, beside its layers."""
    name = type(model).__name__
    if is_seated(model):
        raise ModelError(f"{name} is enabled already; disable() it first")
    if any(is_attached(module) for module in model.modules()):
        raise ModelError(f"{name} is attached to a session already; detach() it first")
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model must be a PreTrainedModel, got {name}; enable it before it is wrapped, or enable what is wrapped"
        )
    theirs = [cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models")]
    if not theirs or not HEADS.search(theirs[0]) or theirs[0].endswith("DoubleHeadsModel"):
        raise ModelError(
            f"{name}: its head looks at more than one token at a time, or is not known; enable its base model "
            f"(model.{getattr(model, 'base_model_prefix', 'model') or 'model'}) and compute the rest from all tokens"
        )
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "pooler":
            raise ModelError(
                f"{path} ({type(module).__name__}) looks at one token for all, which is not served; use "
                "add_pooling_layer=False"
            )
        if _mentions(module, "create_position_ids_from_input"):
            raise ModelError(
                f"{path} ({type(module).__name__}) counts positions by what is in input_ids, which is not served"
            )
    for each in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(model.config, each, 0):
            raise ModelError(
                f"{each} must be 0: ranks would leave out different layers, got {getattr(model.config, each)}"
            )
    if any(layer.cross for layer in layers) and not model.config.is_encoder_decoder:
        raise ModelError(f"{name} has cross-attention and no encoder, which is not served")


def check_call(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse what was asked of a call."""

    def asked(name: str) -> Any:
        return given[name] if given.get(name) is not None else getattr(model.config, name, None)

    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ModelError(
            "use_cache and past_key_values: a model over ranks keeps no cache; leave them out. To generate, disable() "
            "it, or use attnspan.engine"
        )
    for name, why in REFUSED.items():
        if asked(name):
            raise ModelError(f"{name} {why}")
    for name in ("encoder_outputs", "encoder_hidden_states", "head_mask", "pixel_values"):
        if given.get(name) is not None:
            raise ModelError(f"{name} must not be given: it is not known how it lies on the ranks")


# ---- positions -------------------------------------------------------------------------------------------------------


def _mentions(module: nn.Module, name: str) -> bool:
    """Whether methods of a module's class have a name, or a beginning of one, in them."""
    methods = [each for each in vars(type(module)).values() if inspect.isfunction(each)]
    return any(used.startswith(name) for each in methods for used in each.__code__.co_names)


def counts_by_mask(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that are counted by an attention_mask, unless it is told."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(type(module).forward).parameters


def counts_by_itself(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that counts tokens, unless it is told."""
    wanted = {"position_ids", "past_key_values_length"}
    return isinstance(module, nn.Embedding) and wanted <= set(inspect.signature(type(module).forward).parameters)
