"""Triton kernels compiled for a Hopper GPU where there is none."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Compiled(NamedTuple):
    """A compiled kernel: its name, the bytes of shared memory that it takes, and its PTX."""

    name: str
    shared: int
    ptx: str


class Compiling:
    """In the place of a Triton kernel: calls compile it for sm_90, and note a `Compiled`."""

    def __init__(self, fn, compiled):
        self.fn, self.compiled = fn, compiled

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, num_warps, num_stages=3, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.fn.arg_names
        given = dict(zip(names, args, strict=False)) | constants
        constant = {each.name: given[each.name] for each in self.fn.params if each.is_constexpr}
        kinds = {name: "constexpr" if name in constant else kind_of(given[name]) for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, param in enumerate(self.fn.params)
            if not param.is_constexpr and is_aligned(given[param.name], param.do_not_specialize)
        }
        source = ASTSource(self.fn, kinds, constexprs=constant, attrs=aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.compiled.append(Compiled(self.fn.__name__, made.metadata.shared, made.asm["ptx"]))


def is_aligned(x, varies):
    """Whether Triton takes it for a multiple of 16."""
    return isinstance(x, torch.Tensor) or (isinstance(x, int) and not varies and x % 16 == 0)


def kind_of(x):
    from triton.runtime.jit import mangle_type

    return tuple(map(kind_of, x)) if isinstance(x, tuple) else mangle_type(x)
