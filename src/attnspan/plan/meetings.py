"""Where bands and runs meet, as columns: every band with each run of queries, and these with each run of keys.

What geometry.py finds for one rank, for all ranks at once; group_forecast.py counts with it. Knows runs without stride,
and keys that lie as queries do. Shapes: A meetings of a band with a run of queries, P pieces of these by run of keys.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.masks.columns import Columns, counted
from attnspan.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Positions:
    """Bands and runs of a plan as columns; batch rows lie one after another, with a gap between them."""

    plan: Plan
    bands: Columns
    runs: Tensor  # (4, runs): start, stop, rank and batch row, by position

    @classmethod
    def of(cls, plan: Plan) -> Positions:
        width, bands, listed = plan.seq_len + 1, [], array("q")
        for row in range(plan.batch_rows):
            at = row * width
            columns = torch.stack(columns_of(plan, row))
            columns[:4] += at
            bands.append(columns)
            shards = plan.layout.shards(plan.seq_len, row)
            listed.extend(
                n for rank, runs in enumerate(shards) for a, b, _ in runs for n in (a + at, b + at, rank, row)
            )
        table = torch.frombuffer(listed, dtype=torch.int64).view(-1, 4).T
        return cls(plan, Columns(*torch.cat(bands, 1)), table.index_select(1, table[0].argsort()))

    def grouped(self, degree: int) -> Tensor:
        """The runs of groups of so many ranks, neighbours joined."""
        if degree == 1:
            return self.runs
        start, stop, rank, row = self.runs
        group = rank // degree
        edge = ((group[1:] != group[:-1]) | (start[1:] != stop[:-1])).nonzero().squeeze(1)
        first, last = torch.cat([edge.new_zeros(1), edge + 1]), torch.cat([edge, edge.new_tensor([len(group) - 1])])
        return torch.stack([start[first], stop[last], group[first], row[first]])


def columns_of(plan: Plan, row: int) -> Columns:
    """All bands of a batch row, partial ones too."""
    columns, partial = plan.band_columns(row)
    return Columns.of(plan.bands(row)) if partial else columns


class Meetings(NamedTuple):
    """Every band with each run of queries that it meets, by group and band; and the runs of keys that these see."""

    group: Tensor  # (A)
    row: Tensor  # (A) of the batch
    height: Tensor  # (A) queries
    below: Tensor  # (A) queries of this and of later runs of the group in the same band
    above: Tensor  # (A) queries of earlier ones
    again: Tensor  # (A) whether the one before is of the same group and band
    together: Tensor  # (A) a number for each group and band
    general: Tensor  # (A) whether the lower diagonal cuts
    mixed: Tensor  # (A) whether it cuts any of the same group and band
    at: Tensor  # (P) of which meeting
    owner: Tensor  # (P) the group that holds the keys
    fresh: Tensor  # (P) keys that no earlier run of the group sees
    seen: (
        Tensor  # (4, P) keys that all its queries see; keys that some see, their pairs, and how many queries these are
    )

    @classmethod
    def of(cls, bands: Columns, runs: Tensor) -> Meetings:
        """Of bands and runs (start, stop, group, batch row), by position."""
        start, stop, group, _ = runs = runs.contiguous()
        first = torch.searchsorted(stop, bands.q0, right=True)
        band, turn = counted(torch.searchsorted(start, bands.q1) - first)
        run = first.index_select(0, band) + turn
        order = (group.index_select(0, run) * len(bands.q0) + band).argsort(stable=True)
        band, run = band.index_select(0, order), run.index_select(0, order)
        q0, q1, k0, k1, lo, hi = torch.stack(bands).index_select(1, band)
        begin, end, group, row = runs.index_select(1, run)
        q0, q1 = torch.maximum(q0, begin), torch.minimum(q1, end)
        k0, k1 = torch.maximum(k0, q0 + lo), torch.minimum(k1, q1 + hi)
        height, general = q1 - q0, lo > k0 - q1 + 1
        again, seen = torch.zeros_like(general), torch.zeros_like(k1)
        again[1:] = (band[1:] == band[:-1]) & (group[1:] == group[:-1])
        seen[1:] = k1[:-1] * again[1:]
        corner = torch.where(hi < k1 - 1 - q0, q0 + hi, k1)  # all queries see the keys before it
        corner = torch.where(general, k0, corner)
        first = torch.searchsorted(stop, k0, right=True)
        at, turn = counted(torch.searchsorted(start, k1) - first)
        key = first.index_select(0, at) + turn
        where = torch.stack([q0, q1, k0, k1, lo, hi, corner, seen]).index_select(1, at)
        begin, end, owner, _ = runs.index_select(1, key)
        fresh, pieces = _pieces(where, begin, end, is_general=bool(general.any()))
        total, new = height.cumsum(0), ~again
        last = torch.cat([new[1:], new.new_ones(1)]).nonzero().squeeze(1)
        together = new.cumsum(0) - 1
        below = total.index_select(0, last).index_select(0, together) - total + height
        above = below.index_select(0, new.nonzero().squeeze(1)).index_select(0, together) - below
        mixed = torch.zeros_like(together).index_add_(0, together, general.long()).index_select(0, together) > 0
        return cls(group, row, height, below, above, again, together, general, mixed, at, owner, fresh, pieces)


def _pieces(where: Tensor, begin: Tensor, end: Tensor, *, is_general: bool) -> tuple[Tensor, Tensor]:
    """Fresh keys of meetings in runs of keys, and as in `Meetings.seen`."""
    q0, q1, k0, k1, lo, hi, corner, before = where
    k0, k1 = torch.maximum(k0, begin), torch.minimum(k1, end)
    fresh = (k1 - torch.maximum(k0, before)).clamp_(min=0)
    edge = torch.minimum(torch.maximum(k0, corner), k1)
    cut, last = k1 - edge, q1 + hi
    pairs = areas(Columns(q0, q1, edge, k1, lo, hi)) if is_general else cut * (2 * last - edge - k1 + 1) // 2
    queries = torch.minimum(q1, k1 - lo) - torch.maximum(q0, edge - hi)
    return fresh, torch.stack([edge - k0, cut, pairs, queries * (cut > 0)])


def areas(bands: Columns) -> Tensor:
    """The pairs of tight bands."""
    q0, q1, k0, k1, lo, hi = bands

    def before(diagonal: Tensor) -> Tensor:  # pairs below it
        ends = torch.stack([q1 + diagonal - k0, q0 + diagonal - k0, q1 + diagonal - k1, q0 + diagonal - k1]).clamp_(0)
        many, few, over, under = ends * (ends + 1) // 2
        below: Tensor = many - few - over + under
        return below

    return before(hi) - before(lo - 1)
