"""The page pools of a model: where the keys of each layer are, and how it attends.

Layers that see everything and layers that see a window lie in different pools, since the second give back the pages
that a window has left behind. A layer knows its pool and its index there. Soft-caps are a score_mod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from attnspan.engine.config import EngineConfig
from attnspan.engine.model import LayerSpec, ModelInfo
from attnspan.paged import Layer, PageAllocator, PagePool
from attnspan.parallel.soft_cap import soft_cap


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlace:
    """Where a layer's keys are, and how it attends."""

    pool: int
    index: int
    scale: float | None
    score_mod: Callable[..., Tensor] | None
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """The pools of a model, one or two: of layers that see everything, and of those that see a window."""

    pools: tuple[PagePool, ...]
    windows: tuple[int | None, ...]  # the widest of each pool; None: everything
    places: tuple[LayerPlace, ...]  # by layer


def pools_of(model: ModelInfo, sizes: EngineConfig, ranks: int) -> Pools:
    """Pools for a model's layers; a page of `ranks` ranks holds `page_size` tokens on each of them."""
    pools: list[PagePool] = []
    windows: list[int | None] = []
    found: dict[int, tuple[int, int]] = {}
    for group in _groups(model.layers):
        allocator = PageAllocator(
            num_pages=sizes.pages + 1, page_size=sizes.page_size * ranks, host_pages=sizes.host_pages
        )
        specs = [Layer(each.kv_heads, each.head_dim, each.value_dim, each.window) for _, each in group]
        found |= {layer: (len(pools), place) for place, (layer, _) in enumerate(group)}
        pools.append(PagePool(allocator, specs, dtype=model.dtype, device=model.device, page_size=sizes.page_size))
        windows.append(max((each.window for _, each in group if each.window is not None), default=None))
    caps = {each.softcap for each in model.layers if each.softcap is not None}
    mods: dict[float | None, Callable[..., Tensor]] = {
        cap: soft_cap(cap) for cap in caps
    }  # one for all layers of a cap
    places = [
        LayerPlace(*found[layer], each.scale, mods.get(each.softcap), each.window)
        for layer, each in enumerate(model.layers)
    ]
    return Pools(tuple(pools), tuple(windows), tuple(places))


def _groups(layers: Sequence[LayerSpec]) -> list[list[tuple[int, LayerSpec]]]:
    """Numbered layers without a window, then those with one, as far as there are any."""
    full = [(layer, each) for layer, each in enumerate(layers) if each.window is None]
    windowed = [(layer, each) for layer, each in enumerate(layers) if each.window is not None]
    return [group for group in (full, windowed) if group]
