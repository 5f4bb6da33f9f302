"""What a traced mask_mod answers over whole boxes of pairs: interval arithmetic over its graph.

Every number of the graph is replaced by a `Range`, values between which it lies for all pairs of a box. Queries and
keys are ranges of positions, a table that is looked up gives the extremes of its entries (range_min_max.py), and each
operation has a rule. What comes out says of a box that all pairs count (low is true), that none does (high is false),
or nothing::

    doc[q] == doc[k]    q in [0, 128), k in [512, 640):  [0, 0] == [3, 4]   never
    q >= k              the same                         [0, 127] >= [512, 639]  never

[Note: the same arithmetic] A rule calls the operation itself on the ends of ranges, on tensors of the dtypes that it is
called on pair by pair. So types are promoted and results rounded as they are there; and because rounding keeps order, a
result lies between those of the ends.

[Note: unsure] Where a pair may raise (a lookup beyond its table, a division by zero), overflow or be NaN, a range is
not `sure`, and its box is left to be asked pair by pair. What is asked raises what it always did.

[Note: names] Where two numbers are looked up to see whether they are the same, as ids of documents are, their order
means nothing, and ids in any order would have wide ranges. So for that comparison they are renamed, by where they first
appear: documents that lie one after another are then in order, whatever they are called.

An operation without a rule gives any value, of which its box may still be decided by others. Programs that are not flat
(program.py) have no ranges. Knows nothing of lengths or bands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from attnspan.masks.boxes import Boxes
from attnspan.masks.program import CONVERT, INDICES, LOOKUP, Program, depending, looked_up_at
from attnspan.masks.range_min_max import RangeMinMax

aten = torch.ops.aten

MOST_DIMS, MOST_ENTRIES = 2, 1 << 26
"""A table that is looked up by more indices that differ between pairs, or is larger, is known by its extremes alone."""


WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Range(NamedTuple):
    """Values between which a number lies, both included; see [Note: unsure]."""

    low: Tensor
    high: Tensor
    sure: Tensor | None = None


class Intervals:
    """A program of one batch row and some heads, over boxes.

    >>> from attnspan.masks.program import traced
    >>> causal = Intervals(traced(lambda b, h, q, k: q >= k), row=0, heads=1)
    >>> full, empty = causal.decide(Boxes.covering((4, 4), (2, 2)).halved())  # from left to right, from top to bottom
    >>> full.tolist(), empty.tolist()
    ([False, False, True, False], [False, True, False, False])
    """

    def __init__(self, program: Program, row: int, heads: int, device: torch.device | str = "cpu"):
        self.program, self.graph = program, program.graph.graph
        self._known = _constants(program) if program.is_flat else {}
        self._indices = [node for node in self.graph.nodes if node.op == "placeholder"][: len(INDICES)]
        self._varying = depending(self.graph, self._indices[2:])
        self._fixed = [torch.tensor([each], device=device) for each in (row, 0, heads - 1)]
        self._tables: dict[object, RangeMinMax] = {}
        self._names: dict[fx.Node, list[Tensor]] = {}

    def decide(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        """Of boxes, those whose pairs all count for every head, and those of which none does for any."""
        undecided = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.i.device)
        if not self.program.is_flat:
            return undecided, undecided
        with torch.no_grad():
            values = self._values(boxes)
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        found, sure = values[output.args[0]], ~undecided
        for each in values.values():
            if isinstance(each, Range) and each.sure is not None:
                sure = sure & each.sure
        return sure & low(found), sure & ~high(found)

    def _values(self, boxes: Boxes) -> dict[fx.Node, Any]:
        row, first_head, last_head = self._fixed
        ranges = (Range(row, row), Range(first_head, last_head), *map(Range, boxes.first, boxes.last))
        values = {**self._known, **dict(zip(self._indices, ranges, strict=True))}
        for node in self.graph.nodes:
            if node not in values and node.op == "call_function":
                values[node] = self._value(node, values)
        return values

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Range | None:
        """The range of a node; None if anything is possible. A bool is one of two."""
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target is LOOKUP:
            return self._looked_up(node, *args)
        rule = RULES.get(getattr(node.target, "overloadpacket", None))
        if rule in (_equal, _unequal) and all(isinstance(x, fx.Node) and x.target is LOOKUP for x in node.args):
            args = self._renamed(node, values)
        known = all(values[each] is not None for each in node.all_input_nodes)
        if rule is not None and known and not any(isinstance(each, Range) for each in kwargs.values()):
            found = rule(node.target, *args, **kwargs)
            if found is not None:
                return found
        either = torch.tensor([[False], [True]], device=self._fixed[0].device)
        return Range(*either) if node.meta["val"].dtype == torch.bool else None

    def _renamed(self, node: fx.Node, values: dict[fx.Node, Any]) -> list[Range]:
        """The two sides of a comparison of lookups. See [Note: names]."""
        sides: Any = node.args
        if node not in self._names:
            tables = [values[side.args[0]] for side in sides]
            parts = [self._own_row(table, side) for table, side in zip(tables, sides, strict=True)]
            named = zip(tables, _by_appearance(parts), strict=True)
            self._names[node] = [names.expand(table.shape) for table, names in named]
        indices = [[values[i] for i in side.args[1]] for side in sides]
        each = zip(sides, self._names[node], indices, strict=True)
        return [self._looked_up(side, table, at, (node, side)) for side, table, at in each]

    def _own_row(self, table: Tensor, lookup: Any) -> Tensor:
        """Of a table of batch rows, this one: no other is looked up."""
        row = int(self._fixed[0])
        by_row = table.dim() > 1 and lookup.args[1][0] is self._indices[0] and row < len(table)
        return table[row] if by_row else table

    def _looked_up(self, node: fx.Node, table: Tensor, at: list[Any], key: object = None) -> Range:
        """A number of a table. Indices that are the same for all boxes, as those of heads, are taken out before."""
        key = node if key is None else key
        if 0 in table.shape or any(i is None or low(i).dtype not in (torch.int32, torch.int64) for i in at):
            return Range(table.new_zeros(1), table.new_zeros(1), torch.zeros_like(self._fixed[0], dtype=torch.bool))
        inside = [_inside(i, length) for i, length in zip(at, table.shape, strict=True)]
        moving = [dim for dim, i in enumerate(looked_up_at(node)) if i in self._varying]
        kept = moving[:MOST_DIMS] if table.numel() <= MOST_ENTRIES else []
        if key not in self._tables:
            whole = {dim: slice(None) for dim in moving if dim not in kept}
            fixed = {dim: slice(int(x.low), int(x.high) + 1) for dim, x in enumerate(inside) if dim not in moving}
            self._tables[key] = RangeMinMax(*_reduced(table, {**whole, **fixed}))
        least, greatest = self._tables[key].within([(inside[dim].low, inside[dim].high) for dim in kept])
        found = _not_nan(Range(least, greatest))
        return reduce(_surely, [each.sure for each in inside if each.sure is not None], found)


def low(x: Any) -> Any:
    """The lower end of a range; a constant is its own."""
    return x.low if isinstance(x, Range) else x


def high(x: Any) -> Any:
    """The upper end of a range."""
    return x.high if isinstance(x, Range) else x


def _constants(program: Program) -> dict[fx.Node, Any]:
    """The nodes of a graph that are the same for all pairs, computed."""
    values: dict[fx.Node, Any] = {}
    captured = iter(program.captured)
    for nth, node in enumerate(program.graph.graph.nodes):
        if node.op == "placeholder" and nth >= len(INDICES):
            values[node] = next(captured)
        elif node.op == "call_function" and node not in program.moving:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


# ---- lookups ---------------------------------------------------------------------------------------------------------


def _inside(index: Any, length: int) -> Range:
    """Where indices lie in a dim, those below 0 counted from its end; sure where no pair is beyond it."""
    first, last = low(index), high(index)
    below = last < 0
    first, last = torch.where(below, first + length, first), torch.where(below, last + length, last)
    sure = (first >= 0) & (last < length)
    return Range(first.clamp(0, length - 1).long(), last.clamp(0, length - 1).long(), sure)


def _reduced(table: Tensor, dims: dict[int, slice]) -> tuple[Tensor, Tensor]:
    """The least and the greatest values of a table over parts of some of its dims."""
    part = table[tuple(dims.get(dim, slice(None)) for dim in range(table.dim()))]
    return (part.amin(tuple(dims)), part.amax(tuple(dims))) if dims else (part, part)


def _by_appearance(tables: list[Tensor]) -> list[Tensor]:
    """Whole numbers, renamed alike in all tables, in the order in which they appear; others as they are."""
    if any(table.dtype not in WHOLE for table in tables):
        return tables
    rows = [table.flatten().long() for table in tables]
    if all((row[1:] >= row[:-1]).all() for row in rows):
        return tables
    _, which = torch.cat(rows).unique(return_inverse=True)
    places = torch.arange(len(which), device=which.device)
    first = torch.full_like(which, len(which)).scatter_reduce_(0, which, places, "amin")
    parts = first[which].split([len(row) for row in rows])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


# ---- rules -----------------------------------------------------------------------------------------------------------

Rule = Callable[..., Range | None]
"""(operation, *arguments, **more) -> the range of its results, or None where nothing is known."""


def _monotone(*signs: int) -> Rule:
    """Results rise (1) or fall (-1) with each argument."""

    def rule(op: Any, *args: Any, **kwargs: Any) -> Range | None:
        if len(args) > len(signs):
            return None
        ends = [(low(x), high(x))[::sign] for x, sign in zip(args, signs, strict=False)]
        least, greatest = zip(*ends, strict=True)
        return _not_nan(Range(op(*least, **kwargs), op(*greatest, **kwargs)))

    return rule


def _extreme_at_corners(op: Any, left: Any, right: Any, **kwargs: Any) -> Range:
    """Results rise or fall with each argument, this way or that way depending on the other."""
    found = [op(x, y, **kwargs) for x, y in product((low(left), high(left)), (low(right), high(right)))]
    return _not_nan(Range(reduce(torch.minimum, found), reduce(torch.maximum, found)))


def _computed(rule: Rule) -> Rule:
    """Arithmetic: sure where results are finite and cannot overflow."""

    def checked(op: Any, *args: Any, **kwargs: Any) -> Range | None:
        found = rule(op, *args, **kwargs)
        if found is None or kwargs.get("alpha", 1) != 1:
            return None
        dtype = found.low.dtype
        wide = found if dtype.is_floating_point else rule(op, *map(_doubled, args), **kwargs)
        return None if wide is None else _surely(found, _fits(wide, dtype))

    return checked


def _doubled(x: Any) -> Any:
    if isinstance(x, Range):
        return Range(x.low.double(), x.high.double())
    return x.double() if isinstance(x, Tensor) else x


def _fits(wide: Range, dtype: torch.dtype) -> Tensor:
    """Whether a dtype holds what was computed, with room to spare where that was rounded."""
    if dtype.is_floating_point:
        return wide.low.isfinite() & wide.high.isfinite()
    if dtype == torch.bool:
        return torch.ones_like(wide.low, dtype=torch.bool)
    return (wide.low >= torch.iinfo(dtype).min / 2) & (wide.high <= torch.iinfo(dtype).max / 2)


def _surely(found: Range, sure: Tensor) -> Range:
    return found._replace(sure=sure if found.sure is None else found.sure & sure)


def _not_nan(found: Range) -> Range:
    if not found.low.dtype.is_floating_point:
        return found
    return _surely(found, ~(found.low.isnan() | found.high.isnan()))


def _equal(op: Any, left: Any, right: Any) -> Range:
    surely = aten.eq(low(left), high(right)) & aten.eq(high(left), low(right))
    return Range(surely, aten.le(low(left), high(right)) & aten.ge(high(left), low(right)))


def _unequal(op: Any, left: Any, right: Any) -> Range:
    return _negated(op, _equal(op, left, right))


def _negated(op: Any, x: Any) -> Range:
    x = _truth(x)
    return Range(~high(x), ~low(x))


def _truth(x: Any) -> Any:
    """A number as a bool: whether it is not 0."""
    if not isinstance(low(x), Tensor):
        return bool(x)
    return x if low(x).dtype == torch.bool else _unequal(None, x, 0)


def _of_truths(rule: Rule) -> Rule:
    """Of numbers taken as bools."""
    return lambda op, *args: rule(op, *map(_truth, args))


def _of_bools(rule: Rule) -> Rule:
    """Of bools; nothing is known of the bits of other numbers."""

    def bitwise(op: Any, *args: Any) -> Range | None:
        return rule(op, *args) if all(_dtype(low(x)) == torch.bool for x in args) else None

    return bitwise


def _absolute(op: Any, x: Any) -> Range:
    first, last = op(low(x)), op(high(x))
    across = (low(x) < 0) & (high(x) > 0)
    return Range(torch.minimum(first, last).masked_fill(across, 0), torch.maximum(first, last))


def _quotient(op: Any, left: Any, right: Any, **kwargs: Any) -> Range | None:
    """Sure where no divisor is 0; of whole numbers, if it is rounded."""
    rounds = op.overloadpacket is aten.floor_divide or kwargs.get("rounding_mode") is not None
    divisor = _safe(right, lambda low, high: (low > 0) | (high < 0))
    if divisor is None or (rounds and (_is_float(left) or _is_float(right))):
        return None
    found = _extreme_at_corners(op, left, divisor, **kwargs)
    found = _surely(found, _fits(found, found.low.dtype))
    return found if divisor.sure is None else _surely(found, divisor.sure)


def _remainder(op: Any, left: Any, right: Any) -> Range | None:
    """Of whole numbers by a constant: a part of one period, or all of it."""
    period = _safe(right, lambda low, high: (low == high) & (low > 0))
    if period is None or _is_float(left) or _is_float(right) or not isinstance(low(left), Tensor):
        return None
    first, last, by = low(left), high(left), period.low
    once = torch.floor_divide(first, by) == torch.floor_divide(last, by)
    return Range(torch.where(once, op(first, by), 0), torch.where(once, op(last, by), by - 1), period.sure)


def _safe(x: Any, fine: Callable[[Any, Any], Any]) -> Range | None:
    """A divisor that is fine; where it is not, 1, of which nothing is sure. None for a number that is not."""
    if not isinstance(low(x), Tensor):
        return Range(x, x) if fine(x, x) else None
    sure = fine(low(x), high(x))
    return Range(torch.where(sure, low(x), 1), torch.where(sure, high(x), 1), sure)


def _is_float(x: Any) -> bool:
    return _dtype(low(x)).is_floating_point


def _where(op: Any, chosen: Any, left: Any, right: Any) -> Range:
    yes, no = low(chosen), ~high(chosen)
    always, never = torch.ones_like(yes), torch.zeros_like(yes)
    lows, highs = ([op(which, end(left), end(right)) for which in (always, never)] for end in (low, high))
    least = torch.where(yes, lows[0], torch.where(no, lows[1], torch.minimum(*lows)))
    return _not_nan(Range(least, torch.where(yes, highs[0], torch.where(no, highs[1], torch.maximum(*highs)))))


def _shifted(op: Any, x: Any, by: Any) -> Range | None:
    return _monotone(1, 1)(op, x, by) if isinstance(by, int) and 0 <= by < 32 else None


def _converted(op: Any, x: Any, **kwargs: Any) -> Range:
    if kwargs.get("dtype") == torch.bool:
        return Range(*_truth(x)[:2])
    found = _not_nan(Range(op(x.low, **kwargs), op(x.high, **kwargs)))
    return found if found.low.dtype.is_floating_point else _surely(found, _fits(_doubled(x), found.low.dtype))


RULES: dict[Any, Rule] = {
    **dict.fromkeys([aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy], _monotone(1)),
    **dict.fromkeys([aten.ceil, aten.floor, aten.sign, aten.trunc], _monotone(1)),
    **dict.fromkeys([aten.ge, aten.gt], _monotone(1, -1)),
    **dict.fromkeys([aten.le, aten.lt], _monotone(-1, 1)),
    **dict.fromkeys([aten.maximum, aten.minimum], _monotone(1, 1)),
    **dict.fromkeys([aten.clamp, aten.clamp_max, aten.clamp_min], _monotone(1, 1, 1)),
    **dict.fromkeys([aten.bitwise_and, aten.bitwise_or], _of_bools(_monotone(1, 1))),
    **dict.fromkeys([aten.logical_and, aten.logical_or], _of_truths(_monotone(1, 1))),
    **dict.fromkeys([aten.bitwise_right_shift, aten.__rshift__], _shifted),
    **dict.fromkeys([aten.div, aten.floor_divide], _quotient),
    CONVERT.overloadpacket: _converted,
    aten.abs: _computed(_absolute),
    aten.add: _computed(_monotone(1, 1)),
    aten.bitwise_not: _of_bools(_negated),
    aten.bitwise_xor: _of_bools(_unequal),
    aten.eq: _equal,
    aten.logical_not: _negated,
    aten.logical_xor: _of_truths(_unequal),
    aten.mul: _computed(_extreme_at_corners),
    aten.ne: _unequal,
    aten.neg: _computed(_monotone(-1)),
    aten.remainder: _remainder,
    aten.rsub: _computed(_monotone(-1, 1)),
    aten.sub: _computed(_monotone(1, -1)),
    aten.where: _where,
}
"""By operation, whatever its overload."""


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu").dtype
