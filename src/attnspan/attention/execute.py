"""Execute a bound plan on this rank's tensors: out and lse forward, gradients backward.

Without Ulysses this is the loop of loop.py over one lane per batch row of the plan. With Ulysses, heads are exchanged
before and after the same loop.

Lanes, and the sums of gradients, are alive until the results are made; plan/memory_walk.py counts memory accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnspan.attention import loop
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.attention.kept import KeptKeys
from attnspan.attention.lane import Lane, RowsAndHeads
from attnspan.attention.ulysses import HeadAllToAll, Side, segments
from attnspan.dtypes import lse_dtype
from attnspan.kernels import MergedOutputs
from attnspan.plan.heads import repeats_key_heads

SIDES: tuple[Side, Side, Side] = ("query", "key", "key")
"""Which tokens query, key and value have, and so do their gradients."""


def forward(bound: BoundPlan, inputs: Inputs, kept: KeptKeys | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; what arrives stays in `kept`."""
    rows = _plan_batch_rows(bound, inputs)
    if bound.plan.degree > 1:
        parts = [row.forward(kept) for row in rows]
    else:
        lanes = [row.lane() for row in rows]
        parts = loop.forward(bound.transport, lanes, kept)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def backward(
    bound: BoundPlan, inputs: Inputs, merged: MergedOutputs, wanted: Sequence[int] = (), kept: KeptKeys | None = None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], list[Tensor]]:
    """The gradients of this rank's query, key and value in their own dtypes; and this rank's part of the gradients of
    captured tensors (the `wanted` ones) and of the weights that expand a latent, in the precision of sums."""
    rows, captured = _plan_batch_rows(bound, inputs), inputs.captured
    sums = [torch.zeros_like(x, dtype=lse_dtype(x.dtype)) if i in wanted else None for i, x in enumerate(captured)]
    expander = inputs.expander
    weights = [torch.zeros_like(x, dtype=lse_dtype(x.dtype)) for x in (expander.weights if expander else ())]
    merged_rows = [merged.batch_rows(row.batch) for row in rows]
    found: Sequence[tuple[Tensor, ...]]
    if bound.plan.degree > 1:
        found = [row.backward(each, sums, kept) for row, each in zip(rows, merged_rows, strict=True)]
    else:
        lanes = [row.lane() for row in rows]
        grads = loop.backward(bound.transport, lanes, merged_rows, sums, weights, kept.loops[0] if kept else None)
        found = [each.results(inputs.query.dtype, inputs.key.dtype) for each in grads]
    whole = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    dq, dk, dv = (x.to(inputs.query.dtype).contiguous() for x in whole)  # as the op promises to code that is compiled
    return bound.signed(dq), dk, dv, sums, weights


def _plan_batch_rows(bound: BoundPlan, inputs: Inputs) -> list[PlanBatchRow]:
    """The batch rows of the plan: one for all batch rows, or one for each."""
    query, key, value = bound.signed(inputs.query), inputs.key, inputs.value
    batches = (
        [slice(0, len(query))] if bound.plan.batch_rows == 1 else [slice(row, row + 1) for row in range(len(query))]
    )
    return [
        PlanBatchRow(bound, row, batch, inputs._replace(query=query[batch], key=key[batch], value=value[batch]))
        for row, batch in enumerate(batches)
    ]


