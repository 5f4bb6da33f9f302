"""Refuses models, and calls of them, that would be wrong on a rank's tokens; layers.py checks attention layers.

A rank has only some of the tokens. Computations on single tokens are right without changes; others are detected here,
by the names of transformers' classes and the arguments of their methods::

    heads        that use one token for the whole text, such as classifiers
    mixing       of tokens without attention (token_mixing.py)
    positions    have to be an argument: a model that counts would count each rank's tokens from 0
    outputs      must have one entry per token
    calls        that ask for what no rank has (attention weights, the last logits), or for a cache
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.layer_binding import is_bound
from attnspan.integrations.huggingface.layers import AttentionLayer, check_is_model, configs, is_left_out
from attnspan.integrations.huggingface.positions import (
    counts_by_itself,
    counts_content,
    depends_on_length,
    has_no_positions,
    takes_counted,
)
from attnspan.integrations.huggingface.token_mixing import token_mixing
from attnspan.integrations.huggingface.towers import called_before, modules_outside
from attnspan.parallel.attached_forward import is_attached
from attnspan.parallel.batch import IGNORED

HEADS = re.compile(
    r"((?<!PreTrained)Model|ForCausalLM|GenerationDecoder|ForMaskedLM|ForTokenClassification|ForConditionalGeneration"
    r"|NemotronH_Omni_Reasoning_V3)$"
)
"""What is computed of each token by itself; other heads look at one token for all."""

REFUSED = {
    "output_attentions": "must be False: no rank has the weights of attention",
    "output_router_logits": "must be False: the balance of experts is a mean over all tokens, of which a rank has some",
    "z_loss_coefficient": "must be 0: it adds a mean over the logits of all tokens, of which a rank has some",
    "logits_to_keep": "must be 0: which logits are the last is not the same on every rank",
}


def check_positions(modules: Iterable[tuple[str, nn.Module]], counted: bool = False) -> None:
    """Refuse a model that computes positions by itself, whatever position_ids it is given; modules by their paths.

    Not one that is given those that it would have `counted`.
    """
    for path, module in modules:
        if counts_content(module) and not (counted and takes_counted(module)):
            raise ModelError(
                f"{path} ({type(module).__name__}) counts positions by what is in input_ids, which is not served"
            )


def check_alone(model: nn.Module) -> None:
    """Refuse a model that attends to what another model computed, as one that drafts for it."""
    if "shared_kv_states" in inspect.signature(type(model).forward).parameters:
        raise ModelError(
            f"{type(model).__name__} attends to keys of another model (shared_kv_states), which is not served"
        )


def counting_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The embeddings that count the tokens of a call, in a model that is not given positions; refuses one that counts
    them elsewhere."""
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        return []
    found = [module for module in model.modules() if counts_by_itself(module)]
    if not found and not has_no_positions(model):
        raise ModelError(
            f"{type(model).__name__} takes no position_ids and would count the tokens of a step from 0, which is not "
            "served"
        )
    return found


def check_not_enabled(model: nn.Module) -> None:
    """Refuse a model that is enabled, or a part of it."""
    check_is_model(model)
    if is_bound(model):
        raise ModelError(f"{type(model).__name__} is enabled already; disable() it first")


def check_can_be_enabled(
    model: PreTrainedModel, decoder: nn.Module, idle: Collection[AttentionLayer], mixers: Collection[nn.Module]
) -> None:
    """Refuse a model for what it is, besides its layers, its recurrent mixers and what is beside its decoder.

    `idle` layers attend in no pass.
    """
    name = type(model).__name__
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
    outside, unused = modules_outside(model, decoder), {layer.module for layer in idle}
    found = [(path, module) for path, module in model.named_modules() if module not in outside]
    check_alone(model)
    check_positions(found, counted=True)
    for path, module in found:
        around = decoder is not module and decoder in set(module.modules())
        after = called_before(module, decoder) if around else ""
        runs = module not in mixers and not is_left_out(module, unused)
        _check_module(path, module, token_mixing(module, after) if runs else None, model.config.is_encoder_decoder)
    for key, config in configs(model.config):
        for each in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(config, each, 0):
                path = f"{key}.{each}".strip(".")
                raise ModelError(
                    f"{path} must be 0: ranks would leave out different layers, got {getattr(config, each)}"
                )
    if idle and outside:
        raise ModelError(f"{name} has cross-attention and no encoder, which is not served")
    if mixers and model.config.is_encoder_decoder:
        raise ModelError(f"{name} has recurrent mixers in an encoder-decoder, which is not served")


def _check_module(path: str, module: nn.Module, mixing: str | None, encoder_decoder: bool) -> None:
    """Refuse a module that looks at other tokens than each token's own; `mixing` says how."""
    where = f"{path or 'the model'} ({type(module).__name__})"
    if path.rpartition(".")[2] == "pooler":
        raise ModelError(f"{where} looks at one token for all, which is not served; use add_pooling_layer=False")
    if mixing is not None:
        raise ModelError(
            f"{where} looks at tokens beside a token's own, {mixing}, which is not served: a rank has some of them"
        )
    if encoder_decoder and depends_on_length(module):
        raise ModelError(
            f"{where} has frequencies that depend on the length of a sequence (rope_type), which is not served where "
            "there are two"
        )


def check_call(model: PreTrainedModel, given: Mapping[str, object], towers: bool) -> None:
    """Refuse what was asked of a call, of a model with towers before its decoder or without."""
    text = model.config.get_text_config()

    def option(name: str) -> object:
        by_default = getattr(model.config, name, None) or getattr(text, name, None)
        return given[name] if given.get(name) is not None else by_default

    if given.get("use_cache") or any(given.get(name) is not None for name in ("past_key_values", "cache_params")):
        raise ModelError(
            "use_cache, past_key_values and cache_params: a model over ranks keeps no cache; leave them out. To "
            "generate, disable() it, then use attnspan.Engine(model, pages=...)"
        )
    for name, why in REFUSED.items():
        if option(name):
            raise ModelError(f"{name} {why}")
    if given.get("ignore_index", IGNORED) != IGNORED:
        raise ModelError(f"ignore_index must be {IGNORED}, which labels are to have, got {given['ignore_index']}")
    for name in ("encoder_outputs", "encoder_hidden_states", "head_mask", *([] if towers else ["pixel_values"])):
        if given.get(name) is not None:
            raise ModelError(f"{name} must not be given: it is not known how it lies on the ranks")


# ---- what comes back -------------------------------------------------------------------------------------------------


def check_output(output: object, whole: Collection[str], tokens: set[int]) -> None:
    """Refuse what is not of each token by itself: all but the loss is (B, S, ...), S the tokens of a rank.

    Outputs by the names in `whole` come from what ran before, on the whole batch.
    """
    for name, each in tensors_of(output):
        if name in whole:
            continue
        if each.dim() < 3 or each.shape[1] not in tokens:
            raise ModelError(
                f"the model returned {name!r} of shape {tuple(each.shape)}, which is not of each token of a rank; what "
                "is taken of the whole sequence, such as one token for all, is not served"
            )


def tensors_of(output: object) -> Iterator[tuple[str | int, Tensor]]:
    """The tensors that a model returned, with the names of the entries they are in."""
    named: Mapping[str | int, object] = {"a tensor": output}
    if isinstance(output, Mapping):
        named = output
    elif isinstance(output, tuple | list):
        named = dict(enumerate(output))
    for name, value in named.items():
        yield from ((name, each) for each in tree_leaves(value) if isinstance(each, Tensor))
