"""Bands as text. A cell is one pair, or a block of pairs where the lengths would not fit."""

from __future__ import annotations

from collections.abc import Sequence

from attnspan.masks.band import Band, ceil_div

CELLS = 32
"""The most cells a side of a drawing has."""


def draw(bands: Sequence[Band], q_len: int, kv_len: int) -> str:
    """█ allowed, · not, ▒ partly.

    >>> from attnspan.masks.band import tight
    >>> print(draw([tight(0, 64, 0, 64, hi=0)], 64, 64).splitlines()[1])
    █ ▒ · · · · · · · · · · · · · · · · · · · · · · · · · · · · · ·  each cell is 2 x 2
    """
    height, width = ceil_div(q_len, CELLS), ceil_div(kv_len, CELLS)
    cells = [[0] * ceil_div(kv_len, width) for _ in range(ceil_div(q_len, height))]
    for band in bands:
        for i in range(band.q0 // height, ceil_div(band.q1, height)):
            strip = band.cut(i * height, (i + 1) * height, band.k0, band.k1)
            if strip is None:
                continue
            for j in range(strip.k0 // width, ceil_div(strip.k1, width)):
                piece = strip.cut(strip.q0, strip.q1, j * width, (j + 1) * width)
                cells[i][j] += piece.area if piece is not None else 0
    lines = []
    for i, row in enumerate(cells):
        rows = min(height, q_len - i * height)
        lines.append(" ".join(_glyph(n, rows * min(width, kv_len - j * width)) for j, n in enumerate(row)))
    if height * width > 1:
        lines[min(1, len(lines) - 1)] += f"  each cell is {height} x {width}"
    return "\n".join(lines)


def _glyph(count: int, whole: int) -> str:
    return "·" if count == 0 else "█" if count == whole else "▒"


def shortened(text: str, width: int = 100) -> str:
    """The text, or its beginning and its end: how masks, layouts and plans name themselves in a title.

    >>> shortened("Documents([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])", width=40)
    'Documents([1, 2 ... , 8, 9, 10, 11, 12])'
    """
    return text if len(text) <= width else f"{text[: width - 25]} ... {text[-20:]}"
