"""What is alive at each moment of one lane: its steps are walked through as the loops in `attention` do.

The names are those of memory.py. `Gathered` is a gradient that the parts of tiles are added to, `WaitingParts` are the
results of tiles that wait to be merged, as attention/sums.py and kernels/accumulator.py have them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from attnspan.layouts.run import Runs, tokens_in
from attnspan.masks.tile import Tile
from attnspan.plan.cost import Shape
from attnspan.plan.heads import Heads
from attnspan.plan.step import Step
from attnspan.plan.waiting import crowded

if TYPE_CHECKING:
    pass


BytesByName = dict[str, float]
"""What is alive at one moment, by what it is for."""


class Kernels(NamedTuple):
    """What matters of the kernels: whether the tiles of a step are one call, and gradients of keys are rounded."""

    joint: bool
    rounds: bool


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Bytes of one position: of q, of out, of K and V together or of the latent, and of what is made of that, of lse;
    `wide` is float32 over the tensors' dtype."""

    q: float
    out: float
    kv: float
    lse: float
    wide: float
    grouped: bool
    expanded: float = 0.0

    @property
    def computed(self) -> float:
        """K and V as kernels see them."""
        return self.expanded or self.kv

    @staticmethod
    def of(shape: Shape, share: Heads | None, rows: int) -> LaneSizes:
        """Of one lane, which has an even part of the batch, and a share of the heads."""
        width, batch = shape.width, shape.batch / rows
        heads, kv_heads = (shape.heads, shape.kv_heads) if share is None else (len(share.query), len(share.key))
        wide, grouped = max(4, width) / width, heads != kv_heads
        q, out = (batch * heads * dim * width for dim in (shape.head_dim, shape.v_head_dim))
        kv = batch * shape.kv_values(kv_heads) * width
        return LaneSizes(q, out, kv, batch * heads * max(4, width), wide, grouped, shape.expanded_bytes / rows)


