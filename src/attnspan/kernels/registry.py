"""Which kernel computes the tiles of a step: the one that was asked for, or for "auto" the fastest.

This is the only list of kernels. What else is to be known of one, it says itself (`Traits`): the order in which "auto"
tries it, where it runs, whether it rounds gradients, whether it is measured. An explicit request never falls back: it
is met, or refused with the kernel's own reason and the names of those that would do.

"auto" gives a tile to the first kernel in order that can compute it (`kernel_for_tile`). Where `Spec.preference` has
measured this device, its order comes first. Four kinds of steps are not taken apart:

* A score_mod, or a tile that needs a mask_mod, is for a kernel that runs programs, which takes all tiles. Other
  kernels refuse, all by the same rule, which is here.
* Dropout is for such a kernel too, if it has dropout. Other kernels refuse, by a rule that is here too.
* A kernel that is `optional` takes all tiles where it is installed and `Spec.preference`, which has measured it,
  expects it to take less time for them in one call than others do; never where nothing was measured.
* A kernel with `joins_below` takes all tiles in one call where no kernel before it in order can compute any of them, or
  where they are many and small: launches and merges cost more than a faster kernel gains. Not in float32, which goes
  through no tensor cores, nor tiles of every n-th row or column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.errors import KernelError, one_of
from attnspan.kernels import band, blocks, cpu_flash, cuda_flash, cudnn, efficient, flash4, flex, reference
from attnspan.kernels.bands import Bands, are_dense
from attnspan.kernels.kernel import Kernel, Spec, TileKernel, Tiles, Traits
from attnspan.kernels.per_tile import JoinedTiles, PerTile
from attnspan.masks.tile import Tile

_ALL: tuple[Kernel, ...] = (
    Bands(band),
    PerTile(cpu_flash),
    JoinedTiles(cuda_flash),
    PerTile(cudnn),
    PerTile(efficient),
    PerTile(reference),
    blocks,
    flash4,
    flex,
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in sorted(_ALL, key=lambda each: each.traits.order)}
"""By name, in the order in which "auto" tries them."""

_PROGRAMS = tuple(kernel for kernel in KERNELS.values() if kernel.traits.programs)
_USUAL = tuple(kernel for kernel in KERNELS.values() if not kernel.traits.needs_mask_program)
_ONE_CALL = {kernel.name: kernel for kernel in _USUAL if kernel.traits.optional or kernel.traits.joins_below}
_ROUNDING = frozenset(device for kernel in _ALL if kernel.traits.rounds_gradients for device in kernel.traits.devices)


def choose_kernel(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Kernel:
    """The kernel of that name, or for "auto" the one that suits the tiles; raises KernelError if it cannot.

    >>> x, tiles = torch.empty(1, 1, 4, 8), (Tile(range(4), range(4), lo=-3, hi=0),)
    >>> (
    ...     choose_kernel("cpu_flash", Spec(scale=1.0), x, x, x, tiles).name,
    ...     choose_kernel("auto", Spec(scale=1.0), x, x, x, tiles).name,
    ... )
    ('cpu_flash', 'auto')
    """
    if name == "auto":
        odd = _unusual(spec, tiles)
        if odd is None:
            return _optional_kernel(spec, q, k, v, tiles) or _one_call_kernel(spec, q, k, v, tiles) or AUTO
        for kernel in _PROGRAMS:
            if refusal(kernel.name, spec, q, k, v, tiles) is None:
                return kernel
        raise KernelError(_refusal_message("auto", "no kernel can", spec, q, k, v, odd))
    if name not in KERNELS:
        one_of("kernel", name, ["auto", *KERNELS], error=KernelError)
    if reason := refusal(name, spec, q, k, v, tiles):
        odd = next((tile for tile in tiles if refusal(name, spec, q, k, v, (tile,))), tiles[0])
        raise KernelError(_refusal_message(name, reason, spec, q, k, v, odd))
    return KERNELS[name]


def kernel_for_tile(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> TileKernel:
    """The kernel that "auto" has for one tile by itself: the first in order, or the fastest where measured. Raises
    KernelError if there is none.

    >>> x = torch.empty(1, 1, 4, 8)
    >>> kernel_for_tile(Spec(scale=1.0), x, x, x, Tile(range(4), range(4), lo=-3, hi=0)).name
    'cpu_flash'
    """
    for each in _by_speed(spec, q, tile):
        if each.kernel.supports(spec, q, k, v, tile) is None:
            return each.kernel
    raise KernelError(_refusal_message("auto", "no kernel can", spec, q, k, v, tile))


class _AutoPerTile(PerTile):
    """Every tile by the kernel that "auto" has for it."""

    def __init__(self) -> None:
        self.name, self.traits = "auto", Traits(order=0)

    def kernel_for(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> TileKernel:
        return kernel_for_tile(spec, q, k, v, tile)

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
        """Why there is a tile that no kernel can compute."""
        try:
            for tile in tiles:
                kernel_for_tile(spec, q, k, v, tile)
        except KernelError as none:
            return str(none)
        return None


AUTO = _AutoPerTile()


def rounds_gradients(name: str, device: torch.device) -> bool:
    """Whether what is asked for by that name may round gradients to the tensors' dtype there.

    A pure function of what all ranks have in common, so that they agree on what travels.

    >>> (
    ...     rounds_gradients("auto", torch.device("cuda")),
    ...     rounds_gradients("band", torch.device("cuda")),
    ...     rounds_gradients("auto", torch.device("cpu")),
    ... )
    (True, False, False)
    """
    return device.type in _ROUNDING and (name == "auto" or (name in KERNELS and KERNELS[name].traits.rounds_gradients))


def needs_mask_program(name: str) -> bool:
    """Whether the kernel of that name computes nothing without the program of the mask."""
    return name in KERNELS and KERNELS[name].traits.needs_mask_program


def refusal(name: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
    """Why a kernel cannot compute some tiles; None if it can."""
    kernel = KERNELS[name]
    if spec.dropout is not None and not kernel.traits.dropout:
        return f"{name} has no dropout"
    odd = None if kernel.traits.programs else _with_program(spec, tiles)
    if odd is not None and spec.mods is not None:
        return f"{name} runs no {spec.mods.needed_by(odd)}"
    return kernel.supports(spec, q, k, v, tiles)


def refusals(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> dict[str, str]:
    """The reason of every kernel that cannot, by its name."""
    reasons = {name: refusal(name, spec, q, k, v, tiles) for name in KERNELS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _with_program(spec: Spec, tiles: Tiles) -> Tile | None:
    """The first tile that needs a program."""
    return None if spec.mods is None else next(filter(spec.mods.needed_by, tiles), None)


def _unusual(spec: Spec, tiles: Tiles) -> Tile | None:
    """The first tile that is not for the fastest kernel of one tile: it needs a program, or dropout."""
    return _with_program(spec, tiles) if spec.dropout is None else tiles[0]


def _optional_kernel(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Kernel | None:
    """The optional kernel that was measured as the fastest for all tiles in one call, if it can compute them."""
    if spec.preference is None or not _summary(tiles).dense:
        return None
    name = spec.preference.in_one_call(tuple(_ONE_CALL), dtype_name(q.dtype), q.shape[3], tiles)
    kernel = _ONE_CALL.get(name or "")
    if kernel is None or not kernel.traits.optional or kernel.supports(spec, q, k, v, tiles) is not None:
        return None
    return kernel


def _one_call_kernel(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Kernel | None:
    """The kernel that "auto" gives all tiles at once, or None where each is for the fastest."""
    if q.dtype == torch.float32:
        return None
    for kernel in _ONE_CALL.values():
        if kernel.traits.joins_below and kernel.supports(spec, q, k, v, tiles) is None:
            dense, area, kinds = _summary(tiles)
            if not dense:
                continue
            flops = 2 * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3]) * area
            small = len(tiles) > 1 and flops < kernel.traits.joins_below * len(tiles)
            faster = _USUAL[: _USUAL.index(kernel)]
            if small or all(other.supports(spec, q, k, v, (tile,)) for other in faster for tile in kinds):
                return kernel
    return None


class _TileSummary(NamedTuple):
    """What tiles look like together: neighbouring rows and columns only, their pairs, one of each kind."""

    dense: bool
    area: int
    kinds: Tiles


@lru_cache(maxsize=2048)
def _summary(tiles: Tiles) -> _TileSummary:
    kinds = {tile.kind: tile for tile in tiles}
    return _TileSummary(are_dense(tiles), sum(tile.area for tile in tiles), tuple(kinds.values()))


def _by_speed(spec: Spec, q: Tensor, tile: Tile) -> Collection[PerTile]:
    """The kernels that "auto" tries for one tile, the first first."""
    usual = _tile_kernels(q.device.type, q.dtype == torch.float32)
    if spec.preference is None:
        return usual.values()
    measured = spec.preference.order(dtype_name(q.dtype), q.shape[3], tile)
    return [usual[name] for name in dict.fromkeys((*measured, *usual)) if name in usual]


@cache
def _tile_kernels(device: str, float32: bool) -> dict[str, PerTile]:
    """The kernels of single tiles that run on a device, in order."""
    there = [each for each in _USUAL if isinstance(each, PerTile) and device in (each.traits.devices or (device,))]
    if float32:
        there.sort(key=lambda each: each.traits.order_float32 or each.traits.order)
    return {each.name: each for each in there}


def _refusal_message(name: str, reason: str, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str:
    refused = refusals(spec, q, k, v, (tile,))
    usual: Iterable[Kernel] = _PROGRAMS if _unusual(spec, (tile,)) else _by_speed(spec, q, tile)
    able = [other.name for other in usual if other.name not in refused]
    hint = f"for this tile use {' or '.join(able)}, or auto" if able else "; ".join(refused.values())
    return f"kernel={name!r} cannot compute {tile}: {reason}; {hint}"
