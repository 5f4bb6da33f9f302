"""Shards a batch from a transformers collator, which is whole on every rank, for the forward pass of one rank.

Entries that determine which tokens see each other become part of the session's mask; the rest is sharded
(parallel/batch.py)::

    attention_mask        ones for tokens; padding at either end becomes part of the mask
    position_ids          without attention_mask, a document begins where they do not increase by one
    cu_seq_lens_q, _k     documents by cumulative lengths (a batch of one row)
    seq_idx               documents by a number for every token
    labels, shift_labels  shifted while they are whole, and not passed to the model (losses.py)
    decoder_*             the second sequence of an encoder-decoder, which has its own session

The model gets its tokens with their global positions, and an attention_mask of ones: without one, transformers would
interpret jumps in a shard's positions as documents. Recurrent mixers, which have no mask, get the rank's padding.

[Note: as on one device] transformers ignores documents if an attention_mask is given too. A batch with both is
ambiguous, and refused. Labels are shifted across document borders, as on one device: packing collators put -100 there.

Shapes: B batch rows, S tokens of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.losses import LabelKind, align_labels
from attnspan.masks import Documents, KeyPadding, Mask
from attnspan.parallel import ContextParallel
from attnspan.parallel.batch import IGNORED

Entries = dict[str, Any]
"""A batch by the names of forward's arguments: tensors, and whatever else a collator adds."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
IDS = "seq_idx"
REDUNDANT = ("max_length_q", "max_length_k")
"""Entries that accompany the lengths of documents, and are redundant."""

DOCUMENT_ENTRIES = (*LENGTHS, IDS, *REDUNDANT)
"""Entries that describe documents; not passed to a model that runs on a whole batch."""

DECODER = "decoder_"


