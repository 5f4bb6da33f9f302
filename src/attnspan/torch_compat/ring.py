"""torch's ring of attention over any op: `_templated_ring_attention`, and its backward.

Keys and values go from rank to rank; an op attends to what has arrived, and partial results are merged by their
log-sum-exp. The op is the caller's: ``op(query, key, value, is_causal=..., **kwargs)`` returns out, lse and
whatever else it likes, of which the last call's is returned, as in torch. ::

                     causal, in spans          causal, head-tail                        not causal
    own keys         causal                    causal                                   all
    of ranks before  all                       all queries, first half of the keys      all
    of ranks after   nothing                   second half of the queries, all keys     all

In what order sequences lie is the mesh's to tell: see [Note: order of sequences] in ranks.py. Attention by
`ContextParallel`, or by SDPA inside a context, needs no op, knows more orders and has gradients; this is for programs
that bring an op.

[Note: no gradients] An op that is called on keys which came from elsewhere has no gradient for them. Inputs that
require gradients are refused, so that a part of the gradient is not taken for all of it: call it inside an
autograd.Function, whose backward is `_templated_ring_attention_backward`.

Shapes: query, key, value (B, H, S, D), lse (B, H, S), with a last dim of 1 or not; S this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.errors import AttentionError
from attnspan.kernels import Accumulator
from attnspan.layouts import Contiguous, HeadTail
from attnspan.torch_compat.errors import AttentionNotImplemented
from attnspan.torch_compat.ranks import MeshRanks, ranks_of
from attnspan.transports import Transport
from attnspan.transports.abort import abort_on_error
from attnspan.transports.group import Group

SEQ_DIM = 2


def _templated_ring_attention(
    group: Group,
    seq_dim: int,
    op: Callable[..., tuple[Any, ...]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    **kwargs: object,
) -> tuple[Any, ...]:
    """Attention of this rank's queries over the keys of all ranks, by an op for one pair of shards: (out, lse, ...)."""
    ring = TemplatedRing(group, seq_dim, (query, key, value), is_causal, kwargs)
    merged = Accumulator((*query.shape[:3], value.shape[3]), lse_dtype(query.dtype), query.device)
    with abort_on_error(ring.transport):
        for source, kv in ring.shards(_packed(key, value)):
            piece = ring.piece(source)
            if piece is None:
                continue
            k, v = _unpacked(kv, key, value)
            with torch._C.DisableTorchFunction():  # inside a context the op would be taken for a call that bypasses it
                out, lse, *rest = op(
                    piece.queries(query), piece.keys(k), piece.keys(v), is_causal=piece.causal, **kwargs
                )
            by_row = lse.squeeze(-1) if lse.dim() == out.dim() else lse
            # Some kernels pad lse to whole blocks of rows.
            merged.add(piece.rows(query), out, by_row.narrow(SEQ_DIM, 0, out.shape[SEQ_DIM]))
    whole, whole_lse = merged.result(out.dtype)
    return whole, whole_lse.to(lse.dtype).view(*whole_lse.shape, *lse.shape[3:]), *rest


