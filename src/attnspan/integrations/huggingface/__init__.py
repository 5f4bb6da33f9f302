"""Transformers models over ranks (`enable`, for training) and over pages (`attnspan.Engine`, `PagedCache`).

Reading a model, for both:

    layers.py              attention layers as data (interface_calls.py: the arguments of their attention, from source)
    inline_attention.py    layers that compute attention inline (plain_attention.py: a table of most of them;
                           biases.py: biases that they add to scores)
    latents.py             layers of multi-head latent attention (MLA)
    mixers.py              recurrent layers (mixer_functions.py: the functions that they call; inline_mixers.py:
                           inline recurrences; token_mixing.py: other modules that mix tokens, which are refused)
    rebinding.py           a function that calls others than its own
    adapters.py            peft adapters: those that are refused, and those in use
    tiny_module.py         a small module of a class, for self-tests (classes.py: the class of a module)

Over ranks:

    enabling.py            `enable`, and the hooks around a call of the model
    model_parts.py         the parts of the model (checking.py: what is refused)
    binding.py             what is set on its modules and configs (layer_binding.py: on a layer, or a mixer)
    forward_pass.py        the state of one forward pass (call_counts.py: checks that every layer attends in it)
    batches.py             sharding of a whole batch (sessions.py: and its session)
    attention.py           the attention function of layers (masking.py: the masks that they ask for)
    positions.py           modules that count tokens
    losses.py              the loss over all ranks
    towers.py              images and sounds (dealt_towers.py: distributed over ranks)
    training.py            Trainer and accelerate

Over pages:

    transformers_model.py  the model as a `ServedModel` (encoder_decoder.py: one with an encoder)
    served_layers.py       its layers, checked
    serving_binding.py     attributes that are set on it while engines serve it
    paged_attention.py     the attention function of layers, during one call of the model
    fused_modules.py       modules that run as one kernel on CUDA (fused_kernels.py: the kernels and their formulas)
    linear_products.py     its Linear layers in calls that a graph captures
    small_products.py      products of few rows, in Triton (dependent_launch.py: how our kernels follow each other)
    probe.py               a self-test: the model runs on two tokens
    embedding.py           prompts with images or sounds
    lora.py                LoRA adapters by name, several in one step
    generation_config.py   the defaults of requests
    tensor_parallel.py     tensor parallel models
    cache.py               a transformers `Cache` over pages, for `model.generate`

    census.py              which families of transformers are supported (docs/families.md)
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
