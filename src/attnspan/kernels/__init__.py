"""Kernels: the tiles between two buffers in, (out, lse) out, and the way back.

    kernel.py        the contract of a kernel, and of one that computes one tile (per_tile.py: from that to all tiles)
    registry.py      all kernels, and which one computes a step

Kernels, by name:

    cudnn.py, cuda_flash.py, efficient.py, cpu_flash.py    torch's (aten.py: its private ops; parts.py: tiles in parts)
    flash4.py                                              FlashAttention-4
    band.py                                                our own, in Triton (bands.py: all tiles in one call)
    flex.py                                                FlexAttention, compiled: any program
    blocks.py                                              any program on any device, block by block
    reference.py                                           the formulas, in plain torch

Inside of our own:

    agenda.py            which block of rows sees which columns
    band_programs.py     in Triton
    band_hopper.py       in Gluon, for Hopper GPUs (hopper_programs.py)
    band_mods.py         score_mods and mask_mods (triton_mods.py, triton_expressions.py: as Triton code;
                         mod_lookups.py: where they look numbers up)

Shared by kernels:

    accumulator.py       partial results of tiles (merge.py: of two)
    adding.py            sums into tensors of any layout (row_sums.py: of what score_mods learn row by row)
    mods.py              score_mods and mask_mods at global positions (split.py: a program in two)
    segments.py          tiles as sequences of variable length
    dropout.py           dropout by positions
    autograd.py          autograd inside of a custom op
"""

from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.adding import add_into, sum_into, write_into
from attnspan.kernels.band_mods import explain_programs
from attnspan.kernels.dropout import Dropout
from attnspan.kernels.kernel import (
    GradientBuffers,
    Gradients,
    Kernel,
    MergedOutputs,
    Preference,
    Spec,
    StepTiles,
    TileKernel,
    Traits,
)
from attnspan.kernels.merge import merge_into
from attnspan.kernels.mods import GlobalPositions, Mods
from attnspan.kernels.per_tile import PerTile
from attnspan.kernels.registry import (
    AUTO,
    KERNELS,
    choose_kernel,
    kernel_for_tile,
    needs_mask_program,
    refusal,
    refusals,
    rounds_gradients,
)
from attnspan.kernels.row_sums import RowSums

__all__ = [
    "AUTO",
    "KERNELS",
    "Accumulator",
    "Dropout",
    "GlobalPositions",
    "GradientBuffers",
    "Gradients",
    "Kernel",
    "MergedOutputs",
    "Mods",
    "PerTile",
    "Preference",
    "RowSums",
    "Spec",
    "StepTiles",
    "TileKernel",
    "Traits",
    "add_into",
    "choose_kernel",
    "explain_programs",
    "kernel_for_tile",
    "merge_into",
    "needs_mask_program",
    "refusal",
    "refusals",
    "rounds_gradients",
    "sum_into",
    "write_into",
]