@dataclass(frozen=True, slots=True)
class LaneWalk:
    """One lane: its sizes, its own keys, its number of queries and its steps; whether buffers are handed on whole."""

    sizes: LaneSizes
    own: Runs
    rows: int
    steps: tuple[Step, ...]
    hands_on: bool
    kernels: Kernels
    backward: bool
    keeps: bool  # keys, from forward to backward

    @property
    def counts(self) -> tuple[LaneSizes, int, int]:
        return self.sizes, self.rows, tokens_in(self.own)

    def moments(self) -> Iterator[BytesByName]:
        """What is alive at each moment, apart from what the caller gave."""
        yield from self._backward() if self.backward else self._forward()

    def _forward(self) -> Iterator[BytesByName]:
        part = self.sizes.out * self._widened + self.sizes.lse
        waiting = WaitingParts(self.rows, self.sizes, part, [rows for step in self.steps for rows in self._calls(step)])
        for index, step in enumerate(self.steps):
            for rows in self._calls(step):
                now = {**self._arenas(index), "tile": len(rows) * part, "expanded": self._expanded(step)}
                before = waiting.bytes
                summed = waiting.add(rows)
                yield {**now, "parts": before + summed}
        yield {**self._arenas(len(self.steps) - 1), "parts": waiting.bytes, "result": waiting.result}

    def _calls(self, step: Step) -> list[range]:
        """The rows of each kernel call of a step."""
        if self.kernels.joint:
            return [range(self.rows)] if step.tiles else []
        return [tile.rows for tile in step.tiles]

    @property
    def _one_call(self) -> bool:
        """Whether one call computes everything, and its results are final."""
        return self.kernels.joint and sum(bool(step.tiles) for step in self.steps) == 1

    @property
    def _widened(self) -> float:
        """How much larger than the tensors a kernel's results are: float32 where joint calls are to be merged."""
        return self.sizes.wide if self.kernels.joint and not self._one_call else 1.0

    @property
    def _travels(self) -> float:
        """How much wider than the tensors gradients go home: [Note: gradients that travel] in attention/lane.py."""
        return 1.0 if self.kernels.rounds else self.sizes.wide

    def _backward(self) -> Iterator[BytesByName]:
        sizes, steps = self.sizes, self.steps
        queries, keys = Gathered(self.rows, sizes.q, sizes.wide), Gathered(tokens_in(self.own), sizes.kv, sizes.wide)
        before = returned = here = 0.0
        for index, step in enumerate(steps):
            here, last = self._arena(index) * self._travels, index == len(steps) - 1
            made = Gathered(tokens_in(step.arena), sizes.expanded, sizes.wide) if sizes.expanded else None
            kept, expanded = keys.bytes if made else 0.0, self._expanded(step)
            for gathered, tile in self._computed(step, queries, made or keys, own=here == 0 or made is not None):
                now = {**self._arenas(index), "sums": gathered + kept + here + before, "returning": returned}
                yield {**now, "tile": tile, "expanded": expanded}
            if made and step.tiles:  # rounded, and then flowing back, laid out anew, through what made the keys
                now = {**self._arenas(index), "returning": returned, "expanded": expanded}
                sums = queries.bytes + kept + here + before
                yield {**now, "sums": sums + made.bytes, "tile": made.result}
                yield {**now, "sums": sums, "tile": 3 * expanded}
                if here == 0:
                    keys.add(range(tokens_in(self.own)))
            if returned or (here and step.own and not last):  # is added at once
                sums = queries.bytes + keys.bytes + keys.begin() + here
                yield {**self._arenas(index), "sums": sums, "returning": returned}
            returning = sum(transfer.tokens for transfer in step.grad_receives) * sizes.kv * self._travels
            sums = queries.bytes + keys.bytes + here
            yield {**self._arenas(index), "sums": sums, "returning": returned + returning}
            before, returned = here, returning
        kept = here if steps and steps[-1].own else 0.0  # own keys' gradients wait where they were computed
        result = queries.result + (keys.all if kept or returned else keys.result)
        sums = queries.bytes + keys.bytes
        yield {**self._arenas(len(steps) - 1), "sums": sums + here, "returning": returned}
        yield {**self.held, "sums": sums + kept, "returning": returned, "result": result}

    def _computed(self, step: Step, queries: Gathered, keys: Gathered, own: bool) -> Iterator[tuple[float, float]]:
        """Bytes that are gathered, and of a kernel call, at each moment of a step."""
        if self.kernels.joint and step.tiles:  # one call, which writes what stays; beside lie two numbers for each row
            if self._one_call:
                queries.add(range(self.rows))
            else:
                queries.begin()
            if own:
                keys.add(range(keys.rows), self._travels)
            yield queries.bytes + keys.bytes, 2 * self.rows * self.sizes.lse
        for tile in () if self.kernels.joint else step.tiles:
            waiting = queries.bytes + keys.bytes
            yield waiting, self._written(tile) + self._workspace(tile)
            begun = queries.add(tile.rows) + (keys.add(tile.cols) if own else 0.0)
            yield waiting + begun, self._written(tile)

    def _written(self, tile: Tile) -> float:
        """dq, dk and dv of a tile."""
        return len(tile.rows) * self.sizes.q + len(tile.cols) * self.sizes.computed

    def _workspace(self, tile: Tile) -> float:
        """What library kernels take besides: dq in float32, dk and dv of every query head where heads are grouped, and
        copies of out and its gradient where they are part of a larger tensor."""
        sizes, rows = self.sizes, len(tile.rows)
        if sizes.wide == 1:
            return 0.0
        per_head = len(tile.cols) * (sizes.q + sizes.out) if sizes.grouped else 0.0
        return rows * sizes.q * sizes.wide + per_head + (2 * rows * sizes.out if rows < self.rows else 0.0)

    @property
    def held(self) -> BytesByName:
        """What a lane keeps to its end: the last arena, and own keys packed."""
        packed = self._sends_keys and not self.hands_on and any(map(self._packs, self.steps))
        last = len(self.steps) - 1
        return {
            "arenas": self.arenas(last) if self.keeps else self._arena(last),
            "packed": self._own_bytes if packed else 0.0,
        }

    def _arenas(self, index: int) -> BytesByName:
        """The arena of a step and the next one; own keys packed, for good or for the time of one exchange."""
        packed = any(map(self._packs, self.steps[: index + 2]))
        if self.hands_on:
            first = next((i for i, step in enumerate(self.steps) if step.sends), -2)
            packed = first == index + 1
        if self.keeps:
            arenas = self.arenas(len(self.steps) if self.backward else index + 1)
        else:
            arenas = self._arena(index) + self._arena(index + 1)
        return {"arenas": arenas, "packed": self._own_bytes if packed and self._sends_keys else 0.0}

    @property
    def _sends_keys(self) -> bool:
        return not (self.keeps and self.backward)

    def arenas(self, last: int) -> float:
        """Bytes of the keys of all steps up to one."""
        return sum(self._arena(index) for index in range(last + 1))

    @property
    def _own_bytes(self) -> float:
        return tokens_in(self.own) * self.sizes.kv

    def _arena(self, index: int) -> float:
        """Bytes of a step's keys; nothing where they are the caller's own as they lie."""
        step = self.steps[index] if 0 <= index < len(self.steps) else None
        if step is None or (not step.receives and step.arena == self.own):
            return 0.0
        return tokens_in(step.arena) * self.sizes.kv

    def _expanded(self, step: Step) -> float:
        """Bytes of the keys that are made of a step's latents."""
        return tokens_in(step.arena) * self.sizes.expanded if step.tiles else 0.0

    def _packs(self, step: Step) -> bool:
        """Whether own keys are sent from a packed copy: not if all of them lie in the step's arena."""
        return bool(step.sends) and not (step.own == self.own and (step.receives or step.arena != self.own))


