"""A map of blocks: block (i, j) of the score matrix is wholly allowed or wholly not."""

from __future__ import annotations

import ctypes
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attnspan.errors import MaskError, integer, integers
from attnspan.masks.band import Band, ceil_div
from attnspan.masks.cover import bands_of_blocks
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.row_spans import RowSpans
from attnspan.masks.rows import as_table, select


@dataclass(frozen=True, slots=True, init=False, repr=False)
class BlockSparse(Mask):
    """Query block i sees key block j where `map[i][j]` is true; the last blocks may be short.

    `map` is a bool tensor or nested lists, (blocks, blocks) or (rows, blocks, blocks); `block` is one size or
    (query block, key block). Kept as bytes, so that equal maps are equal masks.

    >>> print(BlockSparse([[1, 0], [1, 1]], block=2).draw(4))
    █ █ · ·
    █ █ · ·
    █ █ █ █
    █ █ █ █
    """

    entries: bytes
    shape: tuple[int, int, int]
    block: tuple[int, int]

    def __init__(self, map: torch.Tensor | Sequence[Sequence[int]], block: int | tuple[int, int]):
        object.__setattr__(self, "block", size_pair("block", block))
        allowed = _bool_tensor(map)
        object.__setattr__(self, "shape", tuple(allowed.shape))
        object.__setattr__(self, "entries", ctypes.string_at(allowed.data_ptr(), allowed.nbytes))

    @property
    def map(self) -> torch.Tensor:
        """The map as a bool tensor (rows, query blocks, key blocks)."""
        return torch.frombuffer(bytearray(self.entries), dtype=torch.bool).view(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def natural_len(self) -> int | None:
        return self.shape[1] * self.block[0]

    @property
    def natural_kv_len(self) -> int | None:
        return self.shape[2] * self.block[1]

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        lengths = ("q_len", q_len), ("kv_len", kv_len)
        for (name, length), blocks, size in zip(lengths, self.shape[1:], self.block, strict=True):
            if ceil_div(length, size) != blocks:
                raise MaskError(
                    f"map must hold {ceil_div(length, size)} blocks of {size} to cover {name} ({length}), got {blocks}"
                )

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        corner, width = torch.zeros(1, dtype=torch.int64, device="cpu"), self.block[1]
        blocks = RowSpans.of_pairs(self.map[row].unsqueeze(0), corner, corner)
        spans = RowSpans(blocks.row, blocks.start * width, (blocks.stop * width).clamp(max=kv_len))
        return bands_of_blocks(spans, self.block[0], q_len)

    def _rule(self, space: Space) -> Rule:
        allowed = self.map.to(space.device)
        q_size, k_size = self.block
        return lambda b, h, q, k: select(allowed, b)[q // q_size, k // k_size]

    def __repr__(self) -> str:
        shape = f"{self.shape[1]} x {self.shape[2]}" + (f" x {self.rows} rows" if self.rows > 1 else "")
        return f"BlockSparse({shape} blocks, block={self.block[0] if len(set(self.block)) == 1 else self.block})"


def _bool_tensor(map: object) -> torch.Tensor:
    allowed = as_table("map", map, "a table of true and false, or one per batch row")
    if allowed.dim() not in (2, 3) or allowed.numel() == 0:
        raise MaskError(
            f"map must be (blocks, blocks) or (rows, blocks, blocks), none of them 0, got shape {tuple(allowed.shape)}"
        )
    if not bool(((allowed == 0) | (allowed == 1)).all()):
        other = allowed[(allowed != 0) & (allowed != 1)][0].item()
        raise MaskError(f"map must hold only true and false (or 1 and 0), got {other}")
    return allowed.bool().reshape(-1, *allowed.shape[-2:]).contiguous()


def size_pair(name: str, block: object) -> tuple[int, int]:
    """One block size, or (query block, key block), as the latter.

    >>> size_pair("block", 64), size_pair("block", (64, 128))
    ((64, 64), (64, 128))
    """
    if not isinstance(block, list | tuple):
        size = integer(name, block, at_least=1, error=MaskError)
        return size, size
    if len(block) != 2:
        raise MaskError(f"{name} must be one size or (query block, key block), got {reprlib.repr(block)}")
    queries, keys = integers(name, block, at_least=1, error=MaskError)
    return queries, keys
