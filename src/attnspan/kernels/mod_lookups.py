"""Where a score_mod or a mask_mod looks numbers up, and which derivatives of it belong together.

[Note: derivatives] torch differentiates the graph: it is traced once more together with its gradients. A score changes
pair by pair, so a gradient is that of the changed score times a derivative, and Triton computes the derivatives: of the
changed score by the score and by what was looked up.

[Note: what is summed] What a lookup's index depends on says which derivatives belong to one entry (`Along`): all of a
head, of a row, of a column, or of a distance q - k. These are summed in the pass that computes dq or dk and dv; only an
index that depends on q and k in another way has its gradients written out pair by pair. From there ordinary operations
go to the tables, and to the tensors that these were prepared from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, fx

from attnspan.kernels.split import split_graph
from attnspan.masks.graphs import INDICES, LOOKUP, TRACING, depending, inputs_of, is_number, looked_up_at, result_of
from attnspan.masks.program import Program

Along = Literal["rows", "cols", "distances", "pairs"]


class Uncompilable(Exception):
    """What a program does that there is no Triton for."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A place of a program where it looks a number up: in which of its tables, and which gradients belong together."""

    node: fx.Node
    table: int
    along: Along


@dataclass(frozen=True)
class TracedMod:
    """A program without what it captured: what code depends on."""

    graph: fx.GraphModule
    count: int  # of captured tensors

    @staticmethod
    def of(program: Program) -> TracedMod:
        return TracedMod(program.graph, len(program.captured))

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.graph.nodes)

    @property
    def arguments(self) -> list[fx.Node]:
        given = inputs_of(self.graph.graph)
        return given[: len(given) - self.count]

    @property
    def captured(self) -> list[fx.Node]:
        return inputs_of(self.graph.graph)[len(self.arguments) :]

    @property
    def result(self) -> fx.Node:
        return result_of(self.graph.graph)

    @property
    def tables(self) -> tuple[fx.Node, ...]:
        return split_graph(self.graph, self.count).tables

    @property
    def floating(self) -> tuple[Lookup, ...]:
        """Every lookup that could have a gradient."""
        tables, found = self.tables, []
        for node in self.nodes:
            table = node.args[0] if node.target is LOOKUP else node
            if table in tables and (table is not node or is_number(node)) and dtype_of(node).is_floating_point:
                found.append(Lookup(node, tables.index(table), self.along(indices_of(node))))
        return tuple(found)

    @property
    def by_pair(self) -> int:
        """How many lookups depend on the query and the key."""
        at = (self.along(indices_of(node)) for node in self.nodes if node.target is LOOKUP)
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


def learned(program: Program, wanted: Iterable[int]) -> tuple[Lookup, ...]:
    """The lookups through which some of the captured tensors get gradients."""
    traced = TracedMod.of(program)
    reached = depending(traced.graph.graph, [traced.captured[i] for i in wanted])
    return tuple(each for each in traced.floating if traced.tables[each.table] in reached)


def by_pairs(found: tuple[Lookup, ...]) -> tuple[Lookup, ...]:
    """The same where rows and columns do not go in step, so that a block's diagonals are no distances."""
    return tuple(replace(each, along="pairs") if each.along == "distances" else each for each in found)


@lru_cache(maxsize=256)
def places(traced: fx.GraphModule, found: tuple[Lookup, ...]) -> Callable[..., Sequence[Sequence[Tensor]]]:
    """(*arguments, *captured) -> the indices of every lookup, none for a number."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(traced.graph, copies)
    graph.output([[copies[i] for i in indices_of(each.node)] for each in found])
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def indices_of(node: fx.Node) -> list[fx.Node]:
    """Of a lookup; none for a number."""
    return looked_up_at(node) if node.target is LOOKUP else []


def _is_difference(node: fx.Node, q: fx.Node, k: fx.Node) -> bool:
    return node.target is torch.ops.aten.sub.Tensor and set(node.args) == {q, k} and not node.kwargs


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of what a node computes."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def with_derivatives(traced: TracedMod, nodes: list[fx.Node], wanted: list[int]) -> fx.Graph:
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
    module = fx.GraphModule(torch.nn.Module(), graph)

    def both(score: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        looked = list(given[len(INDICES) :])

        def changed(score: Tensor, *some: Tensor) -> Tensor:
            for i, x in zip(wanted, some, strict=True):
                looked[i] = x
            found: Tensor = module(score, *given[: len(INDICES)], *looked)
            return found

        vjp: Any = torch.func.vjp
        found, back = vjp(changed, score, *(looked[i] for i in wanted))
        return (found, *back(torch.ones_like(found)))

    examples = [torch.zeros((), dtype=dtype_of(node), device="cpu") for node in [*arguments, *nodes]]
    with TRACING, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        table = dict(core_aten_decompositions().items())
        return make_fx(torch.func.functionalize(both), decomposition_table=table)(*examples).graph
