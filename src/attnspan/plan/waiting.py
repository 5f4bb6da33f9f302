"""How long parts of gradients may wait to be summed: decided here, for what sums them and for what predicts memory."""

from __future__ import annotations

from collections.abc import Sequence


def crowded(waiting: Sequence[range], rows: range, width: float, summed: bool) -> bool:
    """Whether the parts that wait are to be added to a sum before one more, of `rows`, joins them.

    As many may wait for a row as take no more memory than a sum and one part; `width` is how much wider the sum is,
    `summed` whether there is one already. Parts of every n-th row do not wait.

    >>> crowded([range(8), range(4)], range(4, 8), 2.0, False), crowded([range(8), range(4)], range(8), 1.0, False)
    (False, True)
    """
    if rows.step > 1:
        return bool(waiting)
    starts = {rows.start, *(each.start for each in waiting if each.start in rows)}
    deepest = max(sum(start in each for each in waiting) for start in starts)
    return deepest + 1 + width * summed > width + 1
