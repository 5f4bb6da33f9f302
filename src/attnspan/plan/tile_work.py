"""How long the tiles of every step take, on all ranks and under several strategies at once.

masks/tile.py makes tiles of one step on one rank, and cost.py knows the seconds of each. Here the tiles of a step are
counted from meetings (meetings.py): a full one of the columns that all rows see, and one of those that a diagonal cuts.
Shapes: V strategies, G groups of ranks, A meetings, S steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan.masks.tile import MAX_STACKED, Kind
from attnspan.plan.cost import BACKWARD, Curve, Hardware
from attnspan.plan.meetings import Meetings

if TYPE_CHECKING:
    from attnspan.plan.group_forecast import GroupForecast


class StepWork(NamedTuple):
    """Of every step of every group, (V, G, S): seconds of its tiles, forward and backward, their rows and columns."""

    forward: Tensor
    backward: Tensor
    rows: Tensor
    cols: Tensor
    spare: Tensor  # seconds that tiles would take less if each were a call of its own, and calls cost nothing

    @classmethod
    def of(cls, groups: GroupForecast, table: Tensor, steps: int) -> StepWork:
        """Of strategies that use the keys at each ring distance in the step that a table says, (V, G)."""
        each, machine, batch = groups.meetings, groups.hardware, groups.plan.batch_rows
        full, cut, cut_area, cut_rows = _columns(groups, table, steps)
        place, places = each.group * batch + each.row, groups.count * batch
        height, general = each.height.double()[:, None], each.general[:, None]
        rows = height.expand(full.shape)
        if each.again.any():
            _join_own(full, (cut, cut_area, cut_rows), each, groups.own_steps(table))
            full, rows = _stacked(full, rows, each, place, places)
        is_full, is_cut = full > 0, cut > 0
        full_area = rows * full
        times: list[Tensor] = []
        for backward in (False, True) if machine.curves else (False,):
            alone = _seconds(machine, "causal", cut_rows, cut_area, backward)
            joint = _seconds(machine, "general", cut_rows, cut_area, backward)
            times.append(_seconds(machine, "full", rows, full_area, backward) + torch.where(general, joint, alone))
            times.append(_seconds(machine, "general", rows, full_area, backward) + joint)
        counts = [is_full + is_cut.double(), is_full + (is_cut & ~general).double(), full_area + cut_area]
        stats = torch.stack([*counts, rows * is_full + cut_rows, full + cut, *times], -1)
        sums = torch.zeros(len(table), places, *stats.shape[2:], dtype=torch.float64, device="cpu")
        sums = sums.index_add_(1, place, stats).view(len(table), groups.count, batch, *stats.shape[2:])
        tiles, plain, area, row_sum, col_sum = sums[..., :5].unbind(-1)
        times = list(sums[..., 5:].unbind(-1))
        if not machine.curves:
            times += [BACKWARD * seconds for seconds in times]
        flops = groups.flops
        is_joint = (
            (tiles > 1) & ((flops * area < machine.joins_below * tiles) | (plain == 0)) & (machine.joins_below > 0)
        )
        launches = machine.launch, machine.launch if machine.launch_backward is None else machine.launch_backward
        each_alone = [flops * seconds * machine.ranks_per_device for seconds in times[::2]]
        forward, backward_ = (
            torch.where(is_joint, flops * joint + launch, seconds + launch * tiles) * machine.ranks_per_device
            for launch, seconds, joint in zip(launches, (flops * each for each in times[::2]), times[1::2], strict=True)
        )
        spare = forward + backward_ - each_alone[0] - each_alone[1]
        return cls(*(each.sum(2) for each in (forward, backward_, row_sum, col_sum, spare)))


def _columns(groups: GroupForecast, table: Tensor, steps: int) -> Tensor:
    """What each meeting sees in each step, (4, V, A, S), as in `Meetings.seen`."""
    each, count, many = groups.meetings, len(table), len(groups.meetings.group)
    slots = table.index_select(1, groups.distance) + each.at * steps
    slots += torch.arange(0, count * many * steps, many * steps, device="cpu")[:, None]
    slots, repeated = slots.view(-1), each.seen.repeat(1, count)
    seen = torch.zeros(4, count * many * steps, dtype=torch.int64, device="cpu")
    seen[:3].index_add_(1, slots, repeated[:3])
    seen[3].scatter_reduce_(0, slots, repeated[3], "amax")  # neighbouring keys are seen by about the same queries
    return seen.view(4, count, many, steps).double()


def _join_own(full: Tensor, cuts: tuple[Tensor, Tensor, Tensor], each: Meetings, own: Tensor) -> None:
    """Where a step has no keys but a group's own, (V, 1), its runs in one band are neighbours: one triangle."""
    cut, below = cuts[0][..., 0], each.below.double()
    apart = ~(own & ~each.general & (cut == each.height) & (full[..., 0] == each.above))
    none = torch.zeros(len(full), len(below), dtype=torch.int64, device="cpu")
    joined = none.index_add_(1, each.together, apart.long()).index_select(1, each.together) == 0
    full[..., 0] *= ~joined
    for values, whole in zip(cuts, (below, below * (below + 1) / 2, below), strict=True):
        values[..., 0] = torch.where(joined, whole * ~each.again, values[..., 0])


def _stacked(full: Tensor, rows: Tensor, each: Meetings, place: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Columns and rows of full tiles where runs of one group share the keys of a band, as tile.py stacks them."""
    fulls = torch.zeros(len(full), places, full.shape[2], dtype=torch.float64, device="cpu")
    few = fulls.index_add_(1, place, (full > 0).double()).index_select(1, place) <= MAX_STACKED
    few &= ~each.mixed[:, None]
    shared = torch.zeros_like(full)
    shared[:, 1:] = full[:, :-1] * each.again[1:, None]
    return torch.where(few, (full - shared).clamp_(0), full), torch.where(few, each.below.double()[:, None], rows)


def _seconds(machine: Hardware, kind: Kind, rows: Tensor, area: Tensor, backward: bool) -> Tensor:
    """Seconds of tiles for one operation per pair, without launches; 0 where there are no pairs."""
    for curve in machine.curves:
        if curve.kind == kind:
            return area / _rate(curve, torch.minimum(rows, area / rows.clamp(min=1)), backward)
    rate: float = {"full": machine.full, "causal": machine.causal, "general": machine.general}[kind]
    return area * (rows + machine.half_rows) / rows.clamp(min=1) * ((BACKWARD if backward else 1.0) / rate)


def _rate(curve: Curve, size: Tensor, backward: bool) -> Tensor:
    """`Curve.rate` of many sizes."""
    sizes, rates = (
        torch.tensor(each, dtype=torch.float64, device="cpu").log()
        for each in (curve.sizes, curve.backward if backward else curve.forward)
    )
    if len(sizes) == 1:
        return rates.exp().expand(size.shape)
    size = size.clamp(curve.sizes[0], curve.sizes[-1]).log()
    right = torch.searchsorted(sizes, size.contiguous()).clamp_(1, len(sizes) - 1)
    share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return (rates[right - 1] * (1 - share) + rates[right] * share).exp()
