"""A map of blocks: block (i, j) of the score matrix is wholly allowed or wholly not."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attnspan.errors import MaskError, integer, integers
from attnspan.masks.algebra import joined
from attnspan.masks.band import Band, ceil_div, tight
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.rows import of_row, select
from attnspan.masks.spans import Spans, spans_of


@dataclass(frozen=True, slots=True, init=False, repr=False)
class BlockSparse(Mask):
    """Query block i sees key block j where `map[i][j]` is true; the last blocks may be short.

    `map` is a bool tensor or nested lists, (blocks, blocks) or (rows, blocks, blocks); `block` is one size or
    (query block, key block). Kept as spans per block row, so that equal maps are equal masks.

    >>> print(BlockSparse([[1, 0], [1, 1]], block=2).draw(4))
    █ █ · ·
    █ █ · ·
    █ █ █ █
    █ █ █ █
    """

    spans: tuple[tuple[Spans, ...], ...]
    columns: int
    block: tuple[int, int]

    def __init__(self, map: torch.Tensor | Sequence[Sequence[int]], block: int | tuple[int, int]):
        object.__setattr__(self, "block", size_pair("block", block))
        allowed = _bool_tensor(map)
        object.__setattr__(self, "columns", allowed.shape[-1])
        object.__setattr__(self, "spans", tuple(tuple(spans_of(row)) for row in allowed))

    @property
    def rows(self) -> int:
        return len(self.spans)

    @property
    def natural_len(self) -> int | None:
        return len(self.spans[0]) * self.block[0]

    @property
    def natural_kv_len(self) -> int | None:
        return self.columns * self.block[1]

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        for name, length, blocks, size in (
            ("q_len", q_len, len(self.spans[0]), self.block[0]),
            ("kv_len", kv_len, self.columns, self.block[1]),
        ):
            if ceil_div(length, size) != blocks:
                raise MaskError(
                    f"map must hold {ceil_div(length, size)} blocks of {size} to cover {name} ({length}), got {blocks}"
                )

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        q_size, k_size = self.block
        pieces = (
            tight(i * q_size, min((i + 1) * q_size, q_len), j0 * k_size, min(j1 * k_size, kv_len))
            for i, spans in enumerate(of_row(self.spans, row))
            for j0, j1 in spans
        )
        return joined(piece for piece in pieces if piece is not None)

    def _rule(self, space: Space) -> Rule:
        allowed = self.map.to(space.device)
        q_size, k_size = self.block
        return lambda b, h, q, k: select(allowed, b)[q // q_size, k // k_size]

    @property
    def map(self) -> torch.Tensor:
        """The map as a bool tensor (rows, query blocks, key blocks)."""
        allowed = torch.zeros(self.rows, len(self.spans[0]), self.columns, dtype=torch.bool, device="cpu")
        for row, blocks in enumerate(self.spans):
            for i, spans in enumerate(blocks):
                for start, stop in spans:
                    allowed[row, i, start:stop] = True
        return allowed

    def __repr__(self) -> str:
        shape = f"{len(self.spans[0])} x {self.columns}" + (f" x {self.rows} rows" if self.rows > 1 else "")
        return f"BlockSparse({shape} blocks, block={self.block[0] if len(set(self.block)) == 1 else self.block})"


def _bool_tensor(map: object) -> torch.Tensor:
    try:
        allowed = map.cpu() if isinstance(map, torch.Tensor) else torch.as_tensor(map, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:  # text, ragged rows, things that are no table
        raise MaskError(
            f"map must be a table of true and false, or one per batch row, got {reprlib.repr(map)}"
        ) from error
    if allowed.dim() not in (2, 3) or allowed.numel() == 0:
        raise MaskError(
            f"map must be (blocks, blocks) or (rows, blocks, blocks), none of them 0, got shape {tuple(allowed.shape)}"
        )
    if not bool(((allowed == 0) | (allowed == 1)).all()):
        other = allowed[(allowed != 0) & (allowed != 1)][0].item()
        raise MaskError(f"map must hold only true and false (or 1 and 0), got {other}")
    return allowed.bool().cpu().reshape(-1, *allowed.shape[-2:])


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
