"""Ulysses: heads for sequence, the exchange inside a group of ranks.

Before: a rank holds its own tokens, all heads. After: it holds all tokens of its group, by position, and its share of
the heads (`plan/heads.py`). Each pair of ranks exchanges one message, all tensors of one dtype in it. The way back is
the same in reverse; gradients of a key head that several ranks took are summed at home, in the order of ranks.

Shapes: B batch rows, H heads (all), h heads (a share), s own tokens, S tokens of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnspan.attention.recording import travelling
from attnspan.attention.wire import places
from attnspan.layouts.run import Runs
from attnspan.plan.heads import Heads
from attnspan.transports import Transport

Side = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class HeadAllToAll:
    """Who exchanges: the group's ranks, the heads each takes, and the positions each holds, of queries and of keys."""

    transport: Transport
    members: range
    shares: tuple[Heads, ...]
    shards: dict[Side, tuple[Runs, ...]]
    arenas: dict[Side, Runs]

    @property
    def here(self) -> int:
        """This rank's place in the group."""
        return self.transport.rank - self.members.start

    def heads(self, member: int, side: Side) -> slice:
        share = getattr(self.shares[member], side)
        return slice(share.start, share.stop)

    def rows(self, member: int, side: Side) -> list[slice]:
        """Where a member's tokens lie among the group's."""
        return places(self.arenas[side]).slices(self.shards[side][member])

    def tokens(self, member: int, side: Side) -> int:
        return len(places(self.shards[side][member]))

    # ---- there and back ----------------------------------------------------------------------------------------

    def gather_tokens(self, tensors: Sequence[Tensor], sides: Sequence[Side]) -> list[Tensor]:
        """Own tokens of all heads (B, H, s, D) to all tokens of a share of the heads (B, h, S, D)."""
        pairs = list(zip(tensors, sides, strict=True))
        sent = [[x[:, self.heads(m, side)] for x, side in pairs] for m in range(len(self.members))]
        shapes = [
            [(len(x), self._count(self.here, side), self.tokens(m, side), x.shape[3]) for x, side in pairs]
            for m in range(len(self.members))
        ]
        received = self._exchange(sent, shapes)
        return [self._by_position([parts[i] for parts in received], side) for i, (_, side) in enumerate(pairs)]

    def scatter_tokens(self, tensors: Sequence[Tensor], sides: Sequence[Side]) -> list[Tensor]:
        """All tokens of a share of the heads (B, h, S, D) to own tokens of all heads (B, H, s, D), summed."""
        pairs = list(zip(tensors, sides, strict=True))
        members = range(len(self.members))
        sent = [[_rows(x, self.rows(m, side)) for x, side in pairs] for m in members]
        shapes = [
            [(len(x), self._count(m, side), self.tokens(self.here, side), x.shape[3]) for x, side in pairs]
            for m in members
        ]
        received = self._exchange(sent, shapes)
        return [self._by_head([parts[i] for parts in received], side) for i, (_, side) in enumerate(pairs)]

    # ---- inside ------------------------------------------------------------------------------------------------

    def _exchange(self, sent: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
        """One message to and from each member: several tensors, one after another."""
        flat = [torch.cat([x.reshape(-1) for x in parts]) for parts in sent]
        sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
        buffers = [flat[self.here].new_empty(sum(each)) for each in sizes]
        others = [m for m in range(len(self.members)) if m != self.here]
        posted = self.transport.exchange(
            [(self.members[m], flat[m]) for m in others], [(self.members[m], buffers[m]) for m in others], "heads"
        )
        travelling(self.transport, posted, "heads").wait()
        buffers[self.here] = flat[self.here]
        return [
            [part.view(shape) for part, shape in zip(buffer.split(size), each, strict=True)]
            for buffer, size, each in zip(buffers, sizes, shapes, strict=True)
        ]

    def _count(self, member: int, side: Side) -> int:
        heads = self.heads(member, side)
        return int(heads.stop - heads.start)

    def _by_position(self, parts: list[Tensor], side: Side) -> Tensor:
        """Every member's tokens, put where they belong."""
        batch, heads, _, dim = parts[0].shape
        whole = parts[0].new_empty(batch, heads, len(places(self.arenas[side])), dim)
        for member, part in enumerate(parts):
            rows = self.rows(member, side)
            for to, piece in zip(rows, part.split([r.stop - r.start for r in rows], dim=2), strict=True):
                whole[:, :, to] = piece
        return whole

    def _by_head(self, parts: list[Tensor], side: Side) -> Tensor:
        """Every member's heads, put where they belong; heads that several members took are summed."""
        batch, _, rows, dim = parts[0].shape
        count = max(self.heads(m, side).stop for m in range(len(parts)))
        if sum(part.shape[1] for part in parts) == count:
            return torch.cat(parts, dim=1)
        whole = parts[0].new_zeros(batch, count, rows, dim)
        for member, part in enumerate(parts):
            whole[:, self.heads(member, side)] += part
        return whole


def _rows(x: Tensor, rows: list[slice]) -> Tensor:
    return torch.cat([x[:, :, piece] for piece in rows], dim=2) if rows else x[:, :, :0]


def segments(share: Heads, group: int) -> list[tuple[slice, slice]]:
    """The (query heads, key heads) of a share, cut so that in each every key head serves as many query heads.

    >>> segments(Heads(range(2, 6), range(0, 2)), group=4)  # heads 2 3 use key head 0, heads 4 5 key head 1
    [(slice(0, 4, None), slice(0, 2, None))]
    >>> segments(Heads(range(3, 6), range(0, 2)), group=4)
    [(slice(0, 1, None), slice(0, 1, None)), (slice(1, 3, None), slice(1, 2, None))]
    """
    counts = [
        len(range(max(share.query.start, key * group), min(share.query.stop, (key + 1) * group))) for key in share.key
    ]
    if len(set(counts)) <= 1:
        return [(slice(0, len(share.query)), slice(0, len(share.key)))] if counts else []
    cuts, start = [], 0
    for key, count in enumerate(counts):
        cuts.append((slice(start, start + count), slice(key, key + 1)))
        start += count
    return cuts
