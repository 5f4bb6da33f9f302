"""Copies of functions with other globals: the same code, in which some global names are bound to our functions.

    forward = rebound(original, {"causal_conv1d_fn": ours})

The modeling file and other models do not change, and each virtual rank can have a copy of its own.

[Note: compiled] torch.compile looks globals up in the module that ``__name__`` among them names, where the originals
are. So the globals of a copy have no ``__name__``. It caches compiled code by code object, and stores what that code
needs among the globals of the function. So every copy has a code object of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType


def rebound(function: FunctionType, functions: Mapping[str, object]) -> FunctionType:
    """A copy of a function in which these names are bound to `functions`; its decorators are copied too."""
    inner, closure = getattr(function, "__wrapped__", None), function.__closure__ or ()
    if inner is not None:
        below = rebound(inner, functions)
        cells = tuple(CellType(below) if _cell_value(cell) is inner else cell for cell in closure)
        return _again(function, function.__globals__, cells)
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"}  # [Note: compiled]
    scope |= {name: functions[name] for name in names_in(function.__code__) if name in functions and name in scope}
    return _again(function, scope, closure)


def can_be_rebound(function: FunctionType) -> bool:
    """Whether each decorator of a function holds what it decorates in its closure, where a copy can replace it."""
    inner = getattr(function, "__wrapped__", None)
    held = [_cell_value(cell) for cell in function.__closure__ or ()]
    return inner is None or (any(each is inner for each in held) and can_be_rebound(inner))


def names_in(code: CodeType) -> Iterator[str]:
    """The global names and attributes that code mentions."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


def _cell_value(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing
        return None


def _again(function: FunctionType, scope: dict[str, object], closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(function.__code__.replace(), scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
