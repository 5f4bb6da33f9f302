"""The model over ranks: long prompts computed by all of them, each a part, and pages spread over all.

A step over pages is the same on every rank: each has the new tokens, keeps the keys that are its own, attends over
those, and one message joins the results (paged/sharded.py). That spreads memory; every rank still computes every token.
A long prompt is spread in time as well: under context parallelism each rank feeds its shard of the tokens, attention is
that of `ContextParallel`, and each layer's keys are handed over to the pages where they belong.

The rank that has the prompt's last token tells the others its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnspan.engine.rank_consensus import RankConsensus
from attnspan.engine.runner import LayerPlace, PagedAttention, Pools, Runner
from attnspan.engine.scheduler import Chunk
from attnspan.masks import Causal, Mask, SlidingWindow
from attnspan.paged import PagePool, ShardedPages, StepPlan
from attnspan.parallel import ContextParallel
from attnspan.parallel.flex import Prepared
from attnspan.transports.group import Group


class RanksRunner(Runner):
    """A runner whose pages are spread over the ranks of `mesh`; prompts of `whole` tokens or more are split.

    What is about to be computed is compared with the other ranks of `consensus` before the model is called.
    """

    def __init__(
        self, model: nn.Module, pools: Pools, *, mesh: Group, consensus: RankConsensus, whole: int, **sizes: Any
    ) -> None:
        self.mesh, self.consensus, self.whole = mesh, consensus, whole
        super().__init__(model, pools, **sizes)
        self._session: ContextParallel | None = None

    def _planned(self, sizes: dict[str, Any]) -> tuple[Sequence[PagePool | ShardedPages], list[StepPlan]]:
        pages = [ShardedPages(pool, self.mesh, interleave=pool.page_size) for pool in self.pools.pools]
        return pages, [each.plan(**sizes) for each in pages]

    def run(self, batch: Sequence[Chunk]) -> Tensor:
        """As of one rank; the same logits on every rank."""
        self._compared = self.consensus.compare_step(batch)
        sample, count = batch[0]
        if len(batch) == 1 and sample.computed == 0 and count == sample.rest >= self.whole:
            return self._split(sample.tokens)
        return super().run(batch)

    def _called(self, tokens: Tensor, positions: Tensor, keep: Tensor | int, attends: Any) -> Tensor:
        self._compared()
        return super()._called(tokens, positions, keep, attends)

    def _split(self, tokens: Sequence[int]) -> Tensor:
        """The logits (1, V) after a prompt that all ranks compute."""
        session = self._on(len(tokens))
        positions = session.positions
        mine = [tokens[position] for position in positions.tolist()]
        last = (positions == len(tokens) - 1).nonzero().flatten().tolist()
        found = self._logits(mine, positions, last, PrefillAttention(session, self._attention))
        logits = found.new_zeros(1, found.shape[1], dtype=torch.float32)
        if last:
            logits.copy_(found)
        session.transport.all_reduce(logits, "logits").wait()
        return logits

    def _on(self, length: int) -> ContextParallel:
        """A session for a prompt of that length; those of the same length share one."""
        masks: dict[str, Mask] = {_name(place): _mask(place) for place in self.pools.places}
        if self._session is None:
            self._session = ContextParallel(self.mesh, seq_len=length, mask=masks)
        return self._session.with_mask(masks, seq_len=length)


class PrefillAttention:
    """Attention under context parallelism: what serves a call of the model on a shard of a prompt."""

    def __init__(self, session: ContextParallel, paged: PagedAttention) -> None:
        self.session, self.paged = session, paged
        self._prepared: dict[tuple[str, float, Any], Prepared] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend, and hand the keys over to their pages. (1, H, S, D) of the shard; (1, S, H, D) out."""
        place = self.paged.pools.places[layer]
        out = self._prepared_for(place)(query, key, value, sinks=sinks)
        pages = self.paged.pages[place.pool]
        assert isinstance(pages, ShardedPages), "made so"
        pages.from_context_parallel(place.index, key, value, self.session, self.paged.plans[place.pool])
        return out.transpose(1, 2).contiguous()

    def _prepared_for(self, place: LayerPlace) -> Prepared:
        """One for all layers of a kind."""
        kind = _name(place), place.scale, place.score_mod
        if kind not in self._prepared:
            self._prepared[kind] = self.session.prepare(kind[0], score_mod=place.score_mod, scale=place.scale)
        return self._prepared[kind]


def _name(place: LayerPlace) -> str:
    return "full" if place.window is None else f"window {place.window}"


def _mask(place: LayerPlace) -> Mask:
    return Causal() if place.window is None else SlidingWindow(place.window - 1)
