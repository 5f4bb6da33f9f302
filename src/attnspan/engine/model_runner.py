"""A step of the model: tokens of many samples packed into one row, keys to their pages, logits of those that want them.

    runner = ModelRunner(model, pools_of(model.info(), config, ranks=1), config, max_length=4096)
    runner.prepare(batch)  # pages
    logits = runner.run(batch)  # a row for every chunk that gets a token

Each pool has a plan of its own (pools.py). Knows nothing of requests, text or what is done with logits.

[Note: new states] A step that fails must leave states as they were, and recurrent layers compute new ones one by one.
So `run` reads states and leaves new ones aside; `keep_states`, when all has gone well, writes them. Keys need none of
this: they are written behind the tokens that count.

Shapes: T tokens of the step, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnspan.engine.config import EngineConfig
from attnspan.engine.cuda_graphs import CudaGraphs
from attnspan.engine.host_tensor import host_tensor
from attnspan.engine.model import EncodingModel, PackedBatch, PromptRows, ServedModel, StateSpec, StepAttention
from attnspan.engine.pools import Pools
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Chunk
from attnspan.errors import EngineError, ModelError
from attnspan.masks import Causal, Mask, TokenGroups
from attnspan.paged import AfterPrefix, StepPlan
from attnspan.paged.kv_cache import PagedKVCache
from attnspan.paged.states import StateStep
from attnspan.recurrence import PackedSequences, Rule

CAUSAL = Causal()


class PagedStepAttention(StepAttention):
    """Attention over `caches`, one for each pool: new keys are written, then queries attend over their sequences.

    Recurrences go on from the states of `states`; the new ones are left in `new_states`. See [Note: new states].
    """

    def __init__(self, pools: Pools, caches: Sequence[PagedKVCache], plans: Sequence[StepPlan], kernel: str):
        self.pools, self.caches, self.plans, self.kernel = pools, caches, plans, kernel
        # By layer, of a step in which tokens of a group see each other.
        self.group_masks: Mapping[int, AfterPrefix] = {}
        self.states: StateStep | None = None
        self.new_states: dict[int, Tensor] = {}

    def begin(self, states: StateStep | None) -> None:
        """Another step; what one that failed has left is forgotten."""
        self.states, self.new_states = states, {}
        if states is not None:
            self.sequences = PackedSequences(states.lengths, self.pools.device)

    def recurrence(self, state: int, rule: Rule) -> Tensor:
        before = self._read(state, StateSpec(tuple(rule.state_shape), rule.dtype))
        out, self.new_states[state] = self.sequences.run(rule, before)
        return out

    def conv1d(self, state: int, tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        before = self._read(state, StateSpec.convolution(len(weight), weight.shape[1], tokens.dtype))
        out, self.new_states[state] = self.sequences.conv1d(tokens, before, weight, bias)
        return out

    def check_state(self, state: int, used: StateSpec) -> None:
        """Refuse another use of a state than the model announced."""
        specs = self.pools.state_specs
        if not 0 <= state < len(specs):
            raise ModelError(f"state {state} is used, and the model's info() names {len(specs)} of them")
        if specs[state] != used or state in self.new_states:
            how = "twice in one step" if specs[state] == used else f"as {used}, and info() says {specs[state]}"
            raise ModelError(f"state {state} is used {how}")

    def _read(self, state: int, used: StateSpec) -> Tensor:
        """A state of every sequence."""
        self.check_state(state, used)
        assert self.pools.states is not None, "there are states"
        assert self.states is not None, "a step was prepared"
        return self.pools.states.read(state, self.states)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        paged = self.pools.layers[layer]
        cache, plan = self.caches[paged.pool], self.plans[paged.pool]
        cache.write(paged.index, key, value, plan)
        out = cache.attend(
            paged.index, query, plan, mask=self.group_masks.get(layer, paged.mask if paged.chunked else CAUSAL),
            score_mod=paged.score_mod, sinks=sinks,
            scale=paged.scale, kernel=self.kernel,
        )  # fmt: skip  # beside the layer's own window
        assert isinstance(out, Tensor), "no lse was asked for"
        return out


class ModelRunner:
    """A model over pools of pages, for samples of at most `max_length` tokens."""

    def __init__(self, model: ServedModel, pools: Pools, config: EngineConfig, max_length: int) -> None:
        self.model, self.pools, self.config = model, pools, config
        self.device = pools.device
        if config.cuda_graphs and pools.states is not None:
            raise EngineError(
                "cuda_graphs=True: the model has recurrent layers, whose states no graph goes on from; leave "
                "cuda_graphs out"
            )
        caches = self._caches()
        sizes = {"max_sequences": config.max_sequences, "max_tokens": config.max_tokens, "max_length": max_length}
        self.plans = [cache.plan(**sizes) for cache in caches]
        self._attention = PagedStepAttention(pools, caches, self.plans, config.kernel)
        # By request: its prompt, and the encoder's result.
        self._encoded: dict[int, tuple[tuple[int, ...], object]] = {}
        self._encodes = model.info().decoder_start is not None
        if self._encodes and config.cuda_graphs:
            raise EngineError("cuda_graphs=True is for models without an encoder; leave cuda_graphs out")
        self._graphs = CudaGraphs(config.max_sequences, self.device) if config.cuda_graphs else None
        self.runs_ahead = config.cuda_graphs  # without graphs the device waits for the host anyway
        for number, layer in enumerate(pools.layers):
            program = "a soft-cap or a bias" if layer.score_mod is not None else "chunks" if layer.chunked else None
            if config.cuda_graphs and program is not None:
                raise EngineError(
                    f"cuda_graphs=True: layer {number} has {program}, which no kernel attends with inside a graph; "
                    "leave cuda_graphs out"
                )

    def _caches(self) -> Sequence[PagedKVCache]:
        """The cache of each pool: the pool itself, or over ranks its share of pages."""
        return self.pools.pools

    @property
    def graph_sizes(self) -> list[int]:
        """The numbers of rows that warm-up runs: those of graphs, or 1 without."""
        return [1] if self._graphs is None else self._graphs.sizes

    def forget_graphs(self) -> None:
        """The model has changed: its graphs, if there are any, are captured again when they are next needed."""
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def encoder_example(self) -> tuple[int, ...]:
        """A prompt for the encoder, if the model has one."""
        return (0,) if self._encodes else ()

    def forget_encoded(self, request: int | None = None) -> None:
        """A request has ended, or all have: what the encoder made of its prompt is dropped."""
        if request is None:
            self._encoded.clear()
        else:
            self._encoded.pop(request, None)

    def _encode(self, sample: Sample) -> object:
        """What the encoder makes of the prompt of a sample, once for its request."""
        prompt, encoded = self._encoded.get(sample.request_number, (None, None))
        if prompt is not sample.encoder_prompt:  # none yet, or of a warm-up that was broken off
            assert isinstance(self.model, EncodingModel), "it has a decoder_start"
            tokens = torch.tensor(sample.encoder_prompt, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                encoded = self.model.encode(tokens)
            self._encoded[sample.request_number] = sample.encoder_prompt, encoded
        return encoded

    def prepare(self, batch: Sequence[Chunk], ahead: bool = False) -> None:
        """Make room for a batch in every pool, and copy the shared pages that it writes to.

        A batch `ahead` decodes tokens that its samples do not have yet (in_flight.py).
        """
        decodes = self._graphs is not None and (ahead or _fits_decode_graph(batch))
        pad_to = self._graphs.padded_rows(len(batch)) if self._graphs is not None and decodes else None
        rows = [(chunk.sample.seq, chunk.new) for chunk in batch]
        for plan in self.plans:
            plan.step(rows, pad_to=pad_to)
        states = self.pools.states
        self._attention.begin(None if states is None else states.step(rows))

    def keep_states(self) -> None:
        """Write the new states of the batch that was run in place of the old ones. See [Note: new states]."""
        attention, pool = self._attention, self.pools.states
        if pool is not None and attention.states is not None:
            for state, after in attention.new_states.items():
                pool.write(state, attention.states, after)
        attention.begin(None)

    def run(self, batch: Sequence[Chunk]) -> Tensor:
        """Feed a prepared batch; the logits (rows, V) after every chunk that gets a token, in order: one row, or
        one more for each token of a draft."""
        if self._graphs is not None and _fits_decode_graph(batch):
            return self.run_decode(batch, host_tensor([chunk.sample.tokens[-1] for chunk in batch], self.device))
        tokens: list[int] = []
        logits_to_keep: list[int] = []
        embedded: list[PromptRows] = []
        for chunk in batch:
            if (prompt := chunk.sample.embedded) is not None:
                embedded.append(PromptRows(len(tokens), len(tokens) + chunk.new, chunk.sample.computed, prompt))
            tokens += chunk.tokens
            if chunk.gets_token:
                logits_to_keep += range(len(tokens) - 1 - len(chunk.draft), len(tokens))
        self._attention.group_masks = _group_masks(batch) if embedded else {}
        rows = [(chunk.sample, chunk.new) for chunk in batch]
        return self._logits(tokens, self._positions(batch), logits_to_keep, self._attention, rows, tuple(embedded))

    def run_decode(self, batch: Sequence[Chunk], tokens: Tensor) -> Tensor:
        """Feed a prepared batch one token for each sample, from `tokens`, which the host may not have read yet; the
        logits (rows, V) after them. By a graph, or without one where tests run steps ahead on a CPU."""
        if self._graphs is not None:
            return self._graphs.run(self._decode, tokens, self._graphs.padded_rows(len(batch)))
        rows = [(chunk.sample, chunk.new) for chunk in batch]
        return self._logits(tokens, self._positions(batch), range(len(batch)), self._attention, rows)

    def _positions(self, batch: Sequence[Chunk]) -> Tensor:
        """The position of every token of a prepared batch, (T,)."""
        if self.plans:
            return self.plans[0].positions
        runs = [range(chunk.sample.computed, chunk.sample.computed + chunk.new) for chunk in batch]
        return torch.tensor([position for run in runs for position in run], device=self.device)

    def _logits(
        self,
        tokens: Sequence[int] | Tensor,
        positions: Tensor,
        logits_to_keep: Sequence[int],
        attention: StepAttention,
        rows: Sequence[tuple[Sample, int]],
        embedded: tuple[PromptRows, ...] = (),
    ) -> Tensor:
        """The logits of tokens by their indices; `rows` are the samples, each with its number of tokens."""
        tokens = torch.as_tensor(tokens, device=self.device, dtype=torch.int64)
        kept = torch.tensor(logits_to_keep, dtype=torch.int64, device=self.device)
        encoded = [(count, self._encode(sample)) for sample, count in rows] if self._encodes else []
        batch = PackedBatch(tokens, positions.long(), kept, encoded, embedded, _adapters_of(rows))
        return self._call(batch, attention)

    def _decode(self, tokens: Tensor) -> Tensor:
        """The logits of each of (rows,) tokens: the call of the model that a graph captures."""
        return self._call(PackedBatch(tokens, self.plans[0].positions.long()), self._attention)

    def _call(self, batch: PackedBatch, attention: StepAttention) -> Tensor:
        attention.calls = 0
        with torch.no_grad(): logits = self.model.step(batch, attention)  # fmt: skip  # noqa: E701  # see call_lock.py
        if attention.calls != len(self.pools.layers):
            raise ModelError(
                f"{attention.calls} of {len(self.pools.layers)} layers attended over pages in a call of the model; it "
                "has changed since the engine was made: make a new one"
            )
        states, used = len(self.pools.state_specs), len(self._attention.new_states)
        if used != states:
            raise ModelError(
                f"{used} of {states} recurrent states were used in a call of the model; it has "
                "changed since the engine was made: make a new one"
            )
        return logits


def _adapters_of(rows: Sequence[tuple[Sample, int]]) -> list[tuple[int, str | None]]:
    """The `adapters` of a batch."""
    if not any([sample.adapter for sample, _ in rows]):  # noqa: C419  # twice as fast
        return []
    return [(count, sample.adapter) for sample, count in rows]


def _group_masks(batch: Sequence[Chunk]) -> dict[int, AfterPrefix]:
    """The mask of new tokens, by layer, of a batch in which some of a group are computed."""
    masks: list[Mask] = []
    layers: set[int] = set()
    for sample, new, _ in batch:
        masks.append(CAUSAL)
        groups = None if sample.embedded is None else sample.embedded.groups
        here = () if groups is None else groups.cut(sample.computed, sample.computed + new)
        if sample.embedded is not None and any(here):
            masks[-1] = CAUSAL | TokenGroups((here,), new)
            layers |= sample.embedded.grouped_layers
    return dict.fromkeys(layers, AfterPrefix(masks)) if layers else {}


def _fits_decode_graph(batch: Sequence[Chunk]) -> bool:
    """Whether every sample is fed one token, its last, and has no images or adapter: a batch for a graph."""
    return all(
        chunk.new == 1 and chunk.gets_token and chunk.sample.embedded is None and chunk.sample.adapter is None
        for chunk in batch
    )