class PlanBatchRow:
    """The inputs of one batch row of the plan, which stands for some batch rows.

    Without Ulysses it is a lane. With it, `forward` and `backward` exchange heads, and go over a lane for each segment
    of this rank's share of them.
    """

    def __init__(self, bound: BoundPlan, batch_row: int, batch: slice, inputs: Inputs):
        self.bound, self.batch_row, self.batch, self.inputs = bound, batch_row, batch, inputs
        self.heads, self.kv_heads = inputs.query.shape[1], inputs.key.shape[1]

    def lane(self) -> Lane:
        """All heads."""
        return self._lane(self.inputs, range(self.heads))

    def forward(self, kept: KeptKeys | None) -> tuple[Tensor, Tensor]:
        exchange, (query, key, value) = self._exchange(), self.inputs[:3]
        tensors = exchange.gather_tokens([query, key, value], SIDES)
        lanes = self._head_lanes(exchange, tensors)
        parts = loop.forward(self.bound.transport, lanes, kept)
        if kept is not None:
            kept.heads.append(tensors)
        shape, precision = tensors[0].shape[:3], lse_dtype(query.dtype)
        out = _by_heads([out for out, _ in parts], lambda: query.new_empty(*shape, value.shape[-1]))
        lse = _by_heads([lse for _, lse in parts], lambda: query.new_empty(shape, dtype=precision))
        out, lse = exchange.scatter_tokens([out, lse.unsqueeze(-1)], ["query", "query"])
        return out, lse.squeeze(-1)

    def backward(
        self, merged: MergedOutputs, sums: Sequence[Tensor | None], kept: KeptKeys | None
    ) -> tuple[Tensor, ...]:
        exchange, steps = self._exchange(), kept.loops[self.batch_row] if kept else None
        inputs = () if kept else self.inputs[:3]
        row_tensors = [
            merged.out,
            merged.grad,
            *(x.unsqueeze(-1) for x in (merged.lse, merged.grad_lse) if x is not None),
        ]
        sides: list[Side] = ["query"] * len(row_tensors)
        gathered = exchange.gather_tokens([*inputs, *row_tensors], [*SIDES[: len(inputs)], *sides])
        tensors = kept.heads[self.batch_row] if kept else gathered[:3]
        out, grad, lse, *grad_lse = gathered[len(inputs) :]
        exchanged = MergedOutputs(
            grad, grad_lse[0].squeeze(-1) if grad_lse else None, out, lse.squeeze(-1), merged.sinks
        )
        del gathered
        merged_segments = [exchanged.heads(query) for query, _ in self._segments(exchange)]
        lanes = self._head_lanes(exchange, tensors)
        query_dtype = self.inputs.query.dtype
        # [Note: gradients of heads] in ulysses.py
        key_dtype = lse_dtype(query_dtype) if repeats_key_heads(exchange.shares) else query_dtype
        grads = loop.backward(self.bound.transport, lanes, merged_segments, sums, (), steps)
        parts = [each.results(query_dtype, key_dtype) for each in grads]
        del grads
        found = [
            _by_heads([part[i] for part in parts], functools.partial(torch.empty_like, x, dtype=dtype))
            for i, (x, dtype) in enumerate(zip(tensors, (query_dtype, key_dtype, key_dtype), strict=True))
        ]
        del parts
        return tuple(exchange.scatter_tokens(found, SIDES))

    def _exchange(self) -> HeadAllToAll:
        return self.bound.head_exchange(self.batch_row, self.heads, self.kv_heads)

    def _segments(self, exchange: HeadAllToAll) -> list[tuple[slice, slice]]:
        return segments(exchange.shares[exchange.here], self.heads // self.kv_heads)

    def _head_lanes(self, exchange: HeadAllToAll, tensors: Sequence[Tensor]) -> list[Lane]:
        query, key, value = tensors
        heads = exchange.shares[exchange.here].query
        return [
            self._lane(self.inputs._replace(query=query[:, q], key=key[:, k], value=value[:, k]), heads[q])
            for q, k in self._segments(exchange)
        ]

    def _lane(self, inputs: Inputs, heads: range) -> Lane:
        return Lane(self.bound, self.batch_row, RowsAndHeads(range(self.batch.start, self.batch.stop), heads), inputs)


def _by_heads(parts: list[Tensor], empty: Callable[[], Tensor]) -> Tensor:
    """The segments of a share side by side; a rank without heads has none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1) if parts else empty()
