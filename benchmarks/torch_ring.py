"""What one rank computes in torch's own ring attention (head-tail, cuDNN), for comparison.

The kernel calls, merges and copies of torch.distributed.tensor.experimental's ring, hop by hop, with no communication;
the merger is torch's own class.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def ring(rank: int, shards: list[tuple[Tensor, Tensor, Tensor]], backward: bool) -> None:
    """Forward, and backward if asked for, of one rank; `shards` are the (q, k, v) of every rank."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

    ranks, query = len(shards), shards[rank][0]
    merger = torch_cp._SDPAMerger(True, seq_dim=2)
    rest: list[Tensor] = []
    for hop in range(ranks):
        _, key, value = shards[(rank - hop) % ranks]
        if hop < ranks - 1:
            torch.cat([key.flatten(), value.flatten()])
        q, k, v, partial = _slices(query, key, value, hop, rank)
        out, lse, *rest = aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=hop == 0
        )
        merger.step(out, lse, partial)
    out, lse = merger.results()
    if backward:
        _ring_backward(rank, shards, out, lse, rest)


def _slices(query: Tensor, key: Tensor, value: Tensor, hop: int, rank: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    if hop == 0:
        return query, key, value, False
    if hop <= rank:
        return query, key.chunk(2, 2)[0], value.chunk(2, 2)[0], False
    return query.chunk(2, 2)[1], key, value, True


def _ring_backward(rank: int, shards: list[tuple[Tensor, ...]], out: Tensor, lse: Tensor, rest: list[Tensor]) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

    ranks, query = len(shards), shards[rank][0]
    grad_q, grad_k, grad_v = (torch.zeros_like(query, dtype=torch.float32) for _ in range(3))
    cum_q, cum_k, _, _, seed, offset = rest[:6]
    for hop in range(ranks):
        _, key, value = shards[(rank - hop) % ranks]
        if hop < ranks - 1:
            torch.cat([key.flatten(), value.flatten()])
        q, k, v, partial = _slices(query, key, value, hop, rank)
        o, g, row_lse = (x.chunk(2, 2)[1] if partial else x for x in (out, out, lse))
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, o, row_lse.contiguous(), seed, offset, None, cum_q, cum_k, q.size(2), k.size(2), 0.0, hop == 0
        )
        if 0 < hop <= rank:
            grad_k = torch_cp._partial_update(grad_k, dk, 2, 2, 0, True)
            grad_v = torch_cp._partial_update(grad_v, dv, 2, 2, 0, True)
        else:
            grad_k += dk
            grad_v += dv
        torch.cat([grad_k.flatten(), grad_v.flatten()])
        if partial:
            grad_q = torch_cp._partial_update(grad_q, dq, 2, 2, 1, True)
        else:
            grad_q += dq
