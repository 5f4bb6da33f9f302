"""States of recurrent layers, in pages: one page for `page_size` tokens of a sequence, however long it is.

Keys of all tokens are kept; of states only the last one counts. So a page of states is one state of each layer, the one
after the latest token of its page_size tokens. While these are computed it is written again and again; when they are
complete it remains as a snapshot of the state at their end, and the next page begins from it::

    pool = StatePool(PageAllocator(num_pages=9, page_size=256), [((8, 64, 64), torch.float32)])
    step = pool.step([(a, 200), (b, 1)])  # room is made
    before = pool.read(0, step)  # (2, 8, 64, 64): zeros for a sequence without tokens
    pool.write(0, step, after)

Pages behind the last token can be given up (`release_window(seq, 2)`), or kept for others to begin from: by an
allocator and a prefix cache that know nothing of what is in them. What a sequence shares is copied before it writes.

A step writes the state after its last token alone. Where a snapshot is wanted at the end of a page, a step must end
there; a first step of several pages takes the last of them, and leaves the others out. The null page stays zero:
nothing is written to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnspan.paged.allocator import NULL_PAGE, PageAllocator
from attnspan.paged.page_tensors import PageTensors


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """New tokens of some sequences: how many of each, and the pages of the states before and after them."""

    lengths: tuple[int, ...]
    before: Tensor  # (sequences,) int64
    after: Tensor


class StatePool(PageTensors):
    """A state of each of `shapes`, with its dtype, in every page of an allocator.

    >>> pool = StatePool(PageAllocator(num_pages=4, page_size=8), [((2,), torch.float32)])
    >>> seq = pool.allocator.add()
    >>> step = pool.step([(seq, 3)])
    >>> pool.read(0, step).tolist()
    [[0.0, 0.0]]
    >>> pool.write(0, step, torch.ones(1, 2))
    >>> pool.read(0, pool.step([(seq, 5)])).tolist()
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        allocator: PageAllocator,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str = "cpu",
    ) -> None:
        place = torch.empty(0, device=device).device
        self.states = tuple(
            torch.zeros(allocator.num_pages, *shape, dtype=dtype, device=place) for shape, dtype in shapes
        )
        super().__init__(allocator, self.states, place)

    def __repr__(self) -> str:
        return (
            f"StatePool({len(self.states)} states, {self.allocator.num_pages} pages of {self.allocator.page_size} "
            f"tokens, {self.nbytes / 2**20:.1f} MiB on {self.device})"
        )

    def step(self, batch: Iterable[tuple[int, int]]) -> StateStep:
        """Make room for new tokens, or change nothing: `batch` is (sequence, number of new tokens), each once."""
        batch, allocator, size = list(batch), self.allocator, self.allocator.page_size
        skipped = {seq: (new - 1) // size * size for seq, new in batch if new > size and not allocator.length(seq)}
        try:
            for seq, length in skipped.items():
                allocator.skip(seq, length)
            growth = allocator.prepare((seq, new - skipped.get(seq, 0)) for seq, new in batch)
            allocator.commit(growth, self.copy)
        except Exception:
            for seq in skipped:
                allocator.trim(seq, 0)
            raise
        pages = [
            (row.table[(start - 1) // size] if start else NULL_PAGE, row.table[-1])
            for row, start in zip(growth.rows, growth.starts, strict=True)
        ]
        return StateStep(tuple(new for _, new in batch), *self._indices(pages))

    def read(self, state: int, step: StateStep) -> Tensor:
        """The states (sequences, ...) before the new tokens."""
        return self.states[state].index_select(0, step.before)

    def write(self, state: int, step: StateStep, after: Tensor) -> None:
        """The states after them."""
        self.states[state].index_copy_(0, step.after, after)
