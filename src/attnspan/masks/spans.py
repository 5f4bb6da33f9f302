"""Spans of positions [start, stop): their union, and those of a table of bools."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Span = tuple[int, int]
Spans = tuple[Span, ...]


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


def spans_of(allowed: torch.Tensor) -> Iterable[Spans]:
    """For each row of a 2-D bool tensor, the spans [start, stop) of its true entries.

    >>> list(spans_of(torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]]).bool()))
    [((0, 2), (3, 4)), ()]
    """
    padded = torch.nn.functional.pad(allowed.to(torch.int8), (1, 1))
    change = padded.diff(dim=-1)
    starts, stops = (change == 1).nonzero().tolist(), (change == -1).nonzero().tolist()
    found: list[list[tuple[int, int]]] = [[] for _ in range(allowed.shape[0])]
    for (row, start), (_, stop) in zip(starts, stops, strict=True):
        found[row].append((start, stop))
    return (tuple(spans) for spans in found)
