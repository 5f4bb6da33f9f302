"""All strategies of one Ulysses degree, on all ranks at once: what a step computes and exchanges, and for how long.

[Note: what is estimated] Tiles are counted by band and run. masks/tile.py also joins bands that touch, and may find a
better cut where several runs of a rank lie in one document. Keys that several bands use are counted for each. Packs of
documents are met to a few per mille; a test holds it against timeline.py.

Knows runs without stride, and keys that lie as queries do. Shapes: V strategies, G groups of ranks, A meetings of a
band with a run of queries, P pieces of these by run of keys, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.plan.clocks import Clocks, link_seconds
from attnspan.plan.cost import BACKWARD, Hardware, Shape
from attnspan.plan.heads import split_heads
from attnspan.plan.meetings import Meetings, Positions, areas
from attnspan.plan.plan import Plan
from attnspan.plan.strategy import Gather, Needed, Ring, Strategy, between_groups
from attnspan.plan.tile_work import StepWork

HOPS = 16
"""The most hops of a ring that is looked at, unless nothing else fits into memory: each is a step to walk through, and
`needed`, which moves less in fewer steps, has been faster on all packs that were tried."""


class Estimate(NamedTuple):
    """A strategy: its seconds on the slowest rank, how often that rank exchanges anything, the most seconds that a rank
    computes at least if tiles are cut and joined otherwise, and the most bytes of keys on one."""

    strategy: Strategy
    seconds: float
    exchanges: int
    busy: float
    needs: float


@dataclass(frozen=True, slots=True)
class ForecastSetting:
    """What strategies are compared for. Keys that are kept until backward, or may be ("auto"), fit into `memory`."""

    shape: Shape
    hardware: Hardware
    keep_keys: bool | Literal["auto"] = False
    memory: float = inf


class PositionBytes(NamedTuple):
    """Bytes of a position on a rank: query, out, lse, K and V, their gradient on its way home; and of a sum, over those
    of a value."""

    q: float
    out: float
    lse: float
    kv: float
    travels: float
    wide: float


@dataclass(frozen=True, eq=False)
class GroupForecast:
    """The ranks of a plan in groups of one Ulysses degree: what each of them does, and how long it takes."""

    positions: Positions
    degree: int
    setting: ForecastSetting

    @property
    def plan(self) -> Plan:
        return self.positions.plan

    @property
    def hardware(self) -> Hardware:
        return self.setting.hardware

    @property
    def count(self) -> int:
        return self.plan.ranks // self.degree

    @cached_property
    def bytes(self) -> PositionBytes:
        shape, share = self.setting.shape, 1 / self.plan.batch_rows
        q, out, lse = (values * share / self.degree * shape.width for values in shape.head_values)
        kv, wide = shape.kv_bytes * share * shape.kv_share(self.degree), max(4, shape.width) / shape.width
        return PositionBytes(q, out, lse * wide, kv, kv * (1.0 if self.hardware.rounds else wide), wide)

    @property
    def flops(self) -> float:
        return self.setting.shape.flops / self.plan.batch_rows / self.degree

    @property
    def held(self) -> float:
        """The positions that a group holds on average."""
        return self.plan.seq_len * self.plan.batch_rows / self.count

    @cached_property
    def heads(self) -> list[float]:
        """Bytes of a position in each exchange of heads, if keys are kept."""
        each = self.bytes
        widened = self.setting.shape.widened_heads(self.degree)
        return [each.q + each.kv, each.out + each.lse, 2 * each.out + each.lse, each.q + each.kv * widened]

    @property
    def copying_heads(self) -> float:
        """Seconds in which a rank copies heads."""
        return self.hardware.copying(2 * self.held * sum(self.heads)) if self.degree > 1 else 0.0

    @cached_property
    def runs(self) -> Tensor:
        return self.positions.grouped(self.degree)

    @cached_property
    def tokens(self) -> Tensor:
        """The positions that each group holds, (G)."""
        start, stop, group, _ = self.runs
        return torch.zeros(self.count, dtype=torch.int64, device="cpu").index_add_(0, group, stop - start).double()

    @cached_property
    def meetings(self) -> Meetings:
        return Meetings.of(self.positions.bands, self.runs)

    @cached_property
    def distance(self) -> Tensor:
        """How far around the ring the keys of each piece lie, (P)."""
        each = self.meetings
        return (each.group.index_select(0, each.at) - each.owner) % self.count

    @cached_property
    def needed(self) -> Tensor:
        """The keys that each group needs of the one at each ring distance before it, (G, G)."""
        each, count = self.meetings, self.count
        keys = torch.zeros(count * count, dtype=torch.int64, device="cpu")
        keys.index_add_(0, each.group.index_select(0, each.at) * count + self.distance, each.fresh)
        keys = keys.view(count, count).double()
        keys[:, 0] = 0
        return keys

    @cached_property
    def far(self) -> Tensor:
        """The keys that each group needs from other nodes, (G)."""
        return (self.needed * self._away).sum(1)

    @cached_property
    def distances(self) -> list[int]:
        """The ring distances at which some group needs keys."""
        used: list[int] = self.needed.sum(0).nonzero().squeeze(1).tolist()
        return used

    # ---- times -------------------------------------------------------------------------------------------------

    @property
    def hopping(self) -> float:
        """Seconds that a ring takes at least to hand on keys, backward too if none are kept; of a long one, see `HOPS`,
        more than anything else."""
        if len(self.distances) > HOPS:
            return 1e30
        forward = float(self._seconds(self._hops(1 + len(self.distances))[:, None], self.bytes.kv).sum(-1).amax())
        return forward if self.setting.keep_keys else 2 * forward

    def estimates(self, strategies: Sequence[Strategy]) -> list[Estimate]:
        """What strategies of this degree take."""
        if not strategies:
            return []
        table, steps = self._steps(strategies)
        # Keys that are needed, and peers: (2, V, 2 ways, 2 places, G, S), in and out, same node and others.
        home = self._spread(self.needed, (table[:, :, None] == torch.arange(steps, device="cpu")).double())
        moved = self._moved_keys(strategies, home)
        keeps, needs = self._memory(moved[0, :, 0].sum(1))
        keys, ways = self._seconds(moved, self.bytes.kv), self._seconds(home, self.bytes.travels)
        work = StepWork.of(self, table, steps)
        fetched = keys * ~keeps[..., None]
        clocks = Clocks.of(self, len(strategies))
        clocks.forward(work, keys)
        clocks.backward(work, fetched, ways, home[0, :, 1].sum(1), keeps)
        seconds, slowest = clocks.compute.max(1)
        exchanges = (torch.stack([keys, fetched, ways]) > 0).sum((0, 3)).gather(1, slowest[:, None]).squeeze(1)
        heads = len(self.heads) if self.degree > 1 else 0
        busy = (clocks.busy - work.spare.sum(-1)).amax(1)
        columns = (each.tolist() for each in (seconds, exchanges + heads, busy, needs))
        return [Estimate(*each) for each in zip(strategies, *columns, strict=True)]

    # ---- steps -------------------------------------------------------------------------------------------------

    def _steps(self, strategies: Sequence[Strategy]) -> tuple[Tensor, int]:
        """In which step each strategy uses the keys at each ring distance, (V, G); and how many steps there are."""
        lists = [_step_of(between_groups(strategy), self.distances, self.count) for strategy in strategies]
        return torch.tensor(lists, device="cpu"), 1 + max(map(max, lists))

    def own_steps(self, table: Tensor) -> Tensor:
        """Whether the first step of each strategy has no keys but a group's own, (V, 1)."""
        return (table[:, self.distances] > 0).all(1, keepdim=True)

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def _moved_keys(self, strategies: Sequence[Strategy], needed: Tensor) -> Tensor:
        """Keys that travel, and peers, as those `needed`: a gather and a ring move whole shards."""
        inner = [between_groups(strategy) for strategy in strategies]
        moved = needed if all(isinstance(each, Needed) for each in inner) else needed.clone()
        for number, each in enumerate(inner):
            if isinstance(each, Gather):
                moved[:, number, ..., 0] = self._shards
            elif isinstance(each, Ring):
                moved[:, number] = self._hops(needed.shape[-1])
        return moved

    @property
    def _shards(self) -> Tensor:
        """All keys of others in one exchange, and peers: (2, 2 ways, 2 places, G)."""
        first = torch.arange(self.count, device="cpu") * self.degree  # rank of each group
        (_, node), own = (first // self.hardware.ranks_per_node).unique(return_inverse=True), self.tokens

        def of_others(numbers: Tensor) -> Tensor:
            """Their sum over the other groups of a node, and over those of other nodes."""
            there = torch.zeros_like(numbers).index_add_(0, node, numbers)[node]
            return torch.stack([there - numbers, numbers.sum() - there])

        holds, others = (own > 0).double(), of_others(torch.ones_like(own))
        both = torch.stack([of_others(own), own * others, of_others(holds), holds * others])
        return both.view(2, 2, *both.shape[1:])

    def _spread(self, keys: Tensor, onto: Tensor) -> Tensor:
        """Keys by group and ring distance, (G, G), of which most are 0, laid onto steps, (V, G, S)."""
        here, distance = keys.nonzero().unbind(1)
        found, count = keys[here, distance], self.count
        place = self._away[here, distance].long() * count
        at = torch.cat([place + here, 2 * count + place + (here - distance) % count])  # that arrive, that leave
        steps = onto.index_select(1, distance).repeat(1, 2, 1)
        onto_steps = torch.stack([steps * found.repeat(2)[:, None], steps])
        laid = onto.new_zeros(2, len(onto), 4 * count, onto.shape[2]).index_add_(2, at, onto_steps)
        return laid.view(2, len(onto), 2, 2, count, onto.shape[2])

    def _hops(self, steps: int) -> Tensor:
        """Whole shards, handed on; a hop may be longer than one."""
        found = torch.zeros(2, 2, 2, self.count, steps, dtype=torch.float64, device="cpu")
        groups = torch.arange(self.count, device="cpu")[:, None]
        node = groups * self.degree // self.hardware.ranks_per_node
        there = torch.tensor([0, *self.distances], device="cpu")
        hop, shards = there.diff(), (groups - there) % self.count
        keys = self.tokens[torch.stack([shards[:, 1:], shards[:, :-1]])]  # that arrive, that leave
        away = node.squeeze(1)[torch.stack([groups - hop, groups + hop]) % self.count] != node
        for place, is_there in enumerate((~away, away)):
            found[0, :, place, :, 1 : len(there)] = keys * is_there
            found[1, :, place, :, 1 : len(there)] = is_there.double()
        return found

    def _seconds(self, keys: Tensor, each: float) -> Tensor:
        """The slower way, and the slower place, of each exchange, (V, G, S)."""
        tokens, peers = keys
        if not self.hardware.overlaps:  # [Note: turns] in timeline.py
            tokens, peers = tokens.mean(-2, True).expand_as(tokens), peers.amax(-2, True).expand_as(peers)
        links = self.hardware.inside, self.hardware.between
        places = [link_seconds(link, tokens[:, :, i] * each, peers[:, :, i]) for i, link in enumerate(links)]
        return torch.maximum(*places).amax(1)

    @property
    def _away(self) -> Tensor:
        return _away(self.count, self.degree, self.hardware.ranks_per_node)

    # ---- memory ------------------------------------------------------------------------------------------------

    def _memory(self, received: Tensor) -> tuple[Tensor, Tensor]:
        """Which strategies keep keys until backward, (V, 1), and the most bytes of keys on a rank, (V)."""
        own, each, setting = self.tokens, self.bytes, self.setting
        shape, rows = setting.shape, self.plan.batch_rows
        coming = torch.cat([received[..., 1:], torch.zeros_like(received[..., :1])], -1)
        peak = (own + (received + coming).amax(-1)) * each.kv
        if not setting.keep_keys:
            return torch.zeros(len(peak), 1, dtype=torch.bool, device="cpu"), peak.amax(1)
        share = split_heads(shape.heads, shape.kv_heads, self.degree)[0]
        kv = shape.kv_bytes / rows * len(share.key) / shape.kv_heads
        kept = (received.sum(-1) + own * (received[..., 0] > 0)) * kv
        if self.degree > 1:
            kept = kept + own * (kv + each.q * self.degree * len(share.query) / shape.heads)
        keeps = torch.ones(len(peak), 1, dtype=torch.bool, device="cpu")
        if setting.keep_keys == "auto":
            q, out, lse = (values * shape.width / rows for values in shape.head_values)
            saved = own / self.degree * (q + out + lse * each.wide + shape.kv_bytes / rows)
            keeps = ((peak.amax(1, True) + kept.amax(1, True) <= setting.memory) & (kept <= saved)).all(1, True)
        return keeps, peak.amax(1) + (kept * keeps).amax(1)


@lru_cache(maxsize=64)
def _away(count: int, degree: int, node: int) -> Tensor:
    """Whether the group at some ring distance before a group is on another node, (G, G)."""
    groups = torch.arange(count, device="cpu")
    nodes = groups * degree // node
    return nodes[(groups[:, None] - groups) % count] != nodes[:, None]


def _step_of(strategy: Strategy, distances: list[int], groups: int) -> list[int]:
    """The step that uses the keys at each ring distance, by strategy.py; own keys are at distance 0."""
    steps = [0] * groups
    parts = len(distances) if isinstance(strategy, Ring) else 0
    if isinstance(strategy, Needed):
        parts = min(strategy.stages - 1, len(distances))
    for part in range(parts):
        for distance in distances[part * len(distances) // parts : (part + 1) * len(distances) // parts]:
            steps[distance] = part + 1
    return steps


@dataclass(frozen=True, eq=False)
class LowerBound:
    """Seconds that no strategy of a Ulysses degree can beat.

    Compute: every tile as large as its document and all ranks equally busy, and what is copied at least; or what larger
    groups were found to compute (`busy`). Link: keys that ranks need from other nodes. Both wait for heads.
    """

    ranks: GroupForecast  # of degree 1
    busy: float = 0.0

    def seconds(self, groups: GroupForecast) -> float:
        machine, each, degree = self.ranks.hardware, groups.bytes, groups.degree
        link = machine.inside if degree <= machine.ranks_per_node else machine.between
        share = groups.held * (degree - 1) / degree
        heads = sum(link.seconds(size * share, degree - 1) for size in groups.heads) if degree > 1 else 0.0
        busy = max(self.busy, self._tiles + machine.copying(groups.held * (each.q + each.kv) * (1 + each.wide)))
        if machine.ranks_per_node % degree:
            return heads + groups.copying_heads + busy
        rate = max(machine.between.bandwidth, machine.between.spread or 0.0)
        fetched = each.kv if self.ranks.setting.keep_keys else 2 * each.kv
        return heads + max(groups.copying_heads + busy, self._far * (fetched + each.travels) / rate)

    @cached_property
    def _tiles(self) -> float:
        bands, machine, plan = self.ranks.positions.bands, self.ranks.hardware, self.ranks.plan
        rows, area = (bands.q1 - bands.q0).double(), areas(bands).double()
        if machine.curves:  # as fast as any tile is
            plain = max(machine.full, machine.causal, machine.general)
            fastest = max(plain, *(max(curve.forward) for curve in machine.curves))
            backward = max(plain / BACKWARD, *(max(curve.backward) for curve in machine.curves))
            total = float(area.sum()) * (1 / fastest + 1 / backward)
        else:
            rate = max(machine.full, machine.causal, machine.general)
            total = float((area * (rows + machine.half_rows) / rows).sum()) * (1 + BACKWARD) / rate
        return total * self.ranks.flops / plan.ranks * machine.ranks_per_device

    @cached_property
    def _far(self) -> float:
        """The most keys that a rank needs from other nodes."""
        return float(self.ranks.far.amax())
