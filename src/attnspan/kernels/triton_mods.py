"""Score_mods and mask_mods as Triton functions, for the programs of `band` (band_programs.py).

A traced program (masks/program.py) is a graph of operations on numbers. `mods_code` writes it as Triton source, a line
for each operation, on blocks of scores and of positions that broadcast, (n, 1) against (1, m). So what depends on the
query alone is computed n times, not n x m. Captured tensors are arguments, prepared once (split.py): other values, and
tables of other sizes, run the same code. triton_expressions.py writes each operation, mod_lookups.py finds the lookups.

[Note: lookups beyond a table] A lookup beyond its table is not read. It gives NaN, which reaches the result of a pair
that counts, and no other. Whole numbers looked up so are 0.

Knows nothing of tiles or ranks.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from attnspan.kernels.mod_lookups import Along, Lookup, TracedMod, Uncompilable, dtype_of, indices_of, with_derivatives
from attnspan.kernels.triton_expressions import HELPERS, TYPES, Expression, operation
from attnspan.masks.graphs import INDICES, LOOKUP, depending, inputs_of, is_number
from attnspan.masks.program import Program

MAX_POSITION = 1 << 30

FUNCTIONS = (
    *("change", "pull", "allow", "row_start", "row_more", "row_keep"),
    *("col_start", "col_more", "col_keep", "spread"),
)
"""The names of what is written, in the order of `ModsCode`."""


class ModsCode(NamedTuple):
    """The functions of a pair of programs, None where there is none; see [Note: what is learned] in band_programs.py.
    Then what is learned, and how many numbers are looked up pair by pair."""

    change: Any = None
    pull: Any = None
    allow: Any = None
    row_start: Any = None
    row_more: Any = None
    row_keep: Any = None
    col_start: Any = None
    col_more: Any = None
    col_keep: Any = None
    spread: Any = None
    learned: tuple[Lookup, ...] = ()
    lookups: int = 0

    def along(self, way: Along) -> tuple[Lookup, ...]:
        """Those of the lookups that are learned."""
        return tuple(each for each in self.learned if each.along == way)


NO_CODE = ModsCode()


def uncompilable(program: Program) -> str | None:
    """What a program does that there is no Triton for; None if it can be compiled."""
    return _uncompilable(TracedMod.of(program))


def mods_code(score: Program | None, mask: Program | None, found: tuple[Lookup, ...] = ()) -> ModsCode:
    """The functions of programs that are not `uncompilable`; `found` is what is learned."""
    return _mods_code(*(None if each is None else TracedMod.of(each) for each in (score, mask)), found)


def prepared(tables: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tables as programs read them, and all of their sizes."""
    dense = tuple((x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous() for x in tables)
    return dense, tuple(size for x in dense for size in x.shape)


# ---- inside ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _uncompilable(traced: TracedMod) -> str | None:
    try:
        source = _TritonSource(traced, 0, 0)
        source.function("ask", learned=None)
        if len(traced.arguments) > len(INDICES):
            source.function("pull", learned=traced.floating)
    except Uncompilable as reason:
        return str(reason)
    return None


@lru_cache(maxsize=256)
def _mods_code(score: TracedMod | None, mask: TracedMod | None, found: tuple[Lookup, ...]) -> ModsCode:
    text = HELPERS
    tables = dims = 0
    if score is not None:
        source = _TritonSource(score, 0, 0)
        tables, dims = len(source.tables), source.dims
        text += source.function("change", learned=None) + source.function("pull", learned=found) + _sums(found)
    if mask is not None:
        text += _TritonSource(mask, tables, dims).function("allow", learned=None)
    file = f"<attnspan mods {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton reads the source of what it compiles; without a time, linecache does not look for a file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), made)
    lookups = sum(each.by_pair for each in (score, mask) if each is not None)
    functions: dict[str, Any] = {name: made.get(name) for name in FUNCTIONS}
    return ModsCode(**functions, learned=found, lookups=lookups)


def _sums(found: tuple[Lookup, ...]) -> str:
    """The functions that sum what is learned: `slope` is the gradient of changed scores, `found` what `pull` gave."""

    def parts(way: Along) -> list[str]:
        return [f"found[{2 + i}]" for i, each in enumerate(found) if each.along == way]

    def function(name: str, arguments: str, *lines: str) -> str:
        return f"\n\n@triton.jit\ndef {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines or ("pass",))

    rows = ["p * d_share", *(f"product({x}, {part})" for part in parts("rows") for x in ("slope", "p"))]
    cols = [f"product(slope, {part})" for part in parts("cols")]
    more = [", ".join(f"carry[{i}] + tl.sum({x}, 1)" for i, x in enumerate(each)) for each in (rows, cols)]
    zeros = [", ".join(["tl.zeros([n], tl.float32)"] * len(each)) for each in (rows, cols)]
    return "".join(
        [
            function("row_start", "n: tl.constexpr", f"return ({zeros[0]},)"),
            function("row_more", "carry, p, d_share, slope, found", f"return ({more[0]},)"),
            function(
                "row_keep", "carry, to, stride, at, cell",
                *(f"tl.store(to + {i} * stride + at, carry[{i}], mask=cell)" for i in range(len(rows))),
            ),
            function("col_start", "n: tl.constexpr", f"return ({zeros[1]},)" if cols else "return ()"),
            function("col_more", "carry, slope, found", f"return ({more[1]},)" if cols else "return ()"),
            function(
                "col_keep", "carry, to, stride, at, cell",
                *(
                    f"tl.store(to + {i} * stride + at, tl.load(to + {i} * stride + at, mask=cell, other=0.0) "
                    f"+ carry[{i}], mask=cell)"
                    for i in range(len(cols))
                ),
                "tl.debug_barrier()",
            ),
            function(
                "spread", "slope, found, distances, stride, first, step, count, pairs, pair_stride, at, cell",
                *(
                    f"add_diagonals(product(slope, {part}), distances + {i} * stride, first, step, count)"
                    for i, part in enumerate(parts("distances"))
                ),
                *(
                    f"tl.store(pairs + {i} * pair_stride + at, product(slope, {part}), mask=cell)"
                    for i, part in enumerate(parts("pairs"))
                ),
            ),
        ]
    )  # fmt: skip


class _TritonSource:
    """A program on its way to Triton; its tables and their sizes come after some others."""

    def __init__(self, traced: TracedMod, table: int, dim: int):
        self.traced, self.first, self.tables = traced, table, traced.tables
        self.sizes: list[int] = []
        for node in self.tables:
            self.sizes.append(dim)
            dim += max(1, node.meta["val"].dim())
        self.dims = dim
        self.lines: list[str] = []

    def function(self, name: str, learned: tuple[Lookup, ...] | None) -> str:
        """The program, or if something is learned its derivatives too, as the source of a function."""
        self.lines = []
        arguments, result = self.traced.arguments, self.traced.result
        score = ["score"] if len(arguments) > len(INDICES) else []
        known: dict[fx.Node, Expression] = {}
        for node, text in zip(arguments, [*score, *INDICES], strict=True):
            known[node] = Expression(text, dtype_of(node), (0, MAX_POSITION) if text in INDICES else None)
            if text in INDICES:
                self.lines.append(f"{text} = {text}.to(tl.int32)")
        if learned is None:
            self._emit(known, [result])
            found = known[result].to(torch.float32 if score else torch.bool)
            if score and result not in depending(self.traced.graph.graph, arguments[:1]):
                found = f"tl.zeros_like(score) + {found}"
        else:
            found = self._derivatives(known, learned)
        lines = "".join(f"    {line}\n" for line in [*self.lines, f"return {found}"])
        return f"\n\n@triton.jit\ndef {name}({', '.join([*score, *INDICES])}, tables, dims):\n{lines}"

    def _derivatives(self, known: dict[fx.Node, Expression], learned: tuple[Lookup, ...]) -> str:
        nodes = [node for node in self.traced.nodes if node.target is LOOKUP or self._is_number(node)]
        self._emit(known, nodes)
        graph = with_derivatives(self.traced, nodes, [nodes.index(each.node) for each in learned])
        inner = {x: known[y] for x, y in zip(inputs_of(graph), [*self.traced.arguments, *nodes], strict=True)}
        (end,) = (node for node in graph.nodes if node.op == "output")
        self._emit(inner, list(end.args[0]))
        changed, *parts = (inner[node].to(torch.float32) for node in end.args[0])
        return f"(tl.zeros_like(score) + {changed}, {', '.join(parts)},)"

    def _is_number(self, node: fx.Node) -> bool:
        return node in self.tables and is_number(node)

    def _is_table(self, node: fx.Node) -> bool:
        return node in self.tables and not self._is_number(node)

    def _emit(self, known: dict[fx.Node, Expression], wanted: Sequence[fx.Node]) -> None:
        """A line for each node that is needed and not known."""
        needed, rest = set(), [node for node in wanted if node not in known]
        while rest:
            node = rest.pop()
            if node not in needed:
                needed.add(node)
                inputs = () if self._is_number(node) else node.all_input_nodes
                rest += [x for x in inputs if x not in known and not self._is_table(x)]
        for node in [node for node in wanted[0].graph.nodes if node in needed] if needed else ():
            value = self._value(node, known)
            name = f"x{len(self.lines)}"
            self.lines.append(f"{name} = {value.text}")
            known[node] = value._replace(text=name)

    def _value(self, node: fx.Node, known: dict[fx.Node, Expression]) -> Expression:
        if self._is_number(node):
            return self._read(self.tables.index(node), "tl.load({})", dtype_of(node))
        if node.target is LOOKUP:
            return self._lookup(node, known)
        return operation(node, known)

    def _read(self, table: int, load: str, dtype: torch.dtype) -> Expression:
        text = load.format(f"tables[{self.first + table}]")
        return Expression(f"({text} != 0)" if dtype == torch.bool else text, dtype)

    def _lookup(self, node: fx.Node, known: dict[fx.Node, Expression]) -> Expression:
        """See [Note: lookups beyond a table]."""
        if node.args[0] not in self.tables or dtype_of(node) not in TYPES:
            raise Uncompilable(f"{node.target} of what is no captured tensor")
        table = self.tables.index(node.args[0])
        at, inside = "", []
        for dim, i in enumerate(indices_of(node)):
            size = f"dims[{self.sizes[table] + dim}]"
            self.lines.append(f"i{len(self.lines)} = wrapped({known[i].text}, {size})")
            name = f"i{len(self.lines) - 1}"
            inside.append(f"within({name}, {size})")
            at = name if not at else f"({at}).to(tl.int64) * {size} + {name}"
        nothing = 'float("nan")' if dtype_of(node).is_floating_point else "0"
        return self._read(table, f"tl.load({{}} + ({at}), mask={' & '.join(inside)}, other={nothing})", dtype_of(node))
