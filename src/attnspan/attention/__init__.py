"""Attention over ranks: the only place where plan, kernel and transport meet. See function.py for the way in."""

from attnspan.attention.function import Attention, attention

__all__ = ["Attention", "attention"]
