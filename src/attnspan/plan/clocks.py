"""The two clocks of timeline.py, of compute and of transfers, for all ranks and several strategies at once.

What happens in which order, and what it costs, is timeline.py's; a test holds the two against each other. Shapes: V
strategies, G groups of ranks, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnspan.plan.cost import Link
from attnspan.plan.tile_work import StepWork

if TYPE_CHECKING:
    from attnspan.plan.group_forecast import GroupForecast


@dataclass(eq=False)
class Clocks:
    """The two clocks of every group under every strategy, (V, G), as timeline.py moves them on one rank."""

    groups: GroupForecast
    compute: Tensor
    link: Tensor
    busy: Tensor  # what was computed, without the waiting

    @classmethod
    def of(cls, groups: GroupForecast, strategies: int) -> Clocks:
        return cls(groups, *torch.zeros(3, strategies, groups.count, dtype=torch.float64, device="cpu"))

    def forward(self, work: StepWork, keys: Tensor) -> None:
        each = self.groups.bytes
        inputs, results, *_ = self.groups.heads
        self._heads(inputs)
        self._computed(self._packed(keys))
        arrive = [*_events(keys), None]
        arrived = self._posted(arrive[0])
        for after, tiles in zip(arrive[1:], work.forward.unbind(-1), strict=True):
            self._waited(arrived)
            arrived = self._posted(after)
            self._computed(tiles)
        merged = (work.rows.sum(-1) - self.groups.tokens).clamp_(0)
        self._computed(self._copying(merged * ((2 + each.wide) * (each.out + each.lse))))
        self._heads(results)

    def backward(self, work: StepWork, keys: Tensor, home: Tensor, returns: Tensor, keeps: Tensor) -> None:
        """`home`: seconds of gradients on their way; `returns`: of how many keys they come; `keeps`: whether keys are
        there already."""
        each = self.groups.bytes
        inputs, _, finals, grads = self.groups.heads
        self._heads(finals + inputs * ~keeps)
        self._computed(self._packed(keys))
        tiles = work.backward + self._copying((work.rows * each.q + work.cols * each.kv) * each.wide)
        landing = self._copying(returns * ((each.travels + each.kv * each.wide) / 2)).unbind(-1)
        arrive, back, landed = [*_events(keys), None], None, None
        arrived = self._posted(arrive[0])
        for after, seconds, way, landing_next in zip(arrive[1:], tiles.unbind(-1), _events(home), landing, strict=True):
            self._waited(arrived)
            arrived = self._posted(after)
            self._computed(seconds)
            self._landed(back, landed)
            back, landed = self._posted(way), landing_next
        self._landed(back, landed)
        self._computed(self._copying(self.groups.tokens * (each.q + each.kv)))
        self._heads(grads)

    def _heads(self, position: float | Tensor) -> None:
        """An exchange inside Ulysses groups, of some bytes for each position that a group holds."""
        degree, machine = self.groups.degree, self.groups.hardware
        if degree == 1:
            return
        link = machine.inside if degree <= machine.ranks_per_node else machine.between
        held = self.groups.tokens * position
        copied = self._copying(held)
        self._computed(copied)
        self._waited(self._posted((link_seconds(link, held * ((degree - 1) / degree), degree - 1), held > 0)))
        self._computed(copied)

    def _packed(self, keys: Tensor) -> Tensor:
        """Seconds to pack own keys, where any are exchanged."""
        return self._copying(self.groups.tokens * self.groups.bytes.kv) * (keys.sum(-1) > 0)

    def _copying(self, size: Tensor) -> Tensor:
        return size * self.groups.hardware.copying(1.0)

    def _computed(self, seconds: Tensor) -> None:
        self.compute = self.compute + seconds
        self.busy = self.busy + seconds

    def _posted(self, event: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """An exchange that begins when the link is free; when it is done, 0 where there is nothing to exchange."""
        if event is None:
            return None
        seconds, some = event
        done = (torch.maximum(self.link, self.compute) + seconds) * some
        self.link = torch.maximum(self.link, done)
        if not self.groups.hardware.overlaps:
            self._waited(done)
        return done

    def _waited(self, arrived: Tensor | None) -> None:
        if arrived is not None:
            self.compute = torch.maximum(self.compute, arrived)

    def _landed(self, back: Tensor | None, seconds: Tensor | None) -> None:
        if seconds is not None:
            self._waited(back)
            self._computed(seconds)


def _events(seconds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Exchanges step by step, and whether there is anything to exchange."""
    return list(zip(seconds.unbind(-1), (seconds > 0).unbind(-1), strict=True))


def link_seconds(link: Link, size: Tensor, peers: Tensor | int) -> Tensor:
    """`Link.seconds` of many exchanges."""
    if link.spread is None or isinstance(peers, int):
        return size / link.rate(peers if isinstance(peers, int) else 1) + (size > 0) * link.latency
    rate = torch.where(peers < 2, link.bandwidth, (peers * link.bandwidth).clamp(max=link.spread))
    return size / rate + (size > 0) * link.latency
