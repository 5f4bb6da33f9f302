"""Shards a batch from a data loader: every entry is sharded, passed, dropped or refused, by these rules.

>>> import torch
>>> import attnspan as span
>>> ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 0]])
>>> padding = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
>>> def rank(world):
...     cp = span.ContextParallel(world, seq_len=4, mask=span.Causal(), layout=span.Contiguous(2))
...     batch = cp.shard_batch({"input_ids": ids, "attention_mask": padding}, padding="mask")
...     return batch["input_ids"].tolist(), batch["position_ids"].tolist(), repr(batch.session.mask)
>>> for shard in span.testing.loopback(ranks=2).run(rank):
...     print(*shard)
[[5, 6], [1, 2]] [[0, 1]] Causal() & KeyPadding([4, 3])
[[7, 8], [3, 0]] [[2, 3]] Causal() & KeyPadding([4, 3])

The rules, in this order; `dims` overrules the last four::

    attention_mask           dropped where the session's masks imply it; else refused, or with padding="mask" a mask
    cu_seqlens and the like  refused: documents are told by the mask
    input_ids, labels, ...   sharded in the dim that the name says (NAMED); refused if that has another length
    (B, S, ...) and (S,)     sharded in that dim, whatever the name
    no dim of S              passed as it came: (B,) tensors, scalars, text
    anything else            refused: a dim of S might be the sequence

Every rank needs the whole tensors.

[Note: one batch] The ranks of a group hold parts of one sequence, so all must load the same batch. A data loader that
distributes by global rank gives each a different one, which would go unnoticed: shapes agree, and the loss is
plausible. So ranks compare checksums of the integer entries of the first batch of a session and of all sessions made
from it by `with_mask`; if one rank refuses that batch, all do. Later batches are sharded without communication.

Shapes: B batch rows, S tokens of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attnspan.errors import ShardError, one_of
from attnspan.masks import KeyPadding
from attnspan.masks.borders import borders
from attnspan.parallel.checksum import checksum
from attnspan.parallel.sharding import check_fill
from attnspan.transports.consensus import all_gather_object, differing_ranks

if TYPE_CHECKING:
    from attnspan.parallel.session import ContextParallel
    from attnspan.transports import Transport

IGNORED = -100
"""The label that losses leave out, as torch's cross_entropy does."""

NAMED = {"input_ids": 1, "labels": 1, "shift_labels": 1, "token_type_ids": 1, "inputs_embeds": 1, "position_ids": -1}
NAMED |= {"per_layer_inputs": 1, "mm_token_type_ids": 1}
"""The dim of the sequence in entries that models know by name."""

