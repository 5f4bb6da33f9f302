"""Moves of tokens between shards: which tokens each rank sends, and where they land.

Moves are derived once from the layout, as data, and then applied to any tensor. Its gradient takes the reverse way, and
is summed where a token went to several places. Only tokens that cross ranks travel. `shifted` are the moves of a shift,
`before` those that bring the preceding tokens to every stretch (recurrence/plan.py).

Shapes: tensors have tokens outermost, (T, ...); where batch rows move differently, T counts through all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnspan.layouts import Layout
from attnspan.layouts.placement import Placement
from attnspan.recurrence import Stretches
from attnspan.transports import Pending, Transport
from attnspan.transports.abort import abort_on_error
from attnspan.transports.consensus import digest
from attnspan.transports.operations import enter_operation


@dataclass(frozen=True)
class Moves:
    """For every other rank and this one: which tokens here go to it, and the places of those that come from it.

    `rows` is 1 if all batch rows move alike. Between two ranks, tokens are in the order of the receiver's places.
    """

    name: str  # the same on every rank, and no other moves' over this layout
    rows: int
    tokens: int  # of this rank's shard, through all rows that are told apart
    places: int  # that tokens land in on this rank, through all rows
    sends: tuple[Tensor, ...]
    lands: tuple[Tensor, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens come from each rank."""
        return [len(places) for places in self.lands]

    @cached_property
    def order(self) -> Tensor:
        """For each place, which of the tokens that came, rank after rank, belongs there; or one past."""
        came = sum(self.sizes)
        order = torch.full((self.places,), came, device="cpu")
        order[torch.cat(self.lands)] = torch.arange(came, device="cpu")
        return order

    @cached_property
    def returns(self) -> list[tuple[Tensor, Tensor]]:
        """Of what comes back, rank after rank: which of it belongs to which token. No token is twice in one pair."""
        tokens = torch.cat(self.sends)
        order = tokens.argsort(stable=True)
        counts = torch.bincount(tokens, minlength=self.tokens)
        time = torch.arange(len(tokens), device="cpu") - (counts.cumsum(0) - counts)[tokens[order]]
        times = [order[time == each] for each in range(int(counts.max()) if len(tokens) else 0)]
        return [(which, tokens[which]) for which in times]


class Landing(NamedTuple):
    """What is to land in some places of all ranks: the position `source` of a batch row, in a place of a rank."""

    rank: Tensor
    place: Tensor
    row: Tensor
    source: Tensor


def shifted(layout: Layout, seq_len: int, rank: int, by: int, documents: Tensor | None) -> Moves:
    """The moves that bring position p what is at p - by, if both are in the sequence and in one document.

    `documents` (rows, seq_len) names the document of every position, or is None.

    >>> from attnspan.layouts import Contiguous
    >>> moves = shifted(Contiguous(2), 6, 0, -1, None)  # rank 0 holds 0 1 2; position 2 gets what is at 3
    >>> [places.tolist() for places in moves.sends], [places.tolist() for places in moves.lands]
    ([[1, 2], []], [[0, 1], [2]])
    """
    with torch.inference_mode(False):  # made anywhere, used anywhere
        rows, by = max(layout.rows, 1 if documents is None else len(documents)), max(-seq_len, min(seq_len, by))
        at = Placement.of(layout, seq_len, rows)
        source = at.position - by
        inside = (source >= 0) & (source < seq_len)
        if documents is not None:
            names = documents.expand(rows, -1)
            inside &= names.gather(1, source.clamp(0, seq_len - 1)) == names.gather(1, at.position)
        row = torch.arange(rows, device="cpu").unsqueeze(1).expand(-1, seq_len)
        wanted = Landing(*(each[inside] for each in (at.holder.expand(rows, -1), at.place, row, source)))
        name = f"shift by {by}" if documents is None else f"shift by {by} within documents {_digest(documents)}"
        return _moves(name, at, rank, int((at.holder == rank).sum()) * rows, wanted)


