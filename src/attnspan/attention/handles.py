"""Handles: tensors that stand for objects in the arguments of custom ops.

[Note: handles] Custom ops take tensors, and torch.compile would recompile for every plan if a plan's parts were
numbers or strings. So a bound plan is passed as a handle: a CPU tensor with its number in `_HELD`. torch.compile does
not specialise on the values of tensors, so another plan of the same shapes is just another number. The handle keeps
the object alive, and the autograd graph saves the handle: the object lives as long as anything that may still use it.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnspan.errors import AttentionError

_HELD: WeakValueDictionary[int, object] = WeakValueDictionary()
_NUMBERS = itertools.count(1)


# Made where compiled code breaks off, it is not looked into: torch 2.11 warns of weak references. (As by
# torch.compiler.disable, which would import the compiler together with this module.)
@torch._disable_dynamo
def handle_of(thing: object, *, keeps: bool = True) -> Tensor:
    """A tensor that stands for an object, and with `keeps` keeps it alive. See [Note: handles]."""
    number = next(_NUMBERS)
    with torch.inference_mode(False):  # made during evaluation, it may be saved for backward later
        found = torch.tensor(number, device="cpu")
    if keeps:
        vars(found)["thing"] = thing  # torch keeps attributes for as long as the tensor lives
    _HELD[number] = thing
    return found


def object_of(handle: Tensor, gone: str) -> object:
    """The object that a handle stands for; an AttentionError that says `gone` if it no longer exists."""
    thing = _HELD.get(int(handle))
    if thing is None:
        raise AttentionError(gone)
    return thing
