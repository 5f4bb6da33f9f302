"""The arguments that a layer of a transformers model passes to its AttentionInterface, read from its source.

A layer calls a function that it looks up by the name of an implementation, with arguments such as
``scaling=self.scaling, sliding_window=self.sliding_window``. Attributes alone prove nothing, since a layer may not pass
them on; so the call is parsed from the source, and its arguments are evaluated for the module. They are attributes,
numbers, and simple expressions.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import textwrap
from collections.abc import Callable, Mapping
from threading import Lock

from torch import nn
from transformers import PreTrainedModel

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name, in the modeling files of transformers, of the table of attention functions."""


class Unclear(Exception):
    """An expression that cannot be evaluated for a module."""


def calls_of(module: nn.Module) -> tuple[Mapping[str, ast.expr], ...]:
    """The calls of the interface in a module's class, each as its keyword arguments; none if it is no such layer."""
    cls: type = type(module)  # that of an nn.Module is not hashable, to mypy
    return _calls_in(cls)


@functools.cache
def _calls_in(cls: type[nn.Module]) -> tuple[Mapping[str, ast.expr], ...]:
    if cls.__module__.startswith("torch.") or issubclass(cls, PreTrainedModel):
        return ()
    found: list[Mapping[str, ast.expr]] = []
    seen: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, object):
            break
        for name, function in vars(base).items():
            if name not in seen and inspect.isfunction(function):
                seen.add(name)
                found += _calls_in_function(function)
    return tuple(found)


def _calls_in_function(function: Callable[..., object]) -> list[Mapping[str, ast.expr]]:
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return []
    if INTERFACE not in source:
        return []
    tree = parse(source)
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and INTERFACE in ast.unparse(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return [
        {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


_PARSING = Lock()  # the parser of Python 3.11 fails, now and then, if two threads use it at once


def parse(source: str) -> ast.Module:
    """The tree of a function's source, which may be indented."""
    with _PARSING:
        return ast.parse(textwrap.dedent(source))


OPERATORS: dict[type, Callable[..., object]] = {
    ast.Pow: operator.pow,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "getattr": getattr,
    "hasattr": hasattr,
    "int": int,
    "float": float,
    "math.sqrt": math.sqrt,
}


def evaluate(node: ast.expr, module: nn.Module) -> object:
    """The value of an expression of `self`, in training."""
    value = functools.partial(evaluate, module=module)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id="self"):
            return module
        case ast.Attribute(value=ast.Name(id="self"), attr="training"):
            return True
        case ast.Attribute():
            return _read(value(node.value), node.attr)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        case ast.IfExp():
            return value(node.body) if value(node.test) else value(node.orelse)
        case ast.BoolOp():
            values = [value(each) for each in node.values]
            return functools.reduce(
                (lambda a, b: a and b) if isinstance(node.op, ast.And) else lambda a, b: a or b, values
            )
        case ast.Compare(ops=[op], comparators=[other]) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(node.left), value(other))
        case ast.Call(keywords=[]) if ast.unparse(node.func) in FUNCTIONS:
            return FUNCTIONS[ast.unparse(node.func)](*(value(each) for each in node.args))
    raise Unclear(f"{ast.unparse(node)} cannot be evaluated for the module")


def _read(holder: object, name: str) -> object:
    if not hasattr(holder, name):
        raise Unclear(f"there is no {name!r}")
    found: object = getattr(holder, name)
    return found
