"""A mask_mod or score_mod, traced once: what it computes as a graph, what it captures as a list of tensors.

FlexAttention's functions are written for one pair of indices. Tracing one call on numbers gives a graph of aten
operations in which every tensor that the function captured, through closures, partials, modules or globals, is an
input of its own: it can be moved to another device, named in an error, hashed for agreement and differentiated.

[Note: flat programs] Most programs only combine numbers: every operation is pointwise, or looks a number up in a
table. Such a graph can be run as it stands on whole tensors of indices that broadcast, (n, 1) queries against
(m,) keys; no vmap, and what depends on the query alone is computed n times, not n x m. Others (a row of a table looked
up, then an entry of that row) run under vmap, as in FlexAttention.

[Note: lookups] The gradient of a table is a sum over every pair that looked into it. Taking it by autograd costs a
tensor of the table's size for every piece of the score matrix. So where a captured tensor is only looked up by
numbers, its lookups are inputs of the graph that is differentiated, and their gradients are added to the table's own
directly.

[Note: values] What a function computes from captured tensors is part of the graph and follows their values; what it
reads out of them into Python (`w.item()`, `if flag:`) is a constant of the graph. `reads_values` tells that it did so:
such a program holds for as long as the values do.

A function that branches on its indices, takes other arguments, draws random numbers or returns no single number cannot
be traced, and is refused by name with the reason. Knows nothing of masks, ranks or tiles.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnspan.errors import AttnspanError

INDICES = ("b", "h", "q_idx", "kv_idx")

TRACING = RLock()  # tracing sets modes that are not for two threads at once, and virtual ranks are threads
_GRAPHS: WeakValueDictionary[str, fx.GraphModule] = (
    WeakValueDictionary()
)  # by text: equal programs share what is compiled
LOOKUP, CONVERT = torch.ops.aten.index.Tensor, torch.ops.aten._to_copy.default
"""How a traced program looks a number up in a table, and gives one another dtype."""
_BY_NUMBER = (
    CONVERT,
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.alias.default,
    # Pointwise too, though not every version of torch says so:
    torch.ops.aten.floor_divide.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.full_like.default,
)


class Lookups(NamedTuple):
    """A graph whose lookups in captured tensors are inputs: see [Note: lookups]."""

    places: fx.GraphModule  # (*arguments, *captured) -> the indices of every lookup
    tables: tuple[int, ...]  # which captured tensor each of them looks into
    by_row: tuple[int, ...]  # those that are the same for all keys
    graph: fx.GraphModule  # (*arguments, *captured, *looked up) -> result


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function of (score,) b, h, q_idx, kv_idx. Made by `traced`.

    >>> window = torch.tensor([2, 4])
    >>> program = traced(lambda b, h, q, k: q - k < window[h], "window")
    >>> b, h, q, k = torch.zeros(1).long(), torch.arange(2), torch.arange(4), torch.arange(4)
    >>> program.over(b, h, q, k)[0, :, 3].tolist()  # query 3, head by head
    [[False, False, True, True], [True, True, True, True]]
    """

    name: str
    graph: fx.GraphModule
    captured: tuple[Tensor, ...]
    dtype: torch.dtype
    reads: frozenset[str]
    reads_values: bool = False  # see [Note: values]

    @cached_property
    def key(self) -> str:
        """The same for programs that compute the same from captured tensors of the same shapes."""
        shapes = [(tuple(x.shape), x.dtype) for x in self.captured]
        return hashlib.sha256(f"{self.graph.code}{shapes}".encode()).hexdigest()[:16]

    @property
    def function(self) -> Callable[..., Tensor]:
        """The graph as a plain function of (None, *arguments, *captured), which compilers look into.

        None is in place of the module, which holds nothing: what was captured is an input.
        """
        return type(self.graph).forward

    @cached_property
    def content(self) -> str:
        """The same for captured tensors of the same content. Computed once: for tensors that are not written to."""
        return content(self.captured)

    @cached_property
    def is_flat(self) -> bool:
        """See [Note: flat programs]."""
        return all(_is_flat(node) for node in self.graph.graph.nodes if node in self.moving)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """The captured tensors that could have a gradient."""
        return tuple(i for i, x in enumerate(self.captured) if x.dtype.is_floating_point)

    def on(self, device: torch.device | str) -> Program:
        """The same program on another device."""
        device = torch.empty(0, device=device).device
        said = {node.kwargs.get("device", device) for node in self.graph.graph.nodes}
        if all(x.device == device for x in self.captured) and said == {device}:
            return self
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph.graph, {}))
        for node in graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
        captured = tuple(x.to(device) for x in self.captured)
        return replace(self, graph=_shared(graph), captured=captured)

    def over(self, *arguments: Tensor, captured: Sequence[Tensor] | None = None) -> Tensor:
        """The result over all pairs: indices are 1-D tensors (B,), (H,), (n,), (m,), a score (B, H, n, m).

        The result has four dims and broadcasts against (B, H, n, m).
        """
        captured = self.captured if captured is None else captured
        score, indices = arguments[:-4], arguments[-4:]
        result: Tensor
        if self.is_flat:
            result = self.graph(*score, *_spread(indices), *captured)
        else:
            result = _mapped(self.graph, len(score))(*score, *indices, *captured)
        return result[(None,) * (4 - result.dim())]

    def over_boxes(self, b: Tensor, h: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The result of a flat program over the pairs of boxes: (1,), (H,), (N, n) queries and (N, m) keys.

        The result has four dims and broadcasts against (N, H, n, m).
        """
        assert self.is_flat, "others run under vmap, `over` all pairs of queries and keys"
        result: Tensor = self.graph(
            b[:, None, None, None], h[:, None, None], queries[:, None, :, None], keys[:, None, None, :], *self.captured
        )
        return result[(None,) * (4 - result.dim())]

    def pull(
        self,
        score: Tensor,
        indices: Sequence[Tensor],
        captured: Sequence[Tensor],
        sums: Sequence[Tensor | None],
        grad: Callable[[Tensor], Tensor],
        shares: Callable[[], Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of a score (B, H, n, m); those of captured tensors are added to `sums`, where there is one.

        `grad` is given the result and returns its gradient. Then, for each of `row_lookups`, (B, H, n): what the
        gradient would be of `shares`, the probabilities, row by row. See [Note: exact sums] in kernels/row_sums.py.
        """
        looked: list[Tensor] = []
        places: list[list[Tensor]] = []
        tables: tuple[int, ...] = ()
        graph = self.graph
        if self.is_flat and self._lookups is not None:
            found = self._lookups.places(score, *_spread(indices), *captured)
            places, tables, graph = [list(each) for each in found], self._lookups.tables, self._lookups.graph
            looked = [captured[table][tuple(at)] for table, at in zip(tables, places, strict=True)]
            for i in self.row_lookups(sums):
                looked[i] = looked[i].expand(*score.shape[:3], 1)
        others = [i for i, total in enumerate(sums) if total is not None and i not in tables]
        spread = _spread(indices) if self.is_flat else list(indices)
        run = graph if self.is_flat else _mapped(graph, 1)

        def call(score: Tensor, looked: list[Tensor], some: list[Tensor]) -> Tensor:
            given = list(captured)
            for i, x in zip(others, some, strict=True):
                given[i] = x
            found: Tensor = run(score, *spread, *given, *looked)
            return found.expand(score.shape)

        result, back = torch.func.vjp(call, score, looked, [captured[i] for i in others])  # type: ignore[misc]
        d_score: Tensor
        d_score, d_looked, d_others = back(grad(result).to(result.dtype))
        by_row = self.row_lookups(sums)
        means = back(shares().to(result.dtype))[1] if by_row else []
        for i, part in zip(others, d_others, strict=True):
            total = sums[i]
            assert total is not None, "others are those that have one"
            total.add_(part)
        for table, where, part in zip(tables, places, d_looked, strict=True):
            total = sums[table]
            if total is not None:
                at = torch.broadcast_tensors(*where)
                part = part.to(total.dtype).sum_to_size(at[0].shape)
                total.index_put_(tuple(at), part, accumulate=True)
        return d_score, [means[i].squeeze(-1) for i in by_row]

    def row_lookups(self, sums: Sequence[Tensor | None]) -> tuple[int, ...]:
        """The lookups of a flat program that are the same for all keys, in tables whose gradients are wanted."""
        if not self.is_flat or self._lookups is None:
            return ()
        tables = self._lookups.tables
        return tuple(i for i in self._lookups.by_row if sums[tables[i]] is not None)

    def put_rows(
        self,
        indices: Sequence[Tensor],
        captured: Sequence[Tensor],
        sums: Sequence[Tensor | None],
        parts: Sequence[Tensor],
    ) -> None:
        """Add parts (B, H, n) of `row_lookups` to the sums of the tables that they look into."""
        assert self._lookups is not None, "row lookups are among them"
        b, h, q, k = indices
        found = self._lookups.places(parts[0].new_zeros(()), *_spread([b, h, q, k[:1]]), *captured)
        for i, part in zip(self.row_lookups(sums), parts, strict=True):
            total, at = sums[self._lookups.tables[i]], torch.broadcast_tensors(*found[i])
            assert total is not None, "row lookups are those that have one"
            part = part.unsqueeze(-1).to(total.dtype).sum_to_size(at[0].shape)
            total.index_put_(tuple(at), part, accumulate=True)

    # ---- inside ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        """What travels: not what was worked out of the nodes, which are others there, but what is known of them."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**state, "kinds": [(node.op, _kind(node)) for node in self.graph.graph.nodes]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds = state.pop("kinds")
        self.__dict__.update(state)
        nodes = list(self.graph.graph.nodes)
        if [node.op for node in nodes] == [op for op, _ in kinds]:
            for node, (_, kind) in zip(nodes, kinds, strict=True):
                if kind is not None:
                    node.meta["val"] = torch.empty([1] * kind[0], dtype=kind[1], device="meta")

    @cached_property
    def moving(self) -> set[fx.Node]:
        """The nodes of its graph that depend on an argument; the others are the same for all pairs."""
        return depending(self.graph.graph, _inputs(self.graph.graph)[: self._arguments])

    @property
    def _arguments(self) -> int:
        return len(_inputs(self.graph.graph)) - len(self.captured)

    @cached_property
    def _lookups(self) -> Lookups | None:
        inputs = _inputs(self.graph.graph)
        of = {node: i for i, node in enumerate(inputs[self._arguments :]) if i in self.differentiable}
        only = [node for node in of if node.users and all(_looks_up(user, node) for user in node.users)]
        if not only:
            return None
        places, graph = fx.Graph(), fx.Graph()
        at: dict[fx.Node, fx.Node] = {}
        inside: dict[fx.Node, fx.Node] = {}
        found = [user for node in only for user in node.users]
        tables = tuple(of[node] for node in only for _ in node.users)
        places.graph_copy(self.graph.graph, at)
        places.output([[at[i] for i in looked_up_at(node)] for node in found])
        for node in inputs:
            inside[node] = graph.node_copy(node)
        for n, node in enumerate(found):
            inside[node] = graph.placeholder(f"looked_up_{n}")
        graph.output(graph.graph_copy(self.graph.graph, inside))
        places.eliminate_dead_code()
        graph.eliminate_dead_code()
        by_key = depending(self.graph.graph, [inputs[self._arguments - 1]])
        by_row = tuple(i for i, node in enumerate(found) if not by_key.intersection(looked_up_at(node)))
        return Lookups(_shared(places), tables, by_row, _shared(graph))


def traced(
    fn: Callable[..., object],
    kind: str = "mask_mod",
    *,
    score: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    error: type[AttnspanError] = AttnspanError,
) -> Program:
    """The program of a function of (b, h, q_idx, kv_idx), or of a score of this dtype and these.

    Raises `error`, naming the function, for one that cannot be evaluated.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    name = name_of(fn)
    examples = [torch.zeros((), dtype=torch.int64, device=device) for _ in INDICES]
    if score is not None:
        examples.insert(0, torch.zeros((), dtype=score, device=device))
    said: list[object] = []
    lookups, values = _Lookups(), _Values()  # type: ignore[no-untyped-call]

    def call(*arguments: Tensor) -> Tensor:
        with lookups, values:
            result = fn(*arguments)
        said.append(result)
        return _number(result, arguments[-1])

    try:
        # Not in inference mode, whose tensors are made and then detached in place.
        autocast = torch.autocast(torch.device(device).type, enabled=False)
        with TRACING, torch.inference_mode(False), torch.no_grad(), autocast:
            graph = make_fx(call)(*examples)
    except Exception as problem:
        raise error(f"{name} could not be evaluated as a {kind}: {problem}") from problem
    _check_result(name, said[-1], score, error)
    program = _lifted(name, graph, error)
    reads = lookups.reads_values or values.reads_values or any(_is_dynamic(node) for node in graph.graph.nodes)
    return replace(program, reads_values=reads)


def name_of(fn: object) -> str:
    """What a function is called, that of a partial by what it calls."""
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", type(inner).__name__)


def content(tensors: Iterable[Tensor]) -> str:
    """A digest of tensors: shapes, dtypes and bits.

    >>> content([torch.tensor([1, 2])]) == content([torch.tensor([2, 1])])
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        digest.update(f"{tuple(x.shape)} {x.dtype} ".encode())
        bits = bits_of(x).cpu()
        if bits.numel():
            digest.update((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))
    return digest.hexdigest()


def bits_of(x: Tensor) -> Tensor:
    """The bits of a tensor, in a row of whole numbers: of eight bytes where they fit, compared as fast as one.

    >>> bits_of(torch.ones(2)).tolist() == bits_of(torch.ones(3)[1:]).tolist()
    True
    """
    row = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if row.nbytes % 8:
        return row.view(torch.uint8)
    return (row.clone() if row.storage_offset() * row.element_size() % 8 else row).view(torch.int64)


class _Lookups(TorchFunctionMode):
    """Inside, `table[i]` with a tensor of one number looks up; torch itself would ask the number for its value.

    What gives anything but tensors, or what is known of them without their values, is noticed: see [Note: values].
    """

    reads_values = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            at = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(i, Tensor) for i in at) and all(_is_index(i) for i in at):
                return LOOKUP(table, [i if isinstance(i, Tensor) else _whole(i, table.device) for i in at])
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor) and name not in METADATA and not _is_tensors(result):
            self.reads_values = True
        return result


