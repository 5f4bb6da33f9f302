"""How many keys must travel when each rank fetches only the ones that its queries see.

The keys a run of queries sees in a band are an interval (every column of a tight band holds a pair); a rank's
need is the union of such intervals, less the positions it owns. Nothing here is as long as the sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from attnspan.layouts.layout import Layout
from attnspan.layouts.run import Run, Runs
from attnspan.masks import Band, Mask
from attnspan.masks.columns import Columns
from attnspan.masks.spans import Span, merged


def moved(mask: Mask, layout: Layout, seq_len: int) -> list[int]:
    """The keys each rank receives: distinct, seen by its queries, owned by others; summed over batch rows.

    >>> from attnspan.layouts import Contiguous
    >>> from attnspan.masks import Causal, Documents
    >>> moved(Causal(), Contiguous(ranks=4), 8)  # rank r needs everything before it
    [0, 2, 4, 6]
    >>> moved(Causal() & Documents([3, 5]), Contiguous(ranks=2), 8)  # position 3 begins the second document
    [0, 1]
    """
    layout.check_rows(mask.rows)
    received = [0] * layout.ranks
    for row in range(max(mask.rows, layout.rows)):
        columns = Columns.of(mask.cover(seq_len, row=row).bands)
        for rank, runs in enumerate(layout.shards(seq_len, row)):
            needed = merged(span for run in runs for span in _keys(columns, run))
            received[rank] += sum(stop - start for start, stop in needed) - _owned(needed, runs)
    return received


def _keys(columns: Columns, run: Run) -> Iterator[Span]:
    """Spans of the keys that a run of queries sees; they may overlap."""
    for band in columns.some(columns.rows_meeting(run.start, run.stop)):
        part = band.cut(run.start, run.stop, band.k0, band.k1)
        if part is not None:
            yield from _seen(part, run)


def _seen(band: Band, run: Run) -> Iterator[Span]:
    """The keys of a band that the queries of a run see."""
    queries = run.positions[_count(run, band.q0) : _count(run, band.q1)]
    if not queries:
        return
    if band.hi - band.lo + 1 >= run.step:  # the keys of neighbouring queries meet
        yield max(band.k0, queries[0] + band.lo), min(band.k1, queries[-1] + band.hi + 1)
    else:
        yield from ((max(band.k0, q + band.lo), min(band.k1, q + band.hi + 1)) for q in queries)


def _owned(spans: list[Span], runs: Runs) -> int:
    """How many positions of disjoint spans lie in the runs."""
    starts = [start for start, _ in spans]
    total = 0
    for run in runs:
        for start, stop in spans[max(bisect_right(starts, run.start) - 1, 0) : bisect_left(starts, run.stop)]:
            total += _count(run, min(stop, run.stop)) - _count(run, start)
    return total


def _count(run: Run, position: int) -> int:
    """How many positions of the run lie before one."""
    return len(range(run.start, position, run.step))
