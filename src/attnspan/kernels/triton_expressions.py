"""One operation of torch as a Triton expression.

Whole numbers are 64 bits wide in torch. Where bounds are known to fit, as those of positions do, 32 are used.
Where an operation has no Triton, or not with such numbers, it is `Uncompilable`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from attnspan.dtypes import dtype_name
from attnspan.kernels.mod_lookups import Uncompilable, dtype_of

Bounds = tuple[int, int] | None

_WHOLE = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
TYPES = {torch.bool: "int1", **{each: dtype_name(each) for each in (*_WHOLE, *_FLOATS)}}
"""What Triton calls a dtype."""

_POINTWISE = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sign": "sign({0})",
    "reciprocal": "(1.0 / {0})",
    "square": "({0} * {0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "(1.0 / tl.sqrt({0}))",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "tanh": "tanh({0})",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))",
    "relu": "larger({0}, 0)",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "clamp_min": "larger({0}, {1})",
    "clamp_max": "smaller({0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "bitwise_not": "(~{0})",
}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {"logical_and": "({0} & {1})", "logical_or": "({0} | {1})", "logical_xor": "({0} ^ {1})"}
_WHOLE_ONLY = ("floor_divide", "remainder")
_SAME = ("_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "view", "expand", "reshape", "to", "copy")
_CONSTANT = ("full", "scalar_tensor", "ones", "zeros", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones")
_POWERS = {2: "({0} * {0})", 3: "({0} * {0} * {0})", 1: "{0}", -1: "(1.0 / {0})", 0.5: "tl.sqrt({0})"}

HELPERS = '''
import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """A polynomial (Cephes) where exponentials would cancel."""
    z, size = x * x, tl.abs(x)
    small = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
             - 3.33332819422e-1) * z * x + x
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def remainder(x, y):
    left = x % y
    return tl.where((left != 0) & ((left < 0) != (y < 0)), left + y, left)


@triton.jit
def floor_divide(x, y):
    left = x % y
    return x // y - tl.where((left != 0) & ((left < 0) != (y < 0)), 1, 0)


@triton.jit
def wrapped(i, size):
    return tl.where(i < 0, i + size, i)


@triton.jit
def within(i, size):
    return (i >= 0) & (i < size)


@triton.jit
def product(x, y):
    """Nothing times anything is nothing, even if that is no number."""
    return tl.where(x == 0.0, 0.0, x * y)


@triton.jit
def add_diagonals(x, to, first, step, count):
    """Sums along the diagonals of x, added to those of `count` distances; the last pair of row 0 is at `first`."""
    n: tl.constexpr = x.shape[0]
    m: tl.constexpr = x.shape[1]
    size: tl.constexpr = 2 * n if n > m else 2 * m
    d = tl.arange(0, size)
    col = tl.arange(0, n)[:, None] - d[None, :] + (m - 1)
    held = (col >= 0) & (col < m)
    found = tl.gather(x, tl.where(held, col, 0), 1)
    at = first + d * step
    cell = (d < n + m - 1) & (at >= 0) & (at < count)
    tl.store(to + at, tl.load(to + at, mask=cell, other=0.0) + tl.sum(tl.where(held, found, 0.0), 0), mask=cell)
    tl.debug_barrier()  # other threads may add to them next
'''
"""What the source of every pair of programs begins with: functions that expressions call."""


class Expression(NamedTuple):
    """A number in the source, as text: its dtype in torch, and bounds of a whole number that is held in 32 bits."""

    text: str
    dtype: torch.dtype
    bounds: Bounds = None

    def to(self, dtype: torch.dtype, narrow: bool = False) -> str:
        """The number in a dtype; whole numbers in 32 bits if that is enough (`narrow`)."""
        if dtype == torch.int64 and narrow:
            dtype = torch.int32
        held = torch.int32 if self.dtype == torch.int64 and self.bounds is not None else self.dtype
        if dtype == torch.bool and held != torch.bool:
            return f"({self.text} != 0)"
        return self.text if held == dtype else f"{self.text}.to(tl.{TYPES[dtype]})"


def operation(node: fx.Node, known: dict[fx.Node, Expression]) -> Expression:
    """What an operation computes from what is known already."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta["val"].dim():
        raise Uncompilable(str(node.target))
    name, dtype = _name(node), dtype_of(node)
    if dtype not in TYPES:
        raise Uncompilable(f"{node.target} in {dtype}")
    if name in _CONSTANT:
        return _constant(node, name)
    given: list[Any] = [known[x] if isinstance(x, fx.Node) else x for x in node.args]
    if name in _SAME:
        source: Expression = given[0]
        bounds = source.bounds if dtype == torch.int64 else None
        return Expression(source.to(dtype, bounds is not None), dtype, bounds)
    if node.kwargs.get("alpha", 1) != 1 or (node.kwargs.get("rounding_mode") not in (None, "floor")):
        raise Uncompilable(f"{node.target} with {dict(node.kwargs)}")
    if node.kwargs.get("rounding_mode") == "floor":
        name = "floor_divide"
    return _pointwise(node, name, dtype, given)


