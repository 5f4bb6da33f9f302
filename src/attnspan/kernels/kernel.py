"""What a kernel is: it computes everything between a buffer of queries and one of keys, and knows the way back.

The work is `StepTiles`: those of one step of a plan, over rows of q and columns of k and v. For each pair that a
tile allows::

    score = scale * q @ k.T
    lse   = log(sum(exp(score)))       natural log; -inf for a row that saw no key, whose out is 0
    out   = exp(score - lse) @ v       with dropout, probabilities are weighted first (dropout.py)

A kernel of one tile is a `TileKernel`: it is handed the rows and columns of its tile, already sliced, and `PerTile`
(per_tile.py) makes a `Kernel` of it. What others must know of a kernel is in its `Traits`. So a new kernel is one file,
and one line in registry.py.

[Note: final out and lse] A row's keys are spread over many tiles, and the softmax over all of them is only known
once they are merged. Backward is therefore given the FINAL out and lse of its rows, not this tile's own: then
``exp(score - lse)`` is this tile's true share of the probabilities, ``sum(grad * out)`` is the true correction,
the tiles' gradients simply add up, and no partial result has to be kept.

Shapes: q (B, H, n, D), k (B, Hk, m, D), v (B, Hk, m, Dv) with Hk dividing H, key head h // (H / Hk) serving query
head h; any strides. out and grad (B, H, n, Dv), lse (B, H, n). Knows tiles; nothing of ranks or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.dropout import Dropout
from attnspan.kernels.mods import GlobalPositions, Mods
from attnspan.kernels.row_sums import RowSums
from attnspan.masks.tile import Tile

Tiles = tuple[Tile, ...]


class Preference(Protocol):
    """Measurements that say which kernel is the fastest; tuning/table.py has them."""

    def order(self, dtype: str, head_dim: int, tile: Tile) -> tuple[str, ...]:
        """Names of kernels, the fastest for such a tile first; none where nothing was measured."""
        ...

    def in_one_call(self, kernels: tuple[str, ...], dtype: str, head_dim: int, tiles: Tiles) -> str | None:
        """Which of some kernels computes all tiles in one call the fastest, if that takes less time than each tile by
        its own fastest kernel; None otherwise, or where nothing was measured."""
        ...


@dataclass(frozen=True, slots=True)
class Spec:
    """What all tiles of one attention have in common.

    >>> Spec(scale=0.125)
    Spec(scale=0.125, dropout=None)
    """

    scale: float
    mods: Mods | None = field(default=None, repr=False)
    preference: Preference | None = field(default=None, repr=False)
    dropout: Dropout | None = None


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

    rounds_gradients: bool = False
    """Whether its gradients may be rounded to the tensors' dtype."""

    programs: bool = False
    """Whether it runs FlexAttention programs."""

    needs_mask_program: bool = False
    """Whether it computes nothing without the program of the mask: "auto" takes it only where one has to run."""

    dropout: bool = False
    """Whether it drops probabilities. A kernel of one tile finds the tile's place in `Spec.dropout`."""

    measured: bool = True
    """Whether `attnspan tune` measures it unasked. Not what is there to be right, nor what takes long to compile."""

    optional: bool = False
    """Whether "auto" takes it only where it was measured on the device, and is expected to be the fastest for all tiles
    of a step in one call: then for all of them."""

    joins_below: float = 0.0
    """Operations of an average tile below which "auto" has it compute all tiles of a step in one call, not in float32;
    0 for a kernel that computes tiles one by one."""

    def runs_on(self, device: torch.device) -> bool:
        return not self.devices or device.type in self.devices

    def misfit(self, q: Tensor) -> str | None:
        """Why such tensors are not for this kernel, by their device and dtype; or None."""
        if not self.runs_on(q.device):
            return f"runs on {' or '.join(self.devices)}, got tensors on {q.device.type}"
        if self.dtypes:
            return not_among(q.dtype, self.dtypes)
        return None if q.is_floating_point() else f"needs a floating-point dtype, got {q.dtype}"


