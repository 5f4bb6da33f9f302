"""Shard, unshard and shift tensors along the sequence.

A tensor with a sequence dim is whole on every rank, or sharded by the layout. All three operations are out of place,
keep dtype and device, return contiguous tensors, and are differentiable::

    shard      whole -> own tokens        no communication; backward fills other ranks' tokens with zeros
    unshard    own tokens -> whole        all-gather; backward sums over ranks and returns own tokens
    shift      own tokens -> own tokens   position p gets what was at p - by; only tokens that cross ranks travel

[Note: gradients] Backward is the exact adjoint for a loss that is the sum of the ranks' losses. A loss that all ranks
compute equally from an unsharded tensor therefore counts once per rank; averaging gradients over ranks, as DDP and
FSDP2 do, then gives those of one device. See [Note: averages] in loss.py.

[Note: asking once] Before the first unshard or shift of a shape, ranks agree on it and on the layout
(transports/consensus.py); later ones of that shape need no agreement.

Shapes: dim is that of the sequence, B batch rows; a layout that deals rows differently also needs to know their dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.attention.handles import handle_of
from attnspan.attention.transforms import check_untransformed
from attnspan.dtypes import dtype_name
from attnspan.errors import RecurrenceError, ShardError
from attnspan.layouts import Layout
from attnspan.layouts.run import positions_of
from attnspan.masks import Mask
from attnspan.parallel.marks import Mark, mark_of, marked
from attnspan.parallel.moves import GatheredTokens, MovedTokens, Moves
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object, digest, ranks_by_value
from attnspan.transports.operations import enter_operation


class Sharding:
    """A layout over a length, seen from one rank of a group; `masks` are those of the session that it belongs to."""

    def __init__(self, layout: Layout, seq_len: int, transport: Transport, masks: Mapping[str, Mask]):
        self.layout, self.seq_len, self.transport, self.masks = layout, seq_len, transport, masks
        self.sizes = _equal_counts(layout, seq_len)
        """How many tokens of each batch row every rank holds."""
        with torch.inference_mode(False):  # made during evaluation, it may be saved for backward later
            self.own = self._on(transport.rank).to(transport.device)
        """The global positions here, (rows, tokens), on the group's device. Not to be written to."""
        self.handle = handle_of(self, keeps=False)
        """Stands for this in compiled code: see compiled_inputs.py."""
        self._agreed: set[str] = set()

    @property
    def rows(self) -> int:
        """How many batch rows lie differently; 1 if all lie alike."""
        return self.layout.rows

    @property
    def tokens(self) -> int:
        """How many tokens of each batch row are here."""
        return self.sizes[self.transport.rank]

    @property
    def mark(self) -> Mark:
        """The mark of this session's shards."""
        return Mark(self.layout, self.seq_len, self.transport.rank, self.masks)

    def _on(self, rank: int) -> Tensor:
        """The global positions on a rank, (rows, tokens)."""
        rows = [self.layout.runs(self.seq_len, rank, row) for row in range(self.rows)]
        return torch.stack([positions_of(runs) for runs in rows])

    # ---- the moves -------------------------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, dim: int, batch_dim: int = 0) -> Tensor:
        """This rank's part of a tensor that is whole here."""
        at = self._in_full(tensor, dim, batch_dim)
        return marked(_as(tensor.dtype, at.take(_plain(tensor), self.own)), self.mark)

    def shard_on(self, rank: int, tensor: Tensor, dim: int, batch_dim: int = 0) -> Tensor:
        """The shard of another rank, of a tensor that is whole here; for comparisons."""
        at = self._in_full(tensor, dim, batch_dim)
        return _as(tensor.dtype, at.take(_plain(tensor), self._on(rank).to(tensor.device)))

    def unshard(self, tensor: Tensor, dim: int, batch_dim: int = 0) -> Tensor:
        """The whole tensor, from everybody's part."""
        check_untransformed("unshard", tensor, error=ShardError)
        at, name = self._together("unshard", tensor, lambda: self._in_shard(tensor, dim, batch_dim, self.rows))
        gathered: Tensor = GatheredTokens.apply(_plain(tensor).movedim(at.seq, 0), self.transport, self.sizes, name)
        back = torch.stack([self.layout.inverse(self.seq_len, row) for row in range(self.rows)])
        return _as(tensor.dtype, at.take(gathered.movedim(0, at.seq), back.to(tensor.device)))

    def shift(self, tensor: Tensor, dim: int, batch_dim: int, moves: Moves, fill: complex) -> Tensor:
        """Move tokens along the sequence; `fill` where nothing comes from."""
        return marked(self.moved(tensor, dim, batch_dim, moves, fill), self.mark)

    def moved(self, tensor: Tensor, dim: int, batch_dim: int, moves: Moves, fill: complex) -> Tensor:
        """The tokens that moves bring to this rank; `fill` where none lands."""
        check_untransformed(moves.name.split()[0], tensor, error=ShardError)

        def look() -> Dims:
            at = self._in_shard(tensor, dim, batch_dim, moves.rows)
            check_fill(fill, tensor.dtype)
            return at

        at, name = self._together(moves.name, tensor, look)
        nothing = _plain(torch.full((), fill, dtype=tensor.dtype, device=tensor.device))
        moved: Tensor = MovedTokens.apply(at.outermost(_plain(tensor)), self.transport, moves, nothing, name)
        return _as(tensor.dtype, at.innermost(moved, moves.rows))

    def shard_from(
        self, tree: Mapping[str, Tensor] | Tensor | None, dim: int, batch_dim: int, source: int
    ) -> Tensor | dict[str, Tensor]:
        """This rank's part of a tensor, or of a dict of them, that only rank `source` has. No gradient flows."""
        given = tree if isinstance(tree, Mapping) else {} if tree is None else {"": tree}
        said: tuple[int, list[tuple[object, ...]]] | ShardError
        try:
            said = source, self._described_all(given, dim, batch_dim, source)
        except ShardError as refusal:
            said = refusal
        sources, every = zip(*all_gather_object(self.transport, said, "the shape of a batch"), strict=True)
        if len(set(sources)) > 1:
            raise ShardError(f"source must be the same on every rank, got {list(sources)}, by rank")
        parts = {name: self._handed(given.get(name), TensorMeta(*each), source) for name, *each in every[source]}
        return parts[""] if list(parts) == [""] else parts

    def _described_all(
        self, given: Mapping[str, Tensor], dim: int, batch_dim: int, source: int
    ) -> list[tuple[object, ...]]:
        """The `TensorMeta` of every tensor that the source has, by name."""
        if bool(given) != (self.transport.rank == source):
            raise ShardError(f"tensor must be given on rank {source} and be None on all others")
        if not all(isinstance(name, str) for name in given):
            raise ShardError(f"tensors must have names that are text, got {list(given)}")
        dims = [self._in_full(tensor, dim, batch_dim) for tensor in given.values()]
        return [(name, *_meta_of(given[name], at)) for name, at in zip(given, dims, strict=True)]

    def _handed(self, tensor: Tensor | None, meta: TensorMeta, source: int) -> Tensor:
        """One tensor's parts, from the source to everyone."""
        at = Dims(meta.seq, meta.batch)
        dtype = getattr(torch, meta.dtype)
        own = _plain(torch.empty(self.tokens, *meta.shape, dtype=dtype, device=self.transport.device))
        sends = []
        if tensor is not None:
            full = _plain(tensor.detach())
            for rank in range(self.transport.ranks):
                sends.append((rank, at.take(full, self._on(rank).to(full.device)).movedim(at.seq, 0)))
        with enter_operation(self.transport, f"shard_from of {meta} in layout {self._digest}"):
            self.transport.exchange(sends, [(source, own)], "a batch").wait()
        return marked(_as(dtype, own.movedim(0, at.seq).contiguous()), self.mark)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _together(self, doing: str, tensor: Tensor, look: Callable[[], Dims]) -> tuple[Dims, str]:
        """The dims that `look` finds, and a name for what is to be done, once all ranks agree on it.

        See [Note: asking once].
        """
        said: str | ShardError
        try:
            at = look()
            said = f"{doing} of {_described(tensor, at)}"
        except ShardError as refusal:
            said = refusal
        name = self.agree(doing, said)
        return at, name

    def agree(self, doing: str, said: str | ShardError | RecurrenceError, again: bool = False) -> str:
        """The name of what is to be done, once all ranks say the same; or what is wrong, raised on all of them.

        With `again` ranks ask even if they have agreed on this before.
        """
        name = f"{said} in layout {self._digest}" if isinstance(said, str) else said
        if isinstance(name, str) and name in self._agreed and not again:
            return name
        usual, *odd = ranks_by_value(all_gather_object(self.transport, name, doing))
        if odd:
            raise ShardError(
                f"all ranks must ask for the same; rank {odd[0][1][0]} asks for {odd[0][0]}, others for {usual[0]}"
            )
        assert isinstance(name, str), "a refusal was raised"
        self._agreed.add(name)
        return name

    @cached_property
    def _digest(self) -> str:
        """The same on every rank that lays the same sequence out alike."""
        shards = [self.layout.shards(self.seq_len, row) for row in range(self.rows)]
        return digest(self.seq_len, shards)

    def described_shard(self, tensor: Tensor, dim: int, batch_dim: int, rows: int) -> str:
        """A shard by what all ranks' must have in common; raises if it is none. `rows` batch rows differ."""
        return _described(tensor, self._in_shard(tensor, dim, batch_dim, rows))

    def _in_full(self, tensor: Tensor, dim: int, batch_dim: int) -> Dims:
        at = self._dims(tensor, dim, batch_dim, self.rows)
        if mark_of(tensor) is not None and self.transport.ranks > 1:
            raise ShardError(
                "tensor is a shard already; shard the whole one, and once (a clone of it would be taken for whole)"
            )
        if tensor.shape[at.seq] != self.seq_len:
            raise ShardError(
                f"tensor must be whole, with seq_len={self.seq_len} tokens in dim {at.seq}, got shape "
                f"{tuple(tensor.shape)}; another length is another session: cp.with_mask(mask, seq_len=...)"
            )
        return at

    def _in_shard(self, tensor: Tensor, dim: int, batch_dim: int, rows: int) -> Dims:
        at = self._dims(tensor, dim, batch_dim, rows)
        self.check_mark(tensor)
        if tensor.shape[at.seq] != self.tokens:
            hint = "; this one is whole, and was never sharded" if tensor.shape[at.seq] == self.seq_len else ""
            raise ShardError(
                f"tensor must be a shard, with this rank's {self.tokens} of {self.seq_len} tokens in dim {at.seq}, got "
                f"shape {tuple(tensor.shape)}{hint}"
            )
        return at

    def check_mark(self, tensor: Tensor) -> None:
        """Refuse a tensor that comes straight from the sharding of another sequence, layout or rank."""
        mark = mark_of(tensor)
        if mark is not None and mark.place != self.mark.place:
            raise ShardError(
                f"tensor is rank {mark.rank}'s part of {mark.seq_len} tokens in {mark.layout!r}; here it would be rank "
                f"{self.mark.rank}'s of {self.seq_len} in {self.layout!r}: use one ContextParallel for a whole batch"
            )

    def check_batch(self, tensor: Tensor) -> None:
        """Refuse a tensor that comes straight from the sharding of another batch: of other tokens, or other masks."""
        mark = mark_of(tensor)
        if mark is not None and (mark.place != self.mark.place or not _equal(mark.masks, self.masks)):
            raise ShardError(
                f"the model attends by a session of {_shown(self)}, and was given a shard of {_shown(mark)}: call "
                "attached.use(session) with the session that sharded the batch before the model runs on it, or shard "
                "the batch with the session in use"
            )

    def _dims(self, tensor: Tensor, dim: int, batch_dim: int, rows: int) -> Dims:
        """Where the sequence and, if it matters, the batch rows are."""
        if not isinstance(tensor, Tensor):
            raise ShardError(f"tensor must be a tensor, or dicts and lists of them, got {type(tensor).__name__}")
        if hasattr(tensor, "to_local"):  # to import its type takes a second
            raise ShardError("tensor must be a plain tensor, got a DTensor; pass its to_local()")
        if tensor.layout != torch.strided:
            raise ShardError(f"tensor must be dense, got one of layout {dtype_name(tensor.layout)}")
        if tensor.device != self.transport.device:
            raise ShardError(f"tensor must be on {self.transport.device}, where the group is, got {tensor.device}")
        seq = _dim("dim", dim, tensor)
        if rows == 1:
            return Dims(seq, None)
        batch = _dim("batch_dim", batch_dim, tensor)
        if seq == batch:
            raise ShardError(f"dim and batch_dim must differ where batch rows do, got {seq} for both")
        if tensor.shape[batch] != rows:
            raise ShardError(f"tensor must have {rows} batch rows in dim {batch}, got shape {tuple(tensor.shape)}")
        return Dims(seq, batch)


