"""peft adapters: those that are refused, because they depend on a whole row of tokens, and those in use.

Most adapters change layers that process tokens one by one, and are as exact as the model. peft is not imported:
adapters are recognised by the attributes of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from attnspan.errors import ModelError


def check_adapters(model: nn.Module) -> None:
    """ModelError for an adapter that depends on tokens of a row which a step, or a rank, does not have."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config, "peft_type", type(config).__name__)
            raise ModelError(
                f"adapter {name!r} ({getattr(kind, 'value', kind)}) puts tokens of its own before those of a prompt, "
                "which is not served; give the model inside, model.get_base_model(), or an adapter that changes layers"
            )
    for path, module in model.named_modules():
        routers: Sized = getattr(module, "lily_router", ())
        if len(routers):
            raise ModelError(
                f"{path} ({type(module).__module__}) is an adapter of the kind Lily, which takes the mean of its "
                "routers over all tokens of a call, and is not served; remove it"
            )
        variants = getattr(module, "lora_variant", None)
        for name, variant in variants.items() if isinstance(variants, Mapping) else ():
            if "ALora" in type(variant).__name__:
                raise ModelError(
                    f"adapter {name!r} is an activated LoRA (aLoRA, in {path}), which begins where its "
                    "alora_invocation_tokens are in a row, and is not served; remove it, or use one without them"
                )


def adds_to_loss(called: nn.Module, model: nn.Module) -> str | None:
    """The class of a wrapper between the model that is called and the one inside that has a loss of its own."""
    inside = set(model.modules())
    for module in called.modules():
        code = getattr(type(module).forward, "__code__", None)
        if module not in inside and code is not None and "loss" in (*code.co_names, *code.co_consts):
            return type(module).__name__
    return None


def adapters_in_use(module: nn.Module) -> tuple[object, ...]:
    """Which adapters of a peft layer are in use, and their scaling; nothing for any other module."""
    active: Iterable[str] | None = getattr(module, "active_adapters", None)
    merged: Iterable[str] | None = getattr(module, "merged_adapters", None)
    if active is None or merged is None:
        return ()
    scaling = getattr(module, "scaling", None)
    return (
        list(active),
        list(merged),
        bool(getattr(module, "disable_adapters", False)),
        sorted(scaling.items()) if isinstance(scaling, dict) else None,
    )


def adapted(model: nn.Module) -> PreTrainedModel:
    """A transformers model, or the one inside a `PeftModel`, which calls its forward without hooks."""
    if isinstance(model, PreTrainedModel):
        return model
    inner: Callable[[], PreTrainedModel] | None = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, model) if inner is None else inner()  # which is checked next
