"""Pages spread over ranks: every rank holds a part of each sequence, and all ranks attend.

The allocator and its page numbers are the same on every rank. A page of the allocator holds ranks x `page_size` tokens:
`page_size` slots on each rank. Positions are distributed round robin, `interleave` at a time::

    2 ranks, page_size 4, interleave 2      positions  0 1 2 3 4 5 6 7     rank 0 holds 0 1 4 5 of a page
                                            rank       0 0 1 1 0 0 1 1     rank 1 holds 2 3 6 7

so that every rank holds the same share, however short a sequence is, and a step goes like this: every rank has the new
tokens' queries, keys and values; each writes the keys it owns, attends over the keys it has, and sends (out, lse) to
all in one message; joined by lse in rank order, the result is that of one rank, and the same bits on all.

[Note: steps without messages] Ranks run the same steps in the same order, without a message. `agree` compares tables
and lengths, and refuses on every rank if they differ. It costs a round of messages: call it where in doubt.

[Note: handing over] Context parallelism leaves a prompt's keys on the ranks by its own layout. `from_context_parallel`
sends every token from the rank that computed it to the rank that keeps it: one uneven exchange, keys and values in
one message. What each rank sends follows from the layout alone.

Knows transports and layouts; nothing of how keys were computed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnspan.errors import PageError, integer
from attnspan.kernels.merge import share_of
from attnspan.layouts import Layout
from attnspan.layouts.run import positions_of
from attnspan.paged.kv_cache import AttendOptions, PagedKVCache
from attnspan.paged.metadata import Spread
from attnspan.paged.pool import PageLayer, PagePool
from attnspan.paged.step_plan import StepPlan
from attnspan.transports.consensus import all_gather_object, differing_ranks, digest
from attnspan.transports.group import Group, transport_of
from attnspan.transports.operations import enter_operation
from attnspan.transports.transport import Transport


class ShardedSequence(Protocol):
    """A sequence that lies on ranks by a layout; `ContextParallel` is one."""

    layout: Layout
    seq_len: int
    transport: Transport


class KeyRoute(NamedTuple):
    """One rank's side of handing over: which of its tokens go to each rank, which of the plan's come from each."""

    sends: list[Tensor]
    receives: list[Tensor]


class ShardedPages(PagedKVCache):
    """A pool whose pages are spread over the ranks of `mesh`: a DeviceMesh, a process group or a virtual world.

    >>> from attnspan.paged import PageLayer, PageAllocator
    >>> from attnspan.testing import loopback
    >>> def rank(world):
    ...     allocator = PageAllocator(num_pages=4, page_size=2 * 4)
    ...     pages = ShardedPages(PagePool(allocator, [PageLayer(1, 2)], page_size=4), world, interleave=2)
    ...     plan = pages.plan(max_sequences=1, max_tokens=8, max_length=8)
    ...     plan.step([(allocator.add(), 5)])
    ...     pages.write(0, torch.ones(5, 1, 2), torch.ones(5, 1, 2), plan)
    ...     out = pages.attend(0, torch.ones(5, 2, 2), plan)
    ...     return plan.metadata.spans[0], out[4, 0].round().tolist()
    >>> loopback(ranks=2).run(rank)  # which keys each rank reads, and what all of them get
    [((0, 3), [1.0, 1.0]), ((0, 2), [1.0, 1.0])]
    """

    def __init__(self, pool: PagePool, mesh: Group = None, *, interleave: int = 1) -> None:
        self.pool, self.allocator, self.transport = pool, pool.allocator, transport_of(mesh)
        ranks = self.transport.ranks
        interleave = integer("interleave", interleave, at_least=1, error=PageError)
        whole_page = self.allocator.page_size
        if pool.page_size * ranks != whole_page:
            raise PageError(
                f"the allocator's page_size must be ranks x the pool's, {ranks} x {pool.page_size}, got {whole_page}; "
                f"as in PagePool(allocator, layers, page_size={whole_page // ranks})"
            )
        if pool.page_size % interleave:
            raise PageError(
                f"interleave must divide the pool's page_size ({pool.page_size}), so that each rank holds as much of a "
                f"page, got {interleave}"
            )
        if pool.device != self.transport.device:
            raise PageError(f"the pool must be on the group's device, {self.transport.device}, got {pool.device}")
        self.spread = Spread(interleave, ranks, self.transport.rank)

    def plan(self, *, max_sequences: int, max_tokens: int, max_length: int) -> StepPlan:
        """A StepPlan that knows which tokens lie here."""
        sizes = {"max_sequences": max_sequences, "max_tokens": max_tokens, "max_length": max_length}
        return StepPlan(self.pool, **sizes, spread=self.spread)

    def write(self, layer: int, key: Tensor, value: Tensor, plan: StepPlan) -> None:
        """As `PagePool.write`, of all new tokens; those that lie elsewhere are left out."""
        self._check_plan(plan)
        self.pool.write(layer, key, value, plan)

    def partial(self, layer: int, query: Tensor, plan: StepPlan, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """(out, lse) over the keys of all ranks: one message to each, the same result on each."""
        self._check_plan(plan)
        return self._joined(*self.pool.partial(layer, query, plan, options))

    def _joined(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The join of every rank's part. An empty part has lse -inf and weight 0, also where all are empty."""
        if self.transport.ranks == 1:
            return out, lse
        packed = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)
        parts = packed.new_empty(self.transport.ranks, *packed.shape)
        self.transport.gather(packed, list(parts.unbind()), "partial attention").wait()
        outs, lses = parts[..., :-1], parts[..., -1]
        total = lses.logsumexp(0)
        return (outs * share_of(lses, total).unsqueeze(-1)).sum(0), total

    def from_context_parallel(
        self, layer: int, key: Tensor, value: Tensor, cp: ShardedSequence, plan: StepPlan
    ) -> None:
        """Write this rank's shard of keys (batch, key heads, shard, dim) and values where its tokens belong.

        The plan's new tokens, in order, are the tokens of the batch, row after row: a sequence for each row, or several
        for a row that is a pack of documents. Every rank calls it, once for each layer.
        """
        self._check_plan(plan)
        layer, spec = self.pool.layer(layer)
        route = plan.metadata.once((cp.layout, cp.seq_len), lambda: self._route(cp, plan))
        self._check_shards(spec, key, value, sum(map(len, route.sends)))
        parts = [key.detach()] if spec.values_in_keys else [key.detach(), value.detach()]
        packed = torch.cat(parts, dim=-1).transpose(1, 2).flatten(0, 1)
        sends = [packed.index_select(0, some) for some in route.sends]
        receives = [packed.new_empty(len(some), *packed.shape[1:]) for some in route.receives]
        peers = range(self.transport.ranks)
        with enter_operation(self.transport, f"keys of layer {layer} for pages"):
            self.transport.exchange(
                list(zip(peers, sends, strict=True)), list(zip(peers, receives, strict=True)), "keys and values"
            ).wait()
        slots = plan.slots.index_select(0, torch.cat(route.receives))
        arrived = torch.cat(receives)
        self.pool.write_slots(layer, arrived[..., : spec.head_dim], arrived[..., spec.head_dim :], slots)

    def _check_shards(self, spec: PageLayer, key: Tensor, value: Tensor, tokens: int) -> None:
        """`tokens` are all that this rank holds, of every row."""
        for name, given, dim in (("key", key, spec.head_dim), ("value", value, spec.value_dim)):
            heads, width = given.shape[1::2] if given.dim() == 4 else (0, 0)
            if (heads, width) != (spec.kv_heads, dim) or given.shape[0] * given.shape[2] != tokens:
                raise PageError(
                    f"{name} must be this rank's shard (batch, {spec.kv_heads}, tokens, {dim}), {tokens} tokens in all,"
                    f" got {tuple(given.shape)}"
                )
            if given.dtype != spec.dtype or given.device != self.pool.device:
                where = f"{spec.dtype} on {self.pool.device}"
                raise PageError(f"{name} must be {where}, got {given.dtype} on {given.device}")

    def _route(self, cp: ShardedSequence, plan: StepPlan) -> KeyRoute:
        """See [Note: handing over]. Tokens are numbered as in the plan; sends as in this rank's packed shard."""
        mine, ranks = self.transport.rank, self.transport.ranks
        if (cp.transport.rank, cp.transport.ranks) != (mine, ranks):
            raise PageError(
                f"cp must be on the same ranks as the pages, rank {mine} of {ranks}, got rank {cp.transport.rank} of "
                f"{cp.transport.ranks}"
            )
        if plan.tokens % cp.seq_len or not plan.tokens:
            raise PageError(
                f"the plan must hold the tokens of every row, a multiple of seq_len={cp.seq_len}, got {plan.tokens}"
            )
        metadata = plan.metadata
        positions = positions_of((s, s + n) for s, n in zip(metadata.query_starts, metadata.query_lens, strict=True))
        owners = positions // self.spread.interleave % ranks
        batch = plan.tokens // cp.seq_len
        held = [torch.cat([_shard(cp, row, rank) + row * cp.seq_len for row in range(batch)]) for rank in range(ranks)]
        to_whom = owners[held[mine]]
        device = self.pool.device
        sends = [(to_whom == peer).nonzero().flatten().to(device) for peer in range(ranks)]
        receives = [tokens[owners[tokens] == mine].to(device) for tokens in held]
        return KeyRoute(sends, receives)

    def agree(self) -> None:
        """Compare all ranks' tables and lengths; PageError on every rank if they differ. Every rank calls it."""
        rows = self.allocator.sequences
        tables = digest([(seq, row.length, row.first, row.table.tolist()) for seq, row in sorted(rows.items())])
        others = differing_ranks(all_gather_object(self.transport, tables, "page tables"))
        if others:
            raise PageError(f"page tables differ between rank 0 and ranks {others}; run the same steps on every rank")

    def _check_plan(self, plan: StepPlan) -> None:
        self.pool.check_plan(plan)
        if plan.spread != self.spread:
            raise PageError("plan must be made by ShardedPages.plan(...), which knows which tokens lie on this rank")


def _shard(cp: ShardedSequence, row: int, rank: int) -> Tensor:
    """The positions that a rank holds of a batch row, in its order."""
    runs = cp.layout.runs(cp.seq_len, rank, row if cp.layout.rows > 1 else 0)
    return positions_of(runs)
