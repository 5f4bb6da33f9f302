"""FlexAttention programs inside a kernel: a score_mod and the mask's mask_mod, evaluated at global positions.

A kernel sees rows and columns of buffers: a rank's queries in the order of its layout, keys as they arrived, a share of
the heads, one of several batch rows. A program was written for the whole attention. `GlobalPositions` says which
position, batch row and head each row, column and tensor dim stands for; evaluated through it, a program never notices
that it was split.

Knows nothing of ranks: who holds what is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.masks.program import Program
from attnspan.masks.tile import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Mods:
    """What changes scores, and what decides which pairs count in tiles that need it (tile.py); each may be None."""

    score_mod: Program | None = None
    mask_mod: Program | None = None

    def needed_by(self, tile: Tile) -> str:
        """What a kernel must be able to run for a tile, or nothing."""
        if self.score_mod is not None:
            return f"score_mod ({self.score_mod.name})"
        return f"mask_mod ({self.mask_mod.name})" if tile.needs_mask_mod and self.mask_mod is not None else ""

    @property
    def key(self) -> str:
        """The same on every rank that runs the same programs."""
        return " ".join("none" if each is None else each.key for each in (self.score_mod, self.mask_mod))

    @property
    def content(self) -> str:
        """The same on every rank whose mask_mod looks things up in the same tensors."""
        return "" if self.mask_mod is None else self.mask_mod.content


class GlobalPositions(NamedTuple):
    """The global position of every row and column, (n,) and (m,), and the batch rows and heads of the tensors. The
    same positions as runs, for kernels that read no tensor of positions."""

    rows: Tensor
    cols: Tensor
    batch: range
    heads: range
    runs: tuple[tuple[range, ...], tuple[range, ...]]

    def indices(self, rows: range, cols: range) -> list[Tensor]:
        """b, h, q_idx and kv_idx of some rows and columns, as programs take them."""
        device = self.rows.device
        b, h = (torch.arange(some.start, some.stop, device=device) for some in (self.batch, self.heads))
        return [b, h, self.rows[as_slice(rows)], self.cols[as_slice(cols)]]


def as_slice(rows: range) -> slice:
    """A range as what indexes a tensor."""
    return slice(rows.start, rows.stop, rows.step)
