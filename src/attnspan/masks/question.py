"""A traced mask_mod, evaluated over one batch row: where its pairs lie, as bands or as a cover.

Every pair is accounted for, and few are evaluated. Blocks are decided as a whole where interval arithmetic can
(intervals.py); the others are halved, down to boxes of some 16 x 16 pairs, and only what is undecided then is
evaluated pair by pair::

    · · · · ·      █ all pairs count, · none: proved, of boxes of any size
    █ ░ · · ·      ░ evaluated
    █ █ ░ · ·

So the cost grows as the edges of a mask. A function of which nothing can be proved is evaluated everywhere, S x S,
never all at once.

What is found becomes spans of keys, row by row, and these bands (row_spans.py). Where bands would be many, as for
every second key, the answer is by block: full blocks, and partial blocks, in which kernels evaluate it again.
Shapes: N boxes, H heads, n queries and m keys of a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnspan.errors import MaskError
from attnspan.masks.algebra import Bands, joined
from attnspan.masks.band import Band, ceil_div
from attnspan.masks.boxes import Boxes, searched
from attnspan.masks.cover import Cover, bands_of_blocks
from attnspan.masks.intervals import Intervals
from attnspan.masks.program import Program
from attnspan.masks.row_spans import RowSpans

FEW = 512
"""So many bands are never too many: short sequences are always exact."""

MAX_SPANS: float = 8
"""A function that allows more spans of keys per row than this, on average, is not turned into bands."""

MIN_BOX = 16
"""Boxes are halved while their halves are at least so high and so wide."""

BLOCKS_AT_ONCE, PAIRS_AT_ONCE = 1 << 12, 1 << 20
"""Blocks that are searched together, and pairs, of all heads, that are evaluated together."""

Size = tuple[int, int]
Blocks = Iterable[tuple[bool, Boxes]]
"""(True, full boxes) and (False, undecided blocks), as `searched` finds them."""


@dataclass(frozen=True)
class Question:
    """A program over the pairs of one batch row, for so many queries and keys, in blocks of a size."""

    program: Program
    row: int
    heads: int
    lengths: Size
    block: Size
    device: torch.device

    def blocks(self) -> Blocks:
        """The blocks that are full, and those that are undecided; no others hold a pair."""
        return searched(Boxes.covering(self.lengths, self.block, self.device), self.block, self.intervals.decide)

    def cover(self, blocks: Blocks, max_evaluated: float = math.inf) -> Cover:
        """Where the pairs of blocks lie. After so many pairs, the other blocks are left to kernels.

        Exact where that takes no more bands than there are undecided blocks; else by blocks.
        """
        found = FoundPairs(self, max_evaluated, most_spans=4 * FEW + MAX_SPANS * self.lengths[0])
        for full, boxes in blocks:
            found.put(full, boxes)
        return found.cover()

    def bands(self, blocks: Blocks) -> Bands:
        """The exact bands of blocks in which all heads are alike, however many they are."""
        found = FoundPairs(self)
        for full, boxes in blocks:
            found.put(full, boxes)
        return joined(found.bands())

    @cached_property
    def intervals(self) -> Intervals:
        return Intervals(self.program, self.row, self.heads, self.device)

    @property
    def least(self) -> Size:
        """How small boxes become: a block, halved as long as that is worth it and comes out even."""
        height, width = self.block
        while self.program.is_flat and min(height, width) >= 2 * MIN_BOX and not height % 2 and not width % 2:
            height, width = height // 2, width // 2
        return height, width

    def answers(self, boxes: Boxes) -> Iterator[tuple[Boxes, Tensor, Tensor]]:
        """Boxes, some at a time: which pairs are allowed for some head and which for all, (N, n, m) each."""
        boxes = boxes.chosen((boxes.i * self.lengths[1] + boxes.j).argsort())
        for part in boxes.parts(max(1, PAIRS_AT_ONCE // (boxes.size[0] * boxes.size[1] * self.heads))):
            try:
                with torch.no_grad():
                    some, every = self._evaluate(part) if self.program.is_flat else self._evaluate_rows(part)
            except Exception as error:
                raise MaskError(f"{self.program.name} could not be evaluated as a mask_mod: {error}") from error
            inside = part.inside
            yield part, *((some, every) if inside is None else (some & inside, every & inside))

    def _evaluate(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        queries, keys = boxes.pairs
        allowed = self.program.over_boxes(*self._indices, queries, keys)
        return _over_heads(allowed.expand(len(boxes), -1, *boxes.size), dim=1)

    def _evaluate_rows(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        """Boxes of the same queries together: a program under vmap is evaluated for all pairs of queries and keys."""
        queries, keys = boxes.pairs
        some, every = torch.empty(2, len(boxes), *boxes.size, dtype=torch.bool, device=self.device)
        for i in boxes.i.unique().tolist():
            which = (boxes.i == i).nonzero().flatten()
            allowed = self.program.over(*self._indices, queries[which[0]], keys[which].flatten())
            allowed = allowed.expand(1, -1, boxes.size[0], keys[which].numel()).unflatten(-1, (len(which), -1))
            found = _over_heads(allowed[0], dim=0)
            some[which], every[which] = (each.transpose(0, 1) for each in found)
        return some, every

    @property
    def _indices(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.row], device=self.device), torch.arange(self.heads, device=self.device)


def _over_heads(allowed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    one = allowed.select(dim, 0)
    return (one, one) if allowed.shape[dim] == 1 else (allowed.any(dim), allowed.all(dim))


class FoundPairs:
    """What a question has found so far, in rows of three heights: those of blocks, of the least boxes, and single ones.

    `spans` and `strips` are None once heads differ or a limit is reached: only blocks are known then.
    """

    def __init__(self, question: Question, max_evaluated: float = math.inf, most_spans: float = math.inf):
        self.question, self.max_evaluated, self.most_spans = question, max_evaluated, most_spans
        self.full: list[RowSpans] = []  # rows of blocks: found full as they were given
        self.filled: list[RowSpans] = []  # rows of blocks: full, as it turned out
        self.partial: list[RowSpans] = []  # rows of blocks: some of their pairs
        self.strips: list[RowSpans] | None = []  # rows of the least boxes: full ones of the last two
        self.spans: list[RowSpans] | None = []  # single rows: pairs of the last
        self.evaluated = self.count = 0  # pairs that were evaluated, and spans of single rows

    def put(self, full: bool, boxes: Boxes) -> None:
        """Full boxes, or undecided blocks."""
        if full:
            self.full.append(boxes.spans(self.question.block[0]))
            return
        for part in boxes.parts(BLOCKS_AT_ONCE):
            if self.evaluated <= self.max_evaluated:
                self._search(part)
            else:
                self.partial.append(part.spans(self.question.block[0]))
                self._stop_if(True)

    def cover(self) -> Cover:
        """See `Question.cover`."""
        height, q_len = self.question.block[0], self.question.lengths[0]
        partial = RowSpans.together(self.partial).merged()
        if self.spans is not None and self.strips is not None:
            chains = self._chains()
            if len(chains) <= 2 * FEW + 4 * len(partial):
                bands = joined(Band(*each) for each in chains.tolist())
                if len(bands) <= max(FEW, len(partial)):
                    return Cover(bands)
        certain = RowSpans.together([*self.full, *self.filled])
        return Cover(bands_of_blocks(certain, height, q_len), bands_of_blocks(partial, height, q_len))

    def bands(self) -> Iterator[Band]:
        """Every pair, exactly."""
        return (Band(*each) for each in self._chains().tolist())

    def _chains(self) -> Tensor:
        assert self.strips is not None, "heads are alike"
        assert self.spans is not None, "heads are alike"
        (height, _), least, q_len = self.question.block, self.question.least[0], self.question.lengths[0]
        full = RowSpans.together(self.full).merged().repeated(height // least, rows=ceil_div(q_len, least))
        strips = RowSpans.together([full, *self.strips]).merged().repeated(least, rows=q_len)
        return RowSpans.together([strips, *self.spans]).merged().bands()

    def _search(self, blocks: Boxes) -> None:
        """Blocks of which each is searched."""
        blocks = Boxes.at(blocks.i, blocks.j, blocks.size, blocks.lengths)
        some, every = torch.zeros(2, len(blocks), dtype=torch.int64, device=blocks.i.device)
        strips: list[RowSpans] = []
        for full, boxes in searched(blocks, self.question.least, self.question.intervals.decide):
            if full:
                strips.append(boxes.spans(self.question.least[0]))
                some.index_add_(0, boxes.source, boxes.area)
                every.index_add_(0, boxes.source, boxes.area)
                continue
            for part, any_head, all_heads in self.question.answers(boxes):
                counts = all_heads.sum((1, 2))
                every.index_add_(0, part.source, counts)
                some.index_add_(0, part.source, counts if any_head is all_heads else any_head.sum((1, 2)))
                strips += self._put_pairs(part, any_head, counts)
                self._stop_if(any_head is not all_heads and not torch.equal(any_head, all_heads))
        filled = every == blocks.area
        self.filled.append(blocks.chosen(filled).spans(blocks.size[0]))
        self.partial.append(blocks.chosen((some > 0) & ~filled).spans(blocks.size[0]))
        if self.strips is not None:
            self.strips.append(RowSpans.together(strips).merged())

    def _put_pairs(self, boxes: Boxes, allowed: Tensor, counts: Tensor) -> list[RowSpans]:
        """The spans of boxes that were evaluated; of those that are full, for the strips."""
        self.evaluated += allowed.numel() * self.question.heads
        if self.spans is None:
            return []
        whole = counts == boxes.area
        others = (~whole).nonzero().flatten()
        self.spans.append(RowSpans.of_pairs(allowed[others], *boxes.chosen(others).first))
        self.count += len(self.spans[-1])
        self._stop_if(self.count > self.most_spans)
        return [boxes.chosen(whole).spans(self.question.least[0])]

    def _stop_if(self, not_worth_it: bool) -> None:
        """From here on, by blocks."""
        if not_worth_it:
            self.spans = self.strips = None
