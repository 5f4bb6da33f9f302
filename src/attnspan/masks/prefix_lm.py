"""A prefix that everyone sees, then causal: prefix language models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnspan.masks.alignment import Align, check_align, offset
from attnspan.masks.band import Band, tight
from attnspan.masks.first_keys import FirstKeys
from attnspan.masks.mask import Rule, Space
from attnspan.masks.rows import int_per_row, of_row, select, shown


@dataclass(frozen=True, slots=True)
class PrefixLM(FirstKeys):
    """Every query sees the first `length` keys, and beyond them the keys up to its own position.

    `length` is one number, or one per batch row; 0 is plain causal.

    >>> print(PrefixLM(2).draw(4))
    █ █ · ·
    █ █ · ·
    █ █ █ ·
    █ █ █ █
    """

    _field: ClassVar[str] = "length"

    length: int | Sequence[int]
    align: Align = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", int_per_row("length", self.length, at_least=0))
        check_align(self.align)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        length = of_row(self._lengths, row)
        yield tight(0, q_len, 0, length)
        yield tight(0, q_len, length, kv_len, hi=offset(self.align, q_len, kv_len))

    def _rule(self, space: Space) -> Rule:
        start = offset(self.align, space.q_len, space.kv_len)
        lengths = torch.tensor(self._lengths, device=space.device)
        return lambda b, h, q, k: (k < select(lengths, b)) | (k <= q + start)

    def __repr__(self) -> str:
        align = "" if self.align is None else f", align={self.align!r}"
        return f"PrefixLM({shown(self._lengths)}{align})"
