"""Which kernel computes a tile: the one that was asked for, or for "auto" the first that can.

`KERNELS` is in order of speed where several can. An explicit request never falls back: it is met, or refused with
the kernel's own reason and the names of those that would do.
"""

from __future__ import annotations

from torch import Tensor

from attnspan.errors import KernelError, one_of
from attnspan.kernels import cpu_flash, cuda_flash, cudnn, efficient, reference
from attnspan.kernels.kernel import Kernel, Spec
from attnspan.masks.tile import Tile

_BY_SPEED: tuple[Kernel, ...] = (cudnn, cuda_flash, efficient, cpu_flash, reference)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _BY_SPEED}


def choose(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Kernel:
    """The kernel of that name, or for "auto" the first that can; raises KernelError if it cannot.

    >>> import torch
    >>> x = torch.empty(1, 1, 4, 8)
    >>> choose("auto", Spec(scale=1.0), x, x, x, Tile(range(4), range(4), lo=-3, hi=0)).name
    'cpu_flash'
    """
    one_of("kernel", name, ["auto", *KERNELS], error=KernelError)
    if name == "auto":
        for kernel in KERNELS.values():
            if kernel.supports(spec, q, k, v, tile) is None:
                return kernel
        raise KernelError(_message(name, "no kernel can", spec, q, k, v, tile))
    reason = KERNELS[name].supports(spec, q, k, v, tile)
    if reason is not None:
        raise KernelError(_message(name, reason, spec, q, k, v, tile))
    return KERNELS[name]


def refusals(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> dict[str, str]:
    """The reason of every kernel that cannot, by its name."""
    reasons = {name: kernel.supports(spec, q, k, v, tile) for name, kernel in KERNELS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _message(name: str, reason: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str:
    refused = refusals(spec, q, k, v, tile)
    able = [other for other in KERNELS if other not in refused]
    hint = f"for this tile use {' or '.join(able)}, or auto" if able else "; ".join(refused.values())
    return f"kernel={name!r} cannot compute {tile}: {reason}; {hint}"
