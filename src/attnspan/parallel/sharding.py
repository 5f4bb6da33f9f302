"""How tensors lie on the ranks: cut them, put them back together, and move them along the sequence.

A tensor that runs along the sequence, whatever else it has, is whole on every rank or split as the layout says. All
three moves are out of place, keep dtype and device, and have a gradient::

    shard      whole -> own tokens        nothing travels; backward puts zeros at what others own
    unshard    own tokens -> whole        every shard to everybody; backward sums over ranks what belongs to each
    shift      own tokens -> own tokens   position p gets what was at p - by: only what crosses a border travels

[Note: gradients] Each is the exact adjoint of the other way for a loss that is the sum of what the ranks compute. A
loss that all ranks compute alike from an unsharded tensor is therefore counted once per rank, and gradients that are
then averaged over ranks, as DDP and FSDP2 do, are those of one device. See [Note: averages] in loss.py.

Shapes: dim is that of the sequence, B batch rows; a layout that deals rows differently also needs to know their dim.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.errors import ShardError
from attnspan.layouts import Layout
from attnspan.layouts.run import tokens_in
from attnspan.transports import Transport


@dataclass(frozen=True)
class Sharding:
    """A layout over a length, seen from one rank of a group."""

    layout: Layout
    seq_len: int
    transport: Transport

    @property
    def rows(self) -> int:
        """How many batch rows lie differently; 1 if all lie alike."""
        return self.layout.rows

    @property
    def tokens(self) -> int:
        """How many tokens of each batch row are here."""
        return self.tokens_on(self.transport.rank)

    def tokens_on(self, rank: int) -> int:
        """How many tokens of each batch row a rank holds."""
        return tokens_in(self.layout.runs(self.seq_len, rank))

    def positions(self, rank: int | None = None) -> Tensor:
        """The global positions on a rank: (S,), or (B, S) if batch rows lie differently."""
        own = _positions(self.layout, self.seq_len, self.transport.rank if rank is None else rank)
        return own[0] if self.rows == 1 else own

    # ---- the three moves -----------------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, dim: int, batch_dim: int = 0) -> Tensor:
        """This rank's part of a tensor that is whole here."""
        at = self._dims(tensor, dim, batch_dim, self.rows)
        if mark_of(tensor) is not None and self.transport.ranks > 1:
            raise ShardError("tensor is a shard already; shard the whole one, and once")
        self._check_length(tensor, at.seq, self.seq_len, "whole, the same on every rank")
        return marked(self._part(tensor, at, self.transport.rank), self)

    def unshard(self, tensor: Tensor, dim: int, batch_dim: int = 0) -> Tensor:
        """The whole tensor, from everybody's part."""
        at = self._dims(tensor, dim, batch_dim, self.rows)
        self.check_shard(tensor, at.seq)
        sizes = [self.tokens_on(rank) for rank in range(self.transport.ranks)]
        gathered: Tensor = _Gathered.apply(tensor.movedim(at.seq, 0), self.transport, sizes)
        back = torch.stack([self.layout.inverse(self.seq_len, row) for row in range(self.rows)])
        return at.take(gathered.movedim(0, at.seq), back)

    def shift(self, tensor: Tensor, dim: int, batch_dim: int, moves: Moves, fill: float) -> Tensor:
        """Move tokens along the sequence; `fill` where nothing comes from."""
        at = self._dims(tensor, dim, batch_dim, moves.rows)
        self.check_shard(tensor, at.seq)
        if moves.rows == 1:
            moved: Tensor = _Moved.apply(tensor.movedim(at.seq, 0), self.transport, moves, fill)
            return marked(moved.movedim(0, at.seq), self)
        assert at.batch is not None, "rows that move differently have a dim"
        front = tensor.movedim((at.batch, at.seq), (0, 1))
        moved = _Moved.apply(front.flatten(0, 1), self.transport, moves, fill)
        return marked(moved.unflatten(0, front.shape[:2]).movedim((0, 1), (at.batch, at.seq)), self)

    def shard_from(self, tensor: Tensor | None, dim: int, batch_dim: int, source: int) -> Tensor:
        """This rank's part of a tensor that only rank `source` has. For data: no gradient flows."""
        at, like = self._told(tensor, dim, batch_dim, source)
        own = like.new_empty(self.tokens, *like.shape, device=self.transport.device)
        ranks = range(self.transport.ranks) if tensor is not None else ()
        sends = [(rank, self._part(tensor, at, rank).movedim(at.seq, 0)) for rank in ranks if tensor is not None]
        self.transport.exchange(sends, [(source, own)], "a batch").wait()
        return marked(own.movedim(0, at.seq), self)

    def _part(self, tensor: Tensor, at: Dims, rank: int) -> Tensor:
        return at.take(tensor, _positions(self.layout, self.seq_len, rank))

    def _told(self, tensor: Tensor | None, dim: int, batch_dim: int, source: int) -> tuple[Dims, Tensor]:
        """Where the sequence lies in the source's tensor, and a token of it, without data; or all ranks raise."""
        said = ""
        try:
            if (tensor is not None) != (self.transport.rank == source):
                raise ShardError(f"tensor must be given on rank {source} and be None on all others")
            if tensor is not None:
                at = self._dims(tensor, dim, batch_dim, self.rows)
                self._check_length(tensor, at.seq, self.seq_len, "whole")
                shape = [n for i, n in enumerate(tensor.shape) if i != at.seq]
                said = json.dumps([at.seq, at.batch, str(tensor.dtype).removeprefix("torch."), shape])
        except ShardError as refused:
            said = f"!{refused}"
        heard = [text.decode() for text in self.transport.agree(said.encode(), "the shape of a batch")]
        for text in heard:
            if text.startswith("!"):
                raise ShardError(text[1:])
        seq, batch, dtype, shape = json.loads(heard[source])
        return Dims(seq, batch), torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    # ---- checks --------------------------------------------------------------------------------------------------

    def check_shard(self, tensor: Tensor, dim: int) -> None:
        """Refuse a tensor that cannot be this rank's part of such a sequence."""
        mark = mark_of(tensor)
        if mark is not None and (mark.layout, mark.seq_len) != (self.layout, self.seq_len):
            raise ShardError(
                f"tensor was sharded over {mark.seq_len} tokens with {mark.layout!r}; here it is {self.seq_len} tokens "
                f"with {self.layout!r}: shard everything of a batch with one ContextParallel"
            )
        hint = "; it is whole: only a shard can be unsharded or shifted" if tensor.shape[dim] == self.seq_len else ""
        self._check_length(tensor, dim, self.tokens, f"rank {self.transport.rank}'s part of {self.seq_len}{hint}")

    def _check_length(self, tensor: Tensor, dim: int, length: int, what: str) -> None:
        if tensor.shape[dim] != length:
            raise ShardError(f"tensor must have {length} tokens in dim {dim} ({what}), got shape {tuple(tensor.shape)}")

    def _dims(self, tensor: Tensor, dim: int, batch_dim: int, rows: int) -> Dims:
        """Where the sequence and, if it matters, the batch rows are."""
        if not isinstance(tensor, Tensor):
            raise ShardError(f"tensor must be a tensor, or dicts and lists of them, got {type(tensor).__name__}")
        if tensor.device != self.transport.device:
            raise ShardError(f"tensor must be on {self.transport.device}, where the group is, got {tensor.device}")
        seq = _dim("dim", dim, tensor)
        if rows == 1:
            return Dims(seq, None)
        batch = _dim("batch_dim", batch_dim, tensor)
        if seq == batch:
            raise ShardError(f"dim and batch_dim must differ where batch rows lie differently, got {seq} for both")
        if tensor.shape[batch] != rows:
            raise ShardError(f"tensor must have {rows} batch rows in dim {batch}, got shape {tuple(tensor.shape)}")
        return Dims(seq, batch)


