"""Write or add one tensor into another of any layout and dtype, at the speed of memory.

Gradients come from kernels as (B, H, n, D) in half precision and are summed in float32 with positions outermost.
torch's own copy of such a pair goes element by element; here, on CUDA, one Triton program moves whole rows of D.
Elsewhere it is torch's copy. Shapes: both (B, H, n, D), any strides with D innermost.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.kernels.merge import has_triton

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


def write_into(target: Tensor, part: Tensor) -> None:
    """target = part."""
    if _fast(target, part):
        _move(target, part, add=False)
    else:
        target.copy_(part)


def add_into(target: Tensor, part: Tensor) -> None:
    """target += part, in the target's dtype."""
    if _fast(target, part):
        _move(target, part, add=True)
    else:
        target += part


def add_all_into(target: Tensor, parts: Tensor) -> None:
    """target += parts[0] + parts[1] + ..., summed in the target's dtype in that order; target and each part dense.

    >>> total = torch.ones(2)
    >>> add_all_into(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16))
    >>> total.tolist()
    [5.0, 7.0]
    """
    if target.is_cuda and target.is_contiguous() and parts.is_contiguous() and has_triton():
        count, size = len(parts), target.numel()
        if count and size:
            with torch.cuda.device(target.device):
                _kernels().gather[(-(-size // 2048),)](target, parts, count, size, 2048)
    else:
        for part in parts:
            target += part


def _fast(target: Tensor, part: Tensor) -> bool:
    return target.is_cuda and target.dim() == 4 and target.stride(3) == part.stride(3) == 1 and has_triton()


def _move(target: Tensor, part: Tensor, *, add: bool) -> None:
    batch, heads, rows, dim = target.shape
    if target.numel() == 0:
        return
    block_d = 1 << (dim - 1).bit_length()
    block_n = max(1, 4096 // block_d)
    strides = (*target.stride()[:3], *part.stride()[:3])
    grid = (-(-rows // block_n), batch * heads)
    with torch.cuda.device(target.device):
        _kernels().move[grid](target, part, heads, rows, dim, *strides, add, block_n, block_d)


class _Kernels(NamedTuple):
    move: Any
    gather: Any


@cache
def _kernels() -> _Kernels:
    """The Triton kernels: `move`, one program for `block_n` rows of one head, and `gather`, for `block` numbers."""
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def move(
        target, part, heads, rows, dim,
        target_b, target_h, target_n, part_b, part_h, part_n,
        add: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    ):
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
        d = tl.arange(0, block_d)
        cell = (n < rows)[:, None] & (d < dim)[None, :]
        at = target + b * target_b + h * target_h + n[:, None] * target_n + d[None, :]
        kind = target.dtype.element_ty
        x = tl.load(part + b * part_b + h * part_h + n[:, None] * part_n + d[None, :], mask=cell, other=0.0).to(kind)
        if add:
            x += tl.load(at, mask=cell, other=0.0)
        tl.store(at, x, mask=cell)

    @triton.jit(do_not_specialize=["count"])
    def gather(target, parts, count, size, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        here = at < size
        total = tl.load(target + at, mask=here, other=0.0)
        for i in range(count):
            total += tl.load(parts + tl.cast(i, tl.int64) * size + at, mask=here, other=0.0).to(total.dtype)
        tl.store(target + at, total, mask=here)
    # fmt: on

    return _Kernels(move, gather)
