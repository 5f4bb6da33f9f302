"""The options of an engine, checked once and compared between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnspan.dtypes import dtype_name
from attnspan.errors import EngineError, integer, one_of
from attnspan.paged.kernels import KERNELS
from attnspan.paged.quantised import MAX_CODES


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of `attnspan.Engine`, described there.

    >>> EngineConfig(pages=0)
    Traceback (most recent call last):
    attnspan.errors.EngineError: pages must be a whole number >= 1, got 0
    """

    pages: int | None = None
    page_size: int = 16
    host_pages: int = 0
    max_sequences: int = 64
    max_tokens: int = 512
    context_parallel_from: int = 256
    prefix_cache: bool = True
    kernel: str = "auto"
    cuda_graphs: bool = False
    memory_share: float | None = None
    states: int | None = None
    state_every: int = 16
    prompt_lookup_num_tokens: int = 0
    kv_dtype: str | torch.dtype | None = None  # by its name, once checked

    def __post_init__(self) -> None:
        share = self.memory_share
        if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
            raise EngineError(f"memory_share must be a number above 0 and at most 1, got {share!r}")
        if share is not None and self.pages is not None:
            raise EngineError(f"give pages or memory_share, not both, got {self.pages!r} and {share!r}")
        sizes = (
            "page_size", "host_pages", "context_parallel_from", "max_sequences", "max_tokens", "state_every",
            "prompt_lookup_num_tokens",
        )  # fmt: skip
        given = (name for name in ("pages", "states") if getattr(self, name) is not None)
        for name in (*sizes, *given):
            # A sample may have two states: see states.py.
            least = {"host_pages": 0, "prompt_lookup_num_tokens": 0, "states": 2}.get(name, 1)
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=least, error=EngineError))
        one_of("kernel", self.kernel, ["auto", *KERNELS], error=EngineError)
        if self.kv_dtype is not None:
            name = dtype_name(self.kv_dtype)
            one_of("kv_dtype", name, [*map(dtype_name, MAX_CODES)], error=EngineError)
            object.__setattr__(self, "kv_dtype", name)
            if self.kernel == "flex":
                raise EngineError(
                    f"kernel='flex' reads no pages in 8 bits, got kv_dtype={name!r}; leave one of them out"
                )
