"""Functions that torch.compile leaves alone: it ends a graph before them, runs them as they are, and begins another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_DISABLED: dict[Callable[..., object], Callable[..., Any]] = {}  # a function each


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """A function, of a module or a class, of which nothing is compiled, nor of what it calls."""
    if "torch._dynamo" not in sys.modules:  # to import it takes longer than all of this package
        return function
    if function not in _DISABLED:  # to make one takes longer than a small call
        _DISABLED[function] = torch.compiler.disable(function)
    return _DISABLED[function]
