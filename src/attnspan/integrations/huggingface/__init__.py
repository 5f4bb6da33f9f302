"""Transformers models over ranks (`enable`, for training) and over pages (`attnspan.Engine`, `PagedCache`).

What is read of a model, for both:

    layers.py              its attention layers, as data (interface_calls.py: what each asks for, by its source)
    inline_attention.py    layers that compute attention inline (plain_attention.py: most of them, as rows of a table;
                           biases.py: numbers that they add to scores)
    latents.py             layers of multi-head latent attention, whose latents stand in for keys and values
    mixers.py              recurrent layers (sequence_functions.py: the functions that they call; inline_mixers.py:
                           inline recurrences; token_mixing.py: what else mixes tokens, which is refused)
    rebinding.py           a function that calls others than its own
    adapters.py            adapters of peft that are refused, and those in use
    tiny_module.py         a small module of a class, on which what is read is tried (classes.py: a module's own class)

Over ranks:

    enabling.py            a call of the model: before, in the layers, after
    model_parts.py         what there is in the model (checking.py: what is refused)
    binding.py             what is set on its modules and configs
    forward_pass.py        what holds during a pass (call_counts.py: that every layer attends in it)
    batches.py             a whole batch becomes shards (sessions.py: and a session)
    attention.py           the attention function of layers (masking.py: the masks that they ask for)
    positions.py           modules that count tokens
    losses.py              the loss over all ranks
    towers.py              images and sounds (dealt_towers.py: over ranks)
    training.py            Trainer and accelerate

Over pages:

    served_model.py        the model as an engine sees it (encoder_decoder.py: one with an encoder)
    served_layers.py       its layers; a model that has others is refused
    serving_binding.py     what is set on it while engines serve it
    serving.py             attention over pages, for as long as one call takes
    fused_modules.py       modules that run as one kernel on CUDA (fused_kernels.py: the kernels, and their formulas)
    probe.py               that the model does as its source says
    embedding.py           prompts with images or sounds
    lora.py                LoRA adapters by name, several in one step
    generation_config.py   the defaults of requests
    tensor_parallel.py     models whose heads lie on several ranks
    cache.py               a transformers `Cache` over pages, for `model.generate`

    census.py              every family of transformers: is it trained, and generated with (docs/families.md)
"""

from typing import TYPE_CHECKING

from attnspan.integrations.huggingface.cache import PagedCache
from attnspan.integrations.huggingface.enabling import Enabled, enable
from attnspan.integrations.huggingface.layers import AttentionLayer, attention_layers
from attnspan.integrations.huggingface.tensor_parallel import load_tensor_parallel

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.training import SpanTrainer, SpanTrainerMixin, dealing

__all__ = [
    "AttentionLayer",
    "Enabled",
    "PagedCache",
    "SpanTrainer",
    "SpanTrainerMixin",
    "attention_layers",
    "dealing",
    "enable",
    "load_tensor_parallel",
]


def __getattr__(name: str) -> object:
    if name in ("SpanTrainer", "SpanTrainerMixin", "dealing"):  # Trainer takes long to import, and wants accelerate
        from attnspan.integrations.huggingface import training

        found: object = getattr(training, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
