"""What stands for a pack of documents: one of its kind, whatever the lengths are today.

Which strategy is fastest depends on how many documents a pack has, how uneven they are and how long the longest is;
hardly on the rest. These three are rounded, coarsely, so that a training run sees a handful of kinds: finer steps gain
nothing (benchmarks/results/planning.md). The typical pack of what is left has the lengths of a log-normal
distribution, at evenly spaced quantiles, in an order that is always the same. It is a function of the rounded numbers
alone: every rank finds the same one, whatever packs it saw before.

>>> typical_lengths([[100, 300, 250, 374]]) == typical_lengths([[300, 105, 374, 245]])
True
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log, log2, sqrt
from random import Random
from statistics import NormalDist, fmean


def typical_lengths(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """As many rows, of documents with the rounded number, spread and longest length of these."""
    total = sum(rows[0])
    count, longest = rounded(fmean(map(len, rows)), 4), rounded(fmean(map(max, rows)), 1)
    spread = rounded(fmean(len(row) * sum(length * length for length in row) for row in rows) / total**2, 2)
    return _drawn(len(rows), total, min(round(count), total), min(round(longest), total), spread)


def rounded(number: float, steps: int) -> float:
    """The nearest power of two, or one of so many steps between two of them.

    >>> [round(rounded(n, 2), 2) for n in (0, 1, 3.1, 100)]
    [0, 1.0, 2.83, 90.51]
    """
    return 2 ** (round(steps * log2(number)) / steps) if number else 0


@lru_cache(maxsize=256)
def _drawn(rows: int, total: int, count: int, longest: int, spread: float) -> tuple[tuple[int, ...], ...]:
    rest, others = total - longest, count - 1
    if not rest or not others:
        return ((total,),) * rows
    squares = spread * total**2 / count - longest**2
    sigma = sqrt(max(0.0, log(max(1.0, squares * others / rest**2))))
    quantiles = [NormalDist().inv_cdf((i + 0.5) / others) for i in range(others)]
    raw = [exp(sigma * quantile) for quantile in quantiles]
    lengths = [longest, *_scaled(raw, rest)]
    return tuple(tuple(Random(row).sample(lengths, len(lengths))) for row in range(rows))


def _scaled(raw: list[float], total: int) -> list[int]:
    """Whole numbers above 0 in the proportions of others, with a sum."""
    raw = raw[:total]
    scale, done, out = (total - len(raw)) / sum(raw), 0.0, []
    for value in raw:
        before, done = int(done), done + value * scale
        out.append(1 + int(done) - before)
    out[-1] += total - sum(out)
    return out
