"""Triton kernels compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import torch


class Compiling:
    """In the place of a Triton kernel: calls compile it for sm_90, and note its name and shared memory."""

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
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if isinstance(given[name], torch.Tensor)
        }
        source = ASTSource(self.fn, kinds, constexprs=constant, attrs=aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.compiled.append((self.fn.__name__, made.metadata.shared))


def kind_of(x):
    from triton.runtime.jit import mangle_type

    return tuple(map(kind_of, x)) if isinstance(x, tuple) else mangle_type(x)
