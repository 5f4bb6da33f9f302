"""A mask_mod or score_mod, traced once: what it computes as a graph, what it captures as a list of tensors.

FlexAttention's functions are written for one pair of indices. Tracing one call on numbers gives a graph of aten
operations in which every tensor that the function captured, through closures, partials, modules or globals, is an
input of its own: it can be moved to another device, named in an error, hashed for agreement and differentiated.

[Note: flat programs] Most programs only combine numbers: every operation is pointwise, or looks a number up in a
table. Such a graph can be run as it stands on whole tensors of indices that broadcast, (n, 1) queries against
(m,) keys; no vmap, and what depends on the query alone is computed n times, not n x m. Others (a row of a table looked
up, then an entry of that row) run under vmap, as in FlexAttention.

[Note: gradients of tables] The gradient of a table is a sum over every pair that looked into it. Taking it by autograd
costs a tensor of the table's size for every piece of the score matrix. So where a captured tensor is only looked up by
numbers, its lookups are inputs of the graph that is differentiated, and their gradients are added to the table's own
directly.

[Note: values] What a function computes from captured tensors is part of the graph and follows their values; what it
reads out of them into Python (`w.item()`, `if flag:`) is a constant of the graph. `reads_values` tells that it did so:
such a program holds for as long as the values do.

tracing.py makes programs, graphs.py looks into their graphs. Knows nothing of masks, ranks or tiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from attnspan.masks.content import content
from attnspan.masks.graphs import (
    INDICES,
    depending,
    dims_and_dtype,
    inputs_of,
    is_flat_node,
    looked_up_at,
    looks_up,
    shared,
)


class TableLookups(NamedTuple):
    """A graph whose lookups in captured tensors are inputs: see [Note: gradients of tables]."""

    places: fx.GraphModule  # (*arguments, *captured) -> the indices of every lookup
    tables: tuple[int, ...]  # which captured tensor each of them looks into
    by_row: tuple[int, ...]  # those that are the same for all keys
    graph: fx.GraphModule  # (*arguments, *captured, *looked up) -> result


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function of (score,) b, h, q_idx, kv_idx. Made by `traced` (tracing.py).

    >>> from attnspan.masks.tracing import traced
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
        return all(is_flat_node(node) for node in self.graph.graph.nodes if node in self.moving)

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
        return replace(self, graph=shared(graph), captured=captured)

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

    def vjp(
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
        tables, places, looked, run = self._looked_up(score, indices, captured, sums)
        others = [i for i, total in enumerate(sums) if total is not None and i not in tables]
        spread = _spread(indices) if self.is_flat else list(indices)

        def call(score: Tensor, looked: list[Tensor], some: list[Tensor]) -> Tensor:
            given = list(captured)
            for i, x in zip(others, some, strict=True):
                given[i] = x
            found: Tensor = run(score, *spread, *given, *looked)
            return found.expand(score.shape)

        vjp: Any = torch.func.vjp
        result, back = vjp(call, score, looked, [captured[i] for i in others])
        d_score: Tensor
        d_score, d_looked, d_others = back(grad(result).to(result.dtype))
        by_row = self.row_lookups(sums)
        means = back(shares().to(result.dtype))[1] if by_row else []
        for i, part in zip(others, d_others, strict=True):
            total = sums[i]
            assert total is not None, "others are those that have one"
            total.add_(part)
        for table, at, part in zip(tables, places, d_looked, strict=True):
            _put(sums[table], at, part)
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
            _put(sums[self._lookups.tables[i]], found[i], part.unsqueeze(-1))

    # ---- inside ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        """What travels: not what was worked out of the nodes, which are others there, but what is known of them."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**state, "kinds": [(node.op, dims_and_dtype(node)) for node in self.graph.graph.nodes]}

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
        return depending(self.graph.graph, inputs_of(self.graph.graph)[: self._arguments])

    @property
    def _arguments(self) -> int:
        return len(inputs_of(self.graph.graph)) - len(self.captured)

    def _looked_up(
        self, score: Tensor, indices: Sequence[Tensor], captured: Sequence[Tensor], sums: Sequence[Tensor | None]
    ) -> tuple[tuple[int, ...], list[Sequence[Tensor]], list[Tensor], Callable[..., Tensor]]:
        """The tables that numbers are looked up in, where, the numbers, and what runs on these. See [Note: gradients of
        tables]."""
        if not self.is_flat:
            return (), [], [], _mapped(self.graph, 1)
        if self._lookups is None:
            return (), [], [], self.graph
        tables = self._lookups.tables
        places = list(self._lookups.places(score, *_spread(indices), *captured))
        looked = [captured[table][tuple(at)] for table, at in zip(tables, places, strict=True)]
        for i in self.row_lookups(sums):
            looked[i] = looked[i].expand(*score.shape[:3], 1)
        return tables, places, looked, self._lookups.graph

    @cached_property
    def _lookups(self) -> TableLookups | None:
        inputs = inputs_of(self.graph.graph)
        of = {node: i for i, node in enumerate(inputs[self._arguments :]) if i in self.differentiable}
        only = [node for node in of if node.users and all(looks_up(user, node) for user in node.users)]
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
        return TableLookups(shared(places), tables, by_row, shared(graph))


def _put(total: Tensor | None, at: Sequence[Tensor], part: Tensor) -> None:
    """Add the gradients of what was looked up to those of its table, if they are wanted."""
    if total is not None:
        at = torch.broadcast_tensors(*at)
        total.index_put_(tuple(at), part.to(total.dtype).sum_to_size(at[0].shape), accumulate=True)


def _spread(indices: Sequence[Tensor]) -> list[Tensor]:
    """Batch rows, heads, queries and keys, each along a dim of its own, to be broadcast."""
    return [index.reshape(-1, *[1] * (3 - dim)) for dim, index in enumerate(indices)]


def _mapped(graph: fx.GraphModule, scores: int) -> Callable[..., Any]:
    """The graph under vmap over keys, queries, heads and batch rows, the last outermost."""
    captured = len(inputs_of(graph.graph)) - scores - len(INDICES)
    mapped: Callable[..., Any] = graph
    for dim in reversed(range(4)):
        dims = (*[0] * scores, *(0 if i == dim else None for i in range(4)), *[None] * captured)
        mapped = torch.vmap(mapped, in_dims=dims)
    return mapped
