"""The graph of a traced function: its inputs, what depends on what, and which nodes look a number up in a table.

Graphs of the same text are one object, so that what is made of them, such as compiled kernels, is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

INDICES = ("b", "h", "q_idx", "kv_idx")

TRACING = RLock()
"""Held while a function is traced, which sets modes that are not for two threads at once; virtual ranks are threads."""

_GRAPHS: WeakValueDictionary[str, fx.GraphModule] = WeakValueDictionary()
"""By text: equal programs share what is compiled."""

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


def looked_up_at(lookup: fx.Node) -> list[fx.Node]:
    """The indices of a lookup."""
    indices = lookup.args[1]
    assert isinstance(indices, list | tuple), "a lookup has a list of them"
    nodes = [each for each in indices if isinstance(each, fx.Node)]
    assert len(nodes) == len(indices), "each is a tensor"
    return nodes


def shared(graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph, the same object for the same text and kinds of inputs, so that it is compiled once."""
    made = fx.GraphModule(torch.nn.Module(), graph)
    kinds = [dims_and_dtype(node) for node in inputs_of(graph)]
    with TRACING:
        return _GRAPHS.setdefault(f"{made.code}{kinds}", made)


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The arguments of a graph, then what it captured."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def result_of(graph: fx.Graph) -> fx.Node:
    """The node whose value a graph of one result returns."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    result: fx.Node
    (result,) = output.all_input_nodes
    return result


def depending(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from any of the sources, and these themselves."""
    found = set(sources)
    for node in graph.nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def is_flat_node(node: fx.Node) -> bool:
    """Whether a node can be computed on whole tensors of indices. See [Note: flat programs] in program.py."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    numbers = all(map(is_number, [node, *node.all_input_nodes]))
    if torch.Tag.pointwise in node.target.tags or node.target in _BY_NUMBER:
        return numbers
    return node.target is LOOKUP and looks_up(node, node.args[0])


def looks_up(node: fx.Node, table: object) -> bool:
    """Whether a node looks a number up in a table, by a number for each of its dims."""
    if node.target is not LOOKUP or node.args[0] is not table:
        return False
    at = node.args[1]
    assert isinstance(table, fx.Node)
    assert isinstance(at, list | tuple)
    return len(at) == _dims(table) and all(map(is_number, at))


def dims_and_dtype(node: fx.Node) -> tuple[int, torch.dtype] | None:
    """The dims and the dtype of what a node computes, as it was traced."""
    value = node.meta.get("val")
    return (value.dim(), value.dtype) if isinstance(value, Tensor) else None


def is_number(node: object) -> bool:
    """Whether what a node computes has no dims."""
    return isinstance(node, fx.Node) and _dims(node) == 0


def _dims(node: fx.Node) -> int | None:
    value = dims_and_dtype(node)
    return None if value is None else value[0]
