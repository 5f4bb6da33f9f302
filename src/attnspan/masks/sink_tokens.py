"""The first tokens, which everyone sees: attention sinks, as positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnspan.errors import MaskError, integer
from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space


@dataclass(frozen=True, slots=True)
class SinkTokens(Mask):
    """Every query sees the first n keys. Streaming attention is `Causal() & (SlidingWindow(w) |
    SinkTokens(n))`.

    >>> print(SinkTokens(1).draw(3))
    █ · ·
    █ · ·
    █ · ·
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, at_least=1, error=MaskError))

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        yield tight(0, q_len, 0, min(self.n, kv_len))

    def _rule(self, space: Space) -> Rule:
        n = self.n
        return lambda b, h, q, k: k < n

    def __repr__(self) -> str:
        return f"SinkTokens({self.n})"
