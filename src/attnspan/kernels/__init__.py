"""Kernels: the tiles between two buffers in, (out, lse) out, and the way back. kernel.py has the contract."""

from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.adding import add_into, sum_into, write_into
from attnspan.kernels.band_mods import explain_programs
from attnspan.kernels.dropout import Dropout
from attnspan.kernels.kernel import (
    BackwardInputs,
    GradientBuffers,
    Gradients,
    Kernel,
    Preference,
    Region,
    Spec,
    TileKernel,
    Traits,
)
from attnspan.kernels.merge import merge_into
from attnspan.kernels.mods import GlobalPositions, Mods
from attnspan.kernels.per_tile import PerTile
from attnspan.kernels.registry import AUTO, KERNELS, choose_kernel, fastest, refusal, refusals, rounds, runs_programs
from attnspan.kernels.row_sums import RowSums

__all__ = [
    "AUTO",
    "KERNELS",
    "Accumulator",
    "BackwardInputs",
    "Dropout",
    "GlobalPositions",
    "GradientBuffers",
    "Gradients",
    "Kernel",
    "Mods",
    "PerTile",
    "Preference",
    "Region",
    "RowSums",
    "Spec",
    "TileKernel",
    "Traits",
    "add_into",
    "choose_kernel",
    "explain_programs",
    "fastest",
    "merge_into",
    "refusal",
    "refusals",
    "rounds",
    "runs_programs",
    "sum_into",
    "write_into",
]
