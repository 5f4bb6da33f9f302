"""What a kernel is: a module that computes one tile, says what it cannot do, and knows the way back.

A kernel is handed the rows and columns of its tile, already sliced, and computes::

    score = scale * q @ k.T            where the tile allows the pair, else nothing
    lse   = log(sum(exp(score)))       natural log; -inf for a row that saw no key, whose out is 0
    out   = exp(score - lse) @ v

[Note: final out and lse] A row's keys are spread over many tiles, and the softmax over all of them is only known
once they are merged. Backward is therefore given the FINAL out and lse of its rows, not this tile's own: then
``exp(score - lse)`` is this tile's true share of the probabilities, ``sum(grad * out)`` is the true correction,
the tiles' gradients simply add up, and no partial result has to be kept.

Shapes: q (B, H, n, D), k (B, Hk, m, D), v (B, Hk, m, Dv) with Hk dividing H, key head h // (H / Hk) serving query
head h; any strides. out and grad (B, H, n, Dv), lse (B, H, n). Knows nothing of ranks, plans or masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from attnspan.kernels.mods import Mods, Region, Rows
from attnspan.masks.tile import Tile


class Preference(Protocol):
    """Measurements that say which kernel is the fastest; tuning/table.py has them."""

    def order(self, dtype: str, head_dim: int, tile: Tile) -> tuple[str, ...]:
        """Names of kernels, the fastest for such a tile first; none where nothing was measured."""
        ...


@dataclass(frozen=True, slots=True)
class Spec:
    """What all tiles of one attention have in common.

    >>> Spec(scale=0.125)
    Spec(scale=0.125)
    """

    scale: float
    mods: Mods | None = field(default=None, repr=False)
    preference: Preference | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What others must know of a kernel.

    >>> import torch
    >>> cuda_only = Traits(devices=("cuda",), dtypes=(torch.float16, torch.bfloat16), order=10)
    >>> cuda_only.misfit(torch.empty(1))
    'runs on cuda, got tensors on cpu'
    """

    order: int
    """In which "auto" tries kernels: the lowest number that can compute a tile does."""

    order_float32: int | None = None
    """The same in float32, where that differs."""

    devices: tuple[str, ...] = ()
    """The types of devices that it runs on; empty where it runs on any."""

    dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes that it computes; empty where it computes all that float."""

    rounds: bool = False
    """Whether its gradients may be rounded to the tensors' dtype."""

    programs: bool = False
    """Whether it runs FlexAttention programs: "auto" takes it for those, and for nothing else."""

    measured: bool = True
    """Whether `attnspan tune` measures it unasked. Not what is there to be right, nor what takes long to compile."""

    joins: float = 0.0
    """Operations of a tile below which "auto" has it compute all tiles of a step in half precision, if it can compute
    them in one call; 0 where it cannot."""

    def runs_on(self, device: torch.device) -> bool:
        return not self.devices or device.type in self.devices

    def misfit(self, q: Tensor) -> str | None:
        """Why such tensors are not for this kernel, by their device and dtype; or None."""
        if not self.runs_on(q.device):
            return f"runs on {' or '.join(self.devices)}, got tensors on {q.device.type}"
        if self.dtypes:
            return not_among(q.dtype, self.dtypes)
        return None if q.is_floating_point() else f"needs a floating-point dtype, got {q.dtype}"


class Kernel(Protocol):
    """The interface that every kernel module has."""

    name: str
    traits: Traits

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """None if the kernel computes this exactly, else the reason why it does not. Reads no values."""

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """(out, lse): out in q's dtype or a wider one, lse in float32 (float64 for float64)."""
        ...

    def backward(
        self, spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) from the final out and lse; dk and dv summed over the query heads of each key head."""
        ...


class ProgramKernel(Protocol):
    """The interface of a kernel that runs FlexAttention programs.

    It takes everything that is computed between two buffers at once: tiles, and what their rows and columns stand for.
    Rows and columns are those of the buffers, not sliced.
    """

    name: str
    traits: Traits

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """As of `Kernel`, for each of the tiles."""

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, region: Region) -> tuple[Tensor, Tensor]:
        """(out, lse) of all rows; 0 and -inf for those without a key."""
        ...

    def backward(
        self, spec: Spec, final: Rows, q: Tensor, k: Tensor, v: Tensor, region: Region, sums: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of all rows and columns, that of lse's gradient included.

        Gradients of captured tensors are added to `sums`, where there is one.
        """
        ...


def not_among(dtype: object, dtypes: tuple[object, ...]) -> str | None:
    """The reason for refusing a dtype, or None.

    >>> import torch
    >>> not_among(torch.float64, (torch.float16, torch.bfloat16))
    'needs float16 or bfloat16, got float64'
    """
    if dtype in dtypes:
        return None
    *others, last = (str(known).removeprefix("torch.") for known in dtypes)
    return f"needs {', '.join(others)} or {last}, got {str(dtype).removeprefix('torch.')}"
