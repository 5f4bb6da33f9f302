"""Kernels: one tile in, (out, lse) out, and its backward. kernel.py has the contract."""

from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.adding import add_into, write_into
from attnspan.kernels.kernel import Kernel, Spec
from attnspan.kernels.merge import merge_into
from attnspan.kernels.registry import KERNELS, choose, refusals

__all__ = ["KERNELS", "Accumulator", "Kernel", "Spec", "add_into", "choose", "merge_into", "refusals", "write_into"]
