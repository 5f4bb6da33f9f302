"""Checkpointing inside torch.compile: blocks may begin in a checkpointed function.

torch.compile follows a checkpointed function as the body of an operator. It lets a body change the stack of torch
function modes, as a block does, only if the code around it has done so before. ``torch.compile(checkpoint_wrapper(
block))`` has no code of ours around the body: the block's attention is attached, and the wrapper is torch's. So while a
model is attached, the wrapper's forward first enters and leaves an empty block. In eager code it does nothing.

Not reached: ``checkpoint(...)`` called in compiled code outside of any attached module. torch.compile refuses it
("Unsafe side effect"); attach the module that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LOCK = RLock()  # what is collected ends in whatever thread that happens
_OPEN = [0]  # attachments, of all threads
_THEIRS: list[Callable[..., object]] = []  # the wrapper's own forward, while it has another


class EmptyBlock(TorchFunctionMode):
    """A block in which nothing is different."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return func(*args, **(kwargs or {}))


def enter_empty_block() -> None:
    """Enter and leave a block, in code that is being compiled."""
    with EmptyBlock():
        pass


def install() -> None:
    """An attachment begins."""
    with _LOCK:
        _OPEN[0] += 1
        if not _THEIRS:
            wrapper = _wrapper()
            _THEIRS.append(getattr(wrapper, "forward", _forward))
            wrapper.forward = _forward


def uninstall() -> None:
    """It ends."""
    with _LOCK:
        _OPEN[0] -= 1
        if not _OPEN[0]:
            _wrapper().forward = _THEIRS.pop()


def _wrapper() -> type[Any]:
    """torch's; a class of our own where there is none, so that torch.compile refuses what cannot be opened."""
    try:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    except ImportError:
        return EmptyBlock
    return CheckpointWrapper


def _forward(self: object, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_compiling():
        enter_empty_block()
    return _THEIRS[0](self, *args, **kwargs)
