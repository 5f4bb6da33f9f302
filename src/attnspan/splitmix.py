"""SplitMix64 on int64 tensors: a counter or a hash becomes numbers that are as good as random, alike on every device.

>>> import torch
>>> mix(torch.tensor([1, 2]) * INCREMENT) == mix(torch.tensor([1, 3]) * INCREMENT)
tensor([ True, False])
"""

from __future__ import annotations

from torch import Tensor

INCREMENT = -0x61C8864680B583EB
"""What the generator adds to its state for each number, as an int64."""


def mix(x: Tensor) -> Tensor:
    """The finalizer on int64 words: changing a bit of a word changes each bit with probability 1/2."""
    x = (x ^ shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
