"""A step of the model: tokens of many samples packed into one row, keys to their pages, logits of those that want them.

    runner = Runner(model, pools_of(layers, sizes, ...), max_sequences=64, max_tokens=512, max_length=4096)
    runner.prepare(batch)  # pages
    logits = runner.run(batch)  # a row for every chunk that ends its sample

Layers that see everything and layers that see a window may lie in different pools (`Pools`), each with a plan of its
own; a layer knows its pool and its place there. Soft-caps are a score_mod; sinks come with the call.

Knows nothing of requests, text or what is done with logits.   Shapes: T tokens of the step, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnspan.engine.cuda_graphs import CudaGraphs
from attnspan.engine.scheduler import Chunk
from attnspan.engine.served import Layers, attending
from attnspan.errors import EngineError
from attnspan.masks import Causal
from attnspan.paged import Layer, PageAllocator, PagePool, ShardedPages, StepPlan
from attnspan.parallel.soft_cap import soft_cap

CAUSAL = Causal()


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlace:
    """Where a layer's keys are, and how it attends."""

    pool: int
    index: int
    scale: float
    score_mod: Callable[..., Tensor] | None
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """The pools of a model, one or two: of layers that see everything, and of those that see a window."""

    pools: tuple[PagePool, ...]
    windows: tuple[int | None, ...]  # the widest of each pool; None: everything
    places: tuple[LayerPlace, ...]  # by layer


class PoolSizes(NamedTuple):
    """Of each pool: its pages, the tokens of one on every rank, and the pages of the host."""

    pages: int
    page_size: int
    host_pages: int = 0
    ranks: int = 1


def pools_of(layers: Layers, sizes: PoolSizes, *, dtype: torch.dtype, device: torch.device) -> Pools:
    """Pools for a model's layers."""
    pages, page_size, host_pages, ranks = sizes
    groups = [[layer for layer in layers if (layer.window is None) is full] for full in (True, False)]
    groups = [group for group in groups if group]
    pools, windows = [], []
    found: dict[int, tuple[int, int]] = {}
    mods: dict[float, Callable[..., Tensor]] = {}  # one function for all layers of a cap
    for number, group in enumerate(groups):
        allocator = PageAllocator(num_pages=pages + 1, page_size=page_size * ranks, host_pages=host_pages)
        specs = [Layer(layer.kv_heads, layer.head_dim, layer.value_dim, layer.window) for layer in group]
        pools.append(PagePool(allocator, specs, dtype=dtype, device=device, page_size=page_size))
        seen = [layer.window for layer in group]
        windows.append(None if None in seen else max(seen))
        found |= {layer.index: (number, place) for place, layer in enumerate(group)}
    for layer in layers:
        if layer.softcap is not None:
            mods.setdefault(layer.softcap, soft_cap(layer.softcap))
    places = [
        LayerPlace(*found[layer.index], layer.scale, mods.get(layer.softcap), layer.window) for layer in layers
    ]  # fmt: skip
    return Pools(tuple(pools), tuple(windows), tuple(places))


class PagedAttention:
    """Attention over pages: what serves a call of the model."""

    def __init__(self, pools: Pools, pages: Sequence[PagePool | ShardedPages], plans: Sequence[StepPlan], kernel: str):
        self.pools, self.pages, self.plans, self.kernel = pools, pages, plans, kernel

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Write the new keys, then attend over all. (1, H, T, D) each; (1, T, H, D) out."""
        place = self.pools.places[layer]
        pages, plan = self.pages[place.pool], self.plans[place.pool]
        pages.write(place.index, key[0].transpose(0, 1), value[0].transpose(0, 1), plan)
        out = pages.attend(
            place.index,
            query[0].transpose(0, 1),
            plan,
            mask=CAUSAL,
            score_mod=place.score_mod,
            sinks=sinks,
            scale=place.scale,
            kernel=self.kernel,
        )
        assert isinstance(out, Tensor), "no lse was asked for"
        return out.unsqueeze(0)


class Runner:
    """A model over pools of pages. `max_length` is of the longest sample, `max_tokens` of a step."""

    def __init__(
        self,
        model: nn.Module,
        pools: Pools,
        *,
        max_sequences: int,
        max_tokens: int,
        max_length: int,
        kernel: str = "auto",
        cuda_graphs: bool = False,
    ) -> None:
        self.model, self.pools, self.kernel = model, pools, kernel
        self.device = pools.pools[0].device
        sizes = {"max_sequences": max_sequences, "max_tokens": max_tokens, "max_length": max_length}
        self.pages, self.plans = self._planned(sizes)
        self._attention = PagedAttention(pools, self.pages, self.plans, kernel)
        self._graphs = CudaGraphs(max_sequences, self.device) if cuda_graphs else None
        for layer, place in enumerate(pools.places):
            if cuda_graphs and place.score_mod is not None:
                raise EngineError(
                    f"cuda_graphs=True: layer {layer} has a soft-cap, which no kernel attends with inside a graph; "
                    "leave cuda_graphs out"
                )

    def _planned(self, sizes: dict[str, Any]) -> tuple[Sequence[PagePool | ShardedPages], list[StepPlan]]:
        """What is written to and read, and the plans of it; see ranks_runner.py for another kind."""
        return self.pools.pools, [StepPlan(pool, **sizes) for pool in self.pools.pools]

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows for which something is made ready when they are first met: graphs, if there are any."""
        return [1] if self._graphs is None else self._graphs.sizes

    def forget_graphs(self) -> None:
        """The model is another one: graphs of it, if there are any, are captured again when they are next needed."""
        if self._graphs is not None:
            self._graphs.forget()

    def prepare(self, batch: Sequence[Chunk]) -> None:
        """Make room for a batch in every pool, and copy the shared pages that it writes to."""
        pad_to = self._graphs.rows(len(batch)) if self._graphs is not None and _decodes(batch) else None
        named = [(chunk.sample.seq, chunk.new) for chunk in batch]
        for plan in self.plans:
            plan.step(named, pad_to=pad_to)  # type: ignore[arg-type]  # whoever is in a batch has a name

    def run(self, batch: Sequence[Chunk]) -> Tensor:
        """Feed a prepared batch; the logits (rows, V) after every chunk that ends its sample, in order."""
        if self._graphs is not None and _decodes(batch):
            rows = self._graphs.rows(len(batch))
            return self._graphs.run(self._decoded, [chunk.sample.tokens[-1] for chunk in batch], rows)
        tokens: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            sample = chunk.sample
            tokens += sample.tokens[sample.computed : sample.computed + chunk.new]
            if chunk.last:
                wanted.append(len(tokens) - 1)
        return self._logits(tokens, self.plans[0].positions, wanted, self._attention)

    def _logits(self, tokens: list[int], positions: Tensor, wanted: list[int], attends: Any) -> Tensor:
        """The logits of the tokens at `wanted`, (wanted, V)."""
        keep = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return self._called(torch.tensor([tokens], device=self.device), positions, keep, attends)

    def _decoded(self, tokens: Tensor) -> Tensor:
        """The logits of every one of (1, rows) tokens: what a graph notes."""
        return self._called(tokens, self.plans[0].positions, 0, self._attention)

    def _called(self, tokens: Tensor, positions: Tensor, keep: Tensor | int, attends: Any) -> Tensor:
        with torch.no_grad(), attending(attends, len(self.pools.places)):
            out = self.model(
                input_ids=tokens,
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
            )
        return out.logits[0]


def _decodes(batch: Sequence[Chunk]) -> bool:
    """Whether every sample is fed one token, its last."""
    return all(chunk.new == 1 and chunk.last for chunk in batch)
