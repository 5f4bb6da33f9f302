"""A layout as text: the owner of each token, then each rank's runs."""

from __future__ import annotations

from collections.abc import Iterable

from attnspan.errors import AttnspanError
from attnspan.layouts.layout import Layout, Shards
from attnspan.layouts.run import Run, Runs
from attnspan.masks.band import ceil_div
from attnspan.masks.drawing import shortened

WIDTH = 64
"""The most columns of the line of owners; longer sequences share cells, `*` where owners differ."""

LINES = 16
"""The most ranks, and the most runs of a rank, that are listed."""


def draw(layout: Layout) -> str:
    """The layout at its own length, or 4 tokens a rank where it has none; or why there is nothing to draw.

    >>> from attnspan.layouts import Striped
    >>> print(draw(Striped(ranks=2, chunk=3)))
    Striped(ranks=2, chunk=3) on 8 tokens
    0 0 0 1 1 1 0 0
    rank 0: [0, 3) [6, 8)
    rank 1: [3, 6)
    """
    seq_len = layout.natural_len or max(4 * layout.ranks, layout.least_len)
    row = f", row 0 of {layout.rows}" if layout.rows > 1 else ""
    title = f"{shortened(repr(layout))} on {seq_len} tokens{row}"
    try:
        shards = layout.shards(seq_len)
    except AttnspanError as error:
        return f"{title}\n(cannot be drawn: {error})"
    lines = [title, owners(shards, seq_len)]
    lines += [f"rank {rank}: {listed(runs)}" for rank, runs in enumerate(shards[:LINES])]
    if layout.ranks > LINES:
        lines.append(f"... {layout.ranks - LINES} more ranks")
    return "\n".join(lines)


def owners(shards: Shards, seq_len: int) -> str:
    """One cell per token, or per group of tokens where they would not fit.

    >>> from attnspan.layouts import Contiguous
    >>> owners(Contiguous(ranks=2).shards(192), 192)[-36:]
    '1 1 1 1 1 1 1  each cell is 6 tokens'
    """
    digits = len(str(len(shards) - 1))
    size = ceil_div(seq_len, WIDTH // (digits + 1))
    cells = [""] * ceil_div(seq_len, size)
    for rank, runs in enumerate(shards):
        for run in runs:
            for cell in cells_of(run, size):
                cells[cell] = str(rank) if cells[cell] in ("", str(rank)) else "*"
    note = f"  each cell is {size} tokens" if size > 1 else ""
    return " ".join(cell.rjust(digits) for cell in cells) + note


def cells_of(run: Run, size: int) -> Iterable[int]:
    """The cells of `size` positions that hold one of the run.

    >>> list(cells_of(Run(3, 6), 2)), sorted(cells_of(Run(0, 13, 6), 2))
    ([1, 2], [0, 3, 6])
    """
    if run.step > size:
        return {position // size for position in run.positions}
    return range(run.start // size, ceil_div(run.stop, size))  # no step is long enough to miss a cell


def listed(runs: Runs, most: int = LINES, what: str = " runs") -> str:
    """The runs, or the first of them and how many more there are."""
    more = f" ... {len(runs) - most} more{what}" if len(runs) > most else ""
    return (" ".join(str(run) for run in runs[:most]) or "nothing") + more
