"""A query sees the keys near it: `left` positions back, `right` positions ahead, and its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnspan.errors import MaskError, integer
from attnspan.masks.alignment import Align, check_align, offset
from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query at position p sees the keys p - left to p + right.

    A model card's "window of W tokens" that counts the token itself is `SlidingWindow(W - 1)`.

    >>> print(SlidingWindow(1).draw(4))
    █ · · ·
    █ █ · ·
    · █ █ ·
    · · █ █
    """

    left: int
    right: int = 0
    align: Align = None

    def __post_init__(self) -> None:
        hint = "no limit is Causal() or Full()"
        for side in ("left", "right"):
            object.__setattr__(self, side, integer(side, getattr(self, side), hint=hint, error=MaskError))
        check_align(self.align)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        start = offset(self.align, q_len, kv_len)
        yield tight(0, q_len, 0, kv_len, lo=start - self.left, hi=start + self.right)

    def _rule(self, space: Space) -> Rule:
        start = offset(self.align, space.q_len, space.kv_len)
        lo, hi = start - self.left, start + self.right
        return lambda b, h, q, k: (k - q >= lo) & (k - q <= hi)

    def __repr__(self) -> str:
        right = f", right={self.right}" if self.right else ""
        align = "" if self.align is None else f", align={self.align!r}"
        return f"SlidingWindow({self.left}{right}{align})"
