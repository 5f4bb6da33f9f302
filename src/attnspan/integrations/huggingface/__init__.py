"""Transformers models over ranks and pages: enabling.py for training, served_model.py and cache.py for generation."""

from typing import TYPE_CHECKING

from attnspan.integrations.huggingface.cache import PagedCache
from attnspan.integrations.huggingface.enabling import Enabled, enable
from attnspan.integrations.huggingface.layers import AttentionLayer, attention_layers

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
]


def __getattr__(name: str) -> object:
    if name in ("SpanTrainer", "SpanTrainerMixin", "dealing"):  # Trainer takes long to import, and wants accelerate
        from attnspan.integrations.huggingface import training

        found: object = getattr(training, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
