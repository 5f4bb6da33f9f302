"""Fair division of a sequence by few cuts: necklace splitting.

Close the sequence to a circle. Of all windows of n out of N tokens, the average work is exactly n/N of the
whole; a window that slides by one token changes its work little by little; so some window holds its fair
share of tokens *and* of work. Take it for half of the ranks, close what is left to a circle again, and divide
both circles further::

    0 . . . . . . . . . . . S        causal, 2 ranks: the window [S/4, 3S/4) has half of the tokens
    [ 0 )[  1  1  1  1 )[ 0 )        and half of the work, and the rest is head and tail

Each division adds at most two cuts, so the shares are fewer than 2 * ranks runs, whatever the mask.

[Note: one line] The circles of one level lie one after another on a line of tokens, and are divided all at once, with
a few operations on tensors. A point is a place on that line. A window that passes the end of its circle goes on at its
beginning.

[Note: choosing a window] Usually many windows are fair enough. Among those whose work stays within the
tolerance, the one is taken whose ends cost least: nothing where the circle is already cut, nothing between
documents, else the keys that would have to cross. Windows with an end on a border of the work (a document, a
band) are looked at. Where none of those is fair, exact ones are sought between them, where the surplus changes its
sign.

[Note: shortest piece] A piece has at least `chunk` tokens, or some part of a fair share of work: where a few rows see
so many keys that they are more than a rank can have, only shorter pieces are fair.

[Note: mending] The shortest piece allowed can stand in the way of every fair window of a small circle, most
of whose work lies in one place. A rank that ends up above the goal is joined with some of the lightest ranks in turn
to a new circle, and that is divided anew; with some partner a fair window is nearly always found.

Knows piecewise numbers of work and of crossing keys; knows nothing of masks, layouts or ranks' names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, joined_runs
from attnspan.masks.columns import counted
from attnspan.masks.piecewise import Piecewise

LOOKS = 80
"""The most borders of the work in a circle that windows are begun and ended at."""

ROOTS = 6
"""About how many exact windows are sought in a circle."""

ROUNDS = 24
"""How often the ranks with most work are mended."""

FINE_ROUNDS = 2
"""How often those are, too, that are good enough but above the goal."""

TRIES = 6
"""How often in vain before a rank is left as it is."""

PAIRS = 96
"""About how many circles of two ranks are tried at once."""

MOST_RUNS = 6
"""The most pieces that a rank is mended to."""

AT_ONCE = 1024
"""About how many windows are measured at once where exact ones are sought."""

HEAVY = 64
"""A piece with this part of a fair share is long enough."""

SPACED = 8
"""How many points at equal distances are looked at in a circle, where the work has few edges."""

FAR = 1 << 62


@dataclass(frozen=True, slots=True)
class Rules:
    """What a division must keep to, and what it is measured by."""

    work: Piecewise
    crossing: Piecewise
    fair: float  # the work of one rank
    tolerance: float  # by how much of that the last division may exceed it
    chunk: int  # the shortest piece
    depth: int  # how many divisions lie between the whole and one rank


@dataclass(frozen=True)
class Circles:
    """Pieces [start, stop) of the sequence, each in a circle; on a line, circle after circle. See [Note: one line].

    `circle` is the number of a piece's circle, ascending; `first` and `ranks` are whose circles they are.
    """

    start: Tensor
    stop: Tensor
    circle: Tensor
    first: Tensor
    ranks: Tensor
    rules: Rules

    @cached_property
    def line(self) -> Tensor:
        """Where each piece begins on the line."""
        return (self.stop - self.start).cumsum(0) - (self.stop - self.start)

    @cached_property
    def tokens(self) -> Tensor:
        """Of each circle."""
        return torch.zeros_like(self.first).index_add(0, self.circle, self.stop - self.start)

    @cached_property
    def origin(self) -> Tensor:
        """Where each circle begins on the line."""
        return self.tokens.cumsum(0) - self.tokens

    @cached_property
    def end(self) -> Tensor:
        """Where each circle ends on the line."""
        return self.origin + self.tokens

    @cached_property
    def shift(self) -> Tensor:
        """From a point of each piece on the line to its position."""
        return self.start - self.line

    @cached_property
    def _ends(self) -> Tensor:
        return self.rules.work.before(torch.stack([self.start, self.stop]))

    @cached_property
    def _loads(self) -> Tensor:
        return self._ends[1] - self._ends[0]

    @cached_property
    def _ahead(self) -> Tensor:
        """The work on the line before each piece, less that of the sequence before it."""
        return self._loads.cumsum(0) - self._ends[1]

    @cached_property
    def work(self) -> Tensor:
        """Of each circle."""
        return self._loads.new_zeros(len(self.first)).index_add(0, self.circle, self._loads)

    def piece_at(self, points: Tensor) -> Tensor:
        """The number of the piece that each point lies in."""
        return torch.searchsorted(self.line, points, right=True) - 1

    def work_before(self, points: Tensor) -> Tensor:
        """The work on the line before each point."""
        piece = self.piece_at(points)
        return self._ahead[piece] + self.rules.work.before(self.shift[piece] + points)

    def wrapped(self, points: Tensor, circle: Tensor) -> Tensor:
        """Points less than a lap after their circle, on it."""
        return torch.where(points < self.end[circle], points, points - self.tokens[circle])

    def windows(self, starts: Tensor, ends: Tensor, circle: Tensor) -> Tensor:
        """The work of the windows between two points each."""
        before = self.work_before(torch.stack([starts, ends]))
        return before[1] - before[0] + torch.where(ends < starts, self.work[circle], 0.0)

    def cost(self, points: Tensor) -> Tensor:
        """What a cut at each point costs: the chunks of keys that cross it; infinite if it leaves too short a piece."""
        piece = self.piece_at(points)
        at = self.shift[piece] + points
        inside, before, (first, last) = at - self.start[piece], self.rules.work.before(at), self._ends[:, piece]
        enough = self._enough(inside, before - first) & self._enough(self.stop[piece] - at, last - before)
        chunks = 1 + torch.ceil(self.rules.crossing.at(at) / self.rules.chunk)
        return torch.where(inside == 0, 0.0, torch.where(enough, chunks, torch.inf))

    def _enough(self, tokens: Tensor, work: Tensor) -> Tensor:
        """Whether pieces are long enough. [Note: shortest piece]"""
        return (tokens >= self.rules.chunk) | (work >= self.rules.fair / HEAVY)

    def borders(self) -> tuple[Tensor, Tensor]:
        """Where pieces begin, the nearest cuts to them, and where the work changes its form, on the line; their circle.

        Of the edges of the work inside of pieces evenly some, where a circle has many; points at equal distances, where
        it has few.
        """
        chunk, edges, size = self.rules.chunk, self.rules.work.edges, self.stop - self.start
        long = (size >= 2 * chunk).nonzero().squeeze(1)
        first = torch.searchsorted(edges, self.start, right=True)
        count = (torch.searchsorted(edges, self.stop) - first).clamp(min=0)
        stride = (1 + torch.zeros_like(self.first).index_add(0, self.circle, count) // LOOKS)[self.circle]
        piece, turn = counted((count + stride - 1) // stride)
        inner = edges[first[piece] + turn * stride[piece]] - self.shift[piece]
        borders = [self.line, self.line[long] + chunk, self.line[long] + size[long] - chunk, inner]
        circle = [self.circle, self.circle[long], self.circle[long], self.circle[piece]]
        if len(edges) < SPACED * len(self.start):
            parts = torch.arange(SPACED, device="cpu").unsqueeze(1)
            borders.append((self.origin + parts * self.tokens // SPACED).flatten())
            circle.append(torch.arange(len(self.first), device="cpu").repeat(SPACED))
        return torch.cat(borders), torch.cat(circle)

    def shards(self, ranks: int) -> Shards:
        """The runs of each rank, where each circle is of one rank."""
        out: list[list[Run]] = [[] for _ in range(ranks)]
        owners = self.first[self.circle].tolist()
        for start, stop, rank in sorted(zip(self.start.tolist(), self.stop.tolist(), owners, strict=True)):
            out[rank].append(Run(start, stop))
        return tuple(joined_runs(tuple(runs)) for runs in out)


def divided(seq_len: int, counts: list[int], rules: Rules) -> Circles | None:
    """A circle for each rank, which gets `counts` tokens; None where no allowed cut was found."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    circles = Circles(zero, zero + seq_len, zero, zero, zero + len(counts), rules)
    before = torch.tensor([0, *counts], device="cpu").cumsum(0)
    for level in range(rules.depth):
        half = circles.ranks // 2
        circles = parted(circles, before[circles.first + half] - before[circles.first], half, level)
    return circles if len(circles.first) == len(counts) else None


