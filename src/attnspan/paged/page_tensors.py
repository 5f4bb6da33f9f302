"""Tensors whose rows are the pages of an allocator, and move as it says: copies, and swaps to the host and back.

Nothing here waits for the device, except swaps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from attnspan.errors import PageError
from attnspan.paged.allocator import Copies, PageAllocator


class PageTensors:
    """`here` are tensors (pages, ...) on a device, which never move."""

    def __init__(self, allocator: PageAllocator, here: Sequence[Tensor], device: torch.device) -> None:
        self.allocator, self.device, self._here = allocator, device, tuple(here)
        self._host = self._on_host(allocator.host_pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages on the device."""
        return sum(x.nbytes for x in self._here)

    def copy(self, copies: Copies) -> None:
        """Copy whole pages, (from, to); steps do so for shared pages that are written to."""
        sources, targets = self._indices(copies)
        for pages in self._here:
            rows = pages.flatten(1)
            rows.index_copy_(0, targets, rows.index_select(0, sources))

    def swap_out(self, seq: int) -> None:
        """Move a sequence to the host: all of it, or nothing if that fails."""
        self.allocator.swap_out(seq, self._to_host)

    def swap_in(self, seq: int) -> None:
        """Bring a sequence back: all of it, or nothing if that fails."""
        self.allocator.swap_in(seq, self._from_host)

    def _to_host(self, moves: Copies) -> None:
        here, there = self._indices(moves)
        for pages, kept in zip(self._here, self._host, strict=True):
            kept.index_copy_(0, there.cpu(), pages.index_select(0, here).cpu())

    def _from_host(self, moves: Copies) -> None:
        there, here = self._indices(moves)
        for pages, kept in zip(self._here, self._host, strict=True):
            pages.index_copy_(0, here, kept.index_select(0, there.cpu()).to(self.device))

    def _indices(self, moves: Copies) -> tuple[Tensor, Tensor]:
        """(from, to) as tensors on the device; from pinned memory, so that the host does not wait for it."""
        pairs = torch.tensor(moves, dtype=torch.int64, device="cpu").view(-1, 2)
        if self.device.type == "cuda":
            pairs = pairs.pin_memory()
        sources, targets = pairs.to(self.device, non_blocking=True).unbind(1)
        return sources, targets

    def _on_host(self, pages: int) -> list[Tensor]:
        """Host pages, in the order of the tensors. Taken at once, so that no swap lacks them."""
        if not pages:
            return []
        size, memory = sum(x[0].nbytes for x in self._here) * pages, _host_memory()
        try:
            if size > memory:  # a system that promises more than it has would end the process when it is written to
                raise MemoryError(f"the host has {memory / 2**30:.1f}")
            return [x.new_zeros(pages, *x.shape[1:], device="cpu") for x in self._here]
        except (RuntimeError, MemoryError) as error:
            raise PageError(
                f"host_pages must fit into the host's memory, got {pages}, which take {size / 2**30:.1f} GiB; ask for "
                f"fewer ({error})"
            ) from error


def _host_memory() -> float:
    """Bytes, or infinity where they are not known."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
