"""Detects modules that mix tokens without attention, by the source of their forward.

On a rank with some of the tokens, ``x[:, 1:]`` is not the next token of each, and ``x[:, 0]`` not the first of all.
Such a module would run without an error, and be wrong. It is detected by expressions in its source::

    x[:, 0]  x[:, -1]  x[:, 1:]  x[:, :-1]      constant indices in the dim of tokens
    roll(x)  pad(x)  conv1d(x)  flip(x)         functions that move tokens
    cumsum(x)  einsum(x)  ...                   functions that may sum over tokens, in recurrences (mixers.py)

Attention is checked elsewhere (layers.py). Not detected: modules without source, and functions that forward calls; the
output of a model is checked too (checking.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator

from torch import nn

from attnspan.integrations.huggingface.interface_calls import parse

MOVING = frozenset({"roll", "pad", "flip", "conv1d", "unfold", "fft", "fftn", "rfft"})
"""Functions of torch that move tokens, or mix them."""

SUMMING = {"cumsum", "cumprod", "cummax", "logcumsumexp", "associative_scan", "einsum", "bmm", "baddbmm"}
"""Functions that a recurrence may be written with."""


def token_mixing(module: nn.Module, after: str = "") -> str | None:
    """The first expression of a module's forward that reads other tokens than a token's own; None if there is none.

    Only what comes after the last call of ``self.after(...)`` counts, if that is given and called.

    >>> class Shifted(nn.Module):
    ...     def forward(self, x):
    ...         return x[:, 1:] + x[:, :-1]
    >>> token_mixing(Shifted()), token_mixing(nn.Linear(1, 1))
    ('x[:, 1:]', None)
    """
    if type(module).__module__.startswith("torch."):
        return None
    try:
        return mixing_in(inspect.unwrap(type(module).forward), after=after)
    except (OSError, TypeError):
        return None


@functools.cache
def mixing_in(
    function: Callable[..., object],
    moving: frozenset[str] = MOVING,
    uncalled: frozenset[str] = frozenset(),
    after: str = "",
) -> str | None:
    """The first such expression of a function, of which those called `moving` move tokens; raises without source.

    What is passed to functions that are `uncalled` here is not looked at.
    """
    tree = parse(inspect.getsource(function))
    begin = max((_end_of_call(node, after) for node in ast.walk(tree)), default=0)
    return next((ast.unparse(node) for node in _found(tree, moving, uncalled) if node.lineno > begin), None)


def _end_of_call(node: ast.AST, name: str) -> int:
    """The last line of a call of a module of `self` by a name; 0 for other code."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attribute)) if attribute == name:
            return node.end_lineno or 0
    return 0


def _found(tree: ast.AST, moving: frozenset[str], uncalled: frozenset[str]) -> Iterator[ast.expr]:
    for node in _walk(tree, uncalled):
        match node:
            case ast.Subscript(slice=ast.Tuple(elts=[ast.Slice(lower=None, upper=None), place, *_])) if _is_fixed(
                place
            ):
                yield node
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in moving:
                yield node


def _walk(tree: ast.AST, uncalled: frozenset[str]) -> Iterator[ast.AST]:
    """All nodes in and under one, without calls of some names."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in uncalled:
        return
    yield tree
    for node in ast.iter_child_nodes(tree):
        yield from _walk(node, uncalled)


def _is_fixed(place: ast.expr) -> bool:
    """Whether an index is a number, or a slice from or to one."""
    if isinstance(place, ast.Slice):
        return any(end is not None and _is_fixed(end) for end in (place.lower, place.upper))
    number = place.operand if isinstance(place, ast.UnaryOp) else place
    return isinstance(number, ast.Constant) and isinstance(number.value, int)
