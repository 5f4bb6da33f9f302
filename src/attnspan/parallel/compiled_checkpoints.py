"""Checkpointing inside torch.compile: scopes may begin in a checkpointed function.

torch.compile traces a checkpointed function as the body of an operator. A body may change the stack of torch function
modes, as a scope does, only if the code around it has done so before. In ``torch.compile(checkpoint_wrapper(block))``
the code around the body is torch's. So while a model is attached, the forward of torch's CheckpointWrapper first enters
and leaves an empty scope. In eager code this does nothing.

Not covered: ``checkpoint(...)`` called in compiled code outside of any attached module. torch.compile refuses it
("Unsafe side effect"); attach the module that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

_LOCK = RLock()  # what is collected ends in whatever thread that happens
_OPEN = [0]  # attachments, of all threads
_TORCHS_FORWARD: list[Callable[..., object]] = []  # torch's forward of the wrapper, while it has another


class _NoWrapper:
    """Stands for the wrapper in a torch that has none; torch.compile then refuses what cannot be opened."""


def enter_empty_scope() -> None:
    """Enter and leave a scope in code that is being compiled."""
    with BaseTorchFunctionMode():
        pass


def install() -> None:
    """An attachment begins."""
    with _LOCK:
        _OPEN[0] += 1
        if not _TORCHS_FORWARD:
            wrapper = _wrapper()
            _TORCHS_FORWARD.append(getattr(wrapper, "forward", _forward))
            wrapper.forward = _forward


def uninstall() -> None:
    """It ends."""
    with _LOCK:
        _OPEN[0] -= 1
        if not _OPEN[0]:
            _wrapper().forward = _TORCHS_FORWARD.pop()


def _wrapper() -> type[Any]:
    """torch's."""
    try:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    except ImportError:
        return _NoWrapper
    return CheckpointWrapper


def _forward(self: object, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_compiling():
        enter_empty_scope()
    return _TORCHS_FORWARD[0](self, *args, **kwargs)
