"""Masks over a step's new tokens alone: everything before them is seen.

Speculative decoding guesses a tree of tokens after a sequence of any length. What the guesses see of one another is a
mask over the guesses, the same at every step; what they see of the sequence is all of it::

    pool.attend(layer, q, plan, mask=AfterPrefix(Tree([-1, 0, 0, 1])))  # four guesses after each sequence

Speaks of rows of a plan, so it is for attention over pages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan.errors import MaskError
from attnspan.masks import Mask
from attnspan.masks.mask import MaskFunction


@dataclass(frozen=True, slots=True, init=False)
class AfterPrefix:
    """One mask for the new tokens of every row, or a list with one for each row.

    Where a mask fixes its length, a row must have as many new tokens.

    >>> from attnspan.masks import Tree
    >>> AfterPrefix(Tree([-1, 0, 0]))
    AfterPrefix(masks=(Tree([-1, 0, 0], [1, 1, 1]),))
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Mask | Sequence[Mask]) -> None:
        each = (masks,) if isinstance(masks, Mask) else tuple(masks)
        if not each or not all(isinstance(mask, Mask) for mask in each):
            raise MaskError(f"masks must be a mask such as Tree([-1, 0, 0]), or one for each row, got {masks!r}")
        for mask in each:
            if mask.rows > 1 or mask.heads > 1:
                raise MaskError(
                    f"masks must be the same for all batch rows and heads, got {mask.rows} rows and {mask.heads} heads "
                    f"of {mask!r}; give a list with a mask for each row"
                )
        object.__setattr__(self, "masks", each)

    def check_fits(self, query_lens: tuple[int, ...]) -> None:
        """Refuse another number of rows, or of new tokens, than the masks are for."""
        masks = self.masks
        if len(masks) not in (1, len(query_lens)):
            rows = len(query_lens)
            raise MaskError(f"masks must be one for all rows, or one for each of the {rows}, got {len(masks)}")
        for row, count in enumerate(query_lens):
            known = masks[row if len(masks) > 1 else 0].natural_len
            if known is not None and count != known:
                raise MaskError(f"the mask of row {row} is for {known} new tokens, got {count}")

    def mask_mod(self, query_lens: tuple[int, ...], query_starts: Tensor) -> MaskFunction:
        """The FlexAttention function; `query_starts` (rows,) are the positions of the rows' first new tokens."""
        most, masks = max(query_lens, default=0) or 1, self.masks
        table = torch.zeros(len(masks), most, most, dtype=torch.bool, device="cpu")
        for row, mask in enumerate(masks):
            count = query_lens[row] if len(masks) > 1 else most
            if count:
                table[row, :count, :count] = mask.dense(count)
        table, single = table.to(query_starts.device), len(masks) == 1

        def after_prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            start = query_starts[b]
            row = torch.zeros_like(b) if single else b
            place, seen = (q - start).clamp(0, most - 1), (k - start).clamp(0, most - 1)
            return (k < start) | table[row, place, seen]

        return after_prefix
