"""Keys and values in 8 bits, with a scale for every token and head.

A token's key of one head becomes `head_dim` codes and one float32 scale: the largest of its numbers is the largest
code. A page then has its own scales, (page_size, heads) of them, beside its codes, and takes 8 + 32 / head_dim bits a
number instead of 16.

[Note: a scale per slot] One scale for a whole page and head would save those few bits, and cost exactness: a page is
filled token by token, and a later token with a larger number would have every earlier one rounded again. With a scale
for each slot what was written is never touched: appending, forking, copying and swapping keep every bit.

[Note: how far off] For numbers x of one token and head, the largest of them a (both off by float32 rounding too).
No scale is below 2^-126, where float32 begins to lose bits, so a counts as at least 2^-126 times the largest code::

    int8            |x - x'| <= a / 254                           codes -127 to 127, rounded to the nearest
    float8_e4m3fn   |x - x'| <= max(|x| / 16, a / 448 / 1024)     3 bits after the first, down to 2^-9 in steps

Knows nothing of pages or layers.   Shapes: x (..., D), scales (...).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_SCALE = 2.0**-126
"""The smallest scale: below it float32 has fewer bits, and codes would overflow."""

MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each dtype."""


class Quantised(NamedTuple):
    """Codes (..., D), float8 ones as the int8 of the same bits, and scales (...)."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """That of the numbers that the codes stand for."""
        return self.codes.shape

    def dequantise(self) -> Tensor:
        """What was stored, in float32."""
        return self.codes.view(self.dtype).float() * self.scales.unsqueeze(-1)


def quantise(x: Tensor, dtype: torch.dtype) -> Quantised:
    """The codes and scales of numbers.

    >>> quantise(torch.tensor([[0.5, -1.0, 0.0]]), torch.int8).codes.tolist()
    [[64, -127, 0]]
    """
    wide = x.float()
    scales = (wide.abs().amax(-1) / MAX_CODES[dtype]).clamp(min=MIN_SCALE)
    shares = wide / scales.unsqueeze(-1)
    codes = shares.round_() if dtype == torch.int8 else shares
    return Quantised(codes.to(dtype).view(torch.int8), scales, dtype)
