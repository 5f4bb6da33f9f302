"""Code that torch.compile does not compile.

`eagerly` is for functions: compiled code has a graph break before them, and runs them eagerly.

[Note: frames of our own] At a graph break, torch.compile goes on to compile the functions that are called there, one by
one. This library's code between the user and torch is called with all kinds of arguments, and would be compiled until
the recompilation limit is reached. `skip_frames` tells dynamo to skip such frames; as part of a user's function they
are traced as usual.
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
    """A function that runs eagerly, with everything that it calls, when compiled code calls it."""
    if "torch._dynamo" not in sys.modules:  # to import it takes longer than all of this package
        return function
    if function not in _DISABLED:  # to make one takes longer than a small call
        _DISABLED[function] = torch.compiler.disable(function)
    return _DISABLED[function]


def skip_frames(code: CodeType, *, callees: bool = True) -> None:
    """Have torch.compile skip frames of a code object, and their callees. See [Note: frames of our own]."""
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        below = action.SKIP if callees else action.DEFAULT
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, below))
    except (ImportError, AttributeError):  # a torch that cannot be told compiles them, which is slow and not wrong
        return
