"""A call, carried out: tensors of this rank in, its out, lse and gradients back.

Without Ulysses this is the loop of loop.py over one lane per batch row. With it, heads are exchanged before and after;
the loop in between is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.attention import loop
from attnspan.attention.call import Call
from attnspan.attention.heads import HeadAllToAll, Side, segments
from attnspan.attention.lane import Computing, Lane, Place
from attnspan.dtypes import lse_dtype
from attnspan.kernels import Final


def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; `captured` are the tensors of a score_mod."""
    work, query = Work(call, captured), call.signed(query)
    parts = [(row, rows, query[rows], key[rows], value[rows]) for row, rows in _rows(call, query)]
    if call.plan.degree > 1:
        return _joined([_forward_heads(work, *part) for part in parts])
    lanes = [work.lane(row, Place(_range(rows), range(q.shape[1])), q, k, v) for row, rows, q, k, v in parts]
    return _joined(loop.forward(call.transport, lanes))


def backward(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    final: Final,
    captured: Sequence[Tensor] = (),
    wanted: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """The gradients of this rank's query, key and value, each in its own dtype, and its part of those of `wanted` ones
    of the captured tensors, in the precision that sums are kept in."""
    found: list[tuple[Tensor, ...]] = []
    work, query = Work(call, captured), call.signed(query)
    sums = [torch.zeros_like(x, dtype=lse_dtype(x.dtype)) if i in wanted else None for i, x in enumerate(captured)]
    parts = [(row, rows, query[rows], key[rows], value[rows]) for row, rows in _rows(call, query)]
    if call.plan.degree > 1:
        for row, rows, q, k, v in parts:
            found.append(_backward_heads(work, row, rows, q, k, v, final.of(rows), sums))
    else:
        lanes = [work.lane(row, Place(_range(rows), range(q.shape[1])), q, k, v) for row, rows, q, k, v in parts]
        grads = loop.backward(call.transport, lanes, [final.of(rows) for _, rows, *_ in parts], sums)
        found = [each.results(query.dtype) for each in grads]
    whole = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    dq, dk, dv = (x.to(query.dtype).contiguous() for x in whole)  # as the op promises to code that is compiled
    return call.signed(dq), dk, dv, sums


class Work(NamedTuple):
    """A call, and the tensors that its score_mod captured."""

    call: Call
    captured: Sequence[Tensor]

    def lane(self, row: int, place: Place, query: Tensor, key: Tensor, value: Tensor) -> Lane:
        computing = Computing(self.call.kernel, self.call.spec(query), self.captured)
        return Lane(self.call.route(row), computing, place, query, key, value)


def _rows(call: Call, query: Tensor) -> list[tuple[int, slice]]:
    return call.rows(query.shape[0])


def _range(rows: slice) -> range:
    return range(rows.start, rows.stop)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


# ---- Ulysses -------------------------------------------------------------------------------------------------------


def _forward_heads(
    work: Work, row: int, rows: slice, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    trade = work.call.trade(row, query.shape[1], key.shape[1])
    tensors = trade.gather_tokens([query, key, value], ["query", "key", "key"])
    lanes = _head_lanes(work, trade, row, rows, tensors, query.shape[1] // key.shape[1])
    parts = loop.forward(work.call.transport, lanes)
    batch, heads, tokens, _ = tensors[0].shape
    out = _by_heads([out for out, _ in parts], lambda: query.new_empty(batch, heads, tokens, value.shape[-1]))
    lse = _by_heads(
        [lse for _, lse in parts], lambda: query.new_empty(batch, heads, tokens, dtype=lse_dtype(query.dtype))
    )
    (out,) = trade.scatter_tokens([out], ["query"])
    (lse,) = trade.scatter_tokens([lse.unsqueeze(-1)], ["query"])
    return out, lse.squeeze(-1)


def _backward_heads(
    work: Work,
    row: int,
    rows: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    final: Final,
    sums: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    trade = work.call.trade(row, query.shape[1], key.shape[1])
    sides: list[Side] = ["query", "key", "key", "query", "query"]
    *tensors, out, grad = trade.gather_tokens([query, key, value, final.out, final.grad], sides)
    scalars = [x.unsqueeze(-1) for x in (final.lse, final.grad_lse) if x is not None]
    lse, *grad_lse = (x.squeeze(-1) for x in trade.gather_tokens(scalars, ["query"] * len(scalars)))
    whole = Final(grad, grad_lse[0] if grad_lse else None, out, lse, final.sinks)
    group = query.shape[1] // key.shape[1]
    lanes = _head_lanes(work, trade, row, rows, tensors, group)
    cuts = segments(trade.shares[trade.here], group)
    finals = [whole.heads(q) for q, _ in cuts]
    precision = lse_dtype(query.dtype)  # all ranks alike, whatever they computed
    parts = [each.results(precision) for each in loop.backward(work.call.transport, lanes, finals, sums)]
    found = [
        _by_heads([part[i] for part in parts], functools.partial(torch.empty_like, x, dtype=precision))
        for i, x in enumerate(tensors)
    ]
    dq, dk, dv = trade.scatter_tokens(found, ["query", "key", "key"])
    return dq, dk, dv


def _head_lanes(
    work: Work, trade: HeadAllToAll, row: int, rows: slice, tensors: list[Tensor], group: int
) -> list[Lane]:
    """A lane for each segment of this rank's share of the heads."""
    query, key, value = tensors
    share = trade.shares[trade.here]
    return [
        work.lane(row, Place(_range(rows), share.query[q]), query[:, q], key[:, k], value[:, k])
        for q, k in segments(share, group)
    ]


def _by_heads(parts: list[Tensor], empty: Callable[[], Tensor]) -> Tensor:
    """The segments of a share side by side; a rank without heads has none."""
    return torch.cat(parts, dim=1) if parts else empty()
