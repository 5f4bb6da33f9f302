"""Fair division of a sequence by few cuts: necklace splitting.

Close the sequence to a circle. Of all windows of n out of N tokens, the average work is exactly n/N of the
whole; a window that slides by one token changes its work little by little; so some window holds its fair
share of tokens *and* of work. Take it for half of the ranks, close what is left to a circle again, and divide
both circles further::

    0 . . . . . . . . . . . S        causal, 2 ranks: the window [S/4, 3S/4) has half of the tokens
    [ 0 )[  1  1  1  1 )[ 0 )        and half of the work, and the rest is head and tail

Each division (fair_window.py) adds at most two cuts, so the shares are fewer than 2 * ranks runs, whatever the mask.

[Note: mending] The shortest piece allowed can stand in the way of every fair window of a small circle, most
of whose work lies in one place. A rank that ends up above the goal is joined with some of the lightest ranks in turn
to a new circle, and that is divided anew; with some partner a fair window is nearly always found.

Plain numbers, not tensors: a circle has a few pieces, and an operation on a tensor takes as long as ten bisections.
Knows piecewise numbers of work and of crossing keys; knows nothing of masks, layouts or ranks' names.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import replace
from itertools import accumulate
from math import inf

from attnspan.layouts.fair_window import MORE_LOOKS, Arc, Circle, DivisionRules, parted
from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, joined_runs

PARTNERS = 8
"""With about how many others a rank is joined at a visit."""

VISITS = 6
"""How many visits in vain before a rank is left as it is."""

MAX_TRIES = 600
"""How often ranks that are not good enough are mended."""

FINE_TRIES = 48
"""How often those are, too, that are good enough but above the goal."""

FEW_ABOVE = 8
"""How many of those there may be at most."""

MAX_RUNS = 6
"""The most pieces that a rank is mended to."""

FEW_RUNS = 4
"""More pieces than this are made fewer, where that is as fair."""


def divided(seq_len: int, counts: list[int], rules: DivisionRules) -> list[Circle] | None:
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


def mended(circles: list[Circle], goal: float, enough: float, rules: DivisionRules) -> list[Circle]:
    """The circles of one rank each, those above the goal joined with a light one and divided anew. [Note: mending]

    Where many are above the goal, to mend a few changes nothing: those that are not above `enough` are left as they
    are.
    """
    mending = _Mending(circles, rules)
    mending.mend(enough, MAX_TRIES)
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

    def __init__(self, circles: list[Circle], rules: DivisionRules):
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
        if found is None or max(len(circle.pieces) for circle in found) > MAX_RUNS:
            return None
        return found[0]._replace(first=heavy.first), found[1]._replace(first=light.first)