class Gathered:
    """Gradients that wait to be summed, and their sum in memory once it is begun (attention/sums.py)."""

    def __init__(self, rows: int, size: float, wide: float):
        self.rows, self._size, self._wide = rows, size, wide  # bytes of a row, and how much wider a sum is
        self._waiting: list[tuple[range, float]] = []
        self._begun = False

    def add(self, rows: range, width: float = 1.0) -> float:
        """A part of some rows, so much wider than the tensors; returns the bytes of the sum if it was begun for it."""
        begun = 0.0
        if rows.step > 1 or crowded([each for each, _ in self._waiting], rows, self._wide / width, self._begun):
            begun = self.begin()
        if rows.step == 1:
            self._waiting.append((rows, width))
        return begun

    def begin(self) -> float:
        """All that waits is added to the sum; returns its bytes if there was none before."""
        begun = 0.0 if self._begun else self._sum
        self._waiting.clear()
        self._begun = True
        return begun

    @property
    def bytes(self) -> float:
        """Of what waits, and of the sum."""
        return sum(len(rows) * width for rows, width in self._waiting) * self._size + self._sum * self._begun

    @property
    def all(self) -> float:
        """Of all rows in the tensors' dtype."""
        return self.rows * self._size

    @property
    def result(self) -> float:
        """Of the total, rounded; one part that has all rows is the result itself."""
        return 0.0 if not self._begun and self._waiting == [(range(self.rows), 1.0)] else self.all

    @property
    def _sum(self) -> float:
        return self.rows * self._size * self._wide


class WaitingParts:
    """Rows, and the results of tiles that wait for each: at most two, or one beside a sum (kernels/accumulator.py).

    A tile's result is kept whole for as long as any of its rows waits.
    """

    def __init__(self, rows: int, sizes: LaneSizes, part: float, tiles: Sequence[range]):
        self._sizes, self._rows, self._part = sizes, rows, part  # bytes of a row of a tile's out and lse
        self._starts = sorted({0, *chain.from_iterable((span.start, span[-1] + 1) for span in tiles)})
        self._waiting: list[list[int]] = [[] for _ in self._starts]
        self._summed = [False] * len(self._starts)
        self._lengths: list[int] = []  # of the tiles, in the order they came
        self._uses: list[int] = []  # of each tile, the stretches of rows that it waits for
        self._kept = 0  # rows of the tiles that have any
        self._begun = False

    def add(self, rows: range) -> float:
        """One more result for some rows; returns the bytes of the sum if it had to be begun for them."""
        begun = self._begun
        strided = rows.step > 1  # every n-th row: all rows are summed, and then these
        first, last = (0, self._rows) if strided else (rows.start, rows.stop)
        tile = len(self._lengths)
        self._lengths.append(len(rows))
        self._uses.append(0)
        index = bisect_left(self._starts, first)
        while index < len(self._starts) and self._starts[index] < last:
            if strided or len(self._waiting[index]) + self._summed[index] == 2:
                self._settle(index)
            if not strided:
                self._waiting[index].append(tile)
                self._uses[tile] += 1
            index += 1
        self._kept += len(rows) if self._uses[tile] else 0
        return self._sum if self._begun and not begun else 0.0

    def _settle(self, index: int) -> None:
        """What waits for a stretch of rows goes into the sum, and is let go of."""
        for tile in self._waiting[index]:
            self._uses[tile] -= 1
            self._kept -= 0 if self._uses[tile] else self._lengths[tile]
        self._waiting[index], self._summed[index], self._begun = [], True, True

    @property
    def bytes(self) -> float:
        """Of what waits, and of the sum of all rows once there is one."""
        return self._kept * self._part + (self._sum if self._begun else 0.0)

    @property
    def result(self) -> float:
        """Of out and lse; one tile alone, of all rows and not to be rounded, is the result itself."""
        size = self._sizes.out + self._sizes.lse
        return 0.0 if self._lengths == [self._rows] and self._part == size else self._rows * size

    @property
    def _sum(self) -> float:
        return self._rows * (self._sizes.out * self._sizes.wide + self._sizes.lse)
