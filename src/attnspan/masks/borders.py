"""Where documents begin and end, read from a mask.

A mask is an expression; the documents of a pack are those of the `Documents` in it, if there is one under `&` only.
Behind `|` or `~` they may be borders or none: what would ignore them refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from attnspan.errors import MaskError
from attnspan.masks.combined import And, Combination, Not, Or
from attnspan.masks.documents import Documents
from attnspan.masks.mask import Mask


def documents_of(masks: Iterable[Mask], seq_len: int) -> Tensor:
    """The number of every position's document, (rows, seq_len); rows is 1 if all batch rows are packed alike.

    >>> from attnspan.masks import Causal
    >>> documents_of([Causal() & Documents([1, 3])], 4).tolist()
    [[0, 1, 1, 1]]
    """
    found = _found(masks)
    if len(found) != 1:
        raise MaskError(f"documents: the mask must hold one Documents(lengths), joined by &, got {len(found)}")
    (documents,) = found
    rows = [torch.tensor(lengths, device="cpu") for lengths in documents.lengths]
    names = [torch.arange(len(lengths), device="cpu").repeat_interleave(lengths) for lengths in rows]
    if any(len(row) != seq_len for row in names):
        raise MaskError(f"documents: they must have {seq_len} tokens together, got {[len(row) for row in names]}")
    return torch.stack(names)


def borders(masks: Iterable[Mask], seq_len: int) -> Tensor:
    """As `documents_of`; without documents, all positions are in one. Raises if some are behind `|` or `~`."""
    masks = list(masks)
    found = _found(masks)
    for mask in masks:
        if not found.issuperset(_found([mask], (And, Or, Not))):
            raise MaskError(
                f"documents: the mask must hold Documents(lengths) joined by & only, got {mask!r}; write "
                "(a | b) & Documents(lengths)"
            )
    return documents_of(found, seq_len) if found else torch.zeros(1, seq_len, dtype=torch.int64, device="cpu")


def _found(masks: Iterable[Mask], behind: tuple[type[Combination], ...] = (And,)) -> set[Documents]:
    """The documents in masks, behind masks of some kinds alone."""
    return {documents for mask in masks for documents in _within(mask, behind)}


def _within(mask: Mask, behind: tuple[type[Combination], ...]) -> Iterator[Documents]:
    if isinstance(mask, Documents):
        yield mask
    elif isinstance(mask, behind):
        for part in mask.parts:
            yield from _within(part, behind)