def parted(circles: Circles, length: Tensor, half: Tensor, level: int) -> Circles:
    """Each circle as two: the best window of `length` tokens, for its first `half` ranks, and the rest for the others.

    A circle of one rank stays as it is, and so does one that cannot be cut.
    """
    points = _Search(circles, length, half, level).best()
    half = torch.where(points < FAR, half, 0)
    many, number = half > 0, torch.arange(len(half), device="cpu")
    # The line is cut at both ends of the windows, and each circle turned so that it begins with its window.
    points = torch.where(many, points, circles.origin)
    ends = circles.wrapped(points + length, number)
    cuts = torch.cat([circles.line, points[many], ends[many]]).unique()
    piece = circles.piece_at(cuts)
    start, circle = circles.start[piece] + cuts - circles.line[piece], circles.circle[piece]
    turned = (cuts - points[circle]) % circles.tokens[circle]
    size = torch.diff(cuts, append=circles.tokens.sum().unsqueeze(0))
    order = (circles.origin[circle] + turned).argsort()
    number = circle + (many.cumsum(0) - many.long())[circle] + (many[circle] & (turned >= length[circle]))
    start, size, number = start[order], size[order], number[order]
    return _named(circles, half, start, start + size, number)


def _named(circles: Circles, half: Tensor, start: Tensor, stop: Tensor, number: Tensor) -> Circles:
    """The parts of circles and whose they are: the lower ranks', where both have as many, are those that come first."""
    old = torch.arange(len(half), device="cpu").repeat_interleave(1 + (half > 0).long())
    second = torch.diff(old, prepend=old.new_full((1,), -1)) == 0
    all_ranks, lower = circles.ranks[old], half[old]
    ranks = torch.where(second, all_ranks - lower, torch.where(lower > 0, lower, all_ranks))
    earliest = torch.full_like(old, FAR).scatter_reduce(0, number, start, "amin")
    tokens = torch.zeros_like(old).index_add(0, number, stop - start)
    last = second.nonzero().squeeze(1)
    alike = (tokens[last] == tokens[last - 1]) & (ranks[last] == ranks[last - 1])
    swapped = last[alike & (earliest[last] < earliest[last - 1])]
    first = circles.first[old] + torch.where(second, lower, 0)
    first = first.index_add(0, swapped, -ranks[swapped]).index_add(0, swapped - 1, ranks[swapped])
    return Circles(start, stop, number, first, ranks, circles.rules)