def before(stretches: Stretches, layout: Layout, seq_len: int, rank: int, left: int) -> Moves:
    """The moves that bring every stretch the `left` tokens before it, as far as they are of its document.

    A rank has `left` places for each of its stretches, in the order of its shard, row after row; as many for each row
    as that with the most stretches needs.

    >>> from attnspan.layouts import Contiguous
    >>> moves = before(Stretches.of(Contiguous(2), 6, torch.zeros(1, 6)), Contiguous(2), 6, 1, left=2)
    >>> moves.places, [places.tolist() for places in moves.lands]
    (2, [[0, 1], []])
    """
    with torch.inference_mode(False):
        s, ranks = stretches, layout.ranks
        key = s.rank * s.rows + s.row
        order = (key * (s.rows * seq_len) + s.place).argsort()
        counts = torch.bincount(key, minlength=ranks * s.rows)
        number = torch.empty_like(order)  # of a stretch among those of its rank and row
        number[order] = torch.arange(len(order), device="cpu") - (counts.cumsum(0) - counts)[key[order]]
        most = counts.view(ranks, s.rows).amax(1)
        begins = s.start[s.step == 0][s.document]  # chains lie in the order of documents
        back = torch.arange(-left, 0, device="cpu")
        source = s.start.unsqueeze(1) + back
        place = ((s.row * most[s.rank] + number) * left).unsqueeze(1) + back + left
        inside = source >= begins.unsqueeze(1)
        each = (s.rank.unsqueeze(1).expand_as(place), place, s.row.unsqueeze(1).expand_as(place), source)
        name = f"halo of {left} within documents {digest(s.start[s.step == 0].tolist())}"
        at = Placement.of(layout, seq_len, s.rows)
        return _moves(name, at, rank, int(most[rank]) * s.rows * left, Landing(*(x[inside] for x in each)))


def _moves(name: str, at: Placement, rank: int, places: int, wanted: Landing) -> Moves:
    """The moves of one rank."""
    origin = at.column[wanted.row, wanted.source]
    holder, place = at.holder[origin], at.place[wanted.row, origin]
    leaves, lands = holder == rank, wanted.rank == rank
    targets, sources = wanted.rank[leaves], holder[lands]
    leaving, landing = place[leaves], wanted.place[lands]
    rows = len(at.position)
    return Moves(
        name,
        rows,
        rows * int((at.holder == rank).sum()),
        places,
        tuple(leaving[targets == peer] for peer in range(at.ranks)),
        tuple(landing[sources == peer] for peer in range(at.ranks)),
    )


def _digest(documents: Tensor) -> str:
    lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents]
    return digest(lengths)


@torch._disable_dynamo  # compiled autograd traces backward passes, and cannot follow transports
def _moved(transport: Transport, name: str | int, move: Callable[[], Pending]) -> int:
    """Carry out a move as an operation; its header, by which the way back is known."""
    with abort_on_error(transport), enter_operation(transport, name) as operation:
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
        return ReturnedTokens.apply(grads[0], ctx.transport, ctx.moves, ctx.header), None, None, None, None


class ReturnedTokens(torch.autograd.Function):
    """What moves brought, back where it came from: added up where one token went to several places."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, placed: Tensor, transport: Transport, moves: Moves, name: str | int) -> Tensor:
        ctx.transport, ctx.moves = transport, moves
        sizes = [len(each) for each in moves.sends]
        came = placed.new_empty(sum(sizes), *placed.shape[1:])
        leaving = [(rank, placed.index_select(0, which.to(placed.device))) for rank, which in enumerate(moves.lands)]
        arriving = list(enumerate(came.split(sizes)))
        ctx.header = _moved(transport, name, lambda: transport.exchange(leaving, arriving, "returned tokens"))
        tokens = placed.new_zeros(moves.tokens, *placed.shape[1:])
        for which, token in moves.returns:  # no token twice in one turn: the same bits every time
            tokens.index_add_(0, token.to(came.device), came.index_select(0, which.to(came.device)))
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        nothing = grads[0].new_zeros(())
        moved: Tensor = MovedTokens.apply(grads[0], ctx.transport, ctx.moves, nothing, ctx.header)
        return moved, None, None, None


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
