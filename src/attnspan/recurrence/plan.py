"""A recurrence over ranks, as data: which stretches there are, in which order, and whose maps go where.

A *stretch* is a row of neighbouring positions of one document on one rank: what a rank can compute alone, given the
state before it. Documents are chains of stretches. The state before a stretch is made of the maps of all stretches
before it in its chain, so a rank gets the maps of those before its last one, and of no others::

    document    0 0 0 0 0 0 0 0 1 1 1 1         rank 0 sends the maps of [0, 3) and [8, 9), rank 1 that of [3, 6);
    rank        0 0 0 1 1 1 0 0 0 1 1 1         nobody waits for those of [6, 8) and [9, 12)

The first stretch of a chain starts from a known state. What it sends is the state that it ends with: no matrix. The
last one sends nothing. Gradients travel the same way from the end: a `Route` is one of the two directions.

Everything here is numbers, made on the CPU: no tensor of data, no group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnspan.layouts.document_runs import Stretches


@dataclass(frozen=True)
class Route:
    """One direction along the chains, for one rank: whose maps go where, and how they compose.

    Stretches are named by their rows in a table: this rank's own first, in the order of its `RankPlan`, then what comes
    from others, rank after rank. Matrices have a table of their own, since the first of a chain needs none.
    """

    messages: tuple[tuple[Tensor, Tensor], ...]  # own rows whose matrices go somewhere, and whose states do
    message_to: tuple[int, ...]  # by peer: which of them; -1 for none
    receives: tuple[int, ...]  # by peer: how many maps come
    received_matrices: tuple[int, ...]
    heads: Tensor  # by chain: the row of its first stretch
    links: Tensor  # rows of those between the first and the last one here, step after step
    link_matrices: Tensor
    sizes: tuple[int, ...]  # how many links each step has
    targets: Tensor  # own rows that a state arrives at
    reads: Tensor  # where it is found: among the states before links, and after them those at the ends of chains


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Own stretches are ordered: first those in the middle of a chain, whose maps others need; then
    those that end one; then those that begin one. Each kind is longest first, so that at every step of a scan the ones
    still under way are the first.
    """

    stretches: Stretches
    rank: int
    ranks: int

    @cached_property
    def own(self) -> Tensor:
        """The numbers of this rank's stretches, in that order."""
        mine = (self.stretches.rank == self.rank).nonzero().flatten()
        mine = mine[self.stretches.length[mine].argsort(descending=True, stable=True)]
        begins, ends = self.stretches.step[mine] == 0, self.stretches.back[mine] == 0
        return mine[torch.where(begins, 2, ends.int()).argsort(stable=True)]

    @cached_property
    def lengths(self) -> Tensor:
        """Their tokens."""
        return self.stretches.length[self.own]

    @cached_property
    def waiting(self) -> int:
        """How many of them wait for a state."""
        return int((self.stretches.step[self.own] > 0).sum())

    @cached_property
    def mapped(self) -> int:
        """How many of those are needed as maps: they do not end a chain."""
        return int((self.stretches.back[self.own[: self.waiting]] > 0).sum())

    @cached_property
    def forward(self) -> Route:
        """From the beginning of documents to their end."""
        return self._route(self.stretches.step, own=len(self.own))

    @cached_property
    def backward(self) -> Route:
        """From the end to the beginning, for gradients: those that begin a chain give nothing."""
        return self._route(self.stretches.back, own=self.waiting)

    def traffic(self, matrix: int, state: int) -> list[tuple[int, int]]:
        """Numbers that go to each peer forward and backward, for maps of so many numbers.

        >>> from attnspan.layouts import Contiguous
        >>> RankPlan(Stretches.of(Contiguous(3), 6, torch.zeros(1, 6)), 1, 3).traffic(matrix=4, state=10)
        [(0, 14), (0, 0), (14, 0)]
        """

        def count(route: Route, peer: int) -> int:
            matrices, states = (
                map(len, route.messages[route.message_to[peer]]) if route.message_to[peer] >= 0 else (0, 0)
            )
            return matrices * matrix + states * state

        return [(count(self.forward, peer), count(self.backward, peer)) for peer in range(self.ranks)]

    def arriving(self, matrix: int, state: int) -> tuple[int, int]:
        """Numbers that come to this rank, forward and backward."""
        forward, backward = (
            sum(route.received_matrices) * matrix + sum(route.receives) * state
            for route in (self.forward, self.backward)
        )
        return forward, backward

    def _route(self, step: Tensor, own: int) -> Route:
        """Along the chains in which stretches have these steps; `own` rows of the table of maps are this rank's."""
        s, peers = self.stretches, range(self.ranks)
        last = torch.full((self.ranks, s.documents), -1, device="cpu")  # the last step of each rank in each chain
        last.view(-1).scatter_reduce_(0, s.rank * s.documents + s.document, step, "amax")

        def sent(source: int, target: int) -> Tensor:
            """The stretches whose maps go from one rank to another: those before its last one."""
            goes = (s.rank == source) & (step < last[target][s.document]) & (source != target)
            return goes.nonzero().flatten()

        leaving, coming = [sent(self.rank, peer) for peer in peers], [sent(peer, self.rank) for peer in peers]
        row_of, matrix_of = self._tables(step, own, torch.cat(coming))
        heads, links, reads = self._links(step, last[self.rank])
        distinct = {tuple(each.tolist()): each for each in leaving if len(each)}
        numbers = {which: number for number, which in enumerate(distinct)}
        return Route(
            tuple((row_of[each[step[each] > 0]], row_of[each]) for each in distinct.values()),
            tuple(numbers.get(tuple(each.tolist()), -1) for each in leaving),
            tuple(len(each) for each in coming),
            tuple(int((step[each] > 0).sum()) for each in coming),
            row_of[heads],
            row_of[links],
            matrix_of[links],
            tuple(torch.bincount(step[links]).tolist()[1:]) if len(links) else (),
            (step[self.own] > 0).nonzero().flatten(),
            reads,
        )

    def _tables(self, step: Tensor, own: int, came: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of stretches in the table of maps and in that of matrices, -1 of those that are in neither."""
        row_of = torch.full((len(step),), -1, device="cpu")
        row_of[self.own] = torch.arange(len(self.own), device="cpu")
        matrix_of = row_of.clone()
        with_matrix = came[step[came] > 0]
        row_of[came] = own + torch.arange(len(came), device="cpu")
        matrix_of[with_matrix] = self.mapped + torch.arange(len(with_matrix), device="cpu")
        return row_of, matrix_of

    def _links(self, step: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of chains that reach this rank, longest first; their links, those of step 1 of all of them, then
        those of step 2, and so on; and where own stretches find their states."""
        s = self.stretches
        chains = (reach > 0).nonzero().flatten()
        chains = chains[reach[chains].argsort(descending=True, stable=True)]
        number = torch.full((s.documents,), -1, device="cpu")
        number[chains] = torch.arange(len(chains), device="cpu")
        links = ((step > 0) & (step < reach[s.document])).nonzero().flatten()
        links = links[(step[links] * s.documents + number[s.document[links]]).argsort()]
        heads = torch.empty(len(chains), dtype=torch.int64, device="cpu")
        first = ((step == 0) & (reach[s.document] > 0)).nonzero().flatten()
        heads[number[s.document[first]]] = first
        found = torch.full((len(step),), -1, device="cpu")
        found[links] = torch.arange(len(links), device="cpu")
        target = self.own[step[self.own] > 0]
        at_the_end = step[target] == reach[s.document[target]]
        return heads, links, torch.where(at_the_end, len(links) + number[s.document[target]], found[target])


class PackedChunks(NamedTuple):
    """Chunks in the order in which they lie on the rank, as sequences of a packed row, for kernels that take those.

    By the names of flash-linear-attention, which cuts a sequence into pieces of `PIECE` tokens, the last one shorter.
    """

    cu_seqlens: Tensor  # (n + 1,): where each chunk begins, and the end
    chunk_indices: Tensor  # (pieces, 2): of each piece, its chunk and its number there
    chunk_offsets: Tensor  # (n + 1,): the number of the first piece of each chunk
    order: Tensor  # (n,): which chunk lies there
    at: Tensor  # (n,): where each chunk lies

    @staticmethod
    def of(first: Tensor, length: Tensor) -> PackedChunks:
        """Chunks that begin at these places and have so many tokens."""
        order = first.argsort()
        length = length[order]
        counts = (length + PIECE - 1) // PIECE
        starts, offsets = (torch.cat([each.new_zeros(1), each.cumsum(0)]) for each in (length, counts))
        number = torch.arange(len(order), device="cpu").repeat_interleave(counts)
        within = torch.arange(len(number), device="cpu") - offsets[number]
        return PackedChunks(starts, torch.stack([number, within], 1), offsets, order, order.argsort())


PIECE = 64
"""Tokens that flash-linear-attention computes at once, its chunk_size."""


@dataclass(frozen=True)
class Chunks:
    """A rank's stretches cut into chunks of `size` tokens, the last of each filled up with nothing.

    In the order of the rank's stretches, step after step: first the first chunks of all in the middle of a chain, then
    their second ones, and so on; then those of the stretches that end a chain, and of those that begin one.
    """

    size: int
    sizes: tuple[tuple[int, ...], ...]  # how many chunks each step has: of those in the middle, at the end, beginning
    stretch: Tensor  # by chunk: the row of its stretch
    tokens: Tensor  # (chunks, size): places on the rank, 0 where there is none
    filled: Tensor  # (chunks, size): where there is one
    back: Tensor  # by token of the rank: its place among the chunks' tokens
    full: bool  # whether every chunk is
    in_order: bool  # whether chunks hold the tokens as they lie on the rank

    @cached_property
    def packed(self) -> PackedChunks:
        """The chunks as a packed row, on the device that they are on."""
        with torch.inference_mode(False):  # made anywhere, used anywhere
            found = PackedChunks.of(self.tokens[:, 0].cpu(), self.filled.sum(1).cpu())
            return PackedChunks(*(each.to(self.tokens.device) for each in found))

    @staticmethod
    def of(plan: RankPlan, size: int) -> Chunks:
        """The chunks of a rank."""
        s, own, waiting = plan.stretches, plan.own, plan.waiting
        counts = (s.length[own] + size - 1) // size
        stretch = torch.arange(len(own), device="cpu").repeat_interleave(counts)
        step = torch.arange(len(stretch), device="cpu") - (counts.cumsum(0) - counts).repeat_interleave(counts)
        kind = (stretch >= plan.mapped).int() + (stretch >= waiting)
        order = ((kind * (int(counts.max() if len(own) else 0) + 1) + step) * (len(own) + 1) + stretch).argsort()
        stretch, step, kind = stretch[order], step[order], kind[order]
        offset = torch.arange(size, device="cpu")
        within = step.unsqueeze(1) * size + offset
        filled = within < s.length[own][stretch].unsqueeze(1)
        tokens = torch.where(filled, s.place[own][stretch].unsqueeze(1) + within, 0)
        back = torch.empty(int(s.length[own].sum()), dtype=torch.int64, device="cpu")
        back[tokens[filled]] = filled.flatten().nonzero().flatten()
        sizes = tuple(tuple(torch.bincount(step[kind == each]).tolist()) for each in range(3))
        full = bool(filled.all())
        in_order = full and torch.equal(back, torch.arange(len(back), device="cpu"))
        return Chunks(size, sizes, stretch, tokens, filled, back, full, in_order)


T = TypeVar("T", Chunks, Route)


def on_device(numbers: T, device: torch.device) -> T:
    """The same numbers, where they are looked up."""

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(numbers, **{each.name: there(getattr(numbers, each.name)) for each in fields(numbers)})
