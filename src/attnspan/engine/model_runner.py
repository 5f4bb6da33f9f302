"""A step of the model: tokens of many samples packed into one row, keys to their pages, logits of those that want them.

    runner = ModelRunner(model, pools_of(model.info(), config, ranks=1), config, max_length=4096)
    runner.prepare(batch)  # pages
    logits = runner.run(batch)  # a row for every chunk that ends its sample

Each pool has a plan of its own (pools.py). Knows nothing of requests, text or what is done with logits.

Shapes: T tokens of the step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attnspan.engine.config import EngineConfig
from attnspan.engine.cuda_graphs import CudaGraphs
from attnspan.engine.model import EncodingModel, PackedBatch, ServedModel, StepAttention
from attnspan.engine.pools import Pools
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Chunk
from attnspan.errors import EngineError, ModelError
from attnspan.paged import StepPlan
from attnspan.paged.kv_cache import PagedKVCache


class PagedStepAttention(StepAttention):
    """Attention over `caches`, one for each pool: new keys are written, then queries attend over their sequences."""

    def __init__(self, pools: Pools, caches: Sequence[PagedKVCache], plans: Sequence[StepPlan], kernel: str):
        self.pools, self.caches, self.plans, self.kernel = pools, caches, plans, kernel

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        place = self.pools.places[layer]
        cache, plan = self.caches[place.pool], self.plans[place.pool]
        cache.write(place.index, key, value, plan)
        out = cache.attend(
            place.index, query, plan, mask=place.mask, score_mod=place.score_mod, sinks=sinks,
            scale=place.scale, kernel=self.kernel,
        )  # fmt: skip  # beside the layer's own window
        assert isinstance(out, Tensor), "no lse was asked for"
        return out


class ModelRunner:
    """A model over pools of pages, for samples of at most `max_length` tokens."""

    def __init__(self, model: ServedModel, pools: Pools, config: EngineConfig, max_length: int) -> None:
        self.model, self.pools, self.config = model, pools, config
        self.device = pools.pools[0].device
        caches = self._caches()
        sizes = {"max_sequences": config.max_sequences, "max_tokens": config.max_tokens, "max_length": max_length}
        self.plans = [cache.plan(**sizes) for cache in caches]
        self._attention = PagedStepAttention(pools, caches, self.plans, config.kernel)
        self._sources: dict[int, tuple[tuple[int, ...], object]] = {}  # by request: its prompt, and what became of it
        self._encodes = model.info().decoder_start is not None
        if self._encodes and config.cuda_graphs:
            raise EngineError("cuda_graphs=True is for models without an encoder; leave cuda_graphs out")
        self._graphs = CudaGraphs(config.max_sequences, self.device) if config.cuda_graphs else None
        for layer, place in enumerate(pools.places):
            program = "a soft-cap or a bias" if place.score_mod is not None else "chunks" if place.chunked else None
            if config.cuda_graphs and program is not None:
                raise EngineError(
                    f"cuda_graphs=True: layer {layer} has {program}, which no kernel attends with inside a graph; "
                    "leave cuda_graphs out"
                )

    def _caches(self) -> Sequence[PagedKVCache]:
        """What is written to and read, for each pool."""
        return self.pools.pools

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows for which something is prepared when they first occur: graphs, if there are any."""
        return [1] if self._graphs is None else self._graphs.sizes

    def forget_graphs(self) -> None:
        """The model has changed: its graphs, if there are any, are captured again when they are next needed."""
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def example(self) -> tuple[int, ...]:
        """A prompt for the encoder, if the model has one."""
        return (0,) if self._encodes else ()

    def forget_sources(self, request: int | None = None) -> None:
        """A request has ended, or all have: what the encoder made of its prompt is dropped."""
        if request is None:
            self._sources.clear()
        else:
            self._sources.pop(request, None)

    def _source(self, sample: Sample) -> object:
        """What the encoder makes of the prompt of a sample, once for its request."""
        prompt, source = self._sources.get(sample.arrival, (None, None))
        if prompt is not sample.source:  # none yet, or of a warm-up that was broken off
            assert isinstance(self.model, EncodingModel), "it has a decoder_start"
            tokens = torch.tensor(sample.source, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                source = self.model.encode(tokens)
            self._sources[sample.arrival] = sample.source, source
        return source

    def _sources_of(self, rows: Iterable[tuple[Sample, int]]) -> list[tuple[int, object]]:
        """The `sources` of a batch, of samples and their numbers of tokens in it."""
        return [(count, self._source(sample)) for sample, count in rows] if self._encodes else []

    def prepare(self, batch: Sequence[Chunk]) -> None:
        """Make room for a batch in every pool, and copy the shared pages that it writes to."""
        pad_to = self._graphs.rows(len(batch)) if self._graphs is not None and _decodes(batch) else None
        for plan in self.plans:
            plan.step([(chunk.sample.seq, chunk.new) for chunk in batch], pad_to=pad_to)

    def run(self, batch: Sequence[Chunk]) -> Tensor:
        """Feed a prepared batch; the logits (rows, V) after every chunk that ends its sample, in order."""
        if self._graphs is not None and _decodes(batch):
            rows = self._graphs.rows(len(batch))
            return self._graphs.run(self._decode, [chunk.sample.tokens[-1] for chunk in batch], rows)
        tokens: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            sample = chunk.sample
            tokens += sample.tokens[sample.computed : sample.computed + chunk.new]
            if chunk.last:
                wanted.append(len(tokens) - 1)
        return self._logits(tokens, self.plans[0].positions, wanted, self._attention, self._sources_of(batch))

    def _logits(
        self,
        tokens: list[int],
        positions: Tensor,
        wanted: list[int],
        attention: StepAttention,
        sources: Sequence[tuple[int, object]],
    ) -> Tensor:
        """The logits of the tokens at `wanted`, (wanted, V)."""
        keep = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        fed = torch.tensor(tokens, device=self.device, dtype=torch.int64)
        return self._call(PackedBatch(fed, positions.long(), keep, sources), attention)

    def _decode(self, tokens: Tensor) -> Tensor:
        """The logits of every one of (rows,) tokens: what a graph captures."""
        return self._call(PackedBatch(tokens, self.plans[0].positions.long()), self._attention)

    def _call(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        attention.calls = 0
        with torch.no_grad():
            logits = self.model.step(batch, attention)
        if attention.calls != len(self.pools.places):
            raise ModelError(
                f"{attention.calls} of {len(self.pools.places)} layers attended over pages in a call of the model; it "
                "has changed since the engine was made: make a new one"
            )
        return logits


def _decodes(batch: Sequence[Chunk]) -> bool:
    """Whether every sample is fed one token, its last."""
    return all(chunk.new == 1 and chunk.last for chunk in batch)
