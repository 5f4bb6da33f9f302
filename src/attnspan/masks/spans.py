"""Spans of positions [start, stop), and their union."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union as disjoint spans in order; neighbours become one.

    >>> merged([(4, 6), (0, 2), (1, 3), (6, 7)])
    [(0, 3), (4, 7)]
    """
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
