"""Ulysses: the all-to-all inside a group of ranks that exchanges heads for tokens.

Before it, a rank holds all heads of its own tokens. After it, a rank holds its share of the heads (`plan/heads.py`) of
all tokens of the group, by position. Each pair of ranks exchanges one message of bytes, which holds tensors of any
dtypes. Results go back the same way in reverse. Gradients of a key head that several ranks took are summed by the owner
of the tokens, in the order of ranks.

[Note: gradients of heads] A gradient is final on the rank that computed its head, so it is rounded before it travels.
Gradients of key heads that several ranks took are yet to be summed, and travel in float32.

Shapes: B batch rows, H heads (all), h heads (a share), s own tokens, S tokens of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.attention.recording import travelling
from attnspan.attention.wire import run_offsets
from attnspan.layouts.run import Runs
from attnspan.plan.heads import Heads
from attnspan.transports import Transport

Side = Literal["query", "key"]
Pairs = Sequence[tuple[Tensor, Side]]


class MessagePart(NamedTuple):
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PackedMessage:
    """Tensors in one buffer of bytes, the widest dtype first, so that each is aligned."""

    def __init__(self, parts: list[MessagePart], device: torch.device):
        self.parts = parts
        self.buffer = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)

    def tensors(self) -> list[Tensor]:
        """Views of the buffer, in the order in which the parts were named."""
        order = sorted(range(len(self.parts)), key=lambda i: -self.parts[i].dtype.itemsize)
        pieces = self.buffer.split([self.parts[i].nbytes for i in order])
        views = {
            i: piece.view(self.parts[i].dtype).view(self.parts[i].shape) for i, piece in zip(order, pieces, strict=True)
        }
        return [views[i] for i in range(len(self.parts))]


@dataclass(frozen=True, slots=True)
class HeadAllToAll:
    """The exchange of a group: its ranks, the heads that each takes, and the positions that each holds."""

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
        return run_offsets(self.arenas[side]).slices(self.shards[side][member])

    def tokens(self, member: int, side: Side) -> int:
        return len(run_offsets(self.shards[side][member]))

    # ---- there and back ----------------------------------------------------------------------------------------

    def gather_tokens(self, tensors: Sequence[Tensor], sides: Sequence[Side]) -> list[Tensor]:
        """Own tokens of all heads (B, H, s, D) to all tokens of a share of the heads (B, h, S, D)."""
        pairs = list(zip(tensors, sides, strict=True))
        expected = [self._parts(self.here, m, pairs) for m in range(len(self.members))]
        received = self._exchange(self._cut_by_head(pairs), expected)
        return [self._by_position([parts[i] for parts in received], side) for i, (_, side) in enumerate(pairs)]

    def scatter_tokens(self, tensors: Sequence[Tensor], sides: Sequence[Side]) -> list[Tensor]:
        """All tokens of a share of the heads (B, h, S, D) to own tokens of all heads (B, H, s, D), summed."""
        pairs = list(zip(tensors, sides, strict=True))
        expected = [self._parts(m, self.here, pairs) for m in range(len(self.members))]
        received = self._exchange(self._cut_by_token(pairs), expected)
        return [self._by_head([parts[i] for parts in received], side) for i, (_, side) in enumerate(pairs)]

    # ---- inside ------------------------------------------------------------------------------------------------

    def _cut_by_head(self, pairs: Pairs) -> list[PackedMessage]:
        """Own tokens, for the member that takes their heads."""
        messages = []
        for member in range(len(self.members)):
            message = PackedMessage(self._parts(member, self.here, pairs), pairs[0][0].device)
            for part, (x, side) in zip(message.tensors(), pairs, strict=True):
                part.copy_(x[:, self.heads(member, side)])
            messages.append(message)
        return messages

    def _cut_by_token(self, pairs: Pairs) -> list[PackedMessage]:
        """Own heads, for the member that holds their tokens."""
        messages = []
        for member in range(len(self.members)):
            message = PackedMessage(self._parts(self.here, member, pairs), pairs[0][0].device)
            for part, (x, side) in zip(message.tensors(), pairs, strict=True):
                rows = self.rows(member, side)
                if rows:
                    torch.cat([x[:, :, piece] for piece in rows], dim=2, out=part)
            messages.append(message)
        return messages

    def _exchange(self, sent: list[PackedMessage], expected: list[list[MessagePart]]) -> list[list[Tensor]]:
        """Exchange one message with each member; the tensors received."""
        others = [m for m in range(len(self.members)) if m != self.here]
        received = list(sent)  # own heads stay
        for m in others:
            received[m] = PackedMessage(expected[m], sent[m].buffer.device)
        posted = self.transport.exchange(
            [(self.members[m], sent[m].buffer) for m in others],
            [(self.members[m], received[m].buffer) for m in others],
            "heads",
        )
        travelling(self.transport, posted, "heads").wait()
        return [message.tensors() for message in received]

    def _parts(self, taker: int, holder: int, pairs: Pairs) -> list[MessagePart]:
        """The heads that one member takes, of the tokens that another holds."""
        return [
            MessagePart((len(x), self._count(taker, side), self.tokens(holder, side), x.shape[3]), x.dtype)
            for x, side in pairs
        ]

    def _count(self, member: int, side: Side) -> int:
        heads = self.heads(member, side)
        return int(heads.stop - heads.start)

    def _by_position(self, parts: list[Tensor], side: Side) -> Tensor:
        """Every member's tokens, put where they belong."""
        batch, heads, _, dim = parts[0].shape
        whole = parts[0].new_empty(batch, heads, len(run_offsets(self.arenas[side])), dim)
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
