"""The class that a module was defined with, and whether torch has compiled it.

FSDP2 replaces the class of a module that it shards by a generated subclass; the source of forward, the name and the
module of the class are those of its base.
"""

from torch import nn


def class_of(module: object) -> type:
    """The class of a module; not one that torch made of it."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs as a graph of torch.compile."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