@dataclass(eq=False)
class StepTiles:
    """Everything that one step computes between two buffers: tiles, where they lie in the whole attention, the tensors
    that the score_mod captured, and whether no other step computes anything, so that out and lse are final (except for
    sinks)."""

    tiles: Tiles
    locate: Callable[[], GlobalPositions]
    captured: Sequence[Tensor] = ()
    is_final: bool = False

    @cached_property
    def where(self) -> GlobalPositions:
        """What rows and columns stand for, worked out for kernels that ask."""
        return self.locate()


@dataclass(frozen=True, slots=True)
class MergedOutputs:
    """What backward is given of all rows: the merged out and lse, the gradients of both, and whether sinks have a share
    in them. See [Note: final out and lse]."""

    grad: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    sinks: bool = False

    def batch_rows(self, rows: slice) -> MergedOutputs:
        """Some batch rows."""
        return self._at(rows)

    def heads(self, heads: slice) -> MergedOutputs:
        """Some heads."""
        return self._at((slice(None), heads))

    def delta(self) -> Tensor:
        """What a score's gradient is corrected by. lse's own gradient is part of it: d lse / d score is the
        probability, and the gradient of a score is probability x (grad @ value - delta)."""
        wide = self.lse.dtype
        correction = (self.grad.to(wide) * self.out.to(wide)).sum(-1)
        return correction if self.grad_lse is None else correction - self.grad_lse.to(wide)

    def rows(self, rows: slice) -> MergedOutputs:
        """Some queries."""
        return self._at((slice(None), slice(None), rows))

    def _at(self, at: slice | tuple[slice, ...]) -> MergedOutputs:
        grad_lse = None if self.grad_lse is None else self.grad_lse[at]
        return MergedOutputs(self.grad[at], grad_lse, self.out[at], self.lse[at], self.sinks)


class GradientBuffers(NamedTuple):
    """Where gradients are written: tensors of any strides and dtype, and whether dq holds a sum that is added to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    add_rows: bool = False


class Gradients(Protocol):
    """Takes the gradients of a step."""

    @property
    def captured(self) -> Sequence[Tensor | None]:
        """Sums for what the score_mod captured, where they are wanted."""
        ...

    @property
    def row_sums(self) -> RowSums:
        """What is learned row by row, whose sums are over all steps."""
        ...

    def add(self, rows: range, cols: range, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Take those of some rows and columns, which belong to the taker from then on."""

    def open(self) -> GradientBuffers:
        """For one writer of all rows and columns: where to. `close` follows."""
        ...

    def close(self, into: GradientBuffers) -> None:
        """Take what was written."""


class Kernel(Protocol):
    """Computes the tiles of a step. They have the rows and columns of the buffers q, k and v, which are not sliced."""

    name: str
    traits: Traits

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
        """None if the kernel computes these tiles exactly, else the reason why it does not. Reads no values."""

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
        """Join (out, lse) of all tiles into the total: out in q's dtype or a wider one, lse in float32 (float64 for
        float64)."""

    def backward(
        self, spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
    ) -> None:
        """Hand over (dq, dk, dv) of all tiles, what lse's gradient adds to them included, from the final out and lse.
        Gradients of captured tensors are added to those of `grads`, where it has one."""


class TileKernel(Protocol):
    """Computes one tile, from the rows and columns of it alone. The interface of most kernel modules."""

    name: str
    traits: Traits

    def supports(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """As of `Kernel`. Tensors may be larger than the tile: lengths are those of the tile."""

    def forward(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """(out, lse), in the dtypes of `Kernel.forward`."""
        ...

    def backward(
        self, spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) from the final out and lse; dk and dv summed over the query heads of each key head."""
        ...


def not_among(dtype: object, dtypes: tuple[object, ...]) -> str | None:
    """The reason for refusing a dtype, or None.

    >>> import torch
    >>> not_among(torch.float64, (torch.float16, torch.bfloat16))
    'needs float16 or bfloat16, got float64'
    """
    if dtype in dtypes:
        return None
    *others, last = (dtype_name(known) for known in dtypes)
    return f"needs {', '.join(others)} or {last}, got {dtype_name(dtype)}"
