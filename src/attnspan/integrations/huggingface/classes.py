"""The class that a module was written as.

FSDP2 gives a module that it shards a class made by torch, between the module and its own: the source of its forward,
its name and its home are those of the class below.
"""


def class_of(module: object) -> type:
    """The class of a module; not one that torch made of it."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
