"""A query sees the keys of its own chunk, where chunks have one fixed size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnspan.errors import MaskError, integer
from attnspan.masks.alignment import Align, check_align, offset
from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space


@dataclass(frozen=True, slots=True)
class Chunked(Mask):
    """Positions [0, size), [size, 2 size), ... see only one another; usually written `Causal() &
    Chunked(size)`.

    >>> print(Chunked(2).draw(5))
    █ █ · · ·
    █ █ · · ·
    · · █ █ ·
    · · █ █ ·
    · · · · █
    """

    size: int
    align: Align = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("size", self.size, at_least=1, error=MaskError))
        check_align(self.align)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        start = offset(self.align, q_len, kv_len)
        for k0 in range(0, kv_len, self.size):
            k1 = min(k0 + self.size, kv_len)
            yield tight(max(k0 - start, 0), min(k0 + self.size - start, q_len), k0, k1)

    def _rule(self, space: Space) -> Rule:
        start = offset(self.align, space.q_len, space.kv_len)
        size = self.size
        return lambda b, h, q, k: (q + start) // size == k // size

    def __repr__(self) -> str:
        return f"Chunked({self.size})" if self.align is None else f"Chunked({self.size}, align={self.align!r})"
