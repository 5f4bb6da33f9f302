"""Where samples keep their keys: one pool of pages, or several that go by the same names.

Layers that see everything and layers that see a window cannot share pages if the latter are to give theirs back (see
paged/pool.py, [Note: windows]), so a model that has both keeps two pools. A sample has the same number in each, because
each gets the same calls in the same order; it fits if it fits in all.

[Note: the most a window needs] A sample that feeds `chunk` tokens through a window of W sees W - 1 keys before them,
and the pages at both ends may be partly used: (W + chunk - 2) // page_size + 2 pages, however long it grows.

Ints only. Pools are told to move what is swapped; an allocator without tensors does as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from attnspan.paged import PageAllocator, PrefixCache


class Swaps(Protocol):
    """What moves a sequence to the host and back: a PagePool, or an allocator alone."""

    def swap_out(self, seq: int) -> object:
        """To the host."""

    def swap_in(self, seq: int) -> object:
        """And back."""


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """One allocator: who moves its pages, the window of its layers, and its prefix cache."""

    allocator: PageAllocator
    swaps: Swaps
    window: int | None = None
    prefixes: PrefixCache | None = None

    @property
    def pages(self) -> int:
        """Pages that tokens can be in."""
        return self.allocator.num_pages - 1

    def most(self, length: int, chunk: int) -> int:
        """The most pages that a sample of so many tokens holds at once. See [Note: the most a window needs]."""
        size = self.allocator.page_size
        pages = -(-length // size)
        return pages if self.window is None else min(pages, (self.window + chunk - 2) // size + 2)


class Room:
    """The stores of a model.

    >>> allocator = PageAllocator(num_pages=5, page_size=4)
    >>> room = Room([Store(allocator, allocator)])
    >>> room.refusal(length=16, chunk=8), room.refusal(length=17, chunk=8)
    (None, '17 tokens need 5 pages of 4 tokens, and the pool has 4')
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)

    def refusal(self, length: int, chunk: int) -> str | None:
        """Why a sample of so many tokens can never run, not even alone; None if it can."""
        for store in self.stores:
            needed = store.most(length, chunk)
            if needed > store.pages:
                size = store.allocator.page_size
                return f"{length} tokens need {needed} pages of {size} tokens, and the pool has {store.pages}"
        return None

    def widest(self, chunk: int) -> int:
        """The most tokens, up to `chunk`, that can be fed at once through every window; at least 1."""
        for store in self.stores:
            if store.window is not None:
                spare = (store.pages - 1) * store.allocator.page_size - store.window + 1
                chunk = min(chunk, max(1, spare))
        return chunk

    def add(self, tokens: Sequence[int], salt: Hashable, shared: bool = True) -> tuple[int, int]:
        """A new name, and how many of its tokens it holds already; at least the last is left."""
        found: list[tuple[int, int]] = []
        for store in self.stores:
            if shared and store.prefixes is not None:
                found.append(store.prefixes.add(tokens, salt=salt))
            else:
                found.append((store.allocator.add(), 0))
        seq, known = found[0][0], min(length for _, length in found)
        assert all(name == seq for name, _ in found), "stores are told the same, so they give the same names"
        for store, (_, length) in zip(self.stores, found, strict=True):
            if length > known:
                store.allocator.trim(seq, known)
        return seq, known

    def reserve(
        self, batch: Sequence[tuple[int, int]], *, spare: int = 0, chunk: int | None = None, newcomer: int = 0
    ) -> bool:
        """Whether (name, new tokens) all fit with so many pages to spare; kept prefixes make room if need be.

        With `chunk`, tokens beyond a window and a chunk do not count for windowed layers: they come later, when
        earlier ones have gone. `newcomer` are the tokens of one more sample, which has no pages here yet.
        """
        for store in self.stores:
            asked, extra = batch, 0
            if chunk is not None and store.window is not None:
                asked = [(seq, min(new, store.window + chunk)) for seq, new in batch]
            if newcomer:
                extra = store.most(newcomer, newcomer if chunk is None else chunk)
            if not store.allocator.reserve(store.allocator.needs(asked) + extra + spare):
                return False
        return True

    def holds(self, length: int) -> bool:
        """Whether every store has pages for so many tokens at once, windows or not."""
        return all(-(-length // store.allocator.page_size) <= store.pages for store in self.stores)

    def fork(self, seq: int, n: int) -> list[int]:
        """So many names for the same tokens."""
        forks, *_ = [store.allocator.fork(seq, n) for store in self.stores]
        return forks

    def keep(self, seq: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Let the full pages of these tokens be found by later prompts."""
        for store in self.stores:
            if store.prefixes is not None:
                store.prefixes.keep(seq, tokens, salt=salt)

    def release(self, seq: int) -> int:
        """Give back the pages behind every window; how many."""
        windows = [(store.allocator, store.window) for store in self.stores if store.window is not None]
        return sum(allocator.release_window(seq, window) for allocator, window in windows)

    def trim(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        for store in self.stores:
            store.allocator.trim(seq, length)

    def free(self, seq: int) -> None:
        """Give up everything that goes by a name."""
        for store in self.stores:
            store.allocator.free(seq)

    def swap_out(self, seq: int) -> bool:
        """Move a sample to the host, if there is room for all of it; whether there was."""
        if not all(store.allocator.may_swap_out(seq) for store in self.stores):
            return False
        for store in self.stores:
            store.swaps.swap_out(seq)
        return True

    def swap_in(self, seq: int) -> bool:
        """Bring a sample back, if there is room for all of it; whether there was."""
        if not all(store.allocator.may_swap_in(seq) for store in self.stores):
            return False
        for store in self.stores:
            store.swaps.swap_in(seq)
        return True

    def reset(self) -> None:
        """Forget everything: all pages are free, no prefix is kept, and names are the same in every store again."""
        name = max(store.allocator.next_id for store in self.stores)
        for store in self.stores:
            (store.allocator if store.prefixes is None else store.prefixes).reset(name)

    def check(self) -> None:
        """Hold every store to what must be true of it."""
        for store in self.stores:
            (store.allocator if store.prefixes is None else store.prefixes).check()
