"""What a traced mask_mod answers over whole boxes of pairs: interval arithmetic over its graph.

Every number of the graph is replaced by a `Range`, values between which it lies for all pairs of a box. Queries and
keys are ranges of positions, a table that is looked up gives the extremes of its entries (range_min_max.py), and each
operation has a rule (range_rules.py). What comes out says of a box that all pairs count (low is true), that none does
(high is false), or nothing::

    doc[q] == doc[k]    q in [0, 128), k in [512, 640):  [0, 0] == [3, 4]   never
    q >= k              the same                         [0, 127] >= [512, 639]  never

[Note: same ids] Where two numbers are looked up to see whether they are the same, as ids of documents are, their order
means nothing, and ids in any order would have wide ranges. So for that comparison they are renamed, by where they first
appear: documents that lie one after another are then in order, whatever they are called.

Where an operation has no rule, a box may still be decided by others. Programs that are not flat (program.py) have no
ranges. Knows nothing of lengths or bands.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from attnspan.masks.boxes import Boxes
from attnspan.masks.graphs import INDICES, LOOKUP, depending, inputs_of, looked_up_at, result_of
from attnspan.masks.program import Program
from attnspan.masks.range_min_max import RangeMinMax
from attnspan.masks.range_rules import RULES, Range, equal, high, low, not_nan, surely, unequal

MAX_DIMS, MAX_ENTRIES = 2, 1 << 26
"""A table that is looked up by more indices that differ between pairs, or is larger, is known by its extremes alone."""

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Intervals:
    """A program of one batch row and some heads, over boxes.

    >>> from attnspan.masks.tracing import traced
    >>> causal = Intervals(traced(lambda b, h, q, k: q >= k), row=0, heads=1)
    >>> full, empty = causal.decide(Boxes.covering((4, 4), (2, 2)).halved())  # from left to right, from top to bottom
    >>> full.tolist(), empty.tolist()
    ([False, False, True, False], [False, True, False, False])
    """

    def __init__(self, program: Program, row: int, heads: int, device: torch.device | str = "cpu"):
        self.program, self.graph = program, program.graph.graph
        self._known = _constants(program) if program.is_flat else {}
        self._indices = inputs_of(self.graph)[: len(INDICES)]
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
        found, sure = values[result_of(self.graph)], ~undecided
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
        if rule in (equal, unequal) and all(isinstance(x, fx.Node) and x.target is LOOKUP for x in node.args):
            args = self._renamed(node, values)
        known = all(values[each] is not None for each in node.all_input_nodes)
        if rule is not None and known and not any(isinstance(each, Range) for each in kwargs.values()):
            found = rule(node.target, *args, **kwargs)
            if found is not None:
                return found
        either = torch.tensor([[False], [True]], device=self._fixed[0].device)
        return Range(*either) if node.meta["val"].dtype == torch.bool else None

    def _renamed(self, node: fx.Node, values: dict[fx.Node, Any]) -> list[Range]:
        """The two sides of a comparison of lookups. See [Note: same ids]."""
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
        kept = moving[:MAX_DIMS] if table.numel() <= MAX_ENTRIES else []
        if key not in self._tables:
            whole = {dim: slice(None) for dim in moving if dim not in kept}
            fixed = {dim: slice(int(x.low), int(x.high) + 1) for dim, x in enumerate(inside) if dim not in moving}
            self._tables[key] = RangeMinMax(*_reduced(table, {**whole, **fixed}))
        least, greatest = self._tables[key].within([(inside[dim].low, inside[dim].high) for dim in kept])
        found = not_nan(Range(least, greatest))
        return reduce(surely, [each.sure for each in inside if each.sure is not None], found)


def _constants(program: Program) -> dict[fx.Node, Any]:
    """The nodes of a graph that are the same for all pairs, computed."""
    graph = program.graph.graph
    values: dict[fx.Node, Any] = dict(zip(inputs_of(graph)[len(INDICES) :], program.captured, strict=True))
    for node in graph.nodes:
        if node.op == "call_function" and node not in program.moving:
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
