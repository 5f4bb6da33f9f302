"""How many keys cross a cut: what it costs to part a sequence at a position.

If a cut at p parts two ranks, queries from p on need the keys before p that they see, and the other way
round. For one band both counts are linear between a few positions, so that for any mask their sum is piecewise linear,
asked in O(log bands). Keys that several bands share are counted by each: an estimate from above, exact where
bands share none (documents).
"""

from __future__ import annotations

import torch

from attnspan.masks.columns import Columns
from attnspan.masks.piecewise import Pieces


def crossing(bands: Columns) -> Pieces:
    """The number of keys of bands that cross a cut at p.

    >>> from attnspan.masks.band import tight
    >>> from attnspan.masks.piecewise import weighted
    >>> causal = weighted(crossing, [(1, Columns.of([tight(0, 4, 0, 4, hi=0)]))])
    >>> causal.at(torch.arange(5)).tolist()  # a cut at 3: the last query needs three keys
    [0.0, 1.0, 2.0, 3.0, 0.0]
    >>> full = weighted(crossing, [(1, Columns.of([tight(0, 4, 0, 4)]))])
    >>> full.at(torch.arange(5)).tolist()  # whichever side they are on, all four keys are needed on the other
    [0.0, 4.0, 4.0, 4.0, 0.0]
    """
    q0, q1, k0, k1, lo, hi = bands
    zero, one = torch.zeros_like(q0).double(), torch.ones_like(q0).double()
    # Keys max(k0, p + lo) <= k < min(k1, p) are seen by a query from p on, where lo < 0.
    start, stop = k0, torch.where(lo < 0, torch.minimum(q1, k1 - lo), k0)
    pieces = [
        (start, torch.minimum(k1, stop), zero, one),
        (torch.maximum(start, k1), stop, k1.double(), zero),
        (start, torch.minimum(k0 - lo, stop), -k0.double(), zero),
        (torch.maximum(start, k0 - lo), stop, -lo.double(), -one),
    ]
    # Keys max(k0, p) <= k < min(k1, p + hi) are seen by a query before p, where hi > 0.
    start, stop = q0 + 1, torch.where(hi > 0, k1, q0)
    return [
        *pieces,
        (start, torch.minimum(k1 - hi, stop), hi.double(), one),
        (torch.maximum(start, k1 - hi), stop, k1.double(), zero),
        (start, torch.minimum(k0, stop), -k0.double(), zero),
        (torch.maximum(start, k0), stop, zero, -one),
    ]
