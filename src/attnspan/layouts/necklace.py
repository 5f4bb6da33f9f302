"""Fair division of a sequence by few cuts: necklace splitting.

Close the sequence to a circle. Of all windows of n out of N tokens, the average work is exactly n/N of the
whole; a window that slides by one token changes its work little by little; so some window holds its fair
share of tokens *and* of work. Take it for half of the ranks, close what is left to a circle again, and divide
both circles further::

    0 . . . . . . . . . . . S        causal, 2 ranks: the window [S/4, 3S/4) has half of the tokens
    [ 0 )[  1  1  1  1 )[ 0 )        and half of the work, and the rest is head and tail

Each division adds at most two cuts, so the shares are fewer than 2 * ranks runs, whatever the mask.

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

[Note: mending] The shortest piece allowed can stand in the way of every fair window of a small circle, most
of whose work lies in one place. A rank that ends up above the goal is joined with some of the lightest ranks in turn
to a new circle, and that is divided anew; with some partner a fair window is nearly always found.

Plain numbers, not tensors: a circle has a few pieces, and an operation on a tensor takes as long as ten bisections.
Knows piecewise numbers of work and of crossing keys; knows nothing of masks, layouts or ranks' names.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, joined_runs
from attnspan.masks.piecewise import Piecewise

LOOKS = 2
"""How many windows are measured in a circle, besides one for each of its ranks, to find where the surplus changes its
sign."""

MOST_LOOKS = 16
"""For how many ranks at most; as many fair windows are sought."""

MORE_LOOKS = 64
"""How many windows are measured, where the surplus changes its sign nowhere between those, and where a short piece is
to be got rid of."""

PARTNERS = 8
"""With about how many others a rank is joined at a visit."""

VISITS = 6
"""How many visits in vain before a rank is left as it is."""

MOST_TRIES = 600
"""How often ranks that are not good enough are mended."""

FINE_TRIES = 48
"""How often those are, too, that are good enough but above the goal."""

FEW_ABOVE = 8
"""How many of those there may be at most."""

MOST_RUNS = 6
"""The most pieces that a rank is mended to."""

FEW_RUNS = 4
"""More pieces than this are made fewer, where that is as fair."""

HEAVY = 64
"""A piece with this part of a fair share is long enough."""

NEARLY = 0.01
"""By how much of a fair share a window may be off, rather than to leave a piece shorter than a chunk."""

SHORT = 1e12
"""What a cut costs that leaves a piece shorter than a chunk all the same: more than any other."""


@dataclass(frozen=True, slots=True)
class Rules:
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


def divided(seq_len: int, counts: list[int], rules: Rules) -> list[Circle] | None:
    """A circle for each rank, which gets `counts` tokens; None where no allowed cut was found."""
    whole = Circle.of([Arc(0, seq_len, 0.0, rules.work.sum_before(seq_len))], 0, len(counts), seq_len)
    circles, before = [whole], list(accumulate(counts, initial=0))
    for level in range(rules.depth):
        parts: list[Circle] = []
        for circle in circles:
            half = circle.ranks // 2
            tokens = before[circle.first + half] - before[circle.first]
            found = parted(circle, tokens, half, level, rules) if half else (circle,)
            if found is None:
                return None
            parts += found
        circles = parts
    return sorted(circles, key=lambda circle: circle.first)


def parted(circle: Circle, tokens: int, half: int, level: int, rules: Rules) -> tuple[Circle, Circle] | None:
    """A circle as two: the best window of so many tokens, for its first `half` ranks, and the rest for the others.

    The lower ranks', where both have as many, are those that come first. None if the circle cannot be cut.
    """
    found = _Search(circle, tokens, half, level, rules).best()
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


def mended(circles: list[Circle], goal: float, enough: float, rules: Rules) -> list[Circle]:
    """The circles of one rank each, those above the goal joined with a light one and divided anew. [Note: mending]

    Where many are above the goal, to mend a few changes nothing: those that are not above `enough` are left as they
    are.
    """
    mending = _Mending(circles, rules)
    mending.mend(enough, MOST_TRIES)
    if sum(circle.work > goal for circle in mending.circles) <= FEW_ABOVE:
        mending.mend(goal, FINE_TRIES)
    mending.shorten(enough)
    return mending.circles


def shards_of(circles: list[Circle]) -> Shards:
    """The runs of each rank, where each circle is of one."""
    runs = [tuple([Run(start, stop) for start, stop, _, _ in sorted(circle.pieces)]) for circle in circles]
    return tuple(map(joined_runs, runs))


class _Mending:
    """Circles of one rank each, by their work."""

    def __init__(self, circles: list[Circle], rules: Rules):
        self.circles, self.rules = [*circles], rules
        self.by_work = sorted((circle.work, number) for number, circle in enumerate(circles))

    def mend(self, limit: float, tries: int) -> None:
        """Join those above a limit with lighter ones: first those visited least in vain, then the heaviest."""
        visits = [0] * len(self.circles)  # in vain
        while tries > 0:
            above = self.by_work[bisect_right(self.by_work, (limit, len(visits))) :]
            visit, _, heavy = min([(visits[number], -work, number) for work, number in above], default=(VISITS, 0.0, 0))
            if visit == VISITS:
                break
            partners = self._partners(2 * limit - self.circles[heavy].work, visit)
            better = self._relieve(heavy, partners, limit)
            visits[heavy] = 0 if better else visit + 1
            tries -= len(partners)

    def shorten(self, limit: float) -> None:
        """Join those of many pieces, or short ones, with others, where both are then better and not above a limit."""
        self.rules = replace(self.rules, looks=MORE_LOOKS)
        bad = [number for number, circle in enumerate(self.circles) if not self._is_neat(circle)]
        for number in bad if len(bad) <= FEW_ABOVE else ():
            circle = self.circles[number]
            visits = (self._partners(2 * limit - circle.work, visit) for visit in range(VISITS))
            tried = (other for others in (self._neighbours(circle), *visits) for other in others if other != number)
            joined = ((other, self._joined(circle, self.circles[other])) for other in tried)
            neat = ((other, both) for other, both in joined if both and all(map(self._is_neat, both)))
            self._take(number, next((each for each in neat if max(each[1][0].work, each[1][1].work) <= limit), None))

    def _neighbours(self, circle: Circle) -> list[int]:
        """Those with a piece beside one of these: joined, they have one cut less."""
        ends = {end for start, stop, _, _ in circle.pieces for end in (start, stop)}
        return [
            number
            for number, other in enumerate(self.circles)
            if any(start in ends or stop in ends for start, stop, _, _ in other.pieces)
        ]

    def _is_neat(self, circle: Circle) -> bool:
        chunk = self.rules.chunk
        return len(circle.pieces) <= FEW_RUNS and min(stop - start for start, stop, _, _ in circle.pieces) >= chunk

    def _take(self, number: int, found: tuple[int, tuple[Circle, Circle]] | None) -> None:
        """Put what two circles were divided into in their places."""
        if found is None:
            return
        for place, circle in zip((number, found[0]), found[1], strict=True):
            self.by_work.remove((self.circles[place].work, place))
            self.circles[place] = circle
            insort(self.by_work, (circle.work, place))

    def _relieve(self, heavy: int, partners: list[int], limit: float) -> bool:
        """Join a circle with one of some others, the first that leaves both below the limit, or the best."""
        before, best = self.circles[heavy], None
        for light in partners:
            found = self._joined(before, self.circles[light])
            largest = inf if found is None else max(found[0].work, found[1].work)
            if found is not None and largest < (0.999 * before.work if best is None else best[0]):
                best = largest, light, found
                if largest <= limit:
                    break
        self._take(heavy, None if best is None else best[1:])
        return best is not None

    def _partners(self, most: float, visit: int) -> list[int]:
        """Some of the circles with at most so much work, or of the lightest; others at each visit."""
        fit = self.by_work[: max(bisect_right(self.by_work, (most, 0)), min(PARTNERS * VISITS, len(self.by_work) - 1))]
        stride = 1 + len(fit) // PARTNERS
        return [number for _, number in fit[visit % stride :: stride]]

    def _joined(self, heavy: Circle, light: Circle) -> tuple[Circle, Circle] | None:
        """Two circles as one, divided anew; each keeps its rank and number of tokens. None if they have many pieces."""
        pieces: list[Arc] = []
        for piece in sorted(heavy.pieces + light.pieces):
            if pieces and pieces[-1].stop == piece.start:
                piece = Arc(pieces[-1].start, piece.stop, pieces.pop().before, piece.after)
            pieces.append(piece)
        both = Circle(pieces, 0, 2, heavy.tokens + light.tokens, heavy.work + light.work)
        found = parted(both, heavy.tokens, 1, self.rules.depth, self.rules)
        if found is None or max(len(circle.pieces) for circle in found) > MOST_RUNS:
            return None
        return found[0]._replace(first=heavy.first), found[1]._replace(first=light.first)


class _Search:
    """The search in a circle for a window of some tokens for its first `half` ranks. See [Note: choosing a window]."""

    def __init__(self, circle: Circle, tokens: int, half: int, level: int, rules: Rules):
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
        few = min(self.circle.ranks, MOST_LOOKS)
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
