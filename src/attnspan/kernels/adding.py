"""Write, add or sum tensors into another of any layout and dtype, at the speed of memory.

Gradients come from kernels as (B, H, n, D), often in half precision, and go into sums in float32, into buffers with
positions outermost, or several of them into one result. torch's own copy between such layouts goes element by element;
here, on CUDA, one Triton program moves whole rows of D. Elsewhere it is torch's copy.

Shapes: targets and parts (B, H, n, D), stacks of parts (any number, B, H, n, D); any strides with D innermost.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.packages import has_triton

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one

SOURCES = 3
"""The most stacks that are summed in one pass."""


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


def sum_into(target: Tensor, stacks: Sequence[Tensor], *, add: bool = False) -> None:
    """target = all parts of all stacks, (any number, B, H, n, D), or target += them: summed wide in that order, and
    rounded once.

    >>> total = torch.empty(1, 1, 2, 1, dtype=torch.bfloat16)
    >>> parts = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    >>> sum_into(total, [parts.view(2, 1, 1, 2, 1)])
    >>> total.flatten().tolist()
    [4.0, 6.0]
    """
    if len(stacks) <= SOURCES and all(_fast(target, stack[0]) for stack in stacks):
        _sum(target, stacks, add=add)
        return
    parts = [target] * add + [part for stack in stacks for part in stack]
    if target.dtype in (torch.float32, torch.float64):
        for index, part in enumerate(parts):
            if part is not target:
                (add_into if index else write_into)(target, part)
    else:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        target.copy_(total)


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


def _sum(target: Tensor, stacks: Sequence[Tensor], *, add: bool) -> None:
    batch, heads, rows, dim = target.shape
    if target.numel() == 0:
        return
    block_d = 1 << (dim - 1).bit_length()
    block_n = max(1, 2048 // block_d)
    nothing = [target, 0, 0, 0, 0, 0]
    sources = [[stack, len(stack), *stack.stride()[:4]] for stack in stacks]
    sources += [nothing] * (SOURCES - len(stacks))
    grid = (-(-rows // block_n), batch * heads)
    with torch.cuda.device(target.device):
        _kernels().total[grid](
            target, *target.stride()[:3], *itertools.chain(*sources), heads, rows, dim, add, block_n, block_d
        )


class _Kernels(NamedTuple):
    move: Any
    total: Any


@cache
def _kernels() -> _Kernels:
    """The Triton kernels, one program for `block_n` rows of one head: `move`, and `total` of three stacks of parts."""
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

    @triton.jit
    def more(total, x, count, x_i, x_b, x_h, x_n, b, h, n, d, cell):
        """`count` parts more in the total."""
        x += b * x_b + h * x_h + n[:, None] * x_n + d[None, :]
        for i in range(count):
            total += tl.load(x + tl.cast(i, tl.int64) * x_i, mask=cell, other=0.0).to(total.dtype)
        return total

    @triton.jit(do_not_specialize=["x_count", "y_count", "z_count"])
    def total(
        target, target_b, target_h, target_n,
        x, x_count, x_i, x_b, x_h, x_n, y, y_count, y_i, y_b, y_h, y_n, z, z_count, z_i, z_b, z_h, z_n,
        heads, rows, dim, add: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    ):
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
        d = tl.arange(0, block_d)
        cell = (n < rows)[:, None] & (d < dim)[None, :]
        at = target + b * target_b + h * target_h + n[:, None] * target_n + d[None, :]
        kind = target.dtype.element_ty
        sum_kind = tl.float64 if kind == tl.float64 else tl.float32
        found = tl.zeros([block_n, block_d], sum_kind)
        if add:
            found += tl.load(at, mask=cell, other=0.0).to(sum_kind)
        found = more(found, x, x_count, x_i, x_b, x_h, x_n, b, h, n, d, cell)
        found = more(found, y, y_count, y_i, y_b, y_h, y_n, b, h, n, d, cell)
        found = more(found, z, z_count, z_i, z_b, z_h, z_n, b, h, n, d, cell)
        tl.store(at, found.to(kind), mask=cell)
    # fmt: on

    return _Kernels(move, total)
