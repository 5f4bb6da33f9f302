"""Which strategy "auto" takes: the best for this very pack, found in milliseconds.

A training loop brings a new pack at every step, and `choose` walks through every strategy rank by rank: longer than the
step takes. So a mask that is made for one batch, as packs of documents are, is forecast: all strategies and all ranks
at once (forecast.py). A mask for any batch, such as Causal(), comes again and again: for it `choose` decides, once.
So it does for masks and layouts that forecast.py does not know, on the pack that stands for others like it
(masks/typical.py).

Either way the strategy is a function of the plan, the shape and the machine: all ranks take the same, whatever packs
they saw before, in whatever order.
"""

from __future__ import annotations

import functools

from attnspan.layouts.by_work import ByWork
from attnspan.masks.real_tensors import with_real_tensors
from attnspan.plan.choose import Choice, KeepKeys, all_strategies, choice_for
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.forecast import forecast
from attnspan.plan.group_forecast import ForecastSetting
from attnspan.plan.meetings import columns_of
from attnspan.plan.plan import Plan
from attnspan.plan.strategy import Gather, Strategy

SAMPLED = 8
"""The ranks that are looked at where `choose` decides: fewer than where a choice is to be explained."""

EQUAL = 0.015
"""Forecast times that differ by less than this part are the same; the strategy with the fewest exchanges is taken. Less
than `choose` allows: together with `SLACK` (forecast.py) it stays below that."""

SHARED = 1.25
"""In how many bands a key may be on average: a forecast counts keys that travel for each of them."""


@with_real_tensors
def strategy_for(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys = False) -> Strategy:
    """The strategy that the cost model finds best for a plan.

    >>> from attnspan.layouts import Balanced
    >>> from attnspan.masks import Causal, Documents
    >>> mask = Causal() & Documents([700, 300, 600, 448])
    >>> strategy_for(Plan(mask, Balanced(mask, ranks=2), 2048), Shape(8), Hardware.of("h100-nvlink"))
    Needed(stages=2)
    """
    if is_forecast(plan) and not shape.latent:  # what it takes to expand is not forecast
        found = _forecast(plan, shape, hardware, keep_keys)
        if found is not None:
            return found
    return _chosen(kind_of(plan), shape, hardware, keep_keys)


@with_real_tensors
def latents_pay(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys = False) -> bool:
    """Whether the best strategy for latents is predicted to take less time than that for their keys and values.

    >>> from attnspan.layouts import HeadTail
    >>> from attnspan.masks import Causal
    >>> plan, shape = Plan(Causal(), HeadTail(ranks=4), 1 << 16), Shape(16, None, 192, 128, latent=576)
    >>> latents_pay(plan, shape, Hardware.of("h100-nvlink"))  # four ranks expand all tokens, over fast links
    False
    """
    kind = kind_of(plan)
    return _seconds(kind, shape, hardware, keep_keys) < _seconds(kind, shape.expanded, hardware, keep_keys)


def is_forecast(plan: Plan) -> bool:
    """Whether the mask is made for one batch, of bands that share few keys if any, and the layout has no strides."""
    if plan.mask.natural_len is None:
        return False
    bands = [columns_of(plan, row) for row in range(plan.mask.rows)]
    keys = sum(int((each.k1 - each.k0).sum()) for each in bands)
    shards = (plan.layout.shards(plan.seq_len, row) for row in range(plan.layout.rows))
    is_plain = all(run.step == 1 for rows in shards for runs in rows for run in runs)
    return is_plain and 0 < keys <= SHARED * plan.mask.rows * plan.seq_len


def kind_of(plan: Plan) -> Plan:
    """The plan that stands for others like it: of the typical mask, laid out alike."""
    layout, typical = plan.layout, functools.cache(lambda mask: mask.typical(plan.seq_len))
    if isinstance(layout, ByWork):
        layout = layout.over(typical)
    elif layout.natural_len is not None:  # made for these very documents
        return plan
    return Plan(typical(plan.mask), layout, plan.seq_len)


@functools.lru_cache(maxsize=256)
def _forecast(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> Strategy | None:
    """The best strategy whose keys fit into half the machine's memory; None where none do."""
    setting = ForecastSetting(shape, hardware, keep_keys, hardware.memory / 2)
    tried = [strategy for strategy in all_strategies(plan.ranks, shape) if strategy != Gather()]  # Needed(1) moves less
    found = [each for each in forecast(plan, tried, setting) if each.needs <= setting.memory]
    best = min((each.seconds for each in found), default=0.0)
    equal = [each for each in found if each.seconds <= best * (1 + EQUAL)]
    return min(equal, key=lambda each: (each.exchanges, each.seconds)).strategy if equal else None


@functools.lru_cache(maxsize=256)
def _seconds(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> float:
    return _choice(plan, shape, hardware, keep_keys).candidates[0].seconds


@functools.lru_cache(maxsize=256)
def _chosen(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> Strategy:
    return Strategy.of(_choice(plan, shape, hardware, keep_keys).plan.strategy)


def _choice(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> Choice:
    return choice_for(plan, shape=shape, hardware=hardware, keep_keys=keep_keys, sampled=SAMPLED)
