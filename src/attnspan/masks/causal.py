"""A query sees the keys up to its own position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnspan.masks.alignment import Align, check_align, offset
from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees the keys up to its own position.

    Where q_len and kv_len differ, say how the axes meet: see [Note: lengths] in mask.py.

    >>> print(Causal(align="bottom").draw(2, 4))
    █ █ █ ·
    █ █ █ █
    """

    align: Align = None

    def __post_init__(self) -> None:
        check_align(self.align)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        yield tight(0, q_len, 0, kv_len, hi=offset(self.align, q_len, kv_len))

    def _rule(self, space: Space) -> Rule:
        start = offset(self.align, space.q_len, space.kv_len)
        return lambda b, h, q, k: k <= q + start

    def __repr__(self) -> str:
        return "Causal()" if self.align is None else f"Causal(align={self.align!r})"
