"""Modules that mix tokens without attention, recognised by the source of their forward.

A rank has some of the tokens, so ``x[:, 1:]`` does not hold the next token of each, nor ``x[:, 0]`` the first of all.
Such a module would run on a rank without an error, and be wrong. It is recognised by the source of its class::

    x[:, 0]  x[:, -1]  x[:, 1:]  x[:, :-1]      one token for all, or all moved by one: numbers at the place of tokens
    roll(x)  pad(x)  conv1d(x)  flip(x)         functions that move tokens

Attention is checked elsewhere (layers.py). Not known here: modules without source, and other functions that forward
calls; the output of a model is checked too (checking.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from attnspan.integrations.huggingface.layers import PARSING

MOVING = {"roll", "pad", "flip", "conv1d", "unfold", "fft", "fftn", "rfft"}
"""Functions of torch that move tokens, or mix them."""


def token_mixing(module: nn.Module) -> str | None:
    """The first expression of a module's forward that reads other tokens than a token's own; None if there is none.

    >>> class Shifted(nn.Module):
    ...     def forward(self, x):
    ...         return x[:, 1:] + x[:, :-1]
    >>> token_mixing(Shifted()), token_mixing(nn.Linear(1, 1))
    ('x[:, 1:]', None)
    """
    cls: Any = type(module)
    return _mixing_in(cls)


@functools.cache
def _mixing_in(cls: Any) -> str | None:
    if cls.__module__.startswith("torch."):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return None
    with PARSING:
        tree = ast.parse(source)
    return next((ast.unparse(node) for node in _found(tree)), None)


def _found(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Tuple(elts=[ast.Slice(lower=None, upper=None), place, *_])) if _is_fixed(
                place
            ):
                yield node
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in MOVING:
                yield node


def _is_fixed(place: ast.expr) -> bool:
    """Whether an index is a number, or a slice from or to one."""
    if isinstance(place, ast.Slice):
        return any(end is not None and _is_fixed(end) for end in (place.lower, place.upper))
    number = place.operand if isinstance(place, ast.UnaryOp) else place
    return isinstance(number, ast.Constant) and isinstance(number.value, int)
