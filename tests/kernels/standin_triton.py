"""In the place of Triton: what the code of score_mods and mask_mods asks of it, in torch, with 64 bits for 32.

It shows that the code computes what the program does; that Triton compiles it, and computes the same, test_band_mods.py
shows where Triton is installed.
"""

from __future__ import annotations

import contextlib
import sys
import types
from unittest.mock import patch

import torch

from attnspan.kernels import triton_mods


class Pointer:
    """A tensor, and where to read in it."""

    def __init__(self, x, at=0):
        self.x, self.at = x.reshape(-1), at

    def __add__(self, at):
        return Pointer(self.x, self.at + at)


def load(pointer, mask=True, other=0):
    at = torch.as_tensor(pointer.at)
    assert bool(((at >= 0) & (at < len(pointer.x)) | ~torch.as_tensor(mask)).all()), "a load beyond the table"
    found = pointer.x[at.clamp(0, len(pointer.x) - 1)]
    return torch.where(torch.as_tensor(mask), found, torch.as_tensor(other, dtype=found.dtype))


def where(condition, x, y):
    kind = next((each.dtype for each in (x, y) if isinstance(each, torch.Tensor)), torch.int64)
    x, y = (each if isinstance(each, torch.Tensor) else torch.tensor(each, dtype=kind) for each in (x, y))
    return torch.where(condition, x, y)


def maximum(x, y, propagate_nan=None):
    return torch.maximum(*torch.broadcast_tensors(x, torch.as_tensor(y, dtype=x.dtype)))


def minimum(x, y, propagate_nan=None):
    return torch.minimum(*torch.broadcast_tensors(x, torch.as_tensor(y, dtype=x.dtype)))


def _modules():
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    names = ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "abs", "zeros_like")
    functions = {name: getattr(torch, name) for name in names}
    numbers = {"int1": torch.bool, **dict.fromkeys(("int32", "int64"), torch.int64)}
    numbers |= dict.fromkeys(("float16", "bfloat16", "float32", "float64"), torch.float64)
    own = {
        "load": load,
        "where": where,
        "maximum": maximum,
        "minimum": minimum,
        "constexpr": int,
        "debug_barrier": lambda: None,
    }
    vars(language).update(functions | numbers | own)
    language.PropagateNan = types.SimpleNamespace(ALL=None)
    language.full = lambda shape, x, dtype: torch.full(shape, x, dtype=dtype)
    triton.language, triton.jit = language, lambda fn: fn
    return {"triton": triton, "triton.language": language}


@contextlib.contextmanager
def standin():
    """Inside, what is written is run by this."""
    triton_mods._mods_code.cache_clear()
    try:
        with patch.dict(sys.modules, _modules()):
            yield
    finally:
        triton_mods._mods_code.cache_clear()