def _equal(ours: Mapping[str, Mask], theirs: Mapping[str, Mask]) -> bool:
    """Whether two sessions have the same masks; nearly always they are one session's."""
    return ours is theirs or (
        ours.keys() == theirs.keys() and all(ours[name] is theirs[name] or ours[name] == theirs[name] for name in ours)
    )


def _shown(batch: Sharding | Mark) -> str:
    """A batch in a few words."""
    masks = ", ".join(f"{name}: {mask!r}" if name else repr(mask) for name, mask in batch.masks.items())
    return f"{batch.seq_len} tokens under {masks:.200}, in {batch.layout!r}"


class Dims(NamedTuple):
    """The dims of a tensor that matter: the sequence, and the batch rows where those lie or move differently."""

    seq: int
    batch: int | None

    def take(self, tensor: Tensor, positions: Tensor) -> Tensor:
        """Some positions along the sequence: (rows, S), a row of them for each batch row, or one for all."""
        if self.batch is None:
            return tensor.index_select(self.seq, positions[0])
        rows, length = len(positions), tensor.shape[self.seq]
        through = positions + length * torch.arange(rows, device=positions.device).unsqueeze(1)
        return self.innermost(self.outermost(tensor).index_select(0, through.flatten()), rows)

    def outermost(self, tensor: Tensor) -> Tensor:
        """Tokens first: (S, ...), or (rows * S, ...) where rows differ."""
        if self.batch is None:
            return tensor.movedim(self.seq, 0)
        return tensor.movedim((self.batch, self.seq), (0, 1)).flatten(0, 1)

    def innermost(self, tokens: Tensor, rows: int) -> Tensor:
        """Tokens back where they belong; contiguous, so that it can be viewed as the caller likes."""
        if self.batch is None:
            return tokens.movedim(0, self.seq).contiguous()
        by_row: Tensor = tokens.unflatten(0, (rows, len(tokens) // rows))
        return by_row.movedim((0, 1), (self.batch, self.seq)).contiguous()


class TensorMeta(NamedTuple):
    """What other ranks must know of a tensor: its dtype, its dims, and its shape without the sequence."""

    seq: int
    batch: int | None
    dtype: str
    shape: list[int]


def _meta_of(tensor: Tensor, at: Dims) -> TensorMeta:
    shape = [size for dim, size in enumerate(tensor.shape) if dim != at.seq]
    return TensorMeta(*at, dtype_name(tensor.dtype), shape)


def _described(tensor: Tensor, at: Dims) -> str:
    """A description of what the tensors of all ranks must have in common."""
    meta = _meta_of(tensor, at)
    rows = "" if at.batch is None else f", batch rows in dim {at.batch}"
    return f"{meta.dtype} {meta.shape} along dim {at.seq}{rows}"


def _equal_counts(layout: Layout, seq_len: int) -> list[int]:
    """How many tokens every rank holds of each batch row, if all rows of a rank have as many."""
    counts = [layout.tokens(seq_len, row) for row in range(layout.rows)]
    for rank, tokens in enumerate(zip(*counts, strict=True)):
        if len(set(tokens)) > 1:
            raise ShardError(
                f"layout gives rank {rank} {list(tokens)} tokens of the batch rows; the rows of one tensor need equal "
                "counts: use Balanced(mask, ranks=..., per_row=True)"
            )
    return counts[0]


def _dim(name: str, dim: int, tensor: Tensor) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.dim() <= dim < tensor.dim():
        raise ShardError(f"{name} must be one of the tensor's {tensor.dim()} dims, got {dim!r}")
    return dim % tensor.dim()


def check_fill(fill: complex, dtype: torch.dtype) -> None:
    """Refuse a number that the dtype cannot represent: -100 in unsigned, or 0.5 in integral dtypes."""
    try:
        kept = torch.full((), fill, dtype=dtype, device="cpu").item()
        rounds = dtype.is_floating_point or dtype.is_complex
        if kept == fill or (rounds and math.isfinite(abs(kept)) == math.isfinite(abs(fill))):
            return
    except (TypeError, ValueError, RuntimeError):
        pass  # not even such a number
    raise ShardError(f"fill must be a number that {dtype_name(dtype)} has, got {fill!r}")


COMMON = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
COMMON |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""What torch can index everywhere."""

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""


def _plain(tensor: Tensor) -> Tensor:
    """The numbers themselves, as a dtype that torch can index and send; they are only moved.

    A lazily conjugated or negated tensor is no such numbers yet, and of rare dtypes the bits are as good.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in COMMON:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ShardError(f"{dtype_name(tensor.dtype)} has no gradient here; detach it, or widen it")
    return tensor.view(SIGNED[tensor.dtype.itemsize])


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The way back from `_plain`."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
