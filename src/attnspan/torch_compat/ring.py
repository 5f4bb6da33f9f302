"""torch's ring of attention over any op: `_templated_ring_attention`, and its backward.

Keys and values go from rank to rank; an op attends to what has arrived, and partial results are merged by their
log-sum-exp. The op is the caller's: ``op(query, key, value, is_causal=..., **kwargs)`` returns out, lse and
whatever else it likes, of which the last call's is returned, as in torch. ::

                     causal, in spans          causal, head-tail                        not causal
    own keys         causal                    causal                                   all
    of ranks before  all                       all queries, first half of the keys      all
    of ranks after   nothing                   second half of the queries, all keys     all

In what order sequences lie is the mesh's to tell: see [Note: order] in ranks.py. Attention by `ContextParallel`, or by
SDPA inside a context, needs no op, knows more orders and has gradients; this is for programs that bring an op.

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

from attnspan.attention.unbroken import unbroken
from attnspan.errors import AttentionError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.torch_compat.errors import AttentionNotImplemented
from attnspan.torch_compat.ranks import MeshRanks, ranks_of
from attnspan.transports import Transport
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
    ring = TemplatedRing.of(group, seq_dim, (query, key, value), is_causal, kwargs)
    merged, rest = Merged(query.new_empty(0), query.new_empty(0)), []
    with unbroken(ring.transport):
        for source, kv in ring.shards(_packed(key, value)):
            piece = ring.piece(source)
            if piece is None:
                continue
            k, v = _unpacked(kv, key, value)
            with torch._C.DisableTorchFunction():  # inside a context the op would be taken for a call that bypasses it
                out, lse, *rest = op(
                    piece.queries(query), piece.keys(k), piece.keys(v), is_causal=piece.causal, **kwargs
                )
            merged.add(piece, out, lse, query.shape[SEQ_DIM])
    return *merged.results(), *rest


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
    ring = TemplatedRing.of(group, seq_dim, (query, key, value), is_causal, kwargs)
    grads = [torch.zeros_like(x, dtype=_wide(x)) for x in (query, key, value)]
    rest: list[Any] = []
    with unbroken(ring.transport):
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

    def queries(self, tensor: Tensor) -> Tensor:
        """Those that attend."""
        return tensor.chunk(2, SEQ_DIM)[1] if self.late_queries else tensor

    def keys(self, tensor: Tensor) -> Tensor:
        """Those that are attended to."""
        return tensor.chunk(2, SEQ_DIM)[0] if self.early_keys else tensor


@dataclass(frozen=True)
class TemplatedRing:
    """Ranks in a circle, and what each attends to of the others' shards."""

    transport: Transport
    is_causal: bool
    balanced: bool

    @classmethod
    def of(cls, group: Group, seq_dim: int, tensors: Any, is_causal: bool, kwargs: dict[str, Any]) -> TemplatedRing:
        """Checked: what the table above does not hold is refused, on every rank."""
        query, key, _ = tensors
        if seq_dim != SEQ_DIM:
            raise AttentionError(
                f"seq_dim must be {SEQ_DIM}, that of (batch, heads, tokens, head dim), got {seq_dim!r}"
            )
        if kwargs.get("dropout_p"):
            raise AttentionNotImplemented(f"dropout_p must be 0, got {kwargs['dropout_p']}: each hop draws anew")
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
        return cls(ranks.transport, is_causal, is_causal and _balanced(ranks, sizes))

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


class Merged:
    """Partial results, merged in float32 at least."""

    def __init__(self, out: Tensor, lse: Tensor):
        self.out, self.lse = out, lse
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None
        self.column = False

    def add(self, piece: RingPiece, out: Tensor, lse: Tensor, tokens: int) -> None:
        """Merge another; the first is that of the own keys, of all queries."""
        self.column = lse.dim() == out.dim()
        first, self.dtypes = self.dtypes is None, (out.dtype, lse.dtype)
        lse = lse if self.column else lse.unsqueeze(-1)
        # Some kernels pad lse to whole blocks of rows.
        out, lse = out.to(_wide(out)), lse.narrow(SEQ_DIM, 0, out.shape[SEQ_DIM]).to(_wide(lse))
        if first:
            self.out, self.lse = out, lse
            return
        old_out, old_lse = piece.queries(self.out), piece.queries(self.lse)
        both = torch.logaddexp(old_lse, lse)
        alive = both.isneginf().logical_not()
        weights = [torch.where(alive, (part - both).exp(), 0) for part in (old_lse, lse)]
        new_out = torch.where(alive, weights[0] * old_out, 0) + torch.where(alive, weights[1] * out, 0)
        kept = tokens - new_out.shape[SEQ_DIM]
        self.out = torch.cat([self.out.narrow(SEQ_DIM, 0, kept), new_out], SEQ_DIM)
        self.lse = torch.cat([self.lse.narrow(SEQ_DIM, 0, kept), both], SEQ_DIM)

    def results(self) -> tuple[Tensor, Tensor]:
        """out and lse, in the dtypes and shapes of the op."""
        assert self.dtypes is not None, "every rank attends to its own keys"
        lse = self.lse if self.column else self.lse.squeeze(-1)
        return self.out.to(self.dtypes[0]), lse.to(self.dtypes[1])


def _balanced(ranks: MeshRanks, sizes: list[int]) -> bool:
    """Whether sequences lie head and tail, or in spans; nothing else is served."""
    layout = ranks.meant(sizes)
    if isinstance(layout, Contiguous):
        return False
    if not isinstance(layout, HeadTail) or sizes[0] % 2:
        raise AttentionNotImplemented(
            f"causal attention by a ring is for spans and even head-tail shards, got {sizes[0]} tokens a rank in "
            f"{layout!r}; use F.scaled_dot_product_attention inside context_parallel, which serves any"
        )
    return True


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Two tensors as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(kv: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    k, v = kv.view(-1).split([key.numel(), value.numel()])
    return [k.view(key.shape), v.view(value.shape)]
