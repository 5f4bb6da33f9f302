"""Exactly fair shares of a mask whose row work is a few straight lines.

In a part of the sequence where the work of a row grows or falls by a constant, head and tail chunks pair
up exactly; where it is flat, any span is as good as another. A sliding window is two such parts, a mix of
full and windowed layers too: three or four runs per rank, and the work is equal to the last pair.
"""

from __future__ import annotations

from itertools import pairwise

from attnspan.layouts.contiguous import Contiguous
from attnspan.layouts.head_tail import HeadTail
from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, joined_runs
from attnspan.masks.piecewise import Piecewise

MAX_SLOPES = 4
"""With more parts than this a rank would have too many runs."""


def by_slope(work: Piecewise, seq_len: int, ranks: int) -> Shards | None:
    """HeadTail on every slope, Contiguous on every flat; None if there are too many of them.

    >>> from attnspan.masks import Causal, SlidingWindow
    >>> from attnspan.masks.columns import Columns
    >>> from attnspan.masks.piecewise import row_work, weighted
    >>> bands = (Causal() & SlidingWindow(4)).bands(12)  # rows see 1 2 3 4, then 5 keys each
    >>> window = weighted(row_work, [(1, Columns.of(bands))])
    >>> for runs in by_slope(window, 12, 2):
    ...     print(*runs)
    [0, 1) [3, 8)
    [1, 3) [8, 12)
    """
    edges = [0, *(edge for edge in work.bends(MAX_SLOPES + 3) if 0 < edge < seq_len), seq_len]
    if len(edges) > MAX_SLOPES + 1:
        return None
    out: list[list[Run]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(edges):
        flat = work.between(start, start + 1) == work.between(stop - 1, stop)
        layout = Contiguous(ranks) if flat else HeadTail(ranks)
        for runs, shard in zip(out, layout.shards(stop - start), strict=True):
            runs += (Run(start + run.start, start + run.stop) for run in shard)
    return tuple(joined_runs(tuple(runs)) for runs in out)
