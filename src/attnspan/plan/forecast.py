"""The time of every strategy for one plan: what timeline.py predicts rank by rank, for all ranks at once.

A training loop brings a new pack at every step. To walk through its steps strategy by strategy and rank by rank takes
a hundred times as long as to lay it out. Here bands, runs and the pieces in which they meet are columns of numbers, and
a strategy is a table: in which of its steps the keys at each ring distance are used. One pass counts the tiles and keys
of every step on every rank; then the two clocks of timeline.py run for all ranks together.

It is a pure function of the plan, the shape and the machine. Strategies of one Ulysses degree share a pass. A degree,
or a ring, is left out where a lower bound of its time says that it cannot gain `SLACK`.

group_forecast.py counts for one degree; how exactly is said there.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch

from attnspan.masks.real_tensors import with_real_tensors
from attnspan.plan.group_forecast import Estimate, ForecastSetting, GroupForecast, LowerBound
from attnspan.plan.meetings import Positions
from attnspan.plan.plan import Plan
from attnspan.plan.strategy import Ring, Strategy, Ulysses, between_groups

SLACK = 0.03
"""The part of the best time so far that a strategy must be able to gain to be looked at."""


@with_real_tensors
@torch.inference_mode()
def forecast(plan: Plan, strategies: Iterable[Strategy], setting: ForecastSetting) -> list[Estimate]:
    """What each strategy takes; those that cannot win are left out.

    >>> from attnspan.layouts import Balanced
    >>> from attnspan.masks import Causal, Documents
    >>> from attnspan.plan.cost import Hardware, Shape
    >>> from attnspan.plan.strategy import Gather, Needed
    >>> mask = Causal() & Documents([7000, 3000, 6000, 384])
    >>> plan, setting = (
    ...     Plan(mask, Balanced(mask, ranks=2), 16384),
    ...     ForecastSetting(Shape(8), Hardware.of("h100-nvlink")),
    ... )
    >>> for found in forecast(plan, [Gather(), Needed(2)], setting):
    ...     print(found.strategy, f"{found.seconds * 1e6:.0f} µs, {found.exchanges} exchanges")
    Gather() 1384 µs, 3 exchanges
    Needed(stages=2) 1096 µs, 3 exchanges
    """
    positions = Positions.of(plan)
    by_degree: dict[int, list[Strategy]] = {}
    for strategy in strategies:
        degree = (strategy.degree or plan.ranks) if isinstance(strategy, Ulysses) else 1
        by_degree.setdefault(degree, []).append(strategy)
    whole, found = GroupForecast(positions, 1, setting), list[Estimate]()
    bound = LowerBound(whole)
    for degree in sorted(by_degree, key=lambda degree: (degree > 1, -degree)):
        groups = whole if degree == 1 else GroupForecast(positions, degree, setting)
        if found and bound.seconds(groups) >= _worth(found, setting):
            continue
        rings = [strategy for strategy in by_degree[degree] if isinstance(between_groups(strategy), Ring)]
        few = groups.estimates([strategy for strategy in by_degree[degree] if strategy not in rings])
        found += few
        least = min((each.busy for each in few), default=0.0)  # a ring computes the same in more and smaller tiles
        if least < _worth(found, setting) and groups.hopping < _worth(found, setting):
            found += groups.estimates(rings)
        if degree > 1:
            bound = LowerBound(whole, least - groups.copying_heads)  # smaller groups too
    return found


def _worth(found: list[Estimate], setting: ForecastSetting) -> float:
    """Seconds below which a strategy is worth looking at."""
    return min((each.seconds for each in found if each.needs <= setting.memory), default=inf) * (1 - SLACK)
