"""A transformers `Cache` with keys and values in pages, for a plain `model.generate`.

    cache = PagedCache(model, pages=1024)
    out = model.generate(tokens, past_key_values=cache, max_new_tokens=100)

Every row of the batch is a sequence of an allocator. New keys are written to pages, and all keys are copied into one
contiguous tensor in every call, which the model's own attention needs. So memory grows with the actual tokens, beams
share pages, and results are those of any other cache, with any attention implementation and any mask, at the cost of
one copy per layer and step.

The shapes that layers pass to a cache are probed when it is made, by running the model on one token: most pass the keys
and values of their heads, some the latents of both (DeepSeek-V3). Pages can hold either.

All rows have the same length: padding is stored too, and hidden by the attention mask as usual. Layers with a window
keep all their keys here (the mask hides them; only the engine frees pages).

| what generation does | here |
|---|---|
| greedy, sampling, `num_return_sequences`, left padding | as with any cache |
| beam search (`reorder_cache`), `batch_select_indices`, `batch_repeat_interleave` | rows are forked, pages are shared |
| assisted decoding, contrastive search (`crop`) | rows are trimmed |
| `copy.deepcopy(cache)`, to go on from one prompt in several ways | rows are forked, in the same pool |
| more tokens than pages | PoolExhausted, before anything is written |
| a call after one that failed halfway | refused until `reset()` |
| gradients | refused: pages hold numbers alone |
| offloading, quantised caches, linear attention, cross-attention | refused |

`reset()` frees all pages, and so does dropping the cache.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from attnspan.errors import ModelError, PageError, integer
from attnspan.integrations.huggingface.layers import attention_layers, decoder_layers
from attnspan.integrations.huggingface.towers import decoder_of, modules_outside
from attnspan.paged import PageAllocator, PageLayer, PagePool, StepPlan


class CachedRows:
    """The rows of a batch in a pool: what a cache and its layers share."""

    def __init__(self, pool: PagePool, rows: list[int]) -> None:
        self.pool, self.rows = pool, rows
        self._plan: StepPlan | None = None

    @property
    def length(self) -> int:
        """The tokens of every row."""
        return self.pool.allocator.length(self.rows[0]) if self.rows else 0

    def grow(self, layer: int, rows: int, tokens: int) -> StepPlan:
        """The plan of the newest tokens: the first layer makes room for them, the others follow."""
        if layer == 0:
            if not self.rows:
                self.rows += [self.pool.allocator.add() for _ in range(rows)]
            if len(self.rows) != rows:
                raise PageError(f"the cache holds a batch of {len(self.rows)}, got one of {rows}; reset() it first")
            plan, length = self._plan, self.length + tokens
            if plan is None or plan.max_sequences < rows or plan.max_tokens < rows * tokens or plan.max_length < length:
                longest = max(2 * length, 64)
                self._plan = StepPlan(
                    self.pool, max_sequences=rows, max_tokens=rows * max(tokens, 8), max_length=longest
                )
            assert self._plan is not None, "made above"
            self._plan.step([(row, tokens) for row in self.rows])
        if self._plan is None:
            raise PageError(f"layer {layer} was called before layer 0, which makes room for the tokens")
        return self._plan

    def forked(self) -> CachedRows:
        """The same tokens on the same pages, until one of the two writes."""
        return CachedRows(self.pool, [self.pool.allocator.fork(row)[0] for row in self.rows])


class PagedCache(Cache):
    """The KV cache of a transformers model in `pages` pages of `page_size` tokens, for one batch at a time."""

    def __init__(self, model: PreTrainedModel, *, pages: int, page_size: int = 16) -> None:
        pages = integer("pages", pages, at_least=1, error=PageError)
        outside = modules_outside(model, decoder_of(model))
        layers = decoder_layers(attention_layers(model, outside=outside), "PagedCache")
        allocator = PageAllocator(num_pages=pages + 1, page_size=page_size)
        handed = handed_over(model, [layer.name for layer in layers])
        dtypes = dict.fromkeys(each.dtype for pair in handed for each in pair)
        if len(dtypes) > 1:
            raise ModelError(f"layers hand {' and '.join(map(str, dtypes))} to the cache; PagedCache holds one dtype")
        specs = [PageLayer(key.shape[1], key.shape[3], value.shape[3]) for key, value in handed]
        self._begin(CachedRows(PagePool(allocator, specs, dtype=next(iter(dtypes)), device=handed[0][0].device), []))

    def _begin(self, held: CachedRows) -> None:
        self._held, self.pool, self.allocator = held, held.pool, held.pool.allocator
        super().__init__(layers=[PagedLayer(held, place) for place in range(len(held.pool.layers))])
        # Nothing in a cache refers back to it, so that it is gone, and has given its pages back, once it is dropped.
        weakref.finalize(self, _give_back, self.allocator, held.rows)

    def __deepcopy__(self, memo: dict[int, object]) -> PagedCache:
        """The same tokens, on the same pages of the same pool until one of the two writes."""
        other = PagedCache.__new__(PagedCache)
        other._begin(self._held.forked())
        for theirs, ours in zip(other.layers, self.layers, strict=True):
            if isinstance(theirs, PagedLayer) and isinstance(ours, PagedLayer):
                theirs.length = ours.length
        memo[id(self)] = other
        return other

    @property
    def rows(self) -> list[int]:
        """The names of the batch's rows in the allocator."""
        return self._held.rows

    @property
    def length(self) -> int:
        """The tokens of every row."""
        return self._held.length

    def select(self, indices: list[int]) -> None:
        """Replace the rows: row i becomes a continuation of what was row indices[i], on the same pages."""
        if not self.rows:
            return
        before = self.rows[:]
        self.rows[:] = [self.allocator.fork(before[index])[0] for index in indices]
        for row in before:
            self.allocator.free(row)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search."""
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.select(indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        self.select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens: as transformers has it, -3 removes three."""
        if tokens_to_remove > 0:
            raise PageError(
                f"tokens_to_remove must be 0 or less, as in crop(-3) to remove three, got {tokens_to_remove}"
            )
        length = max(0, self.length + tokens_to_remove)
        for row in self.rows:
            self.allocator.trim(row, length)
        self._all_hold(length)

    def _all_hold(self, length: int) -> None:
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = length

    def reset(self) -> None:
        """Give back all pages."""
        _give_back(self.allocator, self.rows)
        self._all_hold(0)

    def __repr__(self) -> str:
        stats = self.allocator.stats()
        return f"PagedCache({len(self.rows)} rows of {self.length} tokens in {stats.used} of {stats.pages} pages)"


