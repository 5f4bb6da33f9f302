"""The class that a module was defined with.

FSDP2 replaces the class of a module that it shards by a generated subclass; the source of forward, the name and the
module of the class are those of its base.
"""


def class_of(module: object) -> type:
    """The class of a module; not one that torch made of it."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
