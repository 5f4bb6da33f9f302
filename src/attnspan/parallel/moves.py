"""Tokens that go from shard to shard: who sends which, and where they land.

Moves are worked out once from the layout, as data; then any tensor's tokens travel by them, and its gradient the same
way back, since a token goes to one place at most. Only what crosses between ranks is on the wire.

Shapes: tensors have tokens outermost, (T, ...); where batch rows move differently, T counts through all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnspan.layouts import Layout
from attnspan.transports import Pending, Transport
from attnspan.transports.consensus import digest
from attnspan.transports.operations import under_way
from attnspan.transports.unbroken import unbroken


@dataclass(frozen=True)
class Moves:
    """For every other rank and this one: which tokens here go to it, and the places of those that come from it.

    `rows` is 1 if all batch rows move alike. Between two ranks, tokens are in the order of the receiver's shard.
    """

    name: str  # the same on every rank, and no other moves' over this layout
    rows: int
    tokens: int  # of this rank's shard, through all rows that are told apart
    sends: tuple[Tensor, ...]
    lands: tuple[Tensor, ...]

    @cached_property
    def back(self) -> Moves:
        """The way back."""
        return replace(self, sends=self.lands, lands=self.sends)

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens come from each rank."""
        return [len(places) for places in self.lands]

    @cached_property
    def order(self) -> Tensor:
        """For each place of the shard, which of the tokens that came, rank after rank, belongs there; or one past."""
        came = sum(self.sizes)
        order = torch.full((self.tokens,), came, device="cpu")
        order[torch.cat(self.lands)] = torch.arange(came, device="cpu")
        return order


def shifted(layout: Layout, seq_len: int, rank: int, by: int, documents: Tensor | None) -> Moves:
    """The moves that bring position p what is at p - by, if both are in the sequence and in one document.

    `documents` (rows, seq_len) names the document of every position, or is None.

    >>> from attnspan.layouts import Contiguous
    >>> moves = shifted(Contiguous(2), 6, 0, -1, None)  # rank 0 holds 0 1 2; position 2 gets what is at 3
    >>> [places.tolist() for places in moves.sends], [places.tolist() for places in moves.lands]
    ([[1, 2], []], [[0, 1], [2]])
    """
    with torch.inference_mode(False):  # made anywhere, used anywhere
        return _shifted(layout, seq_len, rank, by, documents)


def _shifted(layout: Layout, seq_len: int, rank: int, by: int, documents: Tensor | None) -> Moves:
    rows, by = max(layout.rows, 1 if documents is None else len(documents)), max(-seq_len, min(seq_len, by))
    position = torch.stack([layout.permutation(seq_len, row) for row in range(layout.rows)]).expand(rows, -1)
    counts = torch.tensor(layout.tokens(seq_len), device="cpu")
    # A column is a token's place when shards lie side by side; each knows its rank, and its place on that rank.
    holder = torch.arange(layout.ranks, device="cpu").repeat_interleave(counts).expand(rows, -1)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    each, row = torch.arange(seq_len, device="cpu"), torch.arange(rows, device="cpu").unsqueeze(1)
    place = each - first + row * counts.repeat_interleave(counts)
    column = torch.empty(rows, seq_len, dtype=torch.int64, device="cpu")
    column.scatter_(1, position, each.expand(rows, -1))

    source = position - by
    inside = (source >= 0) & (source < seq_len)
    source = source.clamp(0, seq_len - 1)
    if documents is not None:
        names = documents.expand(rows, -1)
        inside &= names.gather(1, source) == names.gather(1, position)
    origin = column.gather(1, source)
    comes_from, goes_to = holder.gather(1, origin), holder
    leaves, lands = inside & (comes_from == rank), inside & (goes_to == rank)
    targets, sources = goes_to[leaves], comes_from[lands]
    leaving, landing = place.gather(1, origin)[leaves], place[lands]
    return Moves(
        f"{by}" if documents is None else f"{by} within documents {_digest(documents)}",
        rows,
        rows * int(counts[rank]),
        tuple(leaving[targets == peer] for peer in range(layout.ranks)),
        tuple(landing[sources == peer] for peer in range(layout.ranks)),
    )


def _digest(documents: Tensor) -> str:
    lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents]
    return digest(lengths)


@torch._disable_dynamo  # compiled autograd traces backward passes, and cannot follow transports
def _moved(transport: Transport, name: str | int, move: Callable[[], Pending]) -> int:
    """Carry out a move as an operation; its header, by which the way back is known."""
    with unbroken(transport), under_way(transport, name) as operation:
        move().wait()
    return operation.header


class MovedTokens(torch.autograd.Function):
    """Tokens sent by moves, `fill` where none lands; gradients go the way back."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, transport: Transport, moves: Moves, fill: Tensor, name: str | int) -> Tensor:
        ctx.transport, ctx.moves = transport, moves
        came = tokens.new_empty(sum(moves.sizes) + 1, *tokens.shape[1:])
        came[-1:] = fill
        leaving = [(rank, tokens.index_select(0, which.to(tokens.device))) for rank, which in enumerate(moves.sends)]
        arriving = list(enumerate(came[:-1].split(moves.sizes)))
        ctx.header = _moved(transport, name, lambda: transport.exchange(leaving, arriving, "shifted tokens"))
        return came.index_select(0, moves.order.to(came.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        nothing = grads[0].new_zeros(())
        return MovedTokens.apply(grads[0], ctx.transport, ctx.moves.back, nothing, ctx.header), None, None, None, None


class GatheredTokens(torch.autograd.Function):
    """Everybody's tokens, one rank after another; gradients are summed at their owner."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, transport: Transport, sizes: list[int], name: str | int) -> Tensor:
        ctx.transport, ctx.sizes = transport, sizes
        full = tokens.new_empty(sum(sizes), *tokens.shape[1:])
        ctx.header = _moved(transport, name, lambda: transport.gather(tokens, full.split(sizes), "shards"))
        return full

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return SummedTokens.apply(grads[0], ctx.transport, ctx.sizes, ctx.header), None, None, None


class SummedTokens(torch.autograd.Function):
    """Of tokens that every rank has a value for, the sum over ranks, each token at its owner."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, full: Tensor, transport: Transport, sizes: list[int], name: str | int) -> Tensor:
        ctx.transport, ctx.sizes = transport, sizes
        parts = full.contiguous().split(sizes)
        own = torch.empty_like(parts[transport.rank])
        ctx.header = _moved(transport, name, lambda: transport.reduce_scatter(parts, own, "gradients of shards"))
        return own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return GatheredTokens.apply(grads[0], ctx.transport, ctx.sizes, ctx.header), None, None, None
