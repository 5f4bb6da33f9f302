"""Which strategy "auto" takes: chosen once for a kind of pack, not for every pack.

A training loop brings a new pack at every step, and to predict every strategy for it takes longer than to lay it out.
What is fastest changes little between packs of one kind (masks/typical.py). So the typical pack of the kind is laid
out the same way and chosen for (choose.py), once, and every pack of the kind takes the same strategy.

The kind is a function of the plan alone, and so is what is chosen for it: all ranks take the same strategy, whatever
packs they saw before, in whatever order.
"""

from __future__ import annotations

import functools

from attnspan.layouts.by_work import ByWork
from attnspan.plan.choose import KeepKeys, choice_for
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.plan import Plan
from attnspan.plan.strategy import Strategy

SAMPLED = 8
"""The ranks that are looked at: fewer than where a choice is to be explained."""


def strategy_for(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys = False) -> Strategy:
    """The strategy that the cost model finds best for plans of this kind.

    >>> from attnspan.layouts import Balanced
    >>> from attnspan.masks import Causal, Documents
    >>> mask = Causal() & Documents([700, 300, 600, 448])
    >>> strategy_for(Plan(mask, Balanced(mask, ranks=2), 2048), Shape(8), Hardware.of("h100-nvlink"))
    Needed(stages=1)
    """
    return _chosen(kind_of(plan), shape, hardware, keep_keys)


def kind_of(plan: Plan) -> Plan:
    """The plan that stands for others like it: of the typical mask, laid out alike."""
    layout, typical = plan.layout, functools.cache(lambda mask: mask.typical(plan.seq_len))
    if isinstance(layout, ByWork):
        layout = layout.over(typical)
    elif layout.natural_len is not None:  # made for these very documents
        return plan
    return Plan(typical(plan.mask), layout, plan.seq_len)


@functools.lru_cache(maxsize=256)
def _chosen(plan: Plan, shape: Shape, hardware: Hardware, keep_keys: KeepKeys) -> Strategy:
    return Strategy.of(choice_for(plan, shape, hardware, keep_keys, SAMPLED).plan.strategy)
