"""Score_mods and mask_mods as Triton functions, for the programs of `band` (band_programs.py).

A traced program (masks/program.py) is a graph of operations on numbers. `mods_code` writes it as Triton source, a line
for each operation, on blocks of scores and of positions that broadcast, (n, 1) against (1, m). So what depends on the
query alone is computed n times, not n x m. Captured tensors are arguments, prepared once (split.py): other values, and
tables of other sizes, run the same code.

[Note: lookups] A lookup beyond its table is not read. It gives NaN, which reaches the result of a pair that counts, and
no other. Whole numbers looked up so are 0.

[Note: derivatives] torch differentiates the graph: it is traced once more together with its gradients. A score changes
pair by pair, so a gradient is that of the changed score times a derivative, and Triton computes the derivatives: of the
changed score by the score and by what was looked up.

[Note: what is summed] What a lookup's index depends on says which derivatives belong to one entry (`Along`): all of a
head, of a row, of a column, or of a distance q - k. These are summed in the pass that computes dq or dk and dv; only an
index that depends on q and k in another way has its gradients written out pair by pair. From there ordinary operations
go to the tables, and to the tensors that these were prepared from.

Whole numbers are 64 bits wide in torch. Where bounds are known to fit, as those of positions do, 32 are used.
Knows nothing of tiles or ranks.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from attnspan.kernels.split import split_graph
from attnspan.masks.graphs import INDICES, LOOKUP, TRACING, depending, looked_up_at
from attnspan.masks.program import Program

Along = Literal["rows", "cols", "distances", "pairs"]
Bounds = tuple[int, int] | None

MOST_POSITION = 1 << 30

_TYPES = {
    torch.bool: "int1",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
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

PREAMBLE = '''
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


class Uncompilable(Exception):
    """What a program does that there is no Triton for."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A place of a program where it looks a number up: in which of its tables, and which gradients belong together."""

    node: fx.Node
    table: int
    along: Along


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
    return _uncompilable(_Traced.of(program))


def learned(program: Program, wanted: Iterable[int]) -> tuple[Lookup, ...]:
    """The lookups through which some of the captured tensors get gradients."""
    traced = _Traced.of(program)
    reached = depending(traced.graph.graph, [traced.captured[i] for i in wanted])
    return tuple(each for each in traced.floating if traced.tables[each.table] in reached)


def by_pairs(found: tuple[Lookup, ...]) -> tuple[Lookup, ...]:
    """The same where rows and columns do not go in step, so that a block's diagonals are no distances."""
    return tuple(replace(each, along="pairs") if each.along == "distances" else each for each in found)


def mods_code(score: Program | None, mask: Program | None, found: tuple[Lookup, ...] = ()) -> ModsCode:
    """The functions of programs that are not `uncompilable`; `found` is what is learned."""
    return _mods_code(*(None if each is None else _Traced.of(each) for each in (score, mask)), found)


def prepared(tables: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tables as programs read them, and all of their sizes."""
    dense = tuple((x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous() for x in tables)
    return dense, tuple(size for x in dense for size in x.shape)


@lru_cache(maxsize=256)
def places(traced: fx.GraphModule, found: tuple[Lookup, ...]) -> Callable[..., Sequence[Sequence[Tensor]]]:
    """(*arguments, *captured) -> the indices of every lookup, none for a number."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(traced.graph, copies)
    graph.output([[copies[i] for i in _indices(each.node)] for each in found])
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


# ---- inside ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Traced:
    """A program without what it captured: what code depends on."""

    graph: fx.GraphModule
    count: int  # of captured tensors

    @staticmethod
    def of(program: Program) -> _Traced:
        return _Traced(program.graph, len(program.captured))

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.graph.nodes)

    @property
    def arguments(self) -> list[fx.Node]:
        given = [node for node in self.nodes if node.op == "placeholder"]
        return given[: len(given) - self.count]

    @property
    def captured(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "placeholder"][len(self.arguments) :]

    @property
    def result(self) -> fx.Node:
        (end,) = (node for node in self.nodes if node.op == "output")
        (result,) = end.all_input_nodes
        return result

    @property
    def tables(self) -> tuple[fx.Node, ...]:
        return split_graph(self.graph, self.count).tables

    @property
    def floating(self) -> tuple[Lookup, ...]:
        """Every lookup that could have a gradient."""
        tables, found = self.tables, []
        for node in self.nodes:
            table = node.args[0] if node.target is LOOKUP else node
            number = table is node and node in tables and node.meta["val"].dim() == 0
            if (number or (table is not node and table in tables)) and _dtype(node).is_floating_point:
                found.append(Lookup(node, tables.index(table), self.along(_indices(node))))
        return tuple(found)

    @property
    def by_pair(self) -> int:
        """How many lookups depend on the query and the key."""
        at = (self.along(_indices(node)) for node in self.nodes if node.target is LOOKUP)
        return sum(way in ("distances", "pairs") for way in at)

    def along(self, indices: list[fx.Node]) -> Along:
        """See [Note: what is summed]."""
        graph, wanted = self.graph.graph, set(indices)
        *score, _, _, q, k = self.arguments
        if wanted & depending(graph, score):
            raise Uncompilable("a lookup by score")
        by_row, by_col = (bool(wanted & depending(graph, [node])) for node in (q, k))
        if not (by_row and by_col):
            return "cols" if by_col else "rows"
        rest = {q, k}
        for node in self.nodes:
            if rest.intersection(node.all_input_nodes) and not _is_difference(node, q, k):
                rest.add(node)
        return "pairs" if wanted & rest else "distances"


