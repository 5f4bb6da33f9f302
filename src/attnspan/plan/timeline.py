"""When things happen on one rank, as the cost model predicts: a lane of compute and a lane of transfers.

A transfer may fly while the tiles of the step before are computed; its buffer is free once the step before that is
done. So a step waits only for what did not arrive in time, and `exposed` is that waiting, summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from attnspan.layouts.run import tokens_in
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.plan import Plan
from attnspan.plan.step import Step, Transfer


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
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.computing

    def __str__(self) -> str:
        """Both lanes, drawn to scale.

        >>> first, keys, second = (
        ...     Event("compute", 0, 2, ""),
        ...     Event("link", 0, 3, ""),
        ...     Event("compute", 3, 4, ""),
        ... )
        >>> print(Timeline(0, (first, keys, second)))
        rank 0  compute  ████████████████        ████████  4.000 s
                link     ████████████████████████          waits 1.000 s
        """
        width, end = 32, self.seconds or 1.0
        lanes = {"compute": [" "] * width, "link": [" "] * width}
        for event in self.events:
            for cell in range(int(event.start / end * width), max(int(event.stop / end * width), 0)):
                lanes[event.lane][cell] = "█"
        compute, link = ("".join(lanes[lane]) for lane in ("compute", "link"))
        head = f"rank {self.rank}  "
        return (
            f"{head}compute  {compute}  {self.seconds:.3f} s\n"
            f"{' ' * len(head)}link     {link}  waits {self.exposed:.3f} s"
        )


def predict(plan: Plan, rank: int, shape: Shape, hardware: Hardware, *, backward: bool = False) -> Timeline:
    """The timeline of one rank. Batch rows that differ are computed one after another within a step."""
    lanes = _Lanes()
    _heads(lanes, plan, shape, hardware, "heads out")
    _pass(lanes, plan, rank, shape, hardware, _Rates(1.0, 1.0))
    _heads(lanes, plan, shape, hardware, "heads back")
    if backward:
        # Two and a half times the operations; keys travel again and their gradients, in float32, travel home.
        _heads(lanes, plan, shape, hardware, "heads out")
        gradient = 4 * shape.kv_values / shape.kv_bytes
        _pass(lanes, plan, rank, shape, hardware, _Rates(2.5, 1.0 + gradient))
        _heads(lanes, plan, shape, hardware, "heads back")
    return Timeline(rank, tuple(lanes.events))


class _Rates(NamedTuple):
    compute: float
    link: float


class _Lanes:
    """Two clocks and what was put on them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.compute = 0.0
        self.link = 0.0

    def put(self, lane: Literal["compute", "link"], start: float, seconds: float, what: str) -> float:
        if seconds:
            self.events.append(Event(lane, start, start + seconds, what))
        setattr(self, lane, start + seconds)
        return start + seconds


def _pass(lanes: _Lanes, plan: Plan, rank: int, shape: Shape, hardware: Hardware, rates: _Rates) -> None:
    rows = [plan.steps(rank, row) for row in range(plan.rows)]
    share = 1 / plan.rows  # a Shape counts the whole batch; each row that differs is its part of it
    flops = shape.flops * share / plan.degree
    lanes.link = lanes.compute
    done = [lanes.compute, lanes.compute]
    merged = 0
    for index, steps in enumerate(zip(*rows, strict=True)):
        receiving = _exchange(plan, rank, steps, shape.kv_bytes * share * shape.kv_share(plan.degree), hardware)
        arrived = lanes.put("link", max(lanes.link, done[-2]), receiving * rates.link, f"keys of step {index}")
        tiles = [tile for step in steps for tile in step.tiles]
        merged += sum(len(tile.rows) for tile in tiles)
        seconds = hardware.compute(tiles, flops) * rates.compute
        start = max(lanes.compute, arrived if receiving else lanes.compute)
        done.append(lanes.put("compute", start, seconds, f"tiles of step {index}"))
    queries = sum(tokens_in(plan.queries(rank, row)) for row in range(plan.rows))
    extra = max(0, merged - queries) * shape.q_bytes * share / plan.degree
    lanes.put("compute", lanes.compute, 5 * extra / hardware.memory_bandwidth * rates.compute, "merges")


def _exchange(plan: Plan, rank: int, steps: tuple[Step, ...], key_bytes: float, hardware: Hardware) -> float:
    """The slower of what comes in and what goes out, inside the node and between nodes."""

    def seconds(transfers: list[Transfer], other: Literal["source", "target"]) -> float:
        sizes = [0.0, 0.0]
        for transfer in transfers:
            peer = getattr(transfer, other) * plan.degree + rank % plan.degree
            sizes[peer // hardware.ranks_per_node != rank // hardware.ranks_per_node] += transfer.tokens * key_bytes
        return hardware.exchange(*sizes)

    return max(
        seconds([transfer for step in steps for transfer in step.receives], "source"),
        seconds([transfer for step in steps for transfer in step.sends], "target"),
    )


def head_bytes(plan: Plan, shape: Shape) -> float:
    """Bytes that a rank receives in the head exchanges of a forward pass: queries, keys and values in, output back."""
    tokens = plan.seq_len / plan.ranks
    return tokens * (shape.q_bytes + shape.kv_bytes) * (plan.degree - 1) / plan.degree


def _heads(lanes: _Lanes, plan: Plan, shape: Shape, hardware: Hardware, what: str) -> None:
    """The head exchange of Ulysses: nothing can be computed while it travels."""
    if plan.degree == 1:
        return
    size = head_bytes(plan, shape) / 2
    inside = plan.degree <= hardware.ranks_per_node
    start = max(lanes.compute, lanes.link)
    seconds = hardware.exchange(size, 0.0) if inside else hardware.exchange(0.0, size)
    lanes.compute = lanes.put("link", start, seconds, what)
