"""A program in two: what is computed from captured tensors alone, once, and what is evaluated pair by pair.

[Note: split programs] FlexAttention differentiates a captured tensor only where it is looked up, pair by pair. So what
a program computes from captured tensors alone (the sigmoid of a table) is computed before, once, by ordinary
operations; what is left looks numbers up in tables, of which autograd then walks the rest of the way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from attnspan.masks.graphs import LOOKUP, depending, inputs_of
from attnspan.masks.program import Program


class Split(NamedTuple):
    """A program in two: what is the same for all pairs, and what is evaluated pair by pair. See [Note: split
    programs]."""

    prepare: fx.GraphModule  # (*captured) -> tables
    ask: Callable[..., Tensor]  # (None, *arguments, *tables) -> result
    tables: tuple[fx.Node, ...]  # where they are in the program's graph


def split(program: Program) -> Split:
    """The two parts of a program, the same objects for programs of the same graph."""
    return split_graph(program.graph, len(program.captured))


@functools.lru_cache(maxsize=256)
def split_graph(graph: fx.GraphModule, count: int) -> Split:
    """Of a graph whose last `count` inputs are captured."""
    whole = list(graph.graph.nodes)
    given = inputs_of(graph.graph)
    arguments, captured = given[: len(given) - count], given[len(given) - count :]
    moving, fixed = depending(graph.graph, arguments), set(captured)
    for node in whole:
        if node not in moving and fixed.intersection(node.all_input_nodes):
            fixed.add(node)
    looked = [node for node in whole if node in fixed and any(user in moving for user in node.users)]

    prepare, ask = fx.Graph(), fx.Graph()
    before: dict[fx.Node, fx.Node] = {node: prepare.node_copy(node) for node in captured}
    inside: dict[fx.Node, fx.Node] = {node: ask.node_copy(node) for node in arguments}
    places = [ask.placeholder(f"table_{n}") for n in range(len(looked))]
    nowhere = ask.call_function(operator.mul, (inside[arguments[-1]], 0))
    for node, place in zip(looked, places, strict=True):
        # A number becomes a table of one: FlexAttention differentiates what is looked up, and nothing else.
        is_number = node.meta["val"].dim() == 0
        inside[node] = ask.call_function(operator.getitem, (place, (nowhere,))) if is_number else place
    for node in whole:
        if node in fixed and node not in before:
            before[node] = prepare.node_copy(node, before.__getitem__)
        elif node.op == "call_function" and node not in fixed:
            if node not in moving:  # a constant: both parts may use it
                before[node] = prepare.node_copy(node, before.__getitem__)
            if node.target is LOOKUP:
                at = tuple(inside[i] for i in node.args[1])
                inside[node] = ask.call_function(operator.getitem, (inside[node.args[0]], at))
            else:
                inside[node] = ask.node_copy(node, inside.__getitem__)
        elif node.op == "output":
            ask.output(inside[node.args[0]])
    prepare.output([before[node] for node in looked])
    prepare.eliminate_dead_code()
    ask.eliminate_dead_code()
    made = [fx.GraphModule(torch.nn.Module(), graph) for graph in (prepare, ask)]
    return Split(made[0], type(made[1]).forward, tuple(looked))


def tables(program: Program, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a program looks into, prepared: of one dim at least."""
    return tuple(x if x.dim() else x.reshape(1) for x in split(program).prepare(*captured))