@lru_cache(maxsize=256)
def _uncompilable(traced: _Traced) -> str | None:
    try:
        source = _Source(traced, 0, 0)
        source.function("ask", learned=None)
        if len(traced.arguments) > len(INDICES):
            source.function("pull", learned=traced.floating)
    except Uncompilable as reason:
        return str(reason)
    return None


@lru_cache(maxsize=256)
def _mods_code(score: _Traced | None, mask: _Traced | None, found: tuple[Lookup, ...]) -> ModsCode:
    text = PREAMBLE
    tables = dims = 0
    if score is not None:
        source = _Source(score, 0, 0)
        tables, dims = len(source.tables), source.dims
        text += source.function("change", learned=None) + source.function("pull", learned=found) + _sums(found)
    if mask is not None:
        text += _Source(mask, tables, dims).function("allow", learned=None)
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


class _Value(NamedTuple):
    """What a name in the source holds; whole numbers with bounds are 32 bits wide."""

    text: str
    dtype: torch.dtype
    bounds: Bounds = None

    def to(self, dtype: torch.dtype, narrow: bool = False) -> str:
        if dtype == torch.int64 and narrow:
            dtype = torch.int32
        held = torch.int32 if self.dtype == torch.int64 and self.bounds is not None else self.dtype
        if dtype == torch.bool and held != torch.bool:
            return f"({self.text} != 0)"
        return self.text if held == dtype else f"{self.text}.to(tl.{_TYPES[dtype]})"


def _indices(node: fx.Node) -> list[fx.Node]:
    """Of a lookup; none for a number."""
    return looked_up_at(node) if node.target is LOOKUP else []


def _is_difference(node: fx.Node, q: fx.Node, k: fx.Node) -> bool:
    return node.target is torch.ops.aten.sub.Tensor and set(node.args) == {q, k} and not node.kwargs


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


class _Source:
    """A program on its way to Triton; its tables and their sizes come after some others."""

    def __init__(self, traced: _Traced, table: int, dim: int):
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
        known: dict[fx.Node, _Value] = {}
        for node, text in zip(arguments, [*score, *INDICES], strict=True):
            known[node] = _Value(text, _dtype(node), (0, MOST_POSITION) if text in INDICES else None)
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

    def _derivatives(self, known: dict[fx.Node, _Value], learned: tuple[Lookup, ...]) -> str:
        nodes = [node for node in self.traced.nodes if node.target is LOOKUP or self._is_number(node)]
        self._emit(known, nodes)
        graph = _with_derivatives(self.traced, nodes, [nodes.index(each.node) for each in learned])
        given = [node for node in graph.nodes if node.op == "placeholder"]
        inner = {x: known[y] for x, y in zip(given, [*self.traced.arguments, *nodes], strict=True)}
        (end,) = (node for node in graph.nodes if node.op == "output")
        self._emit(inner, list(end.args[0]))
        changed, *parts = (inner[node].to(torch.float32) for node in end.args[0])
        return f"(tl.zeros_like(score) + {changed}, {', '.join(parts)},)"

    def _is_number(self, node: fx.Node) -> bool:
        return node in self.tables and node.meta["val"].dim() == 0

    def _is_table(self, node: fx.Node) -> bool:
        return node in self.tables and not self._is_number(node)

    def _emit(self, known: dict[fx.Node, _Value], wanted: Sequence[fx.Node]) -> None:
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

    def _value(self, node: fx.Node, known: dict[fx.Node, _Value]) -> _Value:
        if self._is_number(node):
            return self._read(self.tables.index(node), "tl.load({})", _dtype(node))
        if node.target is LOOKUP:
            return self._lookup(node, known)
        if not isinstance(node.target, torch._ops.OpOverload) or node.meta["val"].dim():
            raise Uncompilable(str(node.target))
        name, dtype = _name(node), _dtype(node)
        if dtype not in _TYPES:
            raise Uncompilable(f"{node.target} in {dtype}")
        if name in _CONSTANT:
            return self._constant(node, name)
        given: list[Any] = [known[x] if isinstance(x, fx.Node) else x for x in node.args]
        if name in _SAME:
            source: _Value = given[0]
            bounds = source.bounds if dtype == torch.int64 else None
            return _Value(source.to(dtype, bounds is not None), dtype, bounds)
        if node.kwargs.get("alpha", 1) != 1 or (node.kwargs.get("rounding_mode") not in (None, "floor")):
            raise Uncompilable(f"{node.target} with {dict(node.kwargs)}")
        if node.kwargs.get("rounding_mode") == "floor":
            name = "floor_divide"
        return _pointwise(node, name, dtype, given)

    def _constant(self, node: fx.Node, name: str) -> _Value:
        if name in ("full", "full_like"):
            number = node.args[1]
        elif name == "scalar_tensor":
            number = node.args[0]
        else:
            number = int("ones" in name)
        dtype = _dtype(node)
        bounds = (int(number), int(number)) if dtype == torch.int64 and abs(int(number)) < 1 << 31 else None  # type: ignore[arg-type]
        held = torch.int32 if bounds is not None else dtype
        return _Value(f"tl.full([], {_literal(number, dtype)}, tl.{_TYPES[held]})", dtype, bounds)

    def _read(self, table: int, load: str, dtype: torch.dtype) -> _Value:
        text = load.format(f"tables[{self.first + table}]")
        return _Value(f"({text} != 0)" if dtype == torch.bool else text, dtype)

    def _lookup(self, node: fx.Node, known: dict[fx.Node, _Value]) -> _Value:
        """See [Note: lookups]."""
        if node.args[0] not in self.tables or _dtype(node) not in _TYPES:
            raise Uncompilable(f"{node.target} of what is no captured tensor")
        table = self.tables.index(node.args[0])
        at, inside = "", []
        for dim, i in enumerate(_indices(node)):
            size = f"dims[{self.sizes[table] + dim}]"
            self.lines.append(f"i{len(self.lines)} = wrapped({known[i].text}, {size})")
            name = f"i{len(self.lines) - 1}"
            inside.append(f"within({name}, {size})")
            at = name if not at else f"({at}).to(tl.int64) * {size} + {name}"
        nothing = 'float("nan")' if _dtype(node).is_floating_point else "0"
        return self._read(table, f"tl.load({{}} + ({at}), mask={' & '.join(inside)}, other={nothing})", _dtype(node))


