"""Which kernel computes a tile: the one that was asked for, or for "auto" the first that can.

`KERNELS` is in order of speed where several can; float32, which goes through no tensor cores in `band`, is tried by
`efficient` first. An explicit request never falls back: it is met, or refused with
the kernel's own reason and the names of those that would do.

`PROGRAM_KERNELS` run FlexAttention programs. They are chosen where there is a score_mod or a tile whose pairs must be
asked; the others refuse such a tile, all by the same rule, which is here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnspan.errors import KernelError, one_of
from attnspan.kernels import band, blocks, cpu_flash, cuda_flash, cudnn, efficient, flex, reference
from attnspan.kernels.kernel import Kernel, ProgramKernel, Spec
from attnspan.masks.tile import Tile

_BY_SPEED: tuple[Kernel, ...] = (cudnn, band, cuda_flash, efficient, cpu_flash, reference)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _BY_SPEED}

_IN_FLOAT32: dict[str, Kernel] = {kernel.name: kernel for kernel in (efficient, *_BY_SPEED)}

PROGRAM_KERNELS: dict[str, ProgramKernel] = {kernel.name: kernel for kernel in (flex, blocks)}


def choose(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Kernel | ProgramKernel:
    """The kernel of that name, or for "auto" the first that can; raises KernelError if it cannot.

    >>> import torch
    >>> x = torch.empty(1, 1, 4, 8)
    >>> choose("auto", Spec(scale=1.0), x, x, x, Tile(range(4), range(4), lo=-3, hi=0)).name
    'cpu_flash'
    """
    one_of("kernel", name, ["auto", *KERNELS, *PROGRAM_KERNELS], error=KernelError)
    if name == "auto":
        for able, kernel in _fitting(spec, q, tile).items():
            if refusal(able, spec, q, k, v, tile) is None:
                return kernel
        raise KernelError(_message(name, "no kernel can", spec, q, k, v, tile))
    reason = refusal(name, spec, q, k, v, tile)
    if reason is not None:
        raise KernelError(_message(name, reason, spec, q, k, v, tile))
    return KERNELS[name] if name in KERNELS else PROGRAM_KERNELS[name]


def refusal(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Why a kernel cannot compute a tile; None if it can."""
    if name in PROGRAM_KERNELS:
        return PROGRAM_KERNELS[name].supports(spec, q, k, v, tile)
    program = spec.mods.of(tile) if spec.mods is not None else ""
    return f"{name} runs no {program}" if program else KERNELS[name].supports(spec, q, k, v, tile)


def refusals(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> dict[str, str]:
    """The reason of every kernel that cannot, by its name."""
    reasons = {name: refusal(name, spec, q, k, v, tile) for name in (*KERNELS, *PROGRAM_KERNELS)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _fitting(spec: Spec, q: Tensor, tile: Tile) -> Mapping[str, Kernel | ProgramKernel]:
    """The kernels that "auto" looks at, the first first."""
    if spec.mods is not None and spec.mods.of(tile):
        return PROGRAM_KERNELS
    return _IN_FLOAT32 if q.dtype == torch.float32 else KERNELS


def _message(name: str, reason: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str:
    refused = refusals(spec, q, k, v, tile)
    able = [other for other in _fitting(spec, q, tile) if other not in refused]
    hint = f"for this tile use {' or '.join(able)}, or auto" if able else "; ".join(refused.values())
    return f"kernel={name!r} cannot compute {tile}: {reason}; {hint}"
