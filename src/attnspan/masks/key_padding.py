"""Keys beyond a row's length do not exist: right-padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnspan.masks.band import Band, tight
from attnspan.masks.first_keys import FirstKeys
from attnspan.masks.mask import Rule, Space
from attnspan.masks.rows import int_per_row, of_row, select, shown


@dataclass(frozen=True, slots=True)
class KeyPadding(FirstKeys):
    """Every query sees the first `lengths[row]` keys; one number serves all batch rows. 0 is a row of
    padding.

    >>> KeyPadding([2, 4]).work(4, row=0), KeyPadding([2, 4]).work(4, row=1)
    (8, 16)
    """

    _field: ClassVar[str] = "lengths"

    lengths: int | Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", int_per_row("lengths", self.lengths, at_least=0))

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        length = of_row(self._lengths, row)
        yield tight(0, q_len, 0, length)

    def _rule(self, space: Space) -> Rule:
        lengths = torch.tensor(self._lengths, device=space.device)
        return lambda b, h, q, k: k < select(lengths, b)

    def __repr__(self) -> str:
        return f"KeyPadding({shown(self._lengths)})"
