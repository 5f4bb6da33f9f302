"""The mask of a BlockMask, read once, and again when the BlockMask has changed.

[Note: single rows and heads] A BlockMask of one batch row or head applies to all of them. If its function reads that
index, it is only valid for tensors with one row, or one head; it is then evaluated with index 0.
"""

from __future__ import annotations

from copy import copy
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import MaskError
from attnspan.masks import Mask
from attnspan.masks.listed import listing
from attnspan.masks.mask import MaskFunction
from attnspan.masks.tracing import function_name, traced


class ReadBlockMask:
    """A BlockMask, and the mask that was read from it."""

    def __init__(self, block_mask: BlockMask):
        self.block_mask = block_mask  # alive, so that no other object has its id
        self.mask_mod, self.tensors = block_mask.mask_mod, listing(block_mask)
        self.mask = mask_of(block_mask)

    @property
    def is_current(self) -> bool:
        """Whether the BlockMask still stands for the mask."""
        same = self.block_mask.mask_mod is self.mask_mod
        same = same and all(x is y for x, y in zip_longest(self.tensors, listing(self.block_mask)))
        return same and self.mask.is_current


def mask_of(block_mask: BlockMask) -> Mask:
    """The mask of a BlockMask. See [Note: single rows and heads]."""
    counts = block_mask.kv_num_blocks.shape[:2]
    mask_mod = for_single(block_mask.mask_mod, *counts, device=block_mask.kv_indices.device)
    if mask_mod is not block_mask.mask_mod:
        block_mask = copy(block_mask)
        block_mask.mask_mod = mask_mod
    return Mask.from_block_mask(block_mask)


def for_single(fn: MaskFunction, rows: int, heads: int, *, device: torch.device) -> MaskFunction:
    """A mask_mod for so many batch rows and heads; an index that it reads and that has one value becomes 0."""
    reads = traced(fn, device=device, error=MaskError).reads if 1 in (rows, heads) else frozenset()
    row, head = rows == 1 and "b" in reads, heads == 1 and "h" in reads
    if not row and not head:
        return fn
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return fn(zero if row else b, zero if head else h, q_idx, kv_idx)

    mask_mod.__name__ = function_name(fn)
    vars(mask_mod)["single"] = (row, head)
    return mask_mod
