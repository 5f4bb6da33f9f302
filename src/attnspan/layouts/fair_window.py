"""One division of a circle of tokens: a window with its fair share of tokens and work, and the rest (necklace.py).

[Note: points] A point is a place on a circle: the number of its tokens before it, from 0. A window that passes the end
of its circle goes on at its beginning, so the pieces of a circle are listed for two laps.

[Note: choosing a window] Where the surplus of a window changes its sign between two of a few points, a fair window lies
between them, and is found by bisection. Beside it lie others that are fair enough. Of these, the one is taken whose
ends cost least: nothing where the circle is already cut, nothing between documents, else the keys that would have to
cross. So the windows that are looked at have an end on the nearest borders of the work (a document, a band). How many
are looked at does not depend on how many borders there are.

[Note: shortest piece] A piece has at least `chunk` tokens, or some part of a fair share of work: where a few rows see
so many keys that they are more than a rank can have, only shorter pieces are fair. Those are cut out only where no
other window is fair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from attnspan.masks.piecewise import Piecewise

LOOKS = 2
"""How many windows are measured in a circle, besides one for each of its ranks, to find where the surplus changes its
sign."""

MAX_LOOKS = 16
"""For how many ranks at most; as many fair windows are sought."""

MORE_LOOKS = 64
"""How many windows are measured, where the surplus changes its sign nowhere between those, and where a short piece is
to be got rid of."""

HEAVY = 64
"""A piece with this part of a fair share is long enough."""

NEARLY = 0.01
"""By how much of a fair share a window may be off, rather than to leave a piece shorter than a chunk."""

SHORT = 1e12
"""What a cut costs that leaves a piece shorter than a chunk all the same: more than any other."""


@dataclass(frozen=True, slots=True)
class DivisionRules:
    """What a division must keep to, and what it is measured by."""

    work: Piecewise
    crossing: Piecewise
    fair: float  # the work of one rank
    tolerance: float  # by how much of that the last division may exceed it
    chunk: int  # the shortest piece
    depth: int  # how many divisions lie between the whole and one rank
    looks: int = LOOKS


Cut = tuple[int, float]
"""A position, and the work of the rows before it."""


class Arc(NamedTuple):
    """Positions [start, stop) of the sequence, and the work of the rows before each of them."""

    start: int
    stop: int
    before: float
    after: float


class Circle(NamedTuple):
    """Pieces in a circle, of `ranks` ranks from number `first` on. See [Note: points]."""

    pieces: list[Arc]
    first: int
    ranks: int
    tokens: int
    work: float

    @staticmethod
    def of(pieces: list[Arc], first: int, ranks: int, tokens: int) -> Circle:
        return Circle(pieces, first, ranks, tokens, sum([after - before for _, _, before, after in pieces]))


def parted(circle: Circle, tokens: int, half: int, level: int, rules: DivisionRules) -> tuple[Circle, Circle] | None:
    """A circle as two: the best window of so many tokens, for its first `half` ranks, and the rest for the others.

    The lower ranks', where both have as many, are those that come first. None if the circle cannot be cut.
    """
    found = WindowSearch(circle, tokens, half, level, rules).best()
    if found is None:
        return None
    window, rest = found
    first, others, left = circle.first, circle.ranks - half, circle.tokens - tokens
    alike = half == others and left == tokens
    below = others if alike and min(rest)[0] < min(window)[0] else 0  # how many ranks of the rest come first
    return (
        Circle.of(window, first + below, half, tokens),
        Circle.of(rest, first if below else first + half, others, left),
    )


class WindowSearch:
    """The search in a circle for a window of some tokens for its first `half` ranks. See [Note: choosing a window]."""

    def __init__(self, circle: Circle, tokens: int, half: int, level: int, rules: DivisionRules):
        self.circle, self.tokens, self.rules = circle, tokens, rules
        self.edges = rules.work.lists[0]
        self.line, self.shift, self.ahead = _two_laps(circle)
        # Of two equal halves, a window and the rest are cut out alike: half a lap holds all of them.
        self.lap = tokens if 2 * tokens == circle.tokens and 2 * half == circle.ranks else circle.tokens
        self.target = share = circle.work * half / circle.ranks
        # Work may drift from the mean a little more with each division, up to the tolerance at the last.
        allowed = rules.fair * (1 + rules.tolerance * min(1.0, (level + 1) / rules.depth))
        self.most = max(allowed * half, share)
        self.least = min(circle.work - allowed * (circle.ranks - half), share)
        self.work = self._window_work()
        self.found: dict[int, float] = {}  # the work of the windows that were looked at, by where they start

    def best(self) -> tuple[list[Arc], list[Arc]] | None:
        """The cheapest window that is fair enough, else the fairest, and the rest; None if none can be cut out."""
        few = min(self.circle.ranks, MAX_LOOKS)
        cost, start = self._searched(self.rules.looks + few, 2 + few)
        if cost < SHORT:
            return self._parts(start)
        fairest = sorted([(abs(work - self.target), point) for point, work in self.found.items()])
        near = self.rules.fair * NEARLY
        long = next((point for off, point in fairest if off <= near and self._cost(point) < SHORT), None)
        if long is not None or cost < inf:
            return self._parts(start if long is None else long)
        found = next((point for _, point in fairest if self._cost(point) < inf), None)
        return None if found is None else self._parts(found)

    def _searched(self, looks: int, roots: int) -> tuple[float, int]:
        """Of the windows near some roots, the cost and the start of the cheapest that is fair enough."""
        lap, tokens, least, most, target = self.lap, self.tokens, self.least, self.most, self.target
        turns = self._turns(looks) or self._turns(MORE_LOOKS)
        for turn in turns[:: 1 + len(turns) // roots]:
            root = self._root(*turn) % lap
            for point in self._borders(root):
                self._look(point % lap)
            for point in self._borders(root + tokens):
                self._look((point - tokens) % lap)
        fair = [(self._cost(p), abs(work - target), p) for p, work in self.found.items() if least <= work <= most]
        cost, _, start = min(fair, default=(inf, 0.0, 0))
        return cost, start

    def _look(self, point: int) -> float:
        """Measure the window that starts at a point, once."""
        work = self.found.get(point)
        if work is None:
            work = self.found[point] = self.work(point)
        return work

    def _turns(self, looks: int) -> list[tuple[int, int, bool]]:
        """Between which starts of windows the surplus changes its sign, and whether it rises; measures some."""
        lap, tokens, target = self.lap, self.tokens, self.target
        points = {lap * i // looks for i in range(looks)}
        for at in self.line[: len(self.circle.pieces)]:  # windows that begin, or end, where the circle is cut
            points.add(at % lap)
            points.add((at - tokens) % lap)
        starts = sorted(points)
        below = [self._look(point) < target for point in starts]
        # After half a lap, the window is what was the rest.
        below.append(below[0] if lap == self.circle.tokens else self.found[starts[0]] > target)
        starts.append(starts[0] + lap)
        return [(starts[i], starts[i + 1], now) for i, now in enumerate(below[:-1]) if now != below[i + 1]]

    def _root(self, low: int, high: int, rises: bool) -> int:
        """Between windows on both sides of the target, one that is fair, or the last before the change."""
        work, target, found, far = self.work, self.target, self.found, self.circle.tokens
        least, most = self.least - target, self.most - target
        a, b, halve = abs(found[low] - target), abs(found[high % self.lap] - target), False
        while high - low > 1:
            middle = (low + high) // 2 if halve else low + 1 + int((high - low - 2) * a / (a + b or 1.0))
            point = middle if middle < far else middle - far
            surplus = work(point) - target
            if point < self.lap:
                found[point] = surplus + target
            if least <= surplus <= most:
                return middle
            if (surplus < 0) == rises:
                low, a = middle, abs(surplus)
            else:
                high, b = middle, abs(surplus)
            halve = not halve
        return low

    def _borders(self, point: int) -> list[int]:
        """The nearest places to cut inside of a piece: borders of the work, and the shortest pieces from its ends."""
        k = bisect_right(self.line, point) - 1
        shift, edges, chunk = self.shift[k], self.edges, self.rules.chunk
        start, stop, _, _ = self.circle.pieces[k % len(self.circle.pieces)]
        i = bisect_right(edges, point + shift)
        places = [*edges[max(i - 2, 0) : i + 2], start + chunk, stop - chunk]
        return [place - shift for place in places if start < place < stop]

    def _cost(self, start: int) -> float:
        """The cost of cutting at both ends of a window."""
        first = self._cost_at(start)
        return first if first == inf else first + self._cost_at(start + self.tokens)

    def _cost_at(self, point: int) -> float:
        """What a cut costs: the chunks of keys that cross it; infinite if it leaves too short a piece."""
        k = bisect_right(self.line, point) - 1
        if point == self.line[k]:
            return 0.0
        rules, at, penalty = self.rules, point + self.shift[k], 0.0
        start, stop, before, after = self.circle.pieces[k % len(self.circle.pieces)]
        if at - start < rules.chunk or stop - at < rules.chunk:  # [Note: shortest piece]
            work, long, penalty = rules.work.sum_before(at), rules.fair / HEAVY, SHORT
            if (at - start < rules.chunk and work - before < long) or (stop - at < rules.chunk and after - work < long):
                return inf
        return penalty + 1 + ceil(rules.crossing.number_at(at) / rules.chunk)

    def _window_work(self) -> Callable[[int], float]:
        """The work of the window that starts at a point, as a function."""
        edges, a, b, c = self.rules.work.lists
        line, shift, ahead, tokens = self.line, self.shift, self.ahead, self.tokens

        def window(point: int) -> float:
            k = bisect_right(line, point) - 1
            at = point + shift[k]
            i = bisect_right(edges, at) - 1
            before = ahead[k] + a[i] + at * (b[i] + c[i] * at)
            point += tokens
            k = bisect_right(line, point) - 1
            at = point + shift[k]
            i = bisect_right(edges, at) - 1
            return ahead[k] + a[i] + at * (b[i] + c[i] * at) - before

        return window

    def _parts(self, point: int) -> tuple[list[Arc], list[Arc]]:
        """The pieces of the window that starts at a point, and the others."""
        end, count, work = point + self.tokens, len(self.circle.pieces), self.rules.work
        first, last = bisect_right(self.line, point) - 1, bisect_right(self.line, end) - 1
        at, until = point + self.shift[first], end + self.shift[last]
        cuts = (at, work.sum_before(at)), (until, work.sum_before(until))
        late = count if end >= self.circle.tokens else 0  # the window ends in the second lap
        pieces = self.circle.pieces * 2
        return (
            _between(pieces[first : last + 1], cuts[0], cuts[1]),
            _between(pieces[last - late : first + count - late + 1], cuts[1], cuts[0]),
        )


def _two_laps(circle: Circle) -> tuple[list[int], list[int], list[float]]:
    """Of each piece, for two laps: the point where it begins, the shift from a point of it to its position, and the
    work on the circle before it, less that of the sequence before it."""
    line, shift, ahead = [], [], []
    point, work = 0, 0.0
    for start, stop, before, after in circle.pieces * 2:
        line.append(point)
        shift.append(start - point)
        ahead.append(work - before)
        point += stop - start
        work += after - before
    return line, shift, ahead


def _between(pieces: list[Arc], first: Cut, last: Cut) -> list[Arc]:
    """Pieces from a cut in the first of them to a cut in the last."""
    start, _, before, _ = pieces[-1]
    pieces[-1] = Arc(start, last[0], before, last[1])
    _, stop, _, after = pieces[0]
    pieces[0] = Arc(first[0], stop, first[1], after)
    return pieces if pieces[-1].start < pieces[-1].stop else pieces[:-1]