def _templated_ring_attention_backward(
    group: Group,
    seq_dim: int,
    op: Callable[..., tuple[Any, ...]],
    grad_out: Tensor,
    grad_out_name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Gradients of query, key and value, by the backward op of one pair of shards; out and lse are the merged ones."""
    ring = TemplatedRing(group, seq_dim, (query, key, value), is_causal, kwargs)
    grads = [torch.zeros_like(x, dtype=lse_dtype(x.dtype)) for x in (query, key, value)]
    rest: list[Any] = []
    with abort_on_error(ring.transport):
        for source, kv in ring.shards(_packed(key, value)):
            piece = ring.piece(source)
            if piece is not None:
                k, v = _unpacked(kv, key, value)
                cut = {"query": query, "out": out, "logsumexp": logsumexp, grad_out_name: grad_out}
                given = {name: piece.queries(x).contiguous() for name, x in cut.items()}
                with torch._C.DisableTorchFunction():
                    dq, dk, dv, *rest = op(
                        key=piece.keys(k), value=piece.keys(v), is_causal=piece.causal, **given, **kwargs
                    )
                for whole, part in (
                    (piece.queries(grads[0]), dq),
                    (piece.keys(grads[1]), dk),
                    (piece.keys(grads[2]), dv),
                ):
                    whole += part
            grads[1:] = _unpacked(ring.passed_on(_packed(*grads[1:])), *grads[1:])
    return *(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True)), *rest


@dataclass(frozen=True)
class RingPiece:
    """What is attended to of a pair of shards: all queries or the second half, all keys or the first half."""

    causal: bool = False
    late_queries: bool = False
    early_keys: bool = False

    def rows(self, query: Tensor) -> range:
        """The places of those that attend."""
        tokens = query.shape[SEQ_DIM]
        return range(tokens // 2 if self.late_queries else 0, tokens)

    def queries(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, SEQ_DIM)[1] if self.late_queries else tensor

    def keys(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, SEQ_DIM)[0] if self.early_keys else tensor


class TemplatedRing:
    """Ranks in a circle, and what each attends to of the others' shards.

    What the table above does not hold is refused, on every rank.
    """

    def __init__(self, group: Group, seq_dim: int, tensors: Any, is_causal: bool, kwargs: dict[str, Any]) -> None:
        query, key, _ = tensors
        check_seq_dim(seq_dim)
        if kwargs.get("dropout_p"):
            raise AttentionNotImplemented(f"dropout_p must be 0, got {kwargs['dropout_p']}: each hop would draw again")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise AttentionError(
                "query, key and value must not require gradients: an op has none for keys of other ranks; call it "
                "inside an autograd.Function, or use F.scaled_dot_product_attention inside context_parallel"
            )
        if is_causal and query.shape[SEQ_DIM] != key.shape[SEQ_DIM]:
            raise AttentionNotImplemented(
                f"is_causal must be False where queries and keys are of different lengths, got {query.shape[SEQ_DIM]} "
                f"and {key.shape[SEQ_DIM]}"
            )
        ranks = ranks_of(group)
        sizes = ranks.sizes(key.shape[SEQ_DIM])
        if len(set(sizes)) > 1:
            raise AttentionError(
                f"key must have as many tokens on every rank, got {sizes}, by rank; ContextParallel serves any"
            )
        self.transport: Transport = ranks.transport
        self.is_causal, self.balanced = is_causal, is_causal and _balanced(ranks, sizes)

    def piece(self, source: int) -> RingPiece | None:
        """What to attend to of a rank's keys; None for nothing."""
        rank = self.transport.rank
        if not self.is_causal or source == rank:
            return RingPiece(causal=self.is_causal)
        if not self.balanced:
            return RingPiece() if source < rank else None
        return RingPiece(early_keys=source < rank, late_queries=source > rank)

    def shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's shard and whose it is, own first; the next one travels while one is attended to."""
        rank, ranks = self.transport.rank, self.transport.ranks
        for hop in range(ranks):
            coming = torch.empty_like(own) if hop + 1 < ranks else None
            if coming is not None:
                under_way = self.transport.exchange(
                    [((rank + 1) % ranks, own)], [((rank - 1) % ranks, coming)], "keys and values"
                )
            yield (rank - hop) % ranks, own
            if coming is not None:
                under_way.wait()
                own = coming

    def passed_on(self, tensor: Tensor) -> Tensor:
        """What the rank before passes on, for what this one does."""
        rank, ranks = self.transport.rank, self.transport.ranks
        coming = torch.empty_like(tensor)
        sends, receives = [((rank + 1) % ranks, tensor)], [((rank - 1) % ranks, coming)]
        self.transport.exchange(sends, receives, "gradients of keys and values").wait()
        return coming


def check_seq_dim(seq_dim: object) -> None:
    """Refuse tensors of another shape than (batch, heads, tokens, head dim)."""
    if seq_dim != SEQ_DIM:
        raise AttentionError(f"seq_dim must be {SEQ_DIM}, that of (batch, heads, tokens, head dim), got {seq_dim!r}")


def _balanced(ranks: MeshRanks, sizes: list[int]) -> bool:
    """Whether sequences lie head and tail, or in spans; nothing else is served."""
    layout = ranks.layout_of_shards(sizes)
    if isinstance(layout, Contiguous):
        return False
    if not isinstance(layout, HeadTail) or sizes[0] % 2:
        raise AttentionNotImplemented(
            f"causal attention by a ring is for spans and even head-tail shards, got {sizes[0]} tokens a rank in "
            f"{layout!r}; use F.scaled_dot_product_attention inside context_parallel, which serves any"
        )
    return True


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Two tensors as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(kv: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    k, v = kv.view(-1).split([key.numel(), value.numel()])
    return [k.view(key.shape), v.view(value.shape)]
