"""Tracing a mask_mod or score_mod: one call on numbers, as a graph in which every captured tensor is an input.

A function that branches on its indices, takes other arguments, draws random numbers or returns no single number cannot
be traced, and is refused by name with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnspan.errors import AttnspanError
from attnspan.masks.graphs import (
    INDICES,
    LOOKUP,
    TRACING,
    depending,
    inputs_of,
    is_number,
    looked_up_at,
    result_of,
    shared,
)
from attnspan.masks.program import Program


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

    name = function_name(fn)
    examples = [torch.zeros((), dtype=torch.int64, device=device) for _ in INDICES]
    if score is not None:
        examples.insert(0, torch.zeros((), dtype=score, device=device))
    said: list[object] = []
    lookups, values = _LookupMode(), _ValueMode()  # type: ignore[no-untyped-call]

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


def function_name(fn: object) -> str:
    """What a function is called, that of a partial by what it calls."""
    inner = getattr(fn, "func", fn)
    return getattr(inner, "__name__", type(inner).__name__)


class _LookupMode(TorchFunctionMode):
    """Inside, `table[i]` with a tensor of one number looks up; torch itself would ask the number for its value.

    What gives anything but tensors, or what is known of them without their values, is noticed: see [Note: values] in
    program.py.
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
        results = result if isinstance(result, list | tuple) else (result,)
        if name not in METADATA and not all(isinstance(each, Tensor) for each in results):
            self.reads_values = True
        return result


class _ValueMode(TorchDispatchMode):
    """Inside, operations that read a value out of a tensor are noticed: see [Note: values] in program.py."""

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
    inputs = inputs_of(traced.graph)
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
    used = (given for given in inputs_of(graph)[: len(inputs)] if result_of(graph) in depending(graph, [given]))
    reads = frozenset(given.name for given in used)
    return Program(name, shared(graph), tuple(tensors), result.meta["val"].dtype, reads)


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
            if not all(map(is_number, at)):
                break
            node.args = (row.args[0], at)
