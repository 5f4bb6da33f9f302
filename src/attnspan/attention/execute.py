"""A call, carried out: tensors of this rank in, its out, lse and gradients back.

Without Ulysses this is the loop of loop.py over one lane per batch row. With it, heads are exchanged before and after;
the loop in between is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnspan.attention import loop
from attnspan.attention.call import Call
from attnspan.attention.heads import Side, Trade, segments
from attnspan.attention.lane import Computing, Final, Grads, Lane, wide


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    if call.plan.degree > 1:
        return _joined(
            [_forward_heads(call, row, query[rows], key[rows], value[rows]) for row, rows in _rows(call, query)]
        )
    lanes = [_lane(call, row, query[rows], key[rows], value[rows]) for row, rows in _rows(call, query)]
    return _joined(loop.forward(call.transport, lanes))


def backward(call: Call, query: Tensor, key: Tensor, value: Tensor, final: Final) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's query, key and value, each in its own dtype."""
    found: list[tuple[Tensor, ...]] = []
    rows_of = _rows(call, query)
    if call.plan.degree > 1:
        for row, rows in rows_of:
            found.append(_backward_heads(call, row, query[rows], key[rows], value[rows], final.of(rows)))
    else:
        lanes = [_lane(call, row, query[rows], key[rows], value[rows]) for row, rows in rows_of]
        sums = loop.backward(call.transport, lanes, [final.of(rows) for _, rows in rows_of])
        found = [(*grads.query.result(), *grads.keys.result()) for grads in sums]
    dq, dk, dv = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    return dq.to(query.dtype), _like(dk, key), _like(dv, value)


def _rows(call: Call, query: Tensor) -> list[tuple[int, slice]]:
    return call.rows(query.shape[0])


def _lane(call: Call, row: int, query: Tensor, key: Tensor, value: Tensor) -> Lane:
    return Lane(call.route(row), Computing(call.kernel, call.spec(query)), query, key, value)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in its tensor's dtype, contiguous and its own: sums are kept wide, those of keys and values packed."""
    return gradient.to(tensor.dtype, copy=True, memory_format=torch.contiguous_format)


# ---- Ulysses -------------------------------------------------------------------------------------------------------


def _forward_heads(call: Call, row: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    trade = call.trade(row, query.shape[1], key.shape[1])
    tensors = trade.gather_tokens([query, key, value], ["query", "key", "key"])
    lanes = [_lane(call, row, q, k, v) for q, k, v in _cut(trade, tensors, query.shape[1] // key.shape[1])]
    parts = loop.forward(call.transport, lanes)
    batch, heads, rows, _ = tensors[0].shape
    out = _by_heads([out for out, _ in parts], lambda: query.new_empty(batch, heads, rows, value.shape[-1]))
    lse = _by_heads([lse for _, lse in parts], lambda: query.new_empty(batch, heads, rows, dtype=wide(query.dtype)))
    (out,) = trade.scatter_tokens([out], ["query"])
    (lse,) = trade.scatter_tokens([lse.unsqueeze(-1)], ["query"])
    return out, lse.squeeze(-1)


def _backward_heads(
    call: Call, row: int, query: Tensor, key: Tensor, value: Tensor, final: Final
) -> tuple[Tensor, Tensor, Tensor]:
    trade = call.trade(row, query.shape[1], key.shape[1])
    sides: list[Side] = ["query", "key", "key", "query", "query"]
    *tensors, out, grad = trade.gather_tokens([query, key, value, final.out, final.grad], sides)
    scalars = [x.unsqueeze(-1) for x in (final.lse, final.grad_lse) if x is not None]
    lse, *grad_lse = (x.squeeze(-1) for x in trade.gather_tokens(scalars, ["query"] * len(scalars)))
    whole = Final(grad, grad_lse[0] if grad_lse else None, out, lse)
    cuts = segments(trade.shares[trade.here], query.shape[1] // key.shape[1])
    lanes = [_lane(call, row, tensors[0][:, q], tensors[1][:, k], tensors[2][:, k]) for q, k in cuts]
    sums: list[Grads] = loop.backward(call.transport, lanes, [whole.heads(q) for q, _ in cuts])
    keys = [grads.keys.result() for grads in sums]
    found = (
        _by_heads(
            [grads.query.result()[0] for grads in sums], lambda: torch.empty_like(tensors[0], dtype=wide(query.dtype))
        ),
        _by_heads([dk for dk, _ in keys], lambda: torch.empty_like(tensors[1], dtype=wide(query.dtype))),
        _by_heads([dv for _, dv in keys], lambda: torch.empty_like(tensors[2], dtype=wide(query.dtype))),
    )
    dq, dk, dv = trade.scatter_tokens(found, ["query", "key", "key"])
    return dq, dk, dv


def _cut(trade: Trade, tensors: list[Tensor], group: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    query, key, value = tensors
    return [(query[:, q], key[:, k], value[:, k]) for q, k in segments(trade.shares[trade.here], group)]


def _by_heads(parts: list[Tensor], empty: Callable[[], Tensor]) -> Tensor:
    """The segments of a share side by side; a rank without heads has none."""
    return torch.cat(parts, dim=1) if parts else empty()
