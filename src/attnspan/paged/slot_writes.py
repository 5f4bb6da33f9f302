"""One kernel that writes new keys and values to their slots, and rounds them to 8 bits if the pages hold codes.

A decode step writes a token's keys and values in every layer. In eager torch that is two copies, or some twenty kernels
if they are rounded to 8 bits (quantised.py). Here one program takes the keys of a token, or its values::

    program (token, 0 or 1)    largest number of each head -> scale -> codes -> slot
    without codes              numbers -> slot

Codes and scales are those of `quantise` on CUDA, where torch divides by a constant by a product with its inverse.

Knows nothing of plans and block tables.   Shapes: T tokens, H key heads, D head dim, S slots. In the kernel, strides
are named after a tensor and a dim: g `given`, o `other`, i `into`, j `other_into`; t token, h head, s slot.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnspan.packages import has_triton
from attnspan.paged.metadata import Pages
from attnspan.paged.quantised import MAX_CODES, MIN_SCALE, Quantised

MAX_NUMBERS = 16384
"""The most numbers that one program holds: a token's keys, or its values."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

VARYING = ["g_t", "g_h", "o_t", "o_h", "i_s", "i_h", "j_s", "j_h", "heads", "dim", "other_dim"]
"""Arguments that the compiler must not specialise on: a program for values assigns theirs to the names of those for
keys, which a constant would not allow."""


def can_write(pages: Pages, given: Tensor) -> bool:
    """Whether the kernel supports these: on CUDA, with the numbers of a head contiguous."""
    heads, dim = given.shape[1:]
    known = given.dtype in DTYPES and next_power_of_2(heads) * next_power_of_2(dim) <= MAX_NUMBERS
    apart = isinstance(pages, Tensor) and pages.stride(-1) != 1
    return given.is_cuda and has_triton() and known and given.stride(2) == 1 and not apart and given.shape[0] > 0


def write(pairs: list[tuple[Pages, Tensor]], slots: Tensor) -> None:
    """Write (T, H, D) to slots (T,) int64 of pages (P, size, H, D), for one pair of them, or for keys and values."""
    (pages, given), (other_pages, other) = pairs[0], pairs[-1]
    tokens, heads, dim = given.shape
    stored = pages.dtype if isinstance(pages, Quantised) else None
    into, scales = _flat(pages)
    other_into, other_scales = _flat(other_pages)
    on_device: Any = torch.cuda.device(given.device) if given.is_cuda else torch.no_grad()
    with on_device:
        _compiled()[tokens, len(pairs)](
            into, scales, given, other_into, other_scales, other, slots,
            given.stride(0), given.stride(1), other.stride(0), other.stride(1),
            into.stride(0), into.stride(1), other_into.stride(0), other_into.stride(1), heads, dim, other.shape[2],
            1.0 if stored is None else 1.0 / MAX_CODES[stored], MIN_SCALE,
            block_h=next_power_of_2(heads), block_d=next_power_of_2(max(dim, other.shape[2])),
            codes={None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}[stored], num_warps=4,
        )  # fmt: skip


def _flat(pages: Pages) -> tuple[Tensor, Tensor]:
    """Slots (S, H, D) and their scales (S, H); for pages without scales the slots twice, which the kernel ignores."""
    if isinstance(pages, Quantised):
        codes = pages.codes.view(pages.dtype).flatten(0, 1)
        return codes, pages.scales.flatten(0, 1)
    flat = pages.flatten(0, 1)
    return flat, flat


def next_power_of_2(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _compiled() -> Any:
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit(do_not_specialize=VARYING)
    def write_slots(
        into, scales, given, other_into, other_scales, other, slots, g_t, g_h, o_t, o_h, i_s, i_h, j_s, j_h,
        heads, dim, other_dim, share, smallest,
        block_h: tl.constexpr, block_d: tl.constexpr, codes: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        h = tl.arange(0, block_h).to(tl.int64)
        d = tl.arange(0, block_d)
        if tl.program_id(1) == 1:
            into, scales, given, dim = other_into, other_scales, other, other_dim
            g_t, g_h, i_s, i_h = o_t, o_h, j_s, j_h
        real = (h < heads)[:, None] & (d < dim)[None, :]
        x = tl.load(given + token * g_t + h[:, None] * g_h + d[None, :], mask=real, other=0.0)
        if codes > 0:
            x = x.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(x), 1) * share, smallest)
            scale = tl.where(tl.sum((x != x).to(tl.int32), 1) > 0, float("nan"), scale)  # which a maximum passes over
            tl.store(scales + slot * heads + h, scale, mask=h < heads)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
            if codes == 1:  # to the nearest whole number, or the even one
                x = (x + 12582912.0) - 12582912.0
        tl.store(into + slot * i_s + h[:, None] * i_h + d[None, :], x.to(into.dtype.element_ty), mask=real)
    # fmt: on

    return write_slots
