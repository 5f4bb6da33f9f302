"""Code that torch.compile leaves alone.

`eagerly` is for functions: compiled code ends a graph before them, runs them as they are, and begins another.

[Note: frames of our own] Where torch.compile gives up on a user's function, or breaks off at a call, it goes on to
compile what is called there, function by function. Our code between the user and torch sees all kinds of arguments, and
would be compiled until the recompilation limit is hit. `run_eagerly` tells dynamo to run such frames as they are; as
part of a user's function they are followed as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
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


def run_eagerly(code: CodeType, *, callees: bool = True) -> None:
    """Keep torch.compile from compiling code, and what it calls, by itself. See [Note: frames of our own]."""
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        below = action.SKIP if callees else action.DEFAULT
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, below))
    except (ImportError, AttributeError):  # a torch that cannot be told compiles them, which is slow and not wrong
        return
