"""How many keys cross a cut: what it costs to part a sequence at a position.

If a cut at p parts two ranks, queries from p on need the keys before p that they see, and the other way
round. For one band both counts are linear between a few positions, so that for any mask their sum is a tally,
asked in O(log bands). Keys that several bands share are counted by each: an estimate from above, exact where
bands share none (documents).
"""

from __future__ import annotations

from collections.abc import Iterator

from attnspan.masks.band import Band
from attnspan.masks.profile import Piece


def crossing_pieces(band: Band) -> Iterator[Piece]:
    """Linear pieces of the number of keys that cross a cut at p.

    >>> from attnspan.masks.band import tight
    >>> from attnspan.masks.profile import Tally
    >>> causal = Tally(crossing_pieces(tight(0, 4, 0, 4, hi=0)))
    >>> [causal.at(p) for p in range(5)]  # a cut at 3: the last query needs three keys
    [0, 1, 2, 3, 0]
    >>> full = Tally(crossing_pieces(tight(0, 4, 0, 4)))
    >>> [full.at(p) for p in range(5)]  # whichever side they are on, all four keys are needed on the other
    [0, 4, 4, 4, 0]
    """
    q0, q1, k0, k1, lo, hi = band
    if lo < 0:  # keys max(k0, p + lo) <= k < min(k1, p) are seen by a query from p on
        start, stop = k0, min(q1, k1 - lo)
        yield start, min(k1, stop), 0, 1
        yield max(start, k1), stop, k1, 0
        yield start, min(k0 - lo, stop), -k0, 0
        yield max(start, k0 - lo), stop, -lo, -1
    if hi > 0:  # keys max(k0, p) <= k < min(k1, p + hi) are seen by a query before p
        start, stop = q0 + 1, k1
        yield start, min(k1 - hi, stop), hi, 1
        yield max(start, k1 - hi), stop, k1, 0
        yield start, min(k0, stop), -k0, 0
        yield max(start, k0), stop, 0, -1