@dataclass(frozen=True)
class SequenceInputs:
    """One whole sequence of a batch: its entries, without those that became part of the mask."""

    entries: Entries
    batch_masks: tuple[Mask, ...]  # what documents and padding add to every layer's mask
    rows: int
    seq_len: int
    starts: list[int] | None = None  # the first token of every row, if there is padding before
    padding: Tensor | None = None  # (B, S): 0 in padding, if there is any

    def document_positions(self, more: Iterable[Mask] = ()) -> Tensor | None:
        """The index of each token in its document, given the batch's and `more` masks, or after left padding: (1, S) or
        (B, S). None if that is its index in the row."""
        pieces = [mask.lengths for mask in (*self.batch_masks, *more) if isinstance(mask, Documents)]
        pieces += [tuple((start, self.seq_len - start) for start in self.starts)] if self.starts is not None else []
        if not pieces:
            return None
        begins = torch.zeros(max(map(len, pieces)), self.seq_len, dtype=torch.int64, device="cpu")
        for rows in pieces:
            for row, lengths in zip(begins, rows * (len(begins) // len(rows)), strict=True):
                edges = torch.tensor(lengths[:-1], dtype=torch.int64, device="cpu").cumsum(0)
                row[edges] = edges
        return torch.arange(self.seq_len, device="cpu") - begins.cummax(1).values

    @property
    def max_position(self) -> int | Tensor:
        """The largest position of a token."""
        positions = self.entries.get("position_ids")
        return self.seq_len - 1 if positions is None else positions.max()


@dataclass(frozen=True)
class Shards:
    """A rank's part of a sequence, and its session."""

    session: ContextParallel
    entries: Entries = field(repr=False)
    labels: Tensor | None = field(default=None, repr=False)
    batch_masks: tuple[Mask, ...] = ()  # as in its `SequenceInputs`
    padding: Tensor | None = field(default=None, repr=False)  # of this rank's tokens
    document_positions: Tensor | None = field(default=None, repr=False)  # of the tokens of whole rows


def sequence_of(given: Entries) -> SequenceInputs:
    """The sequence of a batch: its length, and the documents and padding that its entries describe."""
    entries = {name: value for name, value in given.items() if value is not None}
    tokens = entries.get("input_ids", entries.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ModelError(f"input_ids must be a tensor of (B, S), or inputs_embeds of (B, S, D), got {_shown(tokens)}")
    rows, seq_len = tokens.shape[:2]
    mask = entries.pop("attention_mask", None)
    starts, stops = _ends(mask, rows, seq_len)
    documents = _documents(entries, mask, rows, seq_len)
    for name in REDUNDANT:
        entries.pop(name, None)
    left, right = any(starts), any(stop < seq_len for stop in stops)
    batch_masks = [*([~KeyPadding(starts)] if left else []), *([KeyPadding(stops)] if right else []), *documents]
    padding = mask if left or right else None
    return SequenceInputs(entries, tuple(batch_masks), rows, seq_len, starts if left else None, padding)


def shards_of(
    sequence: SequenceInputs, session: ContextParallel, labels: Tensor | None, document_positions: Tensor | None = None
) -> Shards:
    """A rank's part of a sequence; `labels` are whole, each at the token that predicts it."""
    empty = [rank for rank, tokens in enumerate(session.sharding.sizes) if not tokens]
    if empty:
        raise ModelError(
            f"a sequence of {sequence.seq_len} tokens leaves none for rank {empty[0]} of {session.ranks}, and "
            "transformers models do not compute on no tokens; use longer sequences, padded if need be, or fewer ranks"
        )
    _check_left_padding(sequence, labels)
    ours = {"labels": labels, "padding": sequence.padding}
    beside = {name: whole for name, whole in ours.items() if whole is not None}
    cut = dict(session.shard_batch(sequence.entries | beside, dims=dict.fromkeys(beside, 1)))
    own, padding = cut.pop("labels", None), cut.pop("padding", None)
    cut["attention_mask"] = torch.ones(
        sequence.rows, session.sharding.tokens, dtype=torch.int64, device=session.transport.device
    )
    return Shards(session, cut, own, sequence.batch_masks, padding, document_positions)


def _check_left_padding(sequence: SequenceInputs, labels: Tensor | None) -> None:
    """Refuse labels that padding before a row would predict: it sees no token."""
    if labels is None or sequence.starts is None:
        return
    before = torch.arange(labels.shape[1], device="cpu") < torch.tensor(sequence.starts, device="cpu")[:, None]
    wrong = (before & (labels.cpu() != IGNORED)).any(1).nonzero()
    if len(wrong):
        raise ModelError(
            f"labels: in row {int(wrong[0])} padding on the left would predict a label, that of the first token; make "
            f"it {IGNORED}, or pad on the right"
        )


def labels_of(given: Entries, kind: LabelKind | None, model: str) -> Tensor | None:
    """The labels of a batch, taken out of it, each at the token that predicts it."""
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    if labels is None and shifted is None:
        return None
    if kind is None:
        raise ModelError(
            f"labels: the loss of {model} is not one that is served over ranks (cross entropy of every token); leave "
            "labels out and take handle.session.mean_loss(...) of what it returns"
        )
    if shifted is not None and kind != "next":
        raise ModelError(f"shift_labels must not be given: {model} does not look at them on one device; give labels")
    for name, value in (("labels", labels), ("shift_labels", shifted)):
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2):
            raise ModelError(f"{name} must be a tensor of (B, S), got {_shown(value)}")
    mask = given.get("attention_mask")
    if kind == "next_unpadded" and mask is not None:
        labels = labels.masked_fill(mask.to(labels.device) == 0, IGNORED)
    return shifted if shifted is not None else align_labels(labels, kind)


def split_decoder(given: Entries) -> tuple[Entries, Entries]:
    """The entries of an encoder, and those of a decoder, by the names they have in either."""
    decoder = {name.removeprefix(DECODER): value for name, value in given.items() if name.startswith(DECODER)}
    return {name: value for name, value in given.items() if not name.startswith(DECODER)}, decoder


# ---- padding ---------------------------------------------------------------------------------------------------------


def _ends(mask: object, rows: int, seq_len: int) -> tuple[list[int], list[int]]:
    """Where the tokens of every row begin and end, by an attention_mask."""
    if mask is None:
        return [0] * rows, [seq_len] * rows
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ModelError(
            f"attention_mask must be a tensor of (B, S) that marks padding, got {_shown(mask)}; which other tokens are "
            "seen follows from the model and from documents"
        )
    if tuple(mask.shape) != (rows, seq_len):
        raise ModelError(f"attention_mask must be ({rows}, {seq_len}), the whole batch's, got {_shown(mask)}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ModelError("attention_mask must be ones and zeros; numbers to add, or of documents, are not served")
    there = mask.bool().cpu()
    starts = torch.where(there.any(1), there.int().argmax(1), 0)
    stops = torch.where(there.any(1), seq_len - there.flip(1).int().argmax(1), 0)
    holes = (there.sum(1) != stops - starts).nonzero()
    if len(holes):
        raise ModelError(
            f"attention_mask has holes in row {int(holes[0])}; only padding at the ends of a row is served: take those "
            "tokens out"
        )
    return starts.tolist(), stops.tolist()


# ---- documents -------------------------------------------------------------------------------------------------------


def _documents(entries: Entries, mask: Tensor | None, rows: int, seq_len: int) -> list[Mask]:
    """The documents of a batch; lengths are taken out of it."""
    lengths = {name: entries.pop(name) for name in LENGTHS if name in entries}
    found = [_by_lengths(name, value, rows, seq_len) for name, value in lengths.items()]
    if IDS in entries:
        lengths[IDS] = entries.pop(IDS)
        found.append(_by_ids(lengths[IDS], rows, seq_len))
    positions = entries.get("position_ids")
    there = None if mask is None or found else mask.bool()
    by_positions = None if positions is None else _by_positions(positions, rows, seq_len, there)
    if mask is not None and by_positions is not None and not found:
        raise ModelError(
            "position_ids start again inside a row, which means documents, and attention_mask is given as well, by "
            "which transformers lets them see each other; leave attention_mask out to keep documents apart"
        )
    found += [by_positions] if by_positions is not None else []
    if any(each != found[0] for each in found):
        raise ModelError(f"{', '.join([*lengths, 'position_ids'])} must describe the same documents, got {found}")
    return list(found[:1])


def _by_lengths(name: str, edges: Tensor, rows: int, seq_len: int) -> Mask:
    documents = Documents.from_cu_seqlens(edges)
    if rows != 1 or documents.natural_len != seq_len:
        raise ModelError(
            f"{name} must be the running sum of lengths in a batch of one row, {seq_len} tokens at the end, got "
            f"{documents.natural_len} and {rows} rows"
        )
    return documents


def _by_ids(ids: object, rows: int, seq_len: int) -> Mask:
    if not isinstance(ids, Tensor) or tuple(ids.shape) != (rows, seq_len):
        raise ModelError(f"{IDS} must be ({rows}, {seq_len}), a document's number for every token, got {_shown(ids)}")
    return Documents.from_ids(ids.cpu() if rows > 1 else ids[0].cpu())


def _by_positions(positions: object, rows: int, seq_len: int, there: Tensor | None) -> Mask | None:
    """The documents of position_ids, (B, S) or (1, S), among the tokens that are `there`; None where a row is one."""
    if not isinstance(positions, Tensor) or positions.shape[-1] != seq_len:
        raise ModelError(f"position_ids must be (B, {seq_len}), the whole batch's, got {_shown(positions)}")
    if positions.dim() == 3 and len(positions) == 4:  # that in the text, and three of images: the text's counts
        positions = positions[0]
    if positions.dim() != 2:
        return None
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    if there is not None:  # padding has any positions
        there = there.to(begins.device)
        begins = begins & there & there.roll(1, dims=1)
    if not begins.any():
        return None
    ids = begins.cumsum(1).cpu()
    return Documents.from_ids(ids if rows > 1 and len(ids) > 1 else ids[0])


def _shown(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