class _Values(TorchDispatchMode):
    """Inside, operations that read a value out of a tensor are noticed: see [Note: values]."""

    reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            self.reads_values = True
        return func(*args, **(kwargs or {}))


METADATA = {
    *("__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel"),
    *("nelement", "stride", "storage_offset", "element_size", "get_device", "is_contiguous", "is_floating_point"),
    *("is_complex", "is_signed", "is_same_size", "is_tensor", "result_type", "is_inference"),
}
"""Functions of tensors whose results do not depend on values; attributes are `__get__`."""


def _is_tensors(result: object) -> bool:
    return isinstance(result, list | tuple) and all(isinstance(each, Tensor) for each in result)


def _is_dynamic(node: fx.Node) -> bool:
    """Whether the shape of a node's result depends on values; that of a lookup does where its indices are bools."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    values = [each.meta.get("val") for each in node.all_input_nodes[1:]]
    masks = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in values)
    return node.target is not LOOKUP or masks


def _whole(number: int, device: torch.device) -> Tensor:
    """As torch.tensor, which is traced as if it changed something."""
    return torch.full((), number, dtype=torch.int64, device=device)


def _is_index(i: object) -> bool:
    if isinstance(i, Tensor):
        return i.dtype != torch.bool
    return isinstance(i, int) and not isinstance(i, bool)


def _number(result: object, index: Tensor) -> Tensor:
    """What was returned, to be traced; what is no tensor is refused once it has been."""
    if isinstance(result, Tensor):
        return result
    return torch.full_like(index, result is True, dtype=torch.bool)


def _check_result(name: str, result: object, score: torch.dtype | None, error: type[AttnspanError]) -> None:
    if isinstance(result, bool) and score is None:
        return
    what = "a bool tensor" if score is None else "a floating-point tensor"
    fits = isinstance(result, Tensor) and (
        result.dtype == torch.bool if score is None else result.dtype.is_floating_point
    )
    if not isinstance(result, Tensor) or not fits:
        kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise error(f"{name} must return {what}, got {kind}")
    if result.dim():
        one = "one bool" if score is None else "one score"
        raise error(f"{name} must return {one} for one pair of indices, got shape {tuple(result.shape)}")


def _lifted(name: str, traced: fx.GraphModule, error: type[AttnspanError]) -> Program:
    """The captured tensors of a traced graph as inputs, each once."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    captured: dict[str, fx.Node] = {}
    inputs = _inputs(traced.graph)
    for node, given in zip(inputs, ["score", *INDICES][-len(inputs) :], strict=True):
        copies[node] = graph.placeholder(given)
        copies[node].meta = dict(node.meta)
    tensors: list[Tensor] = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            if node.target not in captured:
                captured[node.target] = graph.placeholder(f"captured_{len(captured)}")
                captured[node.target].meta = dict(node.meta)
                tensors.append(getattr(traced, node.target))
            copies[node] = captured[node.target]
    graph.output(graph.graph_copy(traced.graph, copies))
    _without_arguments(graph)
    _join_lookups(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        _check_op(name, node.target, error)
    result = next(iter(reversed(traced.graph.nodes))).args[0]
    (output,) = (node for node in graph.nodes if node.op == "output")
    reads = frozenset(given.name for given in _inputs(graph)[: len(inputs)] if output in depending(graph, [given]))
    return Program(name, _shared(graph), tuple(tensors), result.meta["val"].dtype, reads)


def _check_op(name: str, op: object, error: type[AttnspanError]) -> None:
    """Refuse what does not compute its result from its arguments alone."""
    if not isinstance(op, torch._ops.OpOverload):
        return
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise error(
            f"{name} must compute the same whenever it is asked, got {op}, which draws random numbers; draw them once, "
            "outside, and look them up in the function"
        )
    if op._schema.is_mutable:
        raise error(f"{name} must not change tensors in place, got {op}; return a new one")


_FILLED: dict[object, Callable[[fx.Node], Any]] = {
    torch.ops.aten.new_ones.default: lambda node: 1,
    torch.ops.aten.ones_like.default: lambda node: 1,
    torch.ops.aten.new_zeros.default: lambda node: 0,
    torch.ops.aten.zeros_like.default: lambda node: 0,
    torch.ops.aten.new_full.default: lambda node: _argument(node, 2),
    torch.ops.aten.full_like.default: lambda node: _argument(node, 1),
}
"""Operations that take of a tensor its shape, dtype and device alone, and what they fill another with."""


def _argument(node: fx.Node, place: int) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs["fill_value"]


def _without_arguments(graph: fx.Graph) -> None:
    """Constants that were made after the pattern of an argument, as `b.new_ones(())`, without it."""
    for node in list(graph.nodes):
        if node.target in _FILLED:
            value, like = _FILLED[node.target](node), node.meta["val"]
            with graph.inserting_before(node):
                made = graph.call_function(
                    torch.ops.aten.full.default, (list(like.shape), value), {"dtype": like.dtype, "device": like.device}
                )
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _join_lookups(graph: fx.Graph) -> None:
    """`table[i][j]` as `table[i, j]`: a number, not first a row."""
    for node in graph.nodes:
        while node.target is LOOKUP and isinstance(row := node.args[0], fx.Node) and row.target is LOOKUP:
            at = [*looked_up_at(row), *looked_up_at(node)]
            if not all(isinstance(i, fx.Node) and _rank(i) == 0 for i in at):
                break
            node.args = (row.args[0], at)


def looked_up_at(lookup: fx.Node) -> list[fx.Node]:
    """The indices of a lookup."""
    indices = lookup.args[1]
    assert isinstance(indices, list | tuple), "a lookup has a list of them"
    nodes = [each for each in indices if isinstance(each, fx.Node)]
    assert len(nodes) == len(indices), "each is a tensor"
    return nodes


def _shared(graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph, the same object for the same text and kinds of inputs, so that it is compiled once."""
    made = fx.GraphModule(torch.nn.Module(), graph)
    kinds = [_kind(node) for node in graph.nodes if node.op == "placeholder"]
    with TRACING:
        return _GRAPHS.setdefault(f"{made.code}{kinds}", made)


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def depending(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from any of the sources, and these themselves."""
    found = set(sources)
    for node in graph.nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def _is_flat(node: fx.Node) -> bool:
    """See [Note: flat programs]."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    numbers = all(_rank(each) == 0 for each in [node, *node.all_input_nodes])
    if torch.Tag.pointwise in node.target.tags or node.target in _BY_NUMBER:
        return numbers
    return node.target is LOOKUP and _looks_up(node, node.args[0])


def _looks_up(node: fx.Node, table: object) -> bool:
    """Whether a node looks a number up in a table, by a number for each of its dims."""
    if node.target is not LOOKUP or node.args[0] is not table:
        return False
    at = node.args[1]
    assert isinstance(table, fx.Node)
    assert isinstance(at, list | tuple)
    return len(at) == _rank(table) and all(isinstance(i, fx.Node) and _rank(i) == 0 for i in at)


def _rank(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else None


def _kind(node: fx.Node) -> tuple[int, torch.dtype] | None:
    """The dims and the dtype of what a node computes, as it was traced."""
    value = node.meta.get("val")
    return (value.dim(), value.dtype) if isinstance(value, Tensor) else None


def _spread(indices: Sequence[Tensor]) -> list[Tensor]:
    """Batch rows, heads, queries and keys, each along a dim of its own, to be broadcast."""
    return [index.reshape(-1, *[1] * (3 - dim)) for dim, index in enumerate(indices)]


def _mapped(graph: fx.GraphModule, scores: int) -> Callable[..., Any]:
    """The graph under vmap over keys, queries, heads and batch rows, the last outermost."""
    captured = len(_inputs(graph.graph)) - scores - len(INDICES)
    mapped: Callable[..., Any] = graph
    for dim in reversed(range(4)):
        dims = (*[0] * scores, *(0 if i == dim else None for i in range(4)), *[None] * captured)
        mapped = torch.vmap(mapped, in_dims=dims)
    return mapped
