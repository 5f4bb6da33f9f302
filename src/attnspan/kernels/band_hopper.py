"""`bands` on Hopper GPUs: forward, and dk and dv, by programs that are written for the chip (hopper_programs.py).

What band_programs.py computes, from the same tables. There a program's warps load and multiply in step, and one that
keeps the sums of 128 keys in registers has none left for the addresses of what it loads; here one warp does nothing but
ask for loads, and two groups of warps take turns at the tensor cores.

Written in Gluon, the layer below Triton's language, which is not stable yet: it is used with the versions of Triton
that it was tried with, and elsewhere band_programs.py computes the same. So it does for small tensors, where telling
the copy engine what lies where costs the host more than the GPU wins.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.kernels.agenda import Agenda
from attnspan.kernels.hopper_programs import programs

VERSIONS = ("3.6",)
"""Of Triton."""

DIMS = (64, 128)
SMALL = 2**23
"""Numbers in q, below which nothing is won."""

ALIGNED = 16
"""Bytes that addresses are multiples of."""


class HopperBlocks(NamedTuple):
    """Rows and columns that one group of warps multiplies at a time, and how many blocks are there or on their way."""

    rows: int
    cols: int
    stages: int


FORWARD, BY_KEYS = HopperBlocks(64, 128, 2), HopperBlocks(64, 64, 3)
ROWS, KEYS = 2 * FORWARD.rows, 2 * BY_KEYS.cols
"""Rows and keys of a program, which is two groups of warps."""


def serves(*tensors: Tensor) -> bool:
    """Whether such tensors, the first of them q, can be read here, and are worth it."""
    q = tensors[0]
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and SMALL <= q.numel() < 2**31
        and all(x.shape[3] in DIMS and _aligned(x) for x in tensors)
        and _available(q.device)
    )


def padded(rows: int) -> int:
    """Rows of delta and walls: see [Note: aligned rows] in hopper_programs.py."""
    return -(-rows // 4) * 4


def forward(
    tensors: tuple[Tensor, Tensor, Tensor], into: tuple[Tensor, Tensor], work: Agenda, scale: float, *, flip: bool
) -> None:
    """(out, lse) from (q, k, v) and an agenda by rows of `ROWS`."""
    (q, k, v), (out, lse) = tensors, into
    described = (_described(q, FORWARD.rows), _described(k, FORWARD.cols), _described(v, FORWARD.cols))
    grid = (q.shape[0] * q.shape[1] * len(work.blocks),)
    programs().forward[grid](
        *described, out, lse, *work[:2], *out.stride()[:3], q.shape[1], q.shape[1] // k.shape[1], q.shape[2],
        len(work.blocks), scale, flip=flip, stages=FORWARD.stages, num_warps=4,
    )  # fmt: skip


def by_keys(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor],
    work: Agenda,
    scales: tuple[float, float],
) -> None:
    """dk and dv from (grad, q, k, v), (delta, walls), whose rows are padded, and an agenda by columns of `KEYS`."""
    grad, q, k, v = tensors
    described = [_described(x, BY_KEYS.rows) for x in (grad, q)] + [_described(x, BY_KEYS.cols) for x in (k, v)]
    grid = (k.shape[0] * k.shape[1] * len(work.blocks),)
    strides = [stride for x in into for stride in x.stride()[:3]]
    programs().by_keys[grid](
        *described, *map(_flat, rows), *into, *work[:2], *strides, q.shape[1], q.shape[1] // k.shape[1],
        rows[0].shape[2], len(work.blocks), *scales, stages=BY_KEYS.stages, num_warps=4,
    )  # fmt: skip


@cache
def _available(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    version: str = triton.__version__
    return version.startswith(VERSIONS)


def _aligned(x: Tensor) -> bool:
    size = x.element_size()
    return x.data_ptr() % ALIGNED == 0 and all(stride * size % ALIGNED == 0 for stride in x.stride()[:3])


def _described(x: Tensor, rows: int) -> Any:
    """How the copy engine takes `rows` rows of one head at a time out of a tensor."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]], layout)


def _flat(x: Tensor) -> Any:
    """The same for one number for each row."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [BY_KEYS.rows], layout)
