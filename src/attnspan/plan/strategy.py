"""Who sends what when: the strategies.

Each strategy turns the geometry of a batch row into the steps of one rank. They differ in what travels and in how
much of it is held at once:

    Ring               whole shards are handed on, hop by hop; hops that nobody needs are left out
    Gather             everybody gets everything in one exchange; one step, few large tiles
    Needed(stages)     only keys that the mask uses travel, straight from their owners, in one exchange per stage
    Ulysses(degree)    heads for sequence inside groups of ranks, and any of the above between the groups

[Note: stages] With one stage everything is computed after one exchange: nothing is merged, nothing overlaps. With n
stages the first computes on the rank's own keys while the first exchange travels, and each later stage computes on
what arrived while the next travels. A pair of ranks belongs to one stage, by its distance around the ring, so no
position reaches a rank twice, and both ends know the stage without asking.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from attnspan.errors import PlanError, integer, one_of
from attnspan.layouts.run import Run, Runs, joined_runs
from attnspan.plan.geometry import Geometry
from attnspan.plan.step import Step, Transfer

_SIGN = re.compile(r"\s+x(\s+|$)", re.IGNORECASE)
"""The x between ulysses and what moves keys between its groups."""


class Strategy(ABC):
    """How keys reach the queries that need them."""

    __slots__ = ()

    @abstractmethod
    def steps(self, geometry: Geometry, rank: int, shifts: tuple[int, ...]) -> tuple[Step, ...]:
        """The steps of one rank. `shifts` are the ring distances that any batch row uses, ascending."""

    @staticmethod
    def of(strategy: Strategy | str) -> Strategy:
        """A strategy from its name.

        >>> Strategy.of("needed(3)"), Strategy.of("ulysses(4) x ring")
        (Needed(stages=3), Ulysses(degree=4, inner=Ring()))
        """
        if isinstance(strategy, Strategy):
            return strategy
        if not isinstance(strategy, str):
            raise PlanError(f"strategy must be a name or a Strategy, got {strategy!r}")
        outer, x, inner = (part.strip().lower() for part in _SIGN.sub(" x ", strategy, count=1).partition(" x "))
        made = _named(outer)
        if not x:
            return made
        if not inner:
            raise PlanError(f"strategy must name ring, gather or needed after x, got {strategy!r}")
        if not isinstance(made, Ulysses):
            raise PlanError(f"strategy: only ulysses stands before x, got {strategy!r}")
        return Ulysses(made.degree, _named(inner))


@dataclass(frozen=True, slots=True)
class Ring(Strategy):
    """Shards rotate: memory for two shards, one merge per hop, whole shards on every link."""

    def steps(self, geometry: Geometry, rank: int, shifts: tuple[int, ...]) -> tuple[Step, ...]:
        own, ranks = geometry.k_shards[rank], geometry.ranks
        steps = [Step((), (), own, own, geometry.tiles(rank, own))]
        held = 0
        for shift in shifts:  # a hop may be longer than one: distances that nobody needs are jumped over
            hop, before, held = shift - held, held, shift
            arriving, leaving = (rank - shift) % ranks, (rank - before) % ranks
            arena = geometry.k_shards[arriving]
            receive = Transfer((rank - hop) % ranks, rank, arriving, arena)
            send = Transfer(rank, (rank + hop) % ranks, leaving, geometry.k_shards[leaving])
            ways = _gradient_transfers(geometry, rank, {shift})
            steps.append(Step(_filled(receive), _filled(send), (), arena, geometry.tiles(rank, arena), *ways))
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class Gather(Strategy):
    """One all-gather, then everything at once: the fewest and largest tiles, memory for the whole sequence."""

    def steps(self, geometry: Geometry, rank: int, shifts: tuple[int, ...]) -> tuple[Step, ...]:
        others = [other for other in range(geometry.ranks) if other != rank]
        shards = geometry.k_shards
        receives = [Transfer(other, rank, other, shards[other]) for other in others]
        sends = [Transfer(rank, other, rank, shards[rank]) for other in others]
        arena = in_order([run for runs in shards for run in runs])
        ways = _gradient_transfers(geometry, rank, set(range(1, geometry.ranks)))
        return (Step(_filled(*receives), _filled(*sends), shards[rank], arena, geometry.tiles(rank, arena), *ways),)


@dataclass(frozen=True, slots=True)
class Needed(Strategy):
    """Only the keys that the mask uses travel. See [Note: stages]."""

    stages: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", integer("stages", self.stages, at_least=1, error=PlanError))

    def steps(self, geometry: Geometry, rank: int, shifts: tuple[int, ...]) -> tuple[Step, ...]:
        groups = [set(shifts)] if self.stages == 1 else [set(), *_parts(shifts, self.stages - 1)]
        steps = []
        for stage, group in enumerate(groups):
            grad_sends, grad_receives = _gradient_transfers(geometry, rank, group)
            receives = tuple(Transfer(way.target, rank, way.target, way.runs) for way in grad_sends)
            sends = tuple(Transfer(rank, way.source, rank, way.runs) for way in grad_receives)
            others = [run for transfer in receives for run in transfer.runs]
            own: Runs = ()
            if stage == 0:  # own keys: as they lie if nothing comes beside them, else those that are used
                own = geometry.needs(rank).get(rank, ()) if others else geometry.k_shards[rank]
            arena = in_order([*own, *others]) if others else own
            steps.append(Step(receives, sends, own, arena, geometry.tiles(rank, arena), grad_sends, grad_receives))
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class Ulysses(Strategy):
    """Inside groups of `degree` ranks each rank trades its tokens of most heads for all tokens of a few.

    Groups are `degree` consecutive ranks; between groups the keys move by `inner`. `degree` None means all ranks:
    one group, nothing between.
    """

    degree: int | None = None
    inner: Strategy = Gather()

    def __post_init__(self) -> None:
        if self.degree is not None:
            object.__setattr__(self, "degree", integer("degree", self.degree, at_least=1, error=PlanError))
        if isinstance(self.inner, Ulysses):
            raise PlanError("inner must be ring, gather or needed, got ulysses inside ulysses")

    def steps(self, geometry: Geometry, rank: int, shifts: tuple[int, ...]) -> tuple[Step, ...]:
        # The geometry is that of the groups, so `rank` is a group; see Plan.steps.
        return self.inner.steps(geometry, rank, shifts)


def strategy_name(strategy: Strategy | str) -> str:
    """The name that `Strategy.of` reads back.

    >>> strategy_name(Needed(3)), strategy_name(Ulysses(2, Ring())), strategy_name(Gather())
    ('needed(3)', 'ulysses(2) x ring', 'gather')
    """
    match Strategy.of(strategy):
        case Needed(stages):
            return f"needed({stages})"
        case Ulysses(None):
            return "ulysses"
        case Ulysses(degree, inner):
            return f"ulysses({degree}) x {strategy_name(inner)}"
        case other:
            return type(other).__name__.lower()


def between_groups(strategy: Strategy | str) -> Strategy:
    """What moves keys between groups of ranks; without Ulysses each rank is a group.

    >>> between_groups("ulysses(2) x ring"), between_groups("gather")
    (Ring(), Gather())
    """
    found = Strategy.of(strategy)
    return found.inner if isinstance(found, Ulysses) else found


def in_order(runs: list[Run]) -> Runs:
    """Runs by position, neighbours joined: how arenas are laid out."""
    return joined_runs(tuple(sorted(runs)))


def _named(name: str) -> Strategy:
    match = re.fullmatch(r"(\w+)\s*(?:\(\s*(?:(\w+)\s*=\s*)?(\d+)\s*\))?", name)
    kind = one_of("strategy", match[1] if match else name, ["ring", "gather", "needed", "ulysses"], error=PlanError)
    keyword, number = (match[2], int(match[3])) if match and match[3] else (None, None)
    if kind in ("ring", "gather"):
        if number is not None:
            raise PlanError(f"strategy: {kind} takes no number, got {name!r}")
        return Ring() if kind == "ring" else Gather()
    known = "stages" if kind == "needed" else "degree"
    if keyword is not None and keyword != known:
        raise PlanError(f"strategy: {kind} takes {known}, got {keyword!r} in {name!r}; write {kind}({known}={number})")
    if kind == "needed":
        return Needed(1 if number is None else number)
    return Ulysses(number)


def _gradient_transfers(
    geometry: Geometry, rank: int, shifts: set[int]
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Gradients that a rank sends and that it receives, of keys used between ranks at these ring distances."""
    ranks, needs, serves = geometry.ranks, geometry.needs(rank), geometry.serves(rank)
    owners = sorted(needs.keys() & {(rank - shift) % ranks for shift in shifts})
    users = sorted(serves.keys() & {(rank + shift) % ranks for shift in shifts})
    grad_sends = tuple(Transfer(rank, owner, owner, needs[owner]) for owner in owners)
    grad_receives = tuple(Transfer(user, rank, rank, serves[user]) for user in users)
    return grad_sends, grad_receives


def _filled(*transfers: Transfer) -> tuple[Transfer, ...]:
    """The transfers that carry something: empty shards are ordinary, empty messages are not sent."""
    return tuple(transfer for transfer in transfers if transfer.runs)


def _parts(shifts: tuple[int, ...], parts: int) -> list[set[int]]:
    """Ring distances in `parts` groups of neighbours, the nearest first; no group is empty."""
    parts = min(parts, len(shifts))
    return [set(shifts[i * len(shifts) // parts : (i + 1) * len(shifts) // parts]) for i in range(parts)]
