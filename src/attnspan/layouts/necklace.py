"""Fair division of a sequence by few cuts: necklace splitting.

Close the sequence to a circle. Of all windows of n out of N tokens, the average work is exactly n/N of the
whole; a window that slides by one token changes its work little by little; so some window holds its fair
share of tokens *and* of work. Take it for half of the ranks, close what is left to a circle again, and divide
both circles further::

    0 . . . . . . . . . . . S        causal, 2 ranks: the window [S/4, 3S/4) has half of the tokens
    [ 0 )[  1  1  1  1 )[ 0 )        and half of the work, and the rest is head and tail

Each division adds at most two cuts, so the shares are fewer than 2 * ranks runs, whatever the mask.

[Note: choosing a window] Usually many windows are fair enough. Among those whose work stays within the
tolerance, the one is taken whose ends cost least: nothing where the circle is already cut, nothing between
documents, else the keys that would have to cross. Windows with an end on a border of the work (a document, a
band) are looked at first; only if none is fair enough, exact ones are sought between them, by bisection where
the surplus changes its sign.

[Note: mending] The shortest piece allowed can stand in the way of every fair window of a small circle, most
of whose work lies in one place. A rank that ends up above the goal is joined with one of the lightest ranks
to a new circle, and that is divided anew; with some partner a fair window is nearly always found.

Knows tallies of work and of crossing keys; knows nothing of masks, layouts or ranks' names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate, pairwise

from attnspan.masks.profile import Tally
from attnspan.masks.spans import merged

Piece = tuple[int, int]
"""Positions [start, stop)."""

LOOKS = 160
"""The most windows that are measured before exact ones are sought."""

ROOTS = 24
"""The most exact windows that are sought."""

TRIES = 32
"""How often the rank with most work is mended, besides once for every 16 ranks."""

PARTNERS = 32
"""The most of the lightest ranks that it is joined with in turn; fewer where a rank has few chunks to shift."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a division must keep to, and what it is measured by."""

    work: Tally
    crossing: Tally
    fair: float  # the work of one rank
    tolerance: float  # by how much of that the last division may exceed it
    chunk: int  # the shortest piece
    depth: int  # how many divisions lie between the whole and one rank


