"""The options of an engine, checked once and compared between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan.errors import EngineError, integer, one_of
from attnspan.paged.kernels import KERNELS


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of `attnspan.Engine`, described there.

    >>> EngineConfig(pages=0)
    Traceback (most recent call last):
    attnspan.errors.EngineError: pages must be a whole number >= 1, got 0
    """

    pages: int
    page_size: int = 16
    host_pages: int = 0
    max_sequences: int = 64
    max_tokens: int = 512
    context_parallel_from: int = 256
    prefix_cache: bool = True
    kernel: str = "auto"
    cuda_graphs: bool = False
    states: int | None = None
    state_every: int = 16

    def __post_init__(self) -> None:
        names = ("pages", "page_size", "host_pages", "context_parallel_from", "max_sequences", "max_tokens")
        for name in (*names, "state_every", *(["states"] if self.states is not None else [])):
            least = {"host_pages": 0, "states": 2}.get(name, 1)  # a sample may have two: see states.py
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=least, error=EngineError))
        one_of("kernel", self.kernel, ["auto", *KERNELS], error=EngineError)