def handed_over(model: PreTrainedModel, names: list[str]) -> list[tuple[Tensor, Tensor]]:
    """What each layer hands to a cache for one token, (1, heads, 1, dim) twice; ModelError unless it is so."""
    cache = Cache(layer_class_to_replicate=RecordingLayer)
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    recorded = [layer for layer in cache.layers if isinstance(layer, RecordingLayer)]
    recorded += [RecordingLayer() for _ in names[len(recorded) :]]
    if len(recorded) > len(names):
        raise ModelError(
            f"{len(recorded)} layers hand something to the cache, and {len(names)} attention layers are known"
        )
    found = []
    for name, layer in zip(names, recorded, strict=True):
        shapes = [tuple(each.shape) for each in layer.handed]
        heads = {shape[1] for shape in shapes if len(shape) == 4 and shape[::2] == (1, 1)}
        if len(shapes) != 2 or len(heads) != 1:
            handed = " and ".join(map(str, shapes)) or "nothing"
            raise ModelError(
                f"{name} hands {handed} to the cache for one token; PagedCache holds keys and values "
                "(1, heads, 1, dim) of as many heads"
            )
        key, value = layer.handed
        found.append((key, value))
    return found


class PlainLayer(CacheLayerMixin):
    """One layer of a cache that holds all of its `length` tokens, and is ready from the start."""

    is_sliding = False

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys there will be, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each row."""
        return self.length

    def get_max_length(self) -> int:
        """No fixed end."""
        return -1


class RecordingLayer(PlainLayer):
    """A layer that keeps nothing but what it was handed for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Record both, and return them: there is nothing else."""
        self.handed += (key_states, value_states)
        return key_states, value_states


class PagedLayer(PlainLayer):
    """One layer of a PagedCache."""

    is_croppable = True

    def __init__(self, held: CachedRows, index: int) -> None:
        super().__init__()
        self.held, self.index = held, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, Hk, new, D) and return all there is, (B, Hk, length, D)."""
        rows, tokens = key_states.shape[0], key_states.shape[2]
        if key_states.requires_grad or value_states.requires_grad:
            raise PageError("PagedCache takes no keys that need gradients; call the model under torch.no_grad()")
        plan, pool = self.held.grow(self.index, rows, tokens), self.held.pool
        if self.length + tokens != self.held.length:
            raise PageError(
                f"layer {self.index} holds {self.length} tokens, and layer 0 has {self.held.length - tokens}: a call "
                "of the model failed halfway; reset() the cache"
            )
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        pool.write(self.index, key, value, plan)
        self.length += tokens
        size = pool.page_size
        wanted = plan.tables[:, : -(-self.length // size)].long().flatten()
        pages = (pool.keys[self.index], pool.values[self.index])
        found = (each.flatten(1).index_select(0, wanted) for each in pages if isinstance(each, Tensor))  # not quantised
        heads = pool.layers[self.index].kv_heads
        keys, values = (x.view(rows, -1, heads, x.shape[1] // size // heads) for x in found)
        return keys[:, : self.length].transpose(1, 2), values[:, : self.length].transpose(1, 2)

    def offload(self) -> None:
        """Refused: pages stay where they are."""
        raise PageError("PagedCache does not offload layers; use host_pages of attnspan.Engine instead")

    prefetch = offload


def _give_back(allocator: PageAllocator, rows: list[int]) -> None:
    while rows:
        allocator.free(rows.pop())
