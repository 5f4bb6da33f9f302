"""The page pools of a model: the pool and the attention of each layer, and the pool of recurrent states.

Layers with full attention and layers with a window are in different pools, since the latter free the pages that their
window has left. Layers with chunked attention are in the second pool too: a chunk reaches back no further than a window
of its size. Each layer has an index in its pool. Soft-caps are a score_mod.

[Note: snapshots] Recurrent states have a pool of their own; one page holds a state of every layer (paged/states.py).
With a prefix cache it stands for the tokens of `state_every` pages, so that there are snapshots from which other
prompts can start; without one, for a whole sample. States are not spread over ranks: each rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.engine.config import EngineConfig
from attnspan.engine.kv_cache_manager import KVCacheGroup
from attnspan.engine.model import LayerSpec, ModelInfo, StateSpec
from attnspan.errors import EngineError
from attnspan.masks import Causal, Chunked, Mask, SlidingWindow
from attnspan.paged import PageAllocator, PageLayer, PagePool, PrefixCache, StatePool
from attnspan.paged.quantised import MAX_CODES
from attnspan.parallel.soft_cap import soft_cap

UNBOUNDED = 1 << 31
"""More tokens than a sample has."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledLayer:
    """Which pool has a layer's keys, at which index there, and how the layer attends."""

    pool: int
    index: int
    scale: float | None
    score_mod: Callable[..., Tensor] | None
    mask: Mask  # of a whole sequence
    chunked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """The pools of a model: of layers that see everything, of those that see a window, and of states."""

    pools: tuple[PagePool, ...]
    windows: tuple[int | None, ...]  # the widest of each pool; None: everything
    layers: tuple[PooledLayer, ...]  # by layer
    states: StatePool | None
    state_specs: tuple[StateSpec, ...]
    device: torch.device

    def groups(self, prefix_cache: bool) -> list[KVCacheGroup]:
        """The same as the scheduler sees them: a group for each pool, and one for states."""
        kept = [*zip(self.pools, self.windows, strict=True), *([] if self.states is None else [(self.states, 2)])]
        return [
            KVCacheGroup(
                pool.allocator, pool, window, PrefixCache(pool.allocator) if prefix_cache else None,
                states=pool is self.states,
            )
            for pool, window in kept
        ]  # fmt: skip


def _mask(spec: LayerSpec) -> Mask:
    own = Causal() if spec.window is None else SlidingWindow(spec.window - 1)
    return own if spec.chunk is None else own & Chunked(spec.chunk)


def pools_of(info: ModelInfo, config: EngineConfig, ranks: int) -> Pools:
    """Pools for a model's layers; a page of `ranks` ranks holds `page_size` tokens on each of them."""
    pools: list[PagePool] = []
    windows: list[int | None] = []
    places: dict[int, PooledLayer] = {}
    score_mods = {spec.softcap: soft_cap(spec.softcap) for spec in info.layers if spec.softcap is not None}
    for windowed in (False, True):
        group = {layer: spec for layer, spec in enumerate(info.layers) if (spec.reach is not None) == windowed}
        if not group:
            continue
        for index, (layer, spec) in enumerate(group.items()):
            score_mod = spec.score_mod if spec.softcap is None else score_mods[spec.softcap]  # one for all of a cap
            places[layer] = PooledLayer(len(pools), index, spec.scale, score_mod, _mask(spec), spec.chunk is not None)
        allocator = PageAllocator(
            num_pages=(config.pages or 0) + 1, page_size=config.page_size * ranks, host_pages=config.host_pages
        )
        layers = [
            PageLayer(
                each.kv_heads, each.head_dim, each.value_dim, each.reach, values_in_keys=each.latent,
                quantised=_quantised(number, each, config),
            )
            for number, each in group.items()
        ]  # fmt: skip
        pools.append(PagePool(allocator, layers, dtype=info.dtype, device=info.device, page_size=config.page_size))
        windows.append(max((each.reach for each in group.values() if each.reach is not None), default=None))
    by_layer = tuple(places[layer] for layer in range(len(places)))
    return Pools(tuple(pools), tuple(windows), by_layer, _states_of(info, config), info.states, info.device)


def _quantised(layer: int, spec: LayerSpec, config: EngineConfig) -> torch.dtype | None:
    """What a layer's keys and values are stored in, if not as they are."""
    if config.kv_dtype is None:
        return None
    if spec.latent:
        raise EngineError(
            f"kv_dtype={config.kv_dtype!r}: layer {layer} keeps latents, which are not stored in 8 bits; leave "
            "kv_dtype out"
        )
    return next(dtype for dtype in MAX_CODES if dtype_name(dtype) == config.kv_dtype)


def _states_of(info: ModelInfo, config: EngineConfig) -> StatePool | None:
    """See [Note: snapshots]."""
    if not info.states:
        return None
    most = config.max_sequences
    allocator = PageAllocator(
        num_pages=1 + (config.states or (2 * most if config.prefix_cache else most)),
        page_size=config.state_every * config.page_size if config.prefix_cache else UNBOUNDED,
        host_pages=most if config.host_pages else 0,
    )
    return StatePool(allocator, [(spec.shape, spec.dtype) for spec in info.states], info.device)
