"""Functions that torch.compile leaves alone: it ends a graph before them, runs them as they are, and begins another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def eagerly(function: Callable[..., T]) -> Callable[..., T]:
    """A function of which nothing is compiled, nor of what it calls, whether the caller is compiled or not."""
    if "torch._dynamo" not in sys.modules:  # to import it takes longer than all of this package
        return function
    return torch.compiler.disable(function)