TOLD_BY_MASK = {"cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k"}
TOLD_BY_MASK |= {"max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "seq_idx", "block_mask"}
"""Entries that tell kernels of one device where documents are."""


@dataclass(frozen=True)
class Batch(Mapping[str, Any]):
    """A rank's part of a batch: a read-only dict, so that ``model(**batch)`` works, and what was done to make it.

    `session` is the one to use for this batch: a different one if padding became part of its mask. `done` says for each
    entry what was done with it.
    """

    entries: Mapping[str, object] = field(repr=False)
    session: ContextParallel
    done: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def shard_batch(
    cp: ContextParallel,
    batch: Mapping[str, object],
    *,
    shift_labels: bool,
    padding: Literal["refuse", "mask"],
    dims: Mapping[str, int | None],
) -> Batch:
    """See `ContextParallel.shard_batch`, and [Note: one batch]."""
    if cp.family.compared_batch or cp.ranks == 1:
        return _sharded(cp, batch, shift_labels, padding, dims)
    said: dict[str, Any] | ShardError
    try:
        found = _sharded(cp, batch, shift_labels, padding, dims)
        said = _sums(batch)
    except ShardError as refusal:
        said = refusal
    check_one_batch(cp.transport, said)
    cp.family.compared_batch = True
    return found


def check_one_batch(transport: Transport, said: Mapping[str, int] | ShardError) -> None:
    """ShardError on every rank if ranks differ in the checksums of their first batch, or one refuses it."""
    sums = all_gather_object(transport, said, "the first batch")
    for rank in differing_ranks(sums):
        first, other = sums[0], sums[rank]
        name = next((name for name in first if other.get(name) != first[name]), "the names of entries")
        raise ShardError(
            f"{name} must be the same on all ranks of the group, which hold parts of one batch; rank {rank} has "
            "other data than rank 0: load by data-parallel rank, as in DistributedSampler(num_replicas=dp, "
            "rank=dp_rank) or by SpanTrainer in place of Trainer, or on one rank with cp.shard_from"
        )


def _sums(batch: Mapping[str, object]) -> dict[str, int]:
    """A checksum of every entry of whole numbers."""
    given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    integral = {name: value for name, value in given.items() if not (value.is_floating_point() or value.is_complex())}
    return {name: checksum([value.to(torch.int64)]) for name, value in integral.items()}


def _sharded(
    cp: ContextParallel,
    batch: Mapping[str, object],
    shift_labels: bool,
    padding: Literal["refuse", "mask"],
    dims: Mapping[str, int | None],
) -> Batch:
    if not isinstance(batch, Mapping):
        raise ShardError(f"batch must be a dict of tensors by name, got {type(batch).__name__}")
    unknown = [name for name in dims if name not in batch or name == "attention_mask"]
    if unknown:
        raise ShardError(f"dims must name entries of the batch other than attention_mask, got {unknown[0]!r}")
    one_of("padding", padding, ["refuse", "mask"], error=ShardError)
    given: dict[str, Any] = dict(batch)
    done: dict[str, str] = {}
    rows = _rows(cp, given, dims)
    if "attention_mask" in given:
        cp, done["attention_mask"] = _padded(cp, given.pop("attention_mask"), rows, padding)
    if shift_labels:
        given["shift_labels"] = _next(cp, given)
    entries: dict[str, object] = {}
    for name, value in given.items():
        dim = dims[name] if name in dims else _dim_of(cp, name, value, rows)
        entries[name] = value if dim is None else _cut(cp, name, value, dim)
        done[name] = "passed as it came" if dim is None else f"sharded in dim {dim}"
    if entries.get("position_ids") is None:
        entries["position_ids"] = cp.positions if cp.layout.rows > 1 else cp.positions.unsqueeze(0)
        done["position_ids"] = "added: the global positions"
    if shift_labels:
        done["shift_labels"] = "added: labels moved by one"
    return Batch(entries, cp, done)


# ---- one entry -------------------------------------------------------------------------------------------------------


def _dim_of(cp: ContextParallel, name: str, value: object, rows: int | None) -> int | None:
    """The dim of the sequence in an entry; None if it has none."""
    if name in TOLD_BY_MASK:
        raise ShardError(
            f"{name}: documents are told by the session's mask, as in "
            "cp.with_mask(span.Causal() & span.Documents.from_cu_seqlens(cu_seqlens)); leave it out of the batch"
        )
    if name in NAMED and value is not None:
        if not isinstance(value, Tensor):
            raise ShardError(f"{name} must be a tensor, got {type(value).__name__}")
        if not -value.dim() <= NAMED[name] < value.dim():
            raise ShardError(
                f"{name} must have its sequence in dim {NAMED[name]}, got shape {tuple(value.shape)}; if it has none, "
                f"dims={{{name!r}: None}} passes it as it is"
            )
        return NAMED[name] % value.dim()
    if not isinstance(value, Tensor):
        _check_no_tensors(name, value)
        return None
    shape, length = tuple(value.shape), cp.seq_len
    if length not in shape:
        return None
    likely = 0 if value.dim() == 1 else 1
    fits = rows is None or (rows != length if value.dim() == 1 else shape[0] == rows)
    if shape.count(length) == 1 and shape[likely] == length and fits:
        return likely
    raise ShardError(
        f"{name} of shape {shape} may or may not run along the sequence of {length} tokens; say so by "
        f"dims={{{name!r}: its dim, or None}}"
    )


def _cut(cp: ContextParallel, name: str, value: Tensor, dim: int) -> Tensor:
    """A rank's part of one entry."""
    positions, from_end = name == "position_ids", dim if dim < 0 else dim - value.dim()
    if positions and cp.layout.rows > 1 and (value.dim() == 1 or value.shape[-2] == 1):
        value = value.expand(*value.shape[:-2], cp.layout.rows, -1)  # one for all rows, which lie differently
    try:
        return cp.sharding.shard(value, from_end, -2 if positions else 0)
    except ShardError as refusal:
        raise ShardError(f"{name}: {refusal}") from None


def _check_no_tensors(name: str, value: object) -> None:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if any(isinstance(each, Tensor | Mapping | list | tuple) for each in inside):
        raise ShardError(f"{name} holds things that may be tensors; give each its own name, or dims={{{name!r}: None}}")


def _rows(cp: ContextParallel, batch: Mapping[str, object], dims: Mapping[str, int | None]) -> int | None:
    """The batch rows, by the entries that are known to have them; None if none is."""
    named = {name: batch[name] for name in NAMED if name in batch and name not in dims and name != "position_ids"}
    counts = {name: len(value) for name, value in named.items() if isinstance(value, Tensor) and value.dim() > 1}
    if len(set(counts.values())) > 1:
        raise ShardError(f"entries must have as many batch rows each, got {counts}")
    rows = next(iter(counts.values()), None)
    wanted = max(mask.rows for mask in cp.masks.values())
    if rows is not None and wanted not in (1, rows):
        raise ShardError(f"the session's mask has {wanted} batch rows, the batch {rows}")
    return rows


# ---- labels ----------------------------------------------------------------------------------------------------------


def _next(cp: ContextParallel, batch: Mapping[str, object]) -> Tensor:
    """Every position's label that of the next token of its document, on whole labels: nothing needs to travel."""
    labels = batch.get("labels")
    if "shift_labels" in batch or not isinstance(labels, Tensor):
        raise ShardError(
            "shift_labels=True makes them from 'labels', which the batch must have (labels=input_ids will do), and "
            f"'shift_labels', which it must not; got {', '.join(batch)}"
        )
    if labels.dim() != 2 or labels.shape[1] != cp.seq_len:
        raise ShardError(f"labels must be (B, {cp.seq_len}), got shape {tuple(labels.shape)}")
    names = borders(cp.masks.values(), cp.seq_len).to(labels.device)
    last = torch.ones_like(names[:, :1], dtype=torch.bool)
    ends = torch.cat([names[:, 1:] != names[:, :-1], last], dim=1)
    check_fill(IGNORED, labels.dtype)
    return labels.roll(-1, dims=1).masked_fill(ends, IGNORED)


# ---- padding ---------------------------------------------------------------------------------------------------------


def _padded(cp: ContextParallel, mask: object, rows: int | None, padding: str) -> tuple[ContextParallel, str]:
    """The session in whose masks an attention_mask is contained, and why it can be dropped."""
    if mask is None:
        return cp, "dropped: none"
    lengths = _lengths(mask, cp.seq_len, rows)
    if all(length == cp.seq_len for length in lengths):
        return cp, "dropped: all ones"
    if _implied(cp, lengths):
        return cp, "dropped: the session's mask hides as much"
    shown = f"span.KeyPadding({list(lengths)})"
    one = len(cp.masks) == 1
    if padding == "mask":
        hidden = KeyPadding(lengths)
        masks = cp.mask & hidden if one else {name: each & hidden for name, each in cp.masks.items()}
        return cp.with_mask(masks, layout=cp.layout), f"made a mask: {shown}"
    use = (
        f"cp.with_mask(cp.mask & {shown})"
        if one
        else f"cp.with_mask({{name: mask & {shown} for name, mask in cp.masks.items()}})"
    )
    raise ShardError(
        f"attention_mask hides padding that the session's mask does not; use {use}, or shard_batch(..., "
        "padding='mask') and the session of its result"
    )


def _implied(cp: ContextParallel, lengths: Sequence[int]) -> bool:
    """Whether no query of any row, by any of the masks, sees a key beyond the row's length."""
    return all(
        band.k1 <= length
        for mask in cp.masks.values()
        for row, length in enumerate(lengths)
        for band in mask.bands(cp.seq_len, row=row if mask.rows > 1 else 0)
    )


def _lengths(mask: object, seq_len: int, rows: int | None) -> tuple[int, ...]:
    """The tokens of every row, by an attention_mask that is ones and then zeros; anything else is refused."""
    if not isinstance(mask, Tensor):
        raise ShardError(f"attention_mask must be a tensor of (B, S) or None, got {type(mask).__name__}")
    shape = tuple(mask.shape)
    if mask.dim() > 2:
        raise ShardError(
            f"attention_mask of shape {shape} says which query sees which key, which a session is told by its mask: "
            "describe it, as in span.Causal() & span.Documents(lengths), or use span.Mask.from_dense(...)"
        )
    if mask.dim() != 2 or shape[1] != seq_len or (rows is not None and shape[0] != rows):
        raise ShardError(f"attention_mask must be ({rows or 'B'}, {seq_len}), the whole batch's, got shape {shape}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ShardError("attention_mask must be ones and zeros, got other numbers; numbers to add are not served")
    kept = mask.bool()
    rises, falls = ((a & ~b).any(dim=1) for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[:, :-1], kept[:, 1:])))
    for row, (up, down) in enumerate(zip(rises.tolist(), falls.tolist(), strict=True)):
        if up and down:
            raise ShardError(
                f"attention_mask has holes in row {row}; only padding at the end is a mask here: take those tokens out"
            )
        if up:
            raise ShardError(
                f"attention_mask pads row {row} on the left, which moves the position of every token; pad on the right "
                "(padding_side='right'), or pack without padding, as span.Documents(lengths)"
            )
    return tuple(kept.sum(dim=1).tolist())