def mended(circles: Circles, goal: float, enough: float) -> Circles:
    """The circles of one rank each, those above the goal joined with a light one and divided anew. [Note: mending]

    After a few rounds, what is not above `enough` is left as it is.
    """
    tried = torch.zeros_like(circles.first)
    for turn in range(ROUNDS):
        above = ((circles.work > (goal if turn < FINE_ROUNDS else enough)) & (tried < TRIES)).nonzero().squeeze(1)
        if not len(above) or len(circles.first) < 2:
            break
        above = above[circles.work[above].argsort(descending=True)][:PAIRS]
        pairs = _pairs(circles, above, tried)
        tried[above] += 1
        circles = _exchanged(circles, pairs, _joined(circles, pairs), tried) if len(pairs) else circles
    return circles


def _pairs(circles: Circles, above: Tensor, tried: Tensor) -> Tensor:
    """(heavy, light) to be tried, (n, 2): each heavy circle with some of the lightest, others than before."""
    light = circles.work.argsort()[: len(circles.first) - 1]
    partners = max(1, PAIRS // len(above))
    turn = torch.arange(partners, device="cpu") + (tried[above] * partners).unsqueeze(1)
    place = turn * len(above) + torch.arange(len(above), device="cpu").unsqueeze(1)
    pairs = torch.stack([above.repeat_interleave(partners), light[place.flatten() % len(light)]], 1)
    return pairs[circles.work[pairs[:, 1]] < circles.work[pairs[:, 0]]]


def _joined(circles: Circles, pairs: Tensor) -> Circles:
    """The circles of two ranks each, divided anew; each rank keeps its number of tokens."""
    count = torch.bincount(circles.circle, minlength=len(circles.first))
    offset, each = count.cumsum(0) - count, count[pairs.flatten()]
    member, within = counted(each)
    pair, piece = member // 2, offset[pairs.flatten()][member] + within
    start, stop = circles.start[piece], circles.stop[piece]
    order = (pair * int(circles.stop.max()) + start).argsort()
    pair, start, stop = pair[order], start[order], stop[order]
    border = torch.diff(pair, prepend=pair.new_full((1,), -1)) != 0
    apart = border | (start != torch.cat([stop[:1], stop[:-1]]))
    ends = torch.cat([apart[1:], apart.new_ones(1)])
    two = torch.full_like(pairs[:, 0], 2)
    both = Circles(start[apart], stop[ends], pair[apart], pairs[:, 0], two, circles.rules)
    return parted(both, circles.tokens[pairs[:, 0]], two // 2, circles.rules.depth)


def _exchanged(circles: Circles, pairs: Tensor, parts: Circles, tried: Tensor) -> Circles:
    """The circles with what the best pairs were divided into, where that is better; each is in one pair at most."""
    runs = torch.bincount(parts.circle, minlength=len(parts.first)).tolist()
    works, before = parts.work.tolist(), circles.work.tolist()
    offers, place = [], 0
    whole = (parts.ranks == 2).tolist()
    for heavy, light in pairs.tolist():
        if whole[place]:
            place += 1
            continue
        largest = max(works[place : place + 2])
        if largest < 0.999 * before[heavy] and max(runs[place : place + 2]) <= MOST_RUNS:
            offers.append((-before[heavy], largest, heavy, light, place))
        place += 2
    taken: dict[int, int] = {}
    for _, _, heavy, light, place in sorted(offers):
        if heavy not in taken and light not in taken:
            taken[heavy], taken[light] = place, place + 1
    if not taken:
        return circles
    owners, places = (torch.tensor([*each], device="cpu") for each in (taken.keys(), taken.values()))
    tried[owners] = 0
    stays = torch.ones_like(circles.first, dtype=torch.bool).index_fill(0, owners, False)[circles.circle]
    owner = torch.full_like(parts.first, -1).index_copy(0, places, owners)[parts.circle]
    comes = owner >= 0
    circle, order = torch.cat([circles.circle[stays], owner[comes]]).sort(stable=True)
    start, stop = (
        torch.cat([old[stays], new[comes]])[order]
        for old, new in ((circles.start, parts.start), (circles.stop, parts.stop))
    )
    return Circles(start, stop, circle, circles.first, circles.ranks, circles.rules)


class _Search:
    """The search in each circle for a window of `length` tokens for its first `half` ranks."""

    def __init__(self, circles: Circles, length: Tensor, half: Tensor, level: int):
        rules = circles.rules
        self.circles, self.length, self.half = circles, length, half
        self.all = bool((half > 0).all())
        share = circles.work * half / circles.ranks
        self.target = share
        # Work may drift from the mean a little more with each division, up to the tolerance at the last.
        allowed = rules.fair * (1 + rules.tolerance * min(1.0, (level + 1) / rules.depth))
        self.most = torch.maximum(allowed * half, share)
        self.least = torch.minimum(circles.work - allowed * (circles.ranks - half), share)

    def best(self) -> Tensor:
        """Where the cheapest window of each circle starts that is fair enough; else the fairest; FAR if none is."""
        windows = self._looked()
        best = self._cheapest(*windows)
        missing = (best == FAR) & (self.half > 0)
        if not missing.any():
            return best
        held = missing[windows[1]].nonzero().squeeze(1)
        windows = self._with_exact(*(column[held] for column in windows))
        for found in (self._cheapest(*windows), self._fairest(*windows)):
            best = torch.where(best < FAR, best, found)
        return best

    def _cheapest(self, starts: Tensor, circle: Tensor, work: Tensor) -> Tensor:
        """For each circle the start of the cheapest window that is fair enough, and of those the fairest."""
        fair = ((work >= self.least[circle]) & (work <= self.most[circle])).nonzero().squeeze(1)
        starts, circle, work = starts[fair], circle[fair], work[fair]
        return self._least(starts, circle, [self._cost(starts, circle), (work - self.target[circle]).abs()])

    def _fairest(self, starts: Tensor, circle: Tensor, work: Tensor) -> Tensor:
        """For each circle the start of the fairest window that can be cut out."""
        off = (work - self.target[circle]).abs()
        return self._least(starts, circle, [torch.where(self._cost(starts, circle) < torch.inf, off, torch.inf)])

    def _looked(self) -> tuple[Tensor, Tensor, Tensor]:
        """(start, circle, work) of windows that begin or end on a border."""
        circles = self.circles
        borders, circle = circles.borders()
        if not self.all:
            many = (self.half > 0)[circle].nonzero().squeeze(1)
            borders, circle = borders[many], circle[many]
        length = self.length[circle]
        ends = circles.wrapped(borders + length, circle)
        starts = circles.wrapped(borders + circles.tokens[circle] - length, circle)  # a lap less a window
        first, at, last = circles.work_before(torch.stack([starts, borders, ends]))
        lap = circles.work[circle]
        work = torch.cat([last - at + lap * (ends < borders), at - first + lap * (borders < starts)])
        return torch.cat([borders, starts]), torch.cat([circle, circle]), work

    def _windows(self, starts: Tensor, circle: Tensor) -> Tensor:
        return self.circles.windows(starts, self.circles.wrapped(starts + self.length[circle], circle), circle)

    def _circle(self, starts: Tensor) -> Tensor:
        return torch.searchsorted(self.circles.origin, starts, right=True) - 1

    def _with_exact(self, starts: Tensor, circle: Tensor, work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """These windows, and those on both sides of where the surplus of a circle changes its sign."""
        starts, order = starts.sort()
        circle, work = circle[order], work[order]
        below = work < self.target[circle]
        # The neighbour of the last window of a circle is the first, a lap later.
        begins = torch.searchsorted(starts, self.circles.origin)
        following = torch.arange(1, len(starts) + 1, device="cpu")
        last = torch.cat([circle[1:] != circle[:-1], circle.new_ones(1, dtype=torch.bool)])
        following[last] = begins[circle[last]]
        turns = (below != below[following]).nonzero().squeeze(1)
        turns = turns[:: 1 + len(turns) // (ROOTS * int(last.sum()))]
        if not len(turns):
            return starts, circle, work
        found = self._bisected(circle[turns], starts[turns], starts[following[turns]], below[turns])
        whose = self._circle(found)
        return torch.cat([starts, found]), torch.cat([circle, whose]), torch.cat([work, self._windows(found, whose)])

    def _bisected(self, circle: Tensor, a: Tensor, b: Tensor, below: Tensor) -> Tensor:
        """Between windows on both sides of the target, the starts of the two neighbours that are."""
        b = torch.where(b <= a, b + self.circles.tokens[circle], b)
        cells = max(4, AT_ONCE // len(a))
        parts = torch.arange(cells + 1, device="cpu").unsqueeze(1)
        for _ in range(int(log(max(int((b - a).max()), 2), cells)) + 1):
            points = a + (b - a) * parts // cells
            inner = self.circles.wrapped(points[1:-1], circle)
            same = (self._windows(inner, circle.expand_as(inner)) < self.target[circle]) == below
            step = same.long().cumprod(0).sum(0)  # how many still lie on the side of a
            a, b = points.gather(0, step.unsqueeze(0)).squeeze(0), points.gather(0, step.unsqueeze(0) + 1).squeeze(0)
        found: Tensor = self.circles.wrapped(torch.cat([a, b]), torch.cat([circle, circle])).unique()
        return found

    def _cost(self, starts: Tensor, circle: Tensor) -> Tensor:
        """The cost of cutting at both ends of the windows."""
        ends = self.circles.wrapped(starts + self.length[circle], circle)
        return self.circles.cost(torch.stack([starts, ends])).sum(0)

    def _least(self, starts: Tensor, circle: Tensor, keys: list[Tensor]) -> Tensor:
        """For each circle the start with the least of some keys, the first first; FAR where none is finite."""
        while keys:
            key, *keys = keys
            low = key.new_full((len(self.half),), torch.inf).scatter_reduce(0, circle, key, "amin")
            held = ((key == low[circle]) & (key < torch.inf)).nonzero().squeeze(1)
            starts, circle, keys = starts[held], circle[held], [each[held] for each in keys]
        return starts.new_full((len(self.half),), FAR).scatter_reduce(0, circle, starts, "amin")
