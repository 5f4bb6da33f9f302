"""The attention metadata of a step, for kernels: the pages and positions of each sequence's keys and queries.

A step is a batch of B rows, each a sequence, and T packed queries. Row b has the queries ``offsets[b]`` to ``offsets[b
+ 1]`` and sees the local keys ``key_begins[b]`` to ``key_ends[b]``; key j is in slot ``j % page_size`` of page
``tables[b, j // page_size]``. All other slots are unowned, may hold NaN, and must not affect a result.

[Note: rows of several sequences] Sequences that share pages may read them as one row (pool.py, [Note: shared
beginnings]). Its queries then have any positions, in any order, and `latest` is the largest of them.

[Note: spread] On one device key j is position j. Over ranks, runs of `interleave` positions are dealt in turn, and key
j of rank r is position ``(j // interleave * ranks + r) * interleave + j % interleave``. Positions grow with j.

The numbers are stored twice: as int32 tensors for kernels, and as ints for decisions on the host (sizes and slices),
which must not wait for the device. Knows nothing of layers, masks or scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnspan.paged.quantised import Quantised

T = TypeVar("T")
N = TypeVar("N", int, Tensor)


@dataclass(frozen=True, slots=True)
class Spread:
    """How positions are distributed over ranks, and the number of this rank. See [Note: spread].

    >>> Spread(interleave=2, ranks=2, rank=1).local_length(7)  # positions 2 and 3, and 6
    3
    >>> [Spread(2, 2, 1).position(j) for j in range(3)]
    [2, 3, 6]
    """

    interleave: int = 1
    ranks: int = 1
    rank: int = 0

    def local_length(self, length: int) -> int:
        """How many of the first `length` positions are on this rank."""
        rounds, rest = divmod(length, self.interleave * self.ranks)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def position(self, key: N) -> N:
        """The position of this rank's key number `key`; an int or a tensor."""
        if self.ranks == 1:
            return key
        run = key // self.interleave
        return (run * self.ranks + self.rank) * self.interleave + key - run * self.interleave


ONE_RANK = Spread()

Pages = Tensor | Quantised
"""One layer's keys or values: (pages, page_size, heads, dim)."""


def tensors(*pages: Pages) -> list[Tensor]:
    """The tensors of pages: the pages themselves, or their codes and scales."""
    return [x for each in pages for x in ((each.codes, each.scales) if isinstance(each, Quantised) else (each,))]


@dataclass(frozen=True, slots=True, eq=False)
class PagedMetadata:
    """Tables, key ranges and queries of B rows. See the file's docstring."""

    page_size: int
    tables: Tensor  # (B, W) int32; entries past a row's pages mean nothing; there is at least one
    key_begins: Tensor  # (B,) int32
    key_ends: Tensor  # (B,) int32
    offsets: Tensor  # (B + 1,) int32
    rows: Tensor  # (T,) int32: which row a query is of
    positions: Tensor  # (T,) int32: where in its sequence a query is
    query_lens: tuple[int, ...]  # per row, on the host
    host_key_begins: tuple[int, ...]
    host_key_ends: tuple[int, ...]
    query_starts: tuple[int, ...]  # the position of each row's first query, on the host
    latest: int | None = None  # see [Note: rows of several sequences]
    spread: Spread = ONE_RANK
    merged: bool = False  # whether the result is joined with others, and should not be rounded yet
    for_graphs: bool = False  # whether a CUDA graph may replay the step later, for other lengths
    memo: dict[object, Any] = field(default_factory=dict, repr=False)

    def once(self, what: object, work: Callable[[], T]) -> T:
        """The result of `work`, computed once per step and shared by layers."""
        if what not in self.memo:
            self.memo[what] = work()
        found: T = self.memo[what]
        return found

    @property
    def in_order(self) -> bool:
        """Whether each row's queries are at consecutive positions, as those of one sequence are."""
        return self.latest is None

    def last(self, row: int) -> int:
        """The position of a row's last query."""
        return self.query_starts[row] + self.query_lens[row] - 1 if self.latest is None else self.latest

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of each row's keys."""
        return tuple(zip(self.host_key_begins, self.host_key_ends, strict=True))

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.query_lens)

    def keys_of(self, pages: Pages, row: int, first: int, last: int) -> Tensor:
        """Keys [first, last) of a row as (last - first, Hk, D): a copy, of whole pages except for the ends."""
        if isinstance(pages, Quantised):
            codes, scales = (self.keys_of(part, row, first, last) for part in (pages.codes, pages.scales))
            return Quantised(codes, scales, pages.dtype).dequantise()
        size = self.page_size
        low, high = first // size, -(-last // size)
        # Rows of one long dim, by 64-bit indices: on a CPU ten times as fast as pages of three dims by 32-bit ones.
        rows = pages.flatten(1) if pages.is_contiguous() else pages  # not where values are a part of keys
        found = rows.index_select(0, self.tables[row, low:high].long()).view(-1, *pages.shape[2:])
        return found[first - low * size : last - low * size]

    def key_positions(self, first: int, last: int) -> Tensor:
        """The positions of keys [first, last), (last - first,)."""
        return self.spread.position(torch.arange(first, last, device=self.tables.device))
