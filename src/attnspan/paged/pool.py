"""A pool of pages: the keys and values of every layer, and attention over them.

A layer's pages are two tensors that never move, (pages, page_size, key heads, dim), so that one token's keys of all
heads lie side by side. Layers may differ in heads, dims, dtype and window; they share page numbers, so one block table
serves all of them.

[Note: windows] Pages that a windowed layer no longer sees can be released (`PageAllocator.release_window`) only if no
layer of the pool sees further. Models that mix windowed and full layers keep two pools, each with an allocator of its
own; a layer that would look behind what was released is refused.

[Note: shared beginnings] If rows of a plan begin with the same pages (`share=True`), those are read once (cascade
attention): the queries of all these rows attend to the shared keys together, then each row to its own keys, merged by
lse.

No operation waits for the device, and none takes time in proportion to the size of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from attnspan.errors import MaskError, PageError, integer
from attnspan.kernels import merge_into
from attnspan.masks import Mask
from attnspan.paged import slot_writes
from attnspan.paged.after_prefix import AfterPrefix
from attnspan.paged.allocator import PageAllocator
from attnspan.paged.kernels import choose_paged_kernel
from attnspan.paged.kv_cache import AttendOptions, PagedKVCache, check_without_gradients
from attnspan.paged.metadata import PagedMetadata, Pages, tensors
from attnspan.paged.page_tensors import PageTensors
from attnspan.paged.quantised import MAX_CODES, Quantised, quantise
from attnspan.paged.scoring import Scoring, check_fits, scoring
from attnspan.paged.step_plan import StepPlan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Read = Callable[[PagedMetadata, Tensor], tuple[Tensor, Tensor]]
"""Attention of queries over the pages that a metadata names: (out, lse)."""

MAX_KEPT = 64
"""How many masks a pool caches the scoring of."""


@dataclass(frozen=True, slots=True)
class PageLayer:
    """One layer's keys and values. `window` counts a query's own position; None sees everything.

    >>> PageLayer(kv_heads=8, head_dim=128, window=4096).value_dim
    128

    With `values_in_keys` a value is the first `value_dim` numbers of its key, and is not stored separately. This is for
    latents, which queries attend over as one key head (engine/model.py, [Note: latents]).
    """

    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    window: int | None = None
    dtype: torch.dtype | None = None  # None: the pool's
    quantised: torch.dtype | None = None  # torch.int8 or torch.float8_e4m3fn: stored in 8 bits, see quantised.py
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim"):
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=1, error=PageError))
        object.__setattr__(self, "value_dim", integer("value_dim", self.value_dim, error=PageError) or self.head_dim)
        if self.window is not None:
            object.__setattr__(self, "window", integer("window", self.window, at_least=1, error=PageError))
        if self.quantised is not None and self.quantised not in MAX_CODES:
            raise PageError(f"quantised must be torch.int8 or torch.float8_e4m3fn, got {self.quantised!r}")
        if self.values_in_keys and (self.quantised is not None or self.value_dim > self.head_dim):
            raise PageError(
                "values_in_keys needs a value_dim of at most head_dim, and no quantised, got "
                f"{self.value_dim}, {self.head_dim} and {self.quantised}"
            )


class PagePool(PageTensors, PagedKVCache):
    """Keys and values of `layers` in the pages of an allocator.

    >>> allocator = PageAllocator(num_pages=8, page_size=4)
    >>> pool = PagePool(allocator, [PageLayer(kv_heads=1, head_dim=2)])
    >>> plan = StepPlan(pool, max_sequences=1, max_tokens=8, max_length=16)
    >>> k = v = torch.ones(3, 1, 2)
    >>> pool.write(0, k, v, plan.step([(allocator.add(), 3)]))
    >>> pool.attend(0, torch.ones(3, 2, 2), plan)[2, 1].tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        allocator: PageAllocator,
        layers: Sequence[PageLayer],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        page_size: int | None = None,
    ) -> None:
        size = allocator.page_size if page_size is None else page_size  # of one rank: see sharded.py
        self.page_size = integer("page_size", size, at_least=1, error=PageError)
        if isinstance(layers, PageLayer) or not layers or not all(isinstance(layer, PageLayer) for layer in layers):
            raise PageError(f"layers must hold at least one PageLayer, and nothing else, got {layers!r}")
        self.layers = tuple(replace(layer, dtype=layer.dtype or dtype) for layer in layers)
        for layer in self.layers:
            if layer.dtype not in DTYPES:
                raise PageError(
                    f"dtype must be one of {', '.join(map(str, DTYPES))}, got {layer.dtype}; keys in 8 bits are "
                    "PageLayer(..., quantised=)"
                )
        place, pages = torch.empty(0, device=device).device, allocator.num_pages
        self.keys = tuple(self._pages(layer, layer.head_dim, pages, place) for layer in self.layers)
        self.values = tuple(
            keys[..., : layer.value_dim] if layer.values_in_keys and isinstance(keys, Tensor)
            else self._pages(layer, layer.value_dim, pages, place)
            for layer, keys in zip(self.layers, self.keys, strict=True)
        )  # fmt: skip
        apart = [values for layer, values in zip(self.layers, self.values, strict=True) if not layer.values_in_keys]
        super().__init__(allocator, tensors(*self.keys, *apart), place)
        self._scoring_of = lru_cache(MAX_KEPT)(partial(scoring, device=self.device))

    def _pages(self, layer: PageLayer, dim: int, pages: int, device: torch.device) -> Pages:
        shape = (pages, self.page_size, layer.kv_heads, dim)
        if layer.quantised is None:
            return torch.zeros(shape, dtype=layer.dtype, device=device)
        codes = torch.zeros(shape, dtype=torch.int8, device=device)
        return Quantised(codes, torch.zeros(shape[:3], device=device), layer.quantised)

    def __repr__(self) -> str:
        shape = f"{self.allocator.num_pages} pages of {self.page_size} slots"
        return f"PagePool({len(self.layers)} layers, {shape}, {self.nbytes / 2**20:.1f} MiB on {self.device})"

    # ---- writing ---------------------------------------------------------------------------------------------------

    def plan(self, *, max_sequences: int, max_tokens: int, max_length: int) -> StepPlan:
        """As `StepPlan(pool, ...)`."""
        return StepPlan(self, max_sequences=max_sequences, max_tokens=max_tokens, max_length=max_length)

    def write(self, layer: int, key: Tensor, value: Tensor, plan: StepPlan) -> None:
        """Put the new tokens' keys (tokens, key heads, dim) and values where the plan says."""
        index, spec = self.layer(layer)
        self.check_plan(plan)
        for name, given, dim in (("key", key, spec.head_dim), ("value", value, spec.value_dim)):
            self._check(name, given, (plan.tokens, spec.kv_heads, dim), spec.dtype)
        self.write_slots(index, key, value, plan.slots)

    def write_slots(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write tokens to slots (tokens,) int64, unchecked; `write` knows the slots of a plan."""
        pairs = [(self.keys[layer], key), (self.values[layer], value)]
        if self.layers[layer].values_in_keys:
            del pairs[1]
        if all(slot_writes.can_write(*pair) for pair in pairs):
            slot_writes.write(pairs, slots)
            return
        for pages, given in pairs:
            if isinstance(pages, Quantised):
                found = quantise(given, pages.dtype)
                pages.codes.flatten(0, 1).index_copy_(0, slots, found.codes)
                pages.scales.flatten(0, 1).index_copy_(0, slots, found.scales)
            else:
                pages.flatten(0, 1).index_copy_(0, slots, given)

    # ---- attention -------------------------------------------------------------------------------------------------

    def partial(self, layer: int, query: Tensor, plan: StepPlan, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """(out, lse) over the keys that lie here, not yet rounded: what ranks that share a sequence exchange."""
        index, spec = self.layer(layer)
        self.check_plan(plan)
        metadata = plan.metadata
        self._check_query(query, plan, spec)
        scale = spec.head_dim**-0.5 if options.scale is None else float(options.scale)
        scoring = self._scoring(options.mask, spec.window, plan, query.shape[1])
        if scale <= 0:  # kernels get one above 0, as libraries mask with -inf before they multiply
            query, scale = (-query, -scale) if scale else (query * 0, 1.0)
        scoring = replace(scoring, scale=scale, score_mod=options.score_mod)
        self._check_window(scoring, plan)
        if plan.shared and scoring.program:
            raise MaskError(f"a plan made with share=True serves causal masks and windows, got a {scoring.program}")

        def read(metadata: PagedMetadata, query: Tensor) -> tuple[Tensor, Tensor]:
            of = scoring, metadata, query, self.keys[index], self.values[index]
            return choose_paged_kernel(options.kernel, *of).forward(*of)

        return self._cascade(read, plan, query) if plan.shared else read(metadata, query)

    def _cascade(self, read: Read, plan: StepPlan, query: Tensor) -> tuple[Tensor, Tensor]:
        """See [Note: shared beginnings]."""
        metadata = plan.metadata
        out, lse = read(metadata, query)
        out = out.to(lse.dtype)
        for nth, group in enumerate(plan.shared):
            shared = plan.shared_metadata(nth)
            first = sum(metadata.query_lens[: group.first])
            some = slice(first, first + shared.query_lens[0])
            parts = (out[some], lse[some], *read(shared, query[some]))
            merge_into(*(x.transpose(0, 1).unsqueeze(0) for x in parts))  # (1, H, n, ...)
        return out, lse

    def _scoring(self, mask: Mask | AfterPrefix, window: int | None, plan: StepPlan, heads: int) -> Scoring:
        """A mask as a Scoring, remembered: its tensors are sent to the device once, or once a step."""
        if isinstance(mask, AfterPrefix):
            mask.check_fits(plan.metadata.query_lens)
            mod = plan.metadata.once(mask, lambda: mask.mask_mod(plan.metadata.query_lens, plan.query_starts))
            return Scoring(1.0, window=window, mask_mod=mod)
        if not isinstance(mask, Mask):
            raise PageError(f"mask must be a mask such as Causal(), got {mask!r}")
        found = self._scoring_of(mask, window)
        if found.mask_mod is not None:
            check_fits(mask, plan.host_lengths, heads)
        return found

    # ---- refusals --------------------------------------------------------------------------------------------------

    def layer(self, layer: int) -> tuple[int, PageLayer]:
        """A layer's number, checked, and what it keeps."""
        index = integer("layer", layer, error=PageError)
        if index >= len(self.layers):
            raise PageError(f"layer must be below the pool's {len(self.layers)} layers, got {layer}")
        return index, self.layers[index]

    def check_plan(self, plan: StepPlan) -> None:
        """Refuse a plan of another pool, and one that no longer describes its sequences."""
        if not isinstance(plan, StepPlan):
            raise PageError(f"plan must be a StepPlan, got {plan!r}")
        if plan.pool is not self:
            raise PageError("plan must be one of this pool's; it was made for another")
        plan.check()

    def _check(self, name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        if not isinstance(given, Tensor) or tuple(given.shape) != shape:
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given)
            raise PageError(f"{name} must be (tokens, heads, dim) = {shape}, as planned, got {got}")
        if given.dtype != dtype or given.device != self.device:
            raise PageError(f"{name} must be {dtype} on {self.device}, got {given.dtype} on {given.device}")
        check_without_gradients(name, given)

    def _check_query(self, query: Tensor, plan: StepPlan, spec: PageLayer) -> None:
        if not isinstance(query, Tensor):
            raise PageError(f"query must be a tensor (tokens, heads, dim), got {type(query)}")
        heads = query.shape[1] if query.dim() == 3 else 0
        if heads == 0 or heads % spec.kv_heads:
            raise PageError(
                f"query must be (tokens, heads, dim) with heads a multiple of the layer's {spec.kv_heads} key heads, "
                f"got {tuple(query.shape)}"
            )
        self._check("query", query, (plan.tokens, heads, spec.head_dim), spec.dtype)

    def _check_window(self, scoring: Scoring, plan: StepPlan) -> None:
        most = plan.max_window
        if most is not None and (scoring.window is None or scoring.window > most):
            sees = "everything" if scoring.window is None else f"a window of {scoring.window}"
            raise PageError(
                f"the layer sees {sees}, but pages were released that leave a window of {most}; release less, or "
                "keep layers of different windows in pools of their own"
            )
