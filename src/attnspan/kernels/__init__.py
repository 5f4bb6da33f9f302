"""Kernels: one tile in, (out, lse) out, and its backward. kernel.py has the contract."""

from attnspan.kernels import bands
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.adding import add_into, sum_into, write_into
from attnspan.kernels.kernel import Kernel, Preference, ProgramKernel, Spec
from attnspan.kernels.merge import merge_into
from attnspan.kernels.mods import Mods, Region, Rows, Where
from attnspan.kernels.registry import KERNELS, PROGRAM_KERNELS, choose, joins, refusals, rounds

__all__ = [
    "KERNELS",
    "PROGRAM_KERNELS",
    "Accumulator",
    "Kernel",
    "Mods",
    "Preference",
    "ProgramKernel",
    "Region",
    "Rows",
    "Spec",
    "Where",
    "add_into",
    "bands",
    "choose",
    "joins",
    "merge_into",
    "refusals",
    "rounds",
    "sum_into",
    "write_into",
]