def _pointwise(node: fx.Node, name: str, dtype: torch.dtype, given: list[Any]) -> _Value:
    if name in _COMPARED or name in _LOGICAL or name == "logical_not":
        kind = torch.bool
        if name in _COMPARED:
            kind = torch.result_type(*(_example(x) for x in given))
        narrow = all(_bounds(x) is not None for x in given)
        texts = [_operand(x, kind, narrow) for x in given]
        if name == "logical_not":
            return _Value(f"(~{texts[0]})", dtype)
        form = _LOGICAL.get(name) or f"({{0}} {_COMPARED[name]} {{1}})"
        return _Value(form.format(*texts), dtype)
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
    found = _Value(form.format(*texts), wide, bounds)
    return found if wide == dtype else _Value(f"({found.text}).to(tl.{_TYPES[dtype]})", dtype)


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
    return torch.empty((), dtype=x.dtype, device="meta") if isinstance(x, _Value) else x


def _operand(x: Any, dtype: torch.dtype, narrow: bool) -> str:
    return x.to(dtype, narrow) if isinstance(x, _Value) else _literal(x, dtype)


def _literal(number: Any, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'
    return repr(int(number))


def _bounds(x: Any) -> Bounds:
    if isinstance(x, _Value):
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


def _with_derivatives(traced: _Traced, nodes: list[fx.Node], wanted: list[int]) -> fx.Graph:
    """(*arguments, *looked up) -> the result, its derivatives by the score and by `wanted` of what was looked up."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    arguments, graph = traced.arguments, fx.Graph()
    inside = {node: graph.placeholder(f"x{n}") for n, node in enumerate([*arguments, *nodes])}
    for node in traced.nodes:
        if node.op == "call_function" and node not in inside and inside.keys() >= set(node.all_input_nodes):
            inside[node] = graph.node_copy(node, inside.__getitem__)
            if "device" in node.kwargs:
                inside[node].kwargs = {**inside[node].kwargs, "device": torch.device("cpu")}
    graph.output(inside[traced.result])
    graph.eliminate_dead_code()
    asked = fx.GraphModule(torch.nn.Module(), graph)

    def both(score: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        looked = list(given[len(INDICES) :])

        def changed(score: Tensor, *some: Tensor) -> Tensor:
            for i, x in zip(wanted, some, strict=True):
                looked[i] = x
            found: Tensor = asked(score, *given[: len(INDICES)], *looked)
            return found

        vjp: Any = torch.func.vjp
        found, back = vjp(changed, score, *(looked[i] for i in wanted))
        return (found, *back(torch.ones_like(found)))

    examples = [torch.zeros((), dtype=_dtype(node), device="cpu") for node in [*arguments, *nodes]]
    with TRACING, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        table = dict(core_aten_decompositions().items())
        return make_fx(torch.func.functionalize(both), decomposition_table=table)(*examples).graph
