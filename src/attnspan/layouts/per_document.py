"""Head and tail of every document, dealt to every rank.

A document is cut into 2 * ranks chunks; chunk i goes to rank i and, from the back, to rank 2 * ranks - 1 - i,
so that each rank does an equal part of each document. The shards are rank-major: a rank holds its chunks of
all documents.

[Note: leftover tokens] A length is seldom a multiple of 2 * ranks. The tokens that are left over make some
chunks one longer, and the turn to receive one passes from rank to rank across documents, so that in the end
no two ranks differ by more than one token, and every batch row ends with the same counts. A rank's token can
lengthen its head chunk, where causal work is light, or its tail chunk, where it is heavy: each document takes
the side that leaves the ranks more even.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from attnspan.errors import LayoutError
from attnspan.layouts.layout import Layout, Shards, check_ranks
from attnspan.layouts.run import Run
from attnspan.masks import Documents
from attnspan.masks.documents import Lengths, Rows


@dataclass(frozen=True, slots=True, init=False)
class PerDocument(Layout):
    """Rank r owns chunk r and chunk 2*ranks-1-r of every document, whatever its length.

    `lengths` is one list, or one list per batch row, as for the mask `Documents`.

    >>> PerDocument([4, 12], ranks=2).positions(16)
    [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]
    >>> PerDocument([3, 2, 2], ranks=3).tokens(7)  # documents may be shorter than 2 * ranks
    [3, 2, 2]
    """

    lengths: Rows
    ranks: int

    def __init__(self, lengths: Lengths, *, ranks: int):
        object.__setattr__(self, "ranks", check_ranks(ranks))
        object.__setattr__(self, "lengths", Documents(lengths).lengths)  # checked there

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def natural_len(self) -> int | None:
        return sum(self.lengths[0])

    def _shards(self, seq_len: int, row: int) -> Shards:
        lengths = self.lengths[row]
        if sum(lengths) != seq_len:
            raise LayoutError(
                f"lengths must sum to seq_len ({seq_len}), got {len(lengths)} documents "
                f"with sum {sum(lengths)}; a layout for another length needs its own lengths"
            )
        dealer = _Dealer(self.ranks)
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            dealer.deal(start, length)
        return tuple(tuple(runs) for runs in dealer.shards)

    def __repr__(self) -> str:
        lengths = [list(row) for row in self.lengths]
        return f"PerDocument({lengths[0] if len(lengths) == 1 else lengths}, ranks={self.ranks})"


class _Dealer:
    """Deals documents one after another; remembers whose turn it is and who has worked how much."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.shards: list[list[Run]] = [[] for _ in range(ranks)]
        self.work = [0] * ranks
        self.turn = 0

    def deal(self, start: int, length: int) -> None:
        size, left = divmod(length, 2 * self.ranks)
        extra = [left // self.ranks] * self.ranks
        for i in range(left % self.ranks):
            extra[(self.turn + i) % self.ranks] += 1
        self.turn = (self.turn + left) % self.ranks
        sides = [self._chunks(size, extra, heavy) for heavy in ((False, True) if left else (False,))]
        chunks, self.work = min(((c, self._worked(c)) for c in sides), key=lambda side: max(side[1]))
        for slot, (a, b) in enumerate(chunks):
            if a < b:
                self.shards[self._owner(slot)].append(Run(start + a, start + b))

    def _chunks(self, size: int, extra: list[int], heavy: bool) -> list[tuple[int, int]]:
        """The document's chunks; a single extra token lengthens the tail chunk if `heavy`, else the head."""
        heads = [size + (n == 2 or (n == 1 and not heavy)) for n in extra]
        tails = [size + (n == 2 or (n == 1 and heavy)) for n in extra]
        edges = list(accumulate([*heads, *reversed(tails)], initial=0))
        return list(pairwise(edges))

    def _worked(self, chunks: list[tuple[int, int]]) -> list[int]:
        """The causal work of every rank after these chunks."""
        work = list(self.work)
        for slot, (a, b) in enumerate(chunks):
            work[self._owner(slot)] += (b - a) * (a + b + 1) // 2
        return work

    def _owner(self, slot: int) -> int:
        return min(slot, 2 * self.ranks - 1 - slot)