class Dims(NamedTuple):
    """The dims of a tensor that matter: the sequence, and the batch rows where those lie differently."""

    seq: int
    batch: int | None

    def take(self, tensor: Tensor, positions: Tensor) -> Tensor:
        """Some positions along the sequence: (rows, S), a row of them for each batch row, or one for all."""
        positions = positions.to(tensor.device)
        if self.batch is None:
            return tensor.index_select(self.seq, positions[0])
        shape = [1] * tensor.dim()
        shape[self.batch], shape[self.seq] = positions.shape
        index = positions if self.batch < self.seq else positions.T
        return torch.take_along_dim(tensor, index.reshape(shape), self.seq)


def _dim(name: str, dim: int, tensor: Tensor) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ShardError(f"{name} must be one of the tensor's {tensor.dim()} dims, got {dim!r}")
    return dim % tensor.dim()


@functools.lru_cache(maxsize=256)
def _positions(layout: Layout, seq_len: int, rank: int) -> Tensor:
    rows = [layout.runs(seq_len, rank, row) for row in range(layout.rows)]
    if len({tokens_in(runs) for runs in rows}) > 1:
        raise ShardError(
            f"layout gives rank {rank} {[tokens_in(runs) for runs in rows]} tokens of the batch rows; the rows of one "
            "tensor need equal counts: use Balanced(mask, ranks=..., per_row=True)"
        )
    return torch.stack([torch.cat([torch.arange(*run) for run in runs] or [torch.arange(0)]) for runs in rows])


