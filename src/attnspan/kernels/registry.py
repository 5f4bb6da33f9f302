"""Which kernel computes a tile: the one that was asked for, or for "auto" the first that can.

`KERNELS` is in order of speed where several can; float32, which goes through no tensor cores in `band`, is tried by
`efficient` first. Where `Spec.preference` has measured this device, its order comes first. An explicit request never
falls back: it is met, or refused with the kernel's own reason and the names of those that would do.

`PROGRAM_KERNELS` run FlexAttention programs. They are chosen where there is a score_mod or a tile whose pairs must be
asked; the others refuse such a tile, all by the same rule, which is here.

`joins` says where all tiles of a step are computed in one call (bands.py), as `band` always does: many small tiles cost
more in launches and merges than a faster kernel gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

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


SMALL = band.traits.joins
"""Floating-point operations of a tile's forward pass below which a tile is small; measured on an H200."""


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


def joins(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> bool:
    """Whether all tiles between two buffers are computed in one call, by bands.py."""
    if name not in ("auto", band.name) or not tiles or band.supports(spec, q, k, v, tiles[0]):
        return False
    some = _glance(tiles)
    if not some.dense or (spec.mods is not None and any(map(spec.mods.of, tiles))):
        return False
    if name == band.name:
        return True
    if q.dtype == torch.float32:
        return False
    small = 2 * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3]) * some.area < SMALL * len(tiles)
    return (small and len(tiles) > 1) or all(cudnn.supports(spec, q, k, v, tile) for tile in some.kinds)


def rounds(name: str, q: Tensor) -> bool:
    """Whether what is asked for by that name may give gradients in q's dtype, rounded: library kernels on CUDA do.

    A pure function of what all ranks have in common, so that they agree on what travels.
    """
    return q.is_cuda and name in ("auto", cudnn.name, cuda_flash.name, efficient.name, flex.name)


class _Glance(NamedTuple):
    """What tiles look like together: neighbouring rows and columns only, their pairs, one of each kind."""

    dense: bool
    area: int
    kinds: tuple[Tile, ...]


@lru_cache(maxsize=2048)
def _glance(tiles: tuple[Tile, ...]) -> _Glance:
    dense = all(tile.rows.step == tile.cols.step == 1 for tile in tiles)
    kinds = {tile.kind: tile for tile in tiles}
    return _Glance(dense, sum(tile.area for tile in tiles), tuple(kinds.values()))


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
    usual = _IN_FLOAT32 if q.dtype == torch.float32 else KERNELS
    if spec.preference is None:
        return usual
    measured = spec.preference.order(str(q.dtype).removeprefix("torch."), q.shape[3], tile)
    return {name: usual[name] for name in (*(name for name in measured if name in usual), *usual)}


def _message(name: str, reason: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str:
    refused = refusals(spec, q, k, v, tile)
    able = [other for other in _fitting(spec, q, tile) if other not in refused]
    hint = f"for this tile use {' or '.join(able)}, or auto" if able else "; ".join(refused.values())
    return f"kernel={name!r} cannot compute {tile}: {reason}; {hint}"
