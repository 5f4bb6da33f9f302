"""When things happen on one rank, as the cost model predicts: a lane of compute and a lane of transfers.

The loops of attention/loop.py, walked through with a clock. A step's keys are posted when the step before begins, so
they fly under its tiles; in backward the gradients of a step's keys are posted when it is done, so they fly under the
next one's tiles, and those of the last step under nothing. A step waits only for what did not arrive in time, and
`exposed` is that waiting, summed.

[Note: peers] A rank is looked at alone: its peers are taken to post when it does. That is right for layouts that
balance, and for the busiest rank of those that do not, which is the one that counts.

[Note: turns] Ranks that take turns on a device gain nothing by messages under tiles: while one computes, the end of
the message on the other does not run. They share the link as well: one that has little to say leaves it to the others,
so an exchange takes as long as it would if all had as much.

[Note: copies] What memory costs is estimated by counting passes over buffers: own keys packed to be sent or laid among
others, results merged, gradients summed. A few per cent on a CPU, less on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from attnspan.layouts.run import tokens_in
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.drawing import in_seconds
from attnspan.plan.plan import Plan
from attnspan.plan.step import Step

Way = Literal["receives", "sends", "grad_receives", "grad_sends"]


class Event(NamedTuple):
    """Something that occupies one lane from start to stop, in seconds."""

    lane: Literal["compute", "link"]
    start: float
    stop: float
    what: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted forward pass of one rank (and its backward, if asked for)."""

    rank: int
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the first event to the end of the last."""
        return max((event.stop for event in self.events), default=0.0)

    @property
    def computing(self) -> float:
        """Seconds in which tiles are computed."""
        return sum(event.stop - event.start for event in self.events if event.lane == "compute")

    @property
    def travelling(self) -> float:
        """Seconds in which messages are on their way."""
        return sum(event.stop - event.start for event in self.events if event.lane == "link")

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.computing

    def __str__(self) -> str:
        """Both lanes, drawn to scale.

        >>> first, keys, second = (Event("compute", 0, 2, ""), Event("link", 0, 3, ""), Event("compute", 3, 4, ""))
        >>> print(Timeline(0, (first, keys, second)))
        rank 0  compute  ████████████████        ████████  4.00 s
                link     ████████████████████████          waits 1.00 s
        """
        width, end = 32, self.seconds or 1.0
        lanes = {"compute": [" "] * width, "link": [" "] * width}
        for event in self.events:
            for cell in range(int(event.start / end * width), max(int(event.stop / end * width), 0)):
                lanes[event.lane][cell] = "█"
        compute, link = ("".join(lanes[lane]) for lane in ("compute", "link"))
        head = f"rank {self.rank}  "
        return (
            f"{head}compute  {compute}  {in_seconds(self.seconds)}\n"
            f"{' ' * len(head)}link     {link}  waits {in_seconds(self.exposed)}"
        )


def predict(
    plan: Plan, rank: int, shape: Shape, hardware: Hardware, *, backward: bool = False, keep_keys: bool = False
) -> Timeline:
    """The timeline of one rank. Batch rows that differ are computed one after another within a step. With `keep_keys`
    what arrived forward is there in backward."""
    walk = _TimelineWalk(plan, rank, shape, hardware)
    walk.forward()
    if backward:
        walk.backward(keep_keys)
    return Timeline(rank, tuple(walk.events))


class _TimelineWalk:
    """Two clocks, what was put on them, and the loops that put it there."""

    def __init__(self, plan: Plan, rank: int, shape: Shape, hardware: Hardware) -> None:
        self.plan, self.rank, self.shape, self.hardware = plan, rank, shape, hardware
        self.steps = list(zip(*(plan.steps(rank, row) for row in range(plan.batch_rows)), strict=True))
        share = 1 / plan.batch_rows  # a Shape counts the whole batch; each row that differs is its part of it
        self.flops = shape.flops * share / plan.degree
        self.kv_bytes = shape.kv_bytes * share * shape.kv_share(plan.degree)
        self.expanded_bytes, self.expansion = shape.expanded_bytes * share, shape.expansion_flops * share
        q, out, lse = (values * share / plan.degree for values in shape.head_values)
        self.q_bytes, self.out_bytes = q * shape.width, out * shape.width
        self.wide = max(4, shape.width) / shape.width
        self.travels = self.kv_bytes * (1.0 if hardware.rounds else self.wide)  # of a gradient, on its way home
        self.lse_bytes = lse * shape.width * self.wide
        self.queries = sum(tokens_in(plan.queries(rank, row)) for row in range(plan.batch_rows))
        self.keys = sum(tokens_in(plan.keys(rank, row)) for row in range(plan.batch_rows))
        self.events: list[Event] = []
        self.compute = self.link = 0.0

    # ---- the loops -------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        q, out, lse = self.q_bytes, self.out_bytes, self.lse_bytes
        self._heads("heads out", q, self.kv_bytes)
        self._computed("packing", self._packed())
        arrived = self._keys(0)
        rows = 0
        for index, steps in enumerate(self.steps):
            self._waited(arrived)
            arrived = self._keys(index + 1)
            tiles = [tile for step in steps for tile in step.tiles]
            rows += sum(len(tile.rows) for tile in tiles)
            self._computed(f"latents of step {index}", self._expanding(steps))
            seconds = sum(self.hardware.compute(step.tiles, self.flops) for step in steps)
            self._computed(f"tiles of step {index}", seconds)
        # Every row that several tiles share is read and written again, in float32.
        merged = max(0, rows - self.queries) * (2 + self.wide) * (out + lse)
        self._computed("merges", self.hardware.copying(merged))
        self._heads("heads back", out + lse, 0.0)

    def backward(self, kept: bool) -> None:
        q, out, lse, kv = self.q_bytes, self.out_bytes, self.lse_bytes, self.kv_bytes
        computed = self.expanded_bytes or kv
        finals = 2 * out + lse
        self._heads("heads out", finals if kept else q + finals, 0.0 if kept else kv)
        self._computed("packing", 0.0 if kept else self._packed())
        arrived, home = 0.0 if kept else self._keys(0), 0.0
        for index, steps in enumerate(self.steps):
            self._waited(arrived)
            arrived = 0.0 if kept else self._keys(index + 1)
            tiles = [tile for step in steps for tile in step.tiles]
            self._computed(f"latents of step {index}", 3 * self._expanding(steps))  # again, and back in two products
            seconds = sum(self.hardware.compute(step.tiles, self.flops, backward=True) for step in steps)
            self._computed(f"gradients of step {index}", seconds)
            summed = sum(len(tile.rows) * q + len(tile.cols) * computed for tile in tiles) * self.wide
            self._computed("sums", self.hardware.copying(summed))
            home = self._home(index, home)
        self._landed(len(self.steps) - 1, home)
        if any(step.tiles for steps in self.steps for step in steps):
            self._computed("results", self.hardware.copying(self.queries * q + self.keys * kv))
        self._heads("heads back", q, kv * self.shape.widened_heads(self.plan.degree))

    # ---- transfers -------------------------------------------------------------------------------------------------

    def _keys(self, index: int) -> float:
        """Post the keys of a step; when they will have arrived."""
        if index >= len(self.steps):
            return 0.0
        seconds = self._exchange(index, ("receives", "sends"), self.kv_bytes)
        return self._put("link", max(self.link, self.compute), seconds, f"keys of step {index}")

    def _home(self, index: int, before: float) -> float:
        """Post the gradients of a step's keys, once those of the step before are home; when they will be."""
        self._landed(index - 1, before)
        seconds = self._exchange(index, ("grad_receives", "grad_sends"), self.travels)
        return self._put("link", max(self.link, self.compute), seconds, f"gradients of step {index}")

    def _landed(self, index: int, arrived: float) -> None:
        """Wait for the gradients of a step, and add them."""
        if index < 0:
            return
        self._waited(arrived)
        tokens = sum(transfer.tokens for step in self.steps[index] for transfer in step.grad_receives)
        self._computed("sums", self.hardware.copying(tokens * (self.travels + self.kv_bytes * self.wide) / 2))

    def _exchange(self, index: int, ways: tuple[Way, Way], each: float) -> float:
        """The slower of what comes in and what goes out, inside the node and between nodes."""
        return max(self._one_way(index, way, each) for way in ways)

    def _one_way(self, index: int, way: Way, each: float) -> float:
        """Seconds for this rank's messages; where ranks take turns, for those of an average one."""
        ranks = [self.rank] if self.hardware.overlaps else [*range(0, self.plan.ranks, self.plan.degree)]
        met = [self._messages(rank, index, way) for rank in ranks]
        inside, between = (each * sum(tokens) / len(ranks) for tokens in list(zip(*met, strict=True))[:2])
        near, far = (max(peers) for peers in list(zip(*met, strict=True))[2:])
        return self.hardware.exchange(inside, between, (near, far))

    def _messages(self, rank: int, index: int, way: Way) -> tuple[int, int, int, int]:
        """The tokens that one rank exchanges in a step inside its node and with other nodes, and its peers there."""
        plan, node = self.plan, self.hardware.ranks_per_node
        tokens, peers = [0, 0], [set[int](), set[int]()]
        for row in range(plan.batch_rows):
            for transfer in getattr(plan.steps(rank, row)[index], way):
                other = transfer.source if way in ("receives", "grad_receives") else transfer.target
                peer = other * plan.degree + rank % plan.degree
                away = peer // node != rank // node
                tokens[away] += transfer.tokens
                peers[away].add(peer)
        return tokens[0], tokens[1], len(peers[0]), len(peers[1])

    def _heads(self, what: str, query: float, key: float) -> None:
        """An exchange inside a Ulysses group, of some bytes per query and per key that a rank computes with: nothing
        can be computed while it travels. Beforehand it is cut by member, afterwards laid out by position."""
        degree = self.plan.degree
        if degree == 1:
            return
        held = self.queries * query + self.keys * key  # of all tokens of the group, a share of the heads
        size = held * (degree - 1) / degree
        inside = degree <= self.hardware.ranks_per_node
        self._computed("copies", self.hardware.copying(held))
        sizes, peers = (size, 0.0) if inside else (0.0, size), (degree - 1, degree - 1)
        seconds = self.hardware.exchange(*sizes, peers)
        self._waited(self._put("link", max(self.link, self.compute), seconds, what))
        self._computed("copies", self.hardware.copying(held))

    def _expanding(self, steps: Sequence[Step]) -> float:
        """Seconds in which a step's latents are made keys and values; backward takes two more such products."""
        machine, tokens = self.hardware, sum(tokens_in(step.arena) for step in steps if step.tiles)
        product = tokens * self.expansion / machine.full * machine.ranks_per_device
        return product + machine.copying(tokens * self.expanded_bytes)

    def _packed(self) -> float:
        """Seconds to pack own keys to be sent, or lay them among those of others."""
        laid = max((tokens_in(step.own) for steps in self.steps for step in steps if step.receives), default=0)
        sent = any(step.sends for steps in self.steps for step in steps)
        return self.hardware.copying(max(laid, self.keys if sent else 0) * self.kv_bytes)

    # ---- clocks ----------------------------------------------------------------------------------------------------

    def _put(self, lane: Literal["compute", "link"], start: float, seconds: float, what: str) -> float:
        if not seconds:
            return 0.0  # nothing to wait for
        self.events.append(Event(lane, start, start + seconds, what))
        setattr(self, lane, start + seconds)
        if not self.hardware.overlaps:
            self.compute = self.link = start + seconds
        return start + seconds

    def _computed(self, what: str, seconds: float) -> None:
        self._put("compute", self.compute, seconds, what)

    def _waited(self, arrived: float) -> None:
        self.compute = max(self.compute, arrived)
