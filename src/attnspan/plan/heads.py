"""Which heads a rank of a Ulysses group takes, for any number of heads and ranks.

Query heads are dealt in spans whose sizes differ by at most one; a rank also takes the key heads that its query heads
use. With fewer key heads than ranks, neighbours take the same key head (it is sent to both, and their gradients are
summed at home). Where key heads outnumber the ranks, spans end at key-head borders, so that no key head is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from attnspan.errors import PlanError


class Heads(NamedTuple):
    """The query heads and key heads of one rank of a group."""

    query: range
    key: range


def split_heads(heads: int, kv_heads: int, degree: int) -> tuple[Heads, ...]:
    """The heads of each rank of a group of `degree`.

    >>> for share in split_heads(heads=8, kv_heads=2, degree=4):
    ...     print(share)
    Heads(query=range(0, 2), key=range(0, 1))
    Heads(query=range(2, 4), key=range(0, 1))
    Heads(query=range(4, 6), key=range(1, 2))
    Heads(query=range(6, 8), key=range(1, 2))
    """
    if heads % kv_heads:
        raise PlanError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    group = heads // kv_heads
    unit = group if kv_heads >= degree else 1
    edges = [i * (heads // unit) // degree * unit for i in range(degree + 1)]
    return tuple(
        Heads(range(a, b), range(a // group, -(-b // group) if b > a else a // group)) for a, b in pairwise(edges)
    )


def repeats_key_heads(shares: Sequence[Heads]) -> bool:
    """Whether several ranks take the same key head, and so each has a part of its gradient.

    >>> repeats_key_heads(split_heads(heads=8, kv_heads=2, degree=4)), repeats_key_heads(split_heads(8, 2, 2))
    (True, False)
    """
    taken = [head for share in shares for head in share.key]
    return len(taken) > len(set(taken))
