"""Runs a model over ranks: pages are spread over all ranks, and long prompts use context parallelism.

In a step over pages every rank has all new tokens, keeps its own part of their keys, attends over that part, and merges
the results in one exchange (paged/sharded.py). That divides memory; every rank still computes every token. A long
prompt divides compute as well: each rank feeds its shard of the tokens, attention is that of `ContextParallel`, and
each layer's keys are then sent to the ranks whose pages hold them. Recurrences run over the ranks too, and every rank
keeps the states after the last token: there are no snapshots within such a prompt.

The rank that has the prompt's last token sends its logits to the others.

A tensor parallel model (engine_ranks.py) exchanges parts of its activations by itself, with ranks that have the same
tokens. Here its `mesh` are the ranks with the same heads; where there is one, pages and prompts are not spread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from attnspan.engine.config import EngineConfig
from attnspan.engine.model import LatentHeads, PackedBatch, ServedModel, StateSpec, StepAttention
from attnspan.engine.model_runner import ModelRunner, PagedStepAttention
from attnspan.engine.pools import PooledLayer, Pools
from attnspan.engine.rank_consensus import RankConsensus
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Chunk
from attnspan.masks import Causal, Mask
from attnspan.paged import ShardedPages
from attnspan.paged.kv_cache import PagedKVCache
from attnspan.parallel import ContextParallel
from attnspan.parallel.attentions import SessionAttention
from attnspan.recurrence import Rule
from attnspan.transports.group import Group


class ContextParallelRunner(ModelRunner):
    """A runner whose pages are spread over the ranks of `mesh`, as are prompts of at least `context_parallel_from`.

    What is about to be computed is compared with the other ranks of `consensus` before the model is called.
    """

    def __init__(
        self,
        model: ServedModel,
        pools: Pools,
        config: EngineConfig,
        max_length: int,
        *,
        mesh: Group,
        consensus: RankConsensus,
    ) -> None:
        self.mesh, self.consensus = mesh, consensus
        super().__init__(model, pools, config, max_length)
        self._session: ContextParallel | None = None

    def _caches(self) -> Sequence[PagedKVCache]:
        if self.consensus.page_ranks == 1:
            return super()._caches()
        return [ShardedPages(pool, self.mesh, interleave=pool.page_size) for pool in self.pools.pools]

    def run(self, batch: Sequence[Chunk]) -> Tensor:
        """As on one rank; the same logits on every rank."""
        self._compare = self.consensus.compare_step(batch)
        sample, count, _ = batch[0]
        alone = len(batch) == 1 and sample.computed == 0 and sample.embedded is None
        if alone and count == sample.remaining >= self.config.context_parallel_from:
            return self._prefill(sample)
        return super().run(batch)

    def _call(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        self._compare()
        return super()._call(batch, attention)

    def _prefill(self, sample: Sample) -> Tensor:
        """The logits (1, V) after a prompt that all ranks compute."""
        tokens = sample.tokens
        session = self._session_for(len(tokens))
        positions = session.positions
        mine = [tokens[position] for position in positions.tolist()]
        last = (positions == len(tokens) - 1).nonzero().flatten().tolist()
        attention = PrefillAttention(session, self._attention)
        found = self._logits(mine, positions, last, attention, [(sample, len(mine))])
        logits = found.new_zeros(1, found.shape[1], dtype=torch.float32)
        if last:
            logits.copy_(found)
        session.transport.all_reduce(logits, "logits").wait()
        return logits

    def _session_for(self, length: int) -> ContextParallel:
        """A session for a prompt of that length; prompts of the same length share one."""
        masks: dict[str, Mask] = {_name(layer): layer.mask for layer in self.pools.layers} or {"full": Causal()}
        if self._session is None:
            self._session = ContextParallel(self.mesh, seq_len=length, mask=masks)
        return self._session.with_mask(masks, seq_len=length)


class PrefillAttention(StepAttention):
    """Attention under context parallelism over the shards of a prompt, whose keys and last states end in pages."""

    def __init__(self, session: ContextParallel, paged: PagedStepAttention) -> None:
        self.session, self.paged = session, paged
        self._attentions: dict[Hashable, SessionAttention] = {}  # by mask, scale and score_mod: layers alike share one

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))  # (1, H, S, D)
        out = self._attention(layer)(query, key, value, sinks=sinks)
        return self._hand_over(layer, key, value, out)

    def _attend_latent(
        self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads, sinks: Tensor | None
    ) -> Tensor:
        given = query.transpose(0, 1).unsqueeze(0), latent.unsqueeze(0)
        out = self._attention(layer)(*given, expand=heads.expand, sinks=sinks)
        key = latent[None, None]
        return self._hand_over(layer, key, key[..., : heads.key.shape[2]], out)

    def _attention(self, layer: int) -> SessionAttention:
        paged = self.paged.pools.layers[layer]
        kind = _name(paged), paged.scale, paged.score_mod
        if kind not in self._attentions:
            self._attentions[kind] = self.session.attention_for(kind[0], scale=paged.scale, score_mod=paged.score_mod)
        return self._attentions[kind]

    def _hand_over(self, layer: int, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        """Hand keys over to the pages; the results, (S, H, Dv)."""
        paged = self.paged.pools.layers[layer]
        cache = self.paged.caches[paged.pool]
        assert isinstance(cache, ShardedPages), "made so"
        cache.from_context_parallel(paged.index, key, value, self.session, self.paged.plans[paged.pool])
        return out.transpose(1, 2).contiguous()[0]

    def recurrence(self, state: int, rule: Rule) -> Tensor:
        self.paged.check_state(state, StateSpec(tuple(rule.state_shape), rule.dtype))
        out, self.paged.new_states[state] = self.session.recurrence(rule, return_final_state=True)
        return out

    def conv1d(self, state: int, tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        left, session = weight.shape[1] - 1, self.session
        self.paged.check_state(state, StateSpec.convolution(len(weight), left + 1, tokens.dtype))
        place = session.positions - (session.seq_len - left)  # among the last tokens, which other ranks may hold
        last = tokens.new_zeros(1, left, len(weight))
        last[0].index_copy_(0, place[place >= 0], tokens[place >= 0])
        session.transport.all_reduce(last, "last tokens of a convolution").wait()
        self.paged.new_states[state] = last
        return session.conv1d(tokens.unsqueeze(0), weight, bias, dim=1)[0]


def _name(layer: PooledLayer) -> str:
    return repr(layer.mask)