# ---- marks -------------------------------------------------------------------------------------------------------


def marked(tensor: Tensor, sharding: Sharding) -> Tensor:
    """The tensor, remembering how it was sharded. What is computed from it does not remember."""
    tensor.sharding = sharding  # type: ignore[attr-defined]  # torch keeps attributes of tensors
    return tensor


def mark_of(tensor: Tensor) -> Sharding | None:
    """How a tensor was sharded, if it comes straight from `shard` or `shift`."""
    return getattr(tensor, "sharding", None)


# ---- moves ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """Which tokens of this rank's shard go to each rank, and where those that come from each go.

    `rows` is 1 if all batch rows move alike; else tokens are counted through all rows. Between two ranks, they are in
    the order of the receiver's shard.
    """

    rows: int
    sends: tuple[Tensor, ...]
    receives: tuple[Tensor, ...]

    @property
    def tokens_received(self) -> int:
        """What arrives from other ranks, and stays if it comes from this one."""
        return sum(map(len, self.receives))


def shifted(sharding: Sharding, by: int, documents: Tensor | None) -> Moves:
    """The moves that bring position p what is at p - by, if both are in the sequence and in one document.

    `documents` (rows, S) names the document of every position, or is None.
    """
    layout, length, here = sharding.layout, sharding.seq_len, sharding.transport.rank
    rows = max(layout.rows, 1 if documents is None else len(documents))
    everyone = [_positions(layout, length, rank).expand(rows, -1) for rank in range(layout.ranks)]
    owner, place = torch.empty(2, rows, length, dtype=torch.int64).unbind()
    for rank, own in enumerate(everyone):
        owner.scatter_(1, own, torch.full_like(own, rank))
        place.scatter_(1, own, torch.arange(own.numel()).view_as(own))

    def wanted(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every token of a rank's shard that comes from anywhere: its owner, its place there, its place here."""
        own = everyone[rank]
        source = own - by
        inside = (source >= 0) & (source < length)
        source = source.clamp(0, length - 1)
        if documents is not None:
            names = documents.expand(rows, -1)
            inside &= names.gather(1, source) == names.gather(1, own)
        to = torch.arange(own.numel()).view_as(own)[inside]
        return owner.gather(1, source)[inside], place.gather(1, source)[inside], to

    sends = tuple(there[source == here] for source, there, _ in map(wanted, range(layout.ranks)))
    source, _, to = wanted(here)
    return Moves(rows, sends, tuple(to[source == rank] for rank in range(layout.ranks)))


class _Moved(torch.autograd.Function):
    """Rows sent to where they are wanted, and gradients back the same way. See [Note: gradients]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, transport: Transport, moves: Moves, fill: float) -> Tensor:
        ctx.transport, ctx.moves = transport, moves
        out = torch.full_like(tensor, fill)
        _send(tensor, transport, moves.sends, moves.receives, lambda rows, part: out.index_copy_(0, rows, part))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = torch.zeros_like(grad)
        moves: Moves = ctx.moves
        _send(grad, ctx.transport, moves.receives, moves.sends, lambda rows, part: back.index_add_(0, rows, part))
        return back, None, None, None


def _send(
    tensor: Tensor,
    transport: Transport,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    land: Callable[[Tensor, Tensor], object],
) -> None:
    leaving = [(rank, tensor.index_select(0, rows.to(tensor.device))) for rank, rows in enumerate(sends)]
    arriving = [(rank, tensor.new_empty(len(rows), *tensor.shape[1:])) for rank, rows in enumerate(receives)]
    transport.exchange(leaving, arriving, "shifted tokens").wait()
    for (_, part), rows in zip(arriving, receives, strict=True):
        land(rows.to(tensor.device), part)


class _Gathered(torch.autograd.Function):
    """Everybody's rows, one rank after another; gradients are summed at their owner. See [Note: gradients]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, transport: Transport, sizes: list[int]) -> Tensor:
        ctx.transport, ctx.sizes = transport, sizes
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        transport.gather(tensor, whole.split(sizes), "shards").wait()
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = grad.contiguous().split(ctx.sizes)
        own = torch.empty_like(parts[ctx.transport.rank])
        ctx.transport.reduce_scatter(parts, own, "gradients of shards").wait()
        return own, None, None
