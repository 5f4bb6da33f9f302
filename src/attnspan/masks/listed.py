"""What a FlexAttention BlockMask allows, block list by block list.

That is not always its mask_mod: blocks it does not list are skipped, and it is not evaluated in full ones. So the lists
are believed, and the function is evaluated (question.py) in partial blocks alone; a plan needs none of them. Where all
heads are alike they are evaluated nevertheless, up to so many pairs, because bands may come of it (a causal mask is
then one band, and every kernel can compute it).

A BlockMask is read once, as a function is: lists and what the mask_mod computes are copied ([Note: a value] in
mask_mod.py).

Any block sizes, unequal ones too, any lengths, batch rows and heads. Shapes: R rows, H heads, I and J blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnspan.errors import MaskError
from attnspan.masks.band import Band, ceil_div
from attnspan.masks.boxes import Boxes
from attnspan.masks.content import content
from attnspan.masks.cover import Cover, bands_of_blocks
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.mask_mod import check_reads, rule_of, single_row_and_head
from attnspan.masks.program import Program
from attnspan.masks.question import Blocks, Question
from attnspan.masks.snapshot import Copies, Snapshot

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_EVALUATED = 1 << 26
"""Pairs that are evaluated when a mask is planned for, to find bands in partial blocks."""


@dataclass(frozen=True, slots=True, repr=False)
class Listed(Mask):
    """The blocks that a BlockMask lists; made by `Mask.from_block_mask`. Equal to one that allows the same by block."""

    source: BlockMask = field(compare=False)
    lengths: tuple[int, int]
    block: tuple[int, int]
    partial_RHIJ: torch.Tensor = field(compare=False)
    full_RHIJ: torch.Tensor = field(compare=False)
    lists: Copies = field(compare=False)
    digest: str  # of partial and full
    snapshot: Snapshot | None  # None where partial blocks are allowed whole
    single: tuple[bool, bool] = (False, False)

    @property
    def program(self) -> Program | None:
        """What is evaluated in partial blocks."""
        return None if self.snapshot is None else self.snapshot.program

    @property
    def rows(self) -> int:
        return self.full_RHIJ.shape[0]

    @property
    def heads(self) -> int:
        return self.full_RHIJ.shape[1]

    @property
    def natural_len(self) -> int | None:
        return self.lengths[0]

    @property
    def natural_kv_len(self) -> int | None:
        return self.lengths[1]

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        if self.lengths != (q_len, kv_len):
            raise MaskError(
                f"block_mask is for lengths {self.lengths}, got {(q_len, kv_len)}; give the mask of the whole "
                "sequence, not a rank's part of it"
            )

    def check_fresh(self) -> None:
        if not self.lists.are_current:
            raise MaskError("block_mask has changed: its lists of blocks were written to; make a new one")
        if self.snapshot is not None:
            self.snapshot.check_current()

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        cover = self.cover(q_len, kv_len, row)
        if cover.is_exact:
            return cover.certain
        return self._question(row).bands(self._blocks(row))

    def _cover(self, q_len: int, kv_len: int, row: int) -> Cover:
        if self.heads == 1 and self.program is not None:
            return self._question(row).cover(self._blocks(row), MAX_EVALUATED)
        partial, full = self.partial_RHIJ[row], self.full_RHIJ[row]
        certain = full.all(0)
        both = (self._boxes(chosen).spans(self.block[0]) for chosen in (certain, (partial | full).any(0) & ~certain))
        return Cover(*(bands_of_blocks(spans, self.block[0], self.lengths[0]) for spans in both))

    def _question(self, row: int) -> Question:
        assert self.program is not None, "without a function, all listed blocks are full"
        return Question(self.program, row, self.heads, self.lengths, self.block, self.source.kv_indices.device)

    def _blocks(self, row: int) -> Blocks:
        """Of the only head."""
        return [(True, self._boxes(self.full_RHIJ[row, 0])), (False, self._boxes(self.partial_RHIJ[row, 0]))]

    def _boxes(self, chosen_IJ: torch.Tensor) -> Boxes:
        i, j = chosen_IJ.nonzero().to(self.source.kv_indices.device).unbind(1)
        return Boxes.at(i, j, self.block, self.lengths)

    def _rule(self, space: Space) -> Rule:
        full, partial = self.full_RHIJ.to(space.device), self.partial_RHIJ.to(space.device)
        q_size, k_size = self.block
        ask = None if self.program is None else rule_of(self.program, space.device)
        many, several = self.rows > 1, self.heads > 1

        def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            b, h = (torch.as_tensor(x, device=q.device) for x in (b, h))
            at = (b if many else b * 0, h if several else h * 0, q // q_size, k // k_size)
            listed = partial[at]
            return full[at] | (listed if ask is None else listed & ask(b, h, q, k))

        return rule

    def __repr__(self) -> str:
        shape = "" if (self.rows, self.heads) == (1, 1) else f"{self.rows} rows, {self.heads} heads, "
        asks = "" if self.program is None else f", {self.program.name}"
        return f"Mask.from_block_mask({shape}{self.lengths[0]} x {self.lengths[1]}{asks})"


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The full blocks of a BlockMask, and its mask_mod within the others that it lists."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise MaskError(f"block_mask must be a FlexAttention BlockMask, got {type(block_mask).__name__}")
    if len(block_mask.shape) != 4:
        raise MaskError(
            f"block_mask must be (rows, heads, q_len, kv_len), got {tuple(block_mask.shape)}; index it with [row, head]"
        )
    q_len, kv_len = block_mask.seq_lengths
    size = block_mask.BLOCK_SIZE
    rows, heads, *_ = block_mask.shape
    shape = (rows, heads, ceil_div(q_len, size[0]), ceil_div(kv_len, size[1]))
    partial = _listed_blocks(shape, block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros(shape, dtype=torch.bool, device="cpu")
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed_blocks(shape, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    asks = block_mask.mask_mod is not noop_mask
    partial, full = (partial & ~full, full) if asks else (partial & False, full | partial)
    snapshot = Snapshot(block_mask.mask_mod, block_mask.kv_indices.device) if asks else None
    if snapshot is not None:
        check_reads(snapshot.program, rows, heads, "create_block_mask(fn, {} given)")
    lists, digest = Copies(listing(block_mask)), content([partial, full])
    single = single_row_and_head(block_mask.mask_mod)
    return Listed(block_mask, (q_len, kv_len), size, partial, full, lists, digest, snapshot, single)


def listing(block_mask: BlockMask) -> list[torch.Tensor]:
    """The tensors by which a BlockMask lists its blocks."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return [each for name in names if (each := getattr(block_mask, name)) is not None]


def _listed_blocks(shape: tuple[int, int, int, int], counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """(R, H, I, J), true where a block is listed."""
    counts, indices = counts.cpu(), indices.cpu()
    row, head, i, nth = (torch.arange(indices.shape[-1], device="cpu") < counts[..., None]).nonzero(as_tuple=True)
    chosen = torch.zeros(shape, dtype=torch.bool, device="cpu")
    inside = i < shape[2]
    chosen[row[inside], head[inside], i[inside], indices[row, head, i, nth].long()[inside]] = True
    return chosen
