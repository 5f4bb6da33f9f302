"""Whether a function still is what it was: everything it can read, as a value that is compared.

A score_mod is traced to know what it computes, which takes longer than a small attention. The function object tells
nothing: people make a new one in every layer, and one object may read something else the next time. What a plain
function reads is its code, its cells, defaults and globals. If these are numbers, or tensors that nobody has written to
since, then it computes what it did; if there is anything else among them, it may not, and there is no fingerprint.

>>> slope = 0.5
>>> def score_mod(score, b, h, q_idx, kv_idx):
...     return score - slope * (q_idx - kv_idx)
>>> before = fingerprint(score_mod)
>>> slope = 0.25
>>> fingerprint(score_mod) == before
False
"""

from __future__ import annotations

import dis
import functools
import math
from types import CodeType, FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = (bool, int, float, str, type(None), torch.dtype)
LIBRARIES = (torch, F, math)
"""Modules whose names mean what they mean."""


def fingerprint(fn: object) -> tuple[object, ...] | None:
    """Equal while a function computes the same; None if there is no telling.

    Tensors are told apart by their id: keep the function for as long as its fingerprint.
    """
    if type(fn) is not FunctionType or not _is_plain(fn.__code__):
        return None
    try:
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # one that is still empty
        return None
    named = [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
    read = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *named]
    parts = [_part(each) for each in read]
    return None if None in parts else (fn.__code__, torch.get_default_dtype(), *parts)


@functools.lru_cache(maxsize=256)
def _is_plain(code: CodeType) -> bool:
    """Whether all that code reads is seen from outside: no functions in it, and nothing imported by it."""
    inner = any(isinstance(each, CodeType) for each in code.co_consts)
    return not inner and all(each.opname != "IMPORT_NAME" for each in dis.get_instructions(code))


def _part(value: object) -> tuple[object, ...] | None:
    if type(value) in NUMBERS:
        return type(value), repr(value)
    if any(value is each for each in LIBRARIES):
        return "library", id(value)
    if type(value) in (Tensor, torch.nn.Parameter) and isinstance(value, Tensor):
        if value.is_inference() or value.__dict__:  # writes to the one are not counted, to the other not seen
            return None
        return "tensor", id(value), value._version, tuple(value.shape), value.dtype, value.device
    return None