def _constant(node: fx.Node, name: str) -> Expression:
    given = {"full": 1, "full_like": 1, "scalar_tensor": 0}
    number: Any = node.args[given[name]] if name in given else int("ones" in name)
    dtype = dtype_of(node)
    bounds = (int(number), int(number)) if dtype == torch.int64 and abs(int(number)) < 1 << 31 else None
    held = torch.int32 if bounds is not None else dtype
    return Expression(f"tl.full([], {_literal(number, dtype)}, tl.{TYPES[held]})", dtype, bounds)


def _pointwise(node: fx.Node, name: str, dtype: torch.dtype, given: list[Any]) -> Expression:
    """A comparison, a clamp, or what `_POINTWISE` has a form for; half precision is computed in float32."""
    if name in _COMPARED or name in _LOGICAL or name == "logical_not":
        kind = torch.bool
        if name in _COMPARED:
            kind = torch.result_type(*(_example(x) for x in given))
        narrow = all(_bounds(x) is not None for x in given)
        texts = [_operand(x, kind, narrow) for x in given]
        if name == "logical_not":
            return Expression(f"(~{texts[0]})", dtype)
        form = _LOGICAL.get(name) or f"({{0}} {_COMPARED[name]} {{1}})"
        return Expression(form.format(*texts), dtype)
    if name == "clamp":
        low, high = [*given[1:], None, None][:2] if len(given) > 1 else [None, None]
        low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
        found = given[0] if low is None else _pointwise(node, "clamp_min", dtype, [given[0], low])
        return found if high is None else _pointwise(node, "clamp_max", dtype, [found, high])
    form = _form(node, name, given)
    choice = {"where": 0, "masked_fill": 1}.get(name, -1)
    whole = dtype.is_floating_point is False and dtype != torch.bool
    if name in _WHOLE_ONLY and not whole:
        raise Uncompilable(f"{node.target} of numbers that are not whole")
    numbers = [x for i, x in enumerate(given) if i != choice]
    bounds = _result_bounds(name, [_bounds(x) for x in numbers]) if dtype == torch.int64 else None
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    texts = [_operand(x, torch.bool if i == choice else wide, bounds is not None) for i, x in enumerate(given)]
    found = Expression(form.format(*texts), wide, bounds)
    return found if wide == dtype else Expression(f"({found.text}).to(tl.{TYPES[dtype]})", dtype)


def _form(node: fx.Node, name: str, given: list[Any]) -> str:
    """The Triton of an operation."""
    if name == "pow":
        base, power = given
        if isinstance(base, int | float) and base > 0:
            return f"tl.exp2({{1}} * {math.log2(base)!r})"
        if isinstance(power, int | float) and power in _POWERS:
            return _POWERS[power]
    if name in _POINTWISE:
        return _POINTWISE[name]
    raise Uncompilable(str(node.target))


def _example(x: Any) -> Any:
    return torch.empty((), dtype=x.dtype, device="meta") if isinstance(x, Expression) else x


def _operand(x: Any, dtype: torch.dtype, narrow: bool) -> str:
    return x.to(dtype, narrow) if isinstance(x, Expression) else _literal(x, dtype)


def _literal(number: Any, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'
    return repr(int(number))


def _bounds(x: Any) -> Bounds:
    if isinstance(x, Expression):
        return x.bounds
    return (int(x), int(x)) if isinstance(x, int) and abs(x) < 1 << 31 else None


def _result_bounds(name: str, given: list[Bounds]) -> Bounds:
    """Of whole numbers; None where they may need more than 32 bits."""
    known = [each for each in given if each is not None]
    if len(known) < len(given):
        return None
    (a, b), *rest = known
    c, d = rest[0] if rest else (0, 0)
    found: dict[str, tuple[int, int]] = {
        "add": (a + c, b + d),
        "sub": (a - d, b - c),
        "rsub": (c - b, d - a),
        "mul": (min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)),
        "neg": (-b, -a),
        "abs": (0, max(abs(a), abs(b))),
        "relu": (max(a, 0), max(b, 0)),
        **dict.fromkeys(("maximum", "clamp_min"), (max(a, c), max(b, d))),
        **dict.fromkeys(("minimum", "clamp_max"), (min(a, c), min(b, d))),
        **dict.fromkeys(("where", "masked_fill"), (min(a, c), max(b, d))),
    }
    if name in _WHOLE_ONLY and c > 0:
        found |= {"floor_divide": (min(a // c, a // d), max(b // c, b // d)), "remainder": (0, d)}
    low, high = found.get(name, (-(1 << 40), 1 << 40))
    return (low, high) if max(-low, high) < 1 << 31 else None


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]