class Necklace:
    """Pieces of the sequence, closed to a circle; a point on it is the number of tokens before it."""

    __slots__ = ("before", "load", "pieces", "rules", "starts", "tokens", "work")

    def __init__(self, pieces: list[Piece], rules: Rules):
        self.rules = rules
        self.pieces = pieces
        self.starts = list(accumulate((stop - start for start, stop in pieces), initial=0))
        self.tokens = self.starts.pop()
        before = rules.work.before
        self.before = [before(start) for start, _ in pieces]
        loads = (before(stop) - first for (_, stop), first in zip(pieces, self.before, strict=True))
        self.load = list(accumulate(loads, initial=0))
        self.work = self.load.pop()

    def work_before(self, point: int) -> int:
        """The work between the circle's origin and a point; further laps add the whole each."""
        lap, point = divmod(point, self.tokens)
        i = bisect_right(self.starts, point) - 1
        position = self.pieces[i][0] + point - self.starts[i]
        return lap * self.work + self.load[i] + self.rules.work.before(position) - self.before[i]

    def window(self, point: int, length: int) -> int:
        """The work of the window of that length that starts at a point."""
        return self.work_before(point + length) - self.work_before(point)

    def cost(self, point: int) -> int | None:
        """What a cut there costs: the keys that cross it; None if it would leave too short a piece."""
        i = bisect_right(self.starts, point % self.tokens) - 1
        start, stop = self.pieces[i]
        position = start + point % self.tokens - self.starts[i]
        if position == start:
            return 0
        if min(position - start, stop - position) < self.rules.chunk:
            return None
        return self.rules.chunk + self.rules.crossing.at(position)

    def arc(self, point: int, length: int) -> list[Piece]:
        """The pieces of a window."""
        i = bisect_right(self.starts, point) - 1
        skip = point - self.starts[i]
        out: list[Piece] = []
        while length > 0:
            start, stop = self.pieces[i]
            start += skip
            taken = min(length, stop - start)
            out.append((start, start + taken))
            length, skip, i = length - taken, 0, (i + 1) % len(self.pieces)
        return out

    def borders(self, most: int) -> Iterator[int]:
        """The points where pieces begin, the nearest cuts to them, and where the work changes its form."""
        edges = self.rules.work.edges
        slices = [(bisect_right(edges, start), bisect_left(edges, stop)) for start, stop in self.pieces]
        stride = 1 + sum(last - first for first, last in slices) // most
        for (start, stop), point, (first, last) in zip(self.pieces, self.starts, slices, strict=True):
            yield point
            if stop - start >= 2 * self.rules.chunk:
                yield point + self.rules.chunk
                yield point + stop - start - self.rules.chunk
            for edge in edges[first:last:stride]:
                yield point + edge - start
        if len(edges) < 8 * len(self.pieces):
            yield from range(0, self.tokens, self.tokens // 8 + 1)


def divided(necklace: Necklace, counts: list[int], level: int = 0) -> list[list[Piece]] | None:
    """The pieces of each rank, which get `counts` tokens each; None where no allowed cut was found."""
    if len(counts) == 1:
        return [necklace.pieces]
    half = len(counts) // 2
    parts = _parted(necklace, sum(counts[:half]), half, len(counts) - half, level)
    if parts is None:
        return None
    if counts[:half] == counts[half:]:
        parts = sorted(parts, key=lambda part: min(part.pieces))  # whose tokens come first is the lower rank
    shares = [divided(parts[0], counts[:half], level + 1), divided(parts[1], counts[half:], level + 1)]
    return None if None in shares else [pieces for share in shares if share for pieces in share]


def mended(shares: list[list[Piece]], rules: Rules, goal: int) -> list[list[Piece]]:
    """The shares with those above the goal joined with a light one each and divided anew. [Note: mending]"""
    shares = list(shares)
    work = [Necklace(pieces, rules).work for pieces in shares]
    chunks = sum(stop - start for start, stop in shares[0]) // rules.chunk
    partners = min(PARTNERS, 1 + chunks // 2)
    stuck: set[int] = set()
    for _ in range(TRIES + len(shares) // 16):
        rank = max((rank for rank in range(len(shares)) if rank not in stuck), key=work.__getitem__, default=None)
        if rank is None or work[rank] <= goal:
            break
        best, found = work[rank], None
        for other in nsmallest(partners, range(len(shares)), key=work.__getitem__):
            if best <= goal or work[other] >= best:
                break
            parts = _shared(shares[rank], shares[other], rules)
            if parts and (largest := max(part.work for part in parts)) < best:
                best, found = largest, (other, parts)
        if found is None or best > 0.999 * work[rank]:
            stuck.add(rank)  # and content with the little it gained
        for who, part in zip((rank, found[0]), found[1], strict=True) if found else ():
            shares[who], work[who] = part.pieces, part.work
    return shares


def _shared(heavy: list[Piece], light: list[Piece], rules: Rules) -> list[Necklace] | None:
    """Two ranks' pieces as one circle, divided anew; each keeps its number of tokens."""
    both = Necklace(merged(heavy + light), rules)
    return _parted(both, sum(stop - start for start, stop in heavy), 1, 1, rules.depth)


def _parted(necklace: Necklace, length: int, inner: int, outer: int, level: int) -> list[Necklace] | None:
    """A circle as two: the best window of that length, for `inner` ranks, and the rest for `outer` ranks."""
    point = _Search(necklace, length, inner, outer, level).best()
    if point is None:
        return None
    rest = (point + length) % necklace.tokens, necklace.tokens - length
    return [Necklace(necklace.arc(*window), necklace.rules) for window in ((point, length), rest)]


class _Search:
    """The search for a window of `length` tokens for `inner` ranks that leaves the rest to `outer` ranks."""

    def __init__(self, necklace: Necklace, length: int, inner: int, outer: int, level: int):
        rules = necklace.rules
        self.necklace = necklace
        self.length = length
        share = necklace.work * inner / (inner + outer)
        self.target = share
        # Work may drift from the mean a little more with each division, up to the tolerance at the last.
        allowed = 1 + rules.tolerance * min(1.0, (level + 1) / rules.depth)
        self.most = max(rules.fair * inner * allowed, share)
        self.least = min(necklace.work - rules.fair * outer * allowed, share)

    def best(self) -> int | None:
        """Where the cheapest window starts that is fair enough; else the fairest."""
        looked = self._looked()
        cheap = self._cheapest(looked)
        if cheap is not None:
            return cheap
        exact = self._exact(looked)
        cheap = self._cheapest(exact)
        return cheap if cheap is not None else self._fairest([*looked, *exact])

    def _looked(self) -> list[tuple[int, int]]:
        """(start, work) of windows that begin or end on a border, in order."""
        tokens, work_before = self.necklace.tokens, self.necklace.work_before
        windows: dict[int, int] = {}
        for border in self.necklace.borders(LOOKS // 2):
            here = work_before(border)
            windows[border % tokens] = work_before(border + self.length) - here
            windows[(border - self.length) % tokens] = here - work_before(border - self.length)
        return sorted(windows.items())

    def _exact(self, looked: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """(start, work) of windows on both sides of where the surplus changes its sign."""
        turns = [
            (a, b)
            for a, b in pairwise([*looked, (looked[0][0] + self.necklace.tokens, looked[0][1])])
            if (a[1] < self.target) != (b[1] < self.target)
        ]
        return [window for a, b in turns[:: 1 + len(turns) // ROOTS] for window in self._bisected(a, b)]

    def _bisected(self, a: tuple[int, int], b: tuple[int, int]) -> Iterable[tuple[int, int]]:
        below = a[1] < self.target
        while b[0] - a[0] > 1:
            middle = (a[0] + b[0]) // 2
            seen = middle, self.necklace.window(middle, self.length)
            if (seen[1] < self.target) == below:
                a = seen
            else:
                b = seen
        return [(point % self.necklace.tokens, work) for point, work in (a, b)]

    def _cheapest(self, windows: list[tuple[int, int]]) -> int | None:
        costs = (
            (cost, abs(work - self.target), point)
            for point, work in windows
            if self.least <= work <= self.most and (cost := self._cost(point)) is not None
        )
        best = min(costs, default=None)
        return None if best is None else best[2]

    def _fairest(self, windows: list[tuple[int, int]]) -> int | None:
        fairness = ((abs(work - self.target), point) for point, work in windows if self._cost(point) is not None)
        best = min(fairness, default=None)
        return None if best is None else best[1]

    def _cost(self, point: int) -> int | None:
        """The cost of cutting at both ends of the window; None if one of them is not allowed."""
        ends = self.necklace.cost(point), self.necklace.cost(point + self.length)
        return None if ends[0] is None or ends[1] is None else ends[0] + ends[1]
