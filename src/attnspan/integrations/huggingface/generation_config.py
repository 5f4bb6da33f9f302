"""The defaults of an engine's requests, from a model's generation_config.

Every setting is one of these:

- taken: a field of `SamplingParams`, most of them by the same name
- without an effect on tokens here: caches, outputs, compilation, beams' lengths where there are no beams, lossless
  speculation, special tokens that an engine has from elsewhere or does not need
- anything else, such as beams, watermarks, or names that are not known here: it is named in a warning, unless it is
  neutral

Sampling settings are there for requests that give a temperature, and for all if it says do_sample; then `top_k` is 50
where it says nothing, as in `model.generate`.
"""

from __future__ import annotations

import warnings
from dataclasses import fields

from attnspan.engine.params import SamplingParams
from attnspan.errors import EngineError

RENAMED = {"stop_strings": "stop", "bad_words_ids": "bad_words", "num_return_sequences": "n"}
"""Settings that are fields of another name."""

SAME = {field.name for field in fields(SamplingParams)} - {
    "temperature", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "bad_words",
    "presence_penalty", "frequency_penalty", "logit_bias", "allowed_tokens", "adapter",
}  # fmt: skip
"""Settings that are fields of the same name."""

WITHOUT_EFFECT = {
    "do_sample", "temperature", "eos_token_id",  # taken, here and as end tokens
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "transformers_version", "pad_token_id",
    "bos_token_id", "decoder_start_token_id", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "early_stopping",
    "length_penalty", "renormalize_logits", "use_mtp", "speculation_type", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size",
}  # fmt: skip
"""Settings that change no token of an engine."""

NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": 1.0,
           "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "remove_invalid_values": False,
           "token_healing": False, "penalty_alpha": 0.0}  # fmt: skip
"""Settings that are not served, with the values that ask for nothing."""


def defaults_of(config: object, stacklevel: int = 1) -> SamplingParams:
    """The params that a generation_config stands for; a warning names what is not served, and EngineError what is not
    valid."""
    asked = {} if config is None else vars(config)
    settings = {name: value for name, value in asked.items() if value is not None and not name.startswith("_")}
    taken = {RENAMED.get(name, name): value for name, value in settings.items() if name in {*SAME, *RENAMED}}
    others = settings.keys() - {*SAME, *RENAMED, *WITHOUT_EFFECT}
    unserved = [f"{name}={settings[name]!r}" for name in sorted(others) if NEUTRAL.get(name) != settings[name]]
    if unserved:
        warnings.warn(
            f"an engine ignores these options of generation_config: {', '.join(unserved)}; tokens may differ from "
            "those of model.generate()",
            stacklevel=stacklevel + 1,
        )
    if settings.get("do_sample"):
        taken = {"temperature": settings.get("temperature", 1.0), "top_k": 50} | taken
    try:
        return SamplingParams(**taken)
    except EngineError as error:
        raise EngineError(f"generation_config: {error}") from None
