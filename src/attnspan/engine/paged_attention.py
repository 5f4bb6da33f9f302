"""Attention of one packed step over pages: new keys are written, then every query attends over its whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnspan.engine.model import StepAttention
from attnspan.engine.pools import Pools
from attnspan.masks import Causal
from attnspan.paged import PagePool, ShardedPages, StepPlan

CAUSAL = Causal()


class PagedStepAttention(StepAttention):
    """Attention over `pages`, one set for each pool, as the plans of the step say."""

    def __init__(self, pools: Pools, pages: Sequence[PagePool | ShardedPages], plans: Sequence[StepPlan], kernel: str):
        self.pools, self.pages, self.plans, self.kernel = pools, pages, plans, kernel

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        place = self.pools.places[layer]
        pages, plan = self.pages[place.pool], self.plans[place.pool]
        pages.write(place.index, key, value, plan)
        out = pages.attend(
            place.index,
            query,
            plan,
            mask=CAUSAL,
            score_mod=place.score_mod,
            sinks=sinks,
            scale=place.scale,
            kernel=self.kernel,
        )
        assert isinstance(out, Tensor), "no lse was asked for"
        return out
