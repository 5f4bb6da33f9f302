"""What is asked of a model and a tokenizer before they are served: tokens, ends, positions, a device.

Models are those of transformers; nothing is imported for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from attnspan.errors import EngineError


def check_evaluates(model: Any) -> None:
    """EngineError in training mode."""
    if model.training:
        raise EngineError("model is in training mode, in which dropout may change what it says; call model.eval()")


def check_dtype(model: Any, dtype: torch.dtype | None) -> None:
    """EngineError for a model that is of another dtype than its pages by now."""
    found = next(model.parameters()).dtype
    if found != dtype:
        raise EngineError(f"model is {found} by now, and its pages are {dtype}; make a new engine")


UNUSED = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "begin_suppress_tokens": None,
    "bad_words_ids": None, "sequence_bias": None, "min_length": 0, "min_new_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "num_beams": 1, "guidance_scale": 1.0,
    "stop_strings": None,
}  # fmt: skip
"""What `generate` would do by a generation_config, greedy or not, and an engine does not, with what leaves it out."""


def tell_unused(model: Any) -> None:
    """Warn of what a model's generation_config asks for that changes even greedy tokens, and is not done here."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in UNUSED}
    told = [f"{name}={value}" for name, value in found.items() if value not in (None, UNUSED[name])]
    if told:
        warnings.warn(
            f"an engine does not do what generation_config asks for by {', '.join(told)}; tokens will differ from "
            "those of model.generate()",
            stacklevel=3,
        )


def device_of(model: Any) -> torch.device:
    """The one device of a model that is ready to generate."""
    check_evaluates(model)
    first, *others = dict.fromkeys(parameter.device for parameter in model.parameters())
    if others:
        raise EngineError(f"model must be on one device, got parameters on {first} and {', '.join(map(str, others))}")
    return first


def vocabulary_of(model: Any, tokenizer: Any) -> int:
    """How many tokens the model knows; EngineError if the tokenizer has others."""
    known = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None:
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise EngineError(f"tokenizer must have encode and decode, got {type(tokenizer).__name__}")
        said = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
        if said > known:
            raise EngineError(
                f"tokenizer does not fit the model: it has {said} tokens, and the model knows {known}; give the one "
                "that the model was trained with"
            )
    return known


def end_tokens_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def positions_of(model: Any) -> int | None:
    """How many positions the model has, if it says so.

    Rotary embeddings whose angles depend on how long the longest sample of a batch is are exact only as long as they
    have not changed: up to the length that the model was first trained for.
    """
    config = model.config.get_text_config(decoder=True)  # of a model with several, the one that speaks
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    limits = [getattr(config, "max_position_embeddings", None)]
    for each in nested:
        if each.get("rope_type") in ("dynamic", "longrope"):
            limits.append(
                each.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or getattr(config, "max_position_embeddings", None)
            )
    found = [limit for limit in limits if limit]
    return min(found) if found else None
