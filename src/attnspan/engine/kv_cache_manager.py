"""The KV cache as the scheduler sees it: whether samples fit, over one group of layers or several.

Layers with full attention and layers with a window cannot share pages if the latter are to free theirs (paged/pool.py,
[Note: windows]), so a model with both has two groups, each with its own pages. A sample has the same sequence id in
each, because all groups get the same calls in the same order; it fits if it fits in all.

[Note: the most a window needs] A sample that feeds `max_chunk` tokens through a window of W sees W - 1 keys before
them, and the pages at both ends may be partly used: at most (W + max_chunk - 2) // page_size + 2 pages, however long it
grows.

[Note: states] The states of recurrent layers are a group too (paged/states.py), in which a sample holds one page, and
two during a step. They are cached and freed like pages with a window of two tokens. A cached page is the state at its
end, so prompts start at page borders, and steps end there (`to_border`).

Ints only: a `Swapper` moves swapped pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from attnspan.paged import PageAllocator, PrefixCache


class Swapper(Protocol):
    """Moves a sequence to the host and back: a PagePool, a StatePool, or an allocator alone."""

    def swap_out(self, seq: int) -> object:
        """To the host."""

    def swap_in(self, seq: int) -> object:
        """And back."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheGroup:
    """Layers that share page tables: their allocator, its swapper, their window, and their prefix cache.

    `states`: they keep recurrent states instead of keys. See [Note: states].
    """

    allocator: PageAllocator
    swapper: Swapper
    window: int | None = None
    prefix_cache: PrefixCache | None = None
    states: bool = False

    @property
    def num_pages(self) -> int:
        """Usable pages, without the null page."""
        return self.allocator.num_pages - 1

    def max_pages(self, length: int, max_chunk: int) -> int:
        """The most pages that a sample of so many tokens holds at once. See [Note: the most a window needs]."""
        size = self.allocator.page_size
        pages = -(-length // size)
        if self.states:
            return min(pages, 2)
        return pages if self.window is None else min(pages, (self.window + max_chunk - 2) // size + 2)


class KVCacheManager:
    """The groups of a model.

    >>> allocator = PageAllocator(num_pages=5, page_size=4)
    >>> kv_cache = KVCacheManager([KVCacheGroup(allocator, allocator)])
    >>> kv_cache.refusal(length=16, max_chunk=8), kv_cache.refusal(length=17, max_chunk=8)
    (None, '17 tokens need 5 pages of 4 tokens, and the pool has 4')
    """

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self.groups = tuple(groups)
        self._border = next((group.allocator.page_size for group in groups if group.states), 1)

    @property
    def keeps_states(self) -> bool:
        """Whether there are recurrent layers. See [Note: states]."""
        return any(group.states for group in self.groups)

    def to_border(self, computed: int) -> int | None:
        """The most tokens that one step may compute after `computed`, so that it ends at a border; None: any number."""
        return self._border - computed % self._border if self.keeps_states else None

    def refusal(self, length: int, max_chunk: int) -> str | None:
        """Why a sample of so many tokens can never run, not even alone; None if it can."""
        for group in self.groups:
            needed = group.max_pages(length, max_chunk)
            if needed > group.num_pages:
                size = group.allocator.page_size
                return f"{length} tokens need {needed} pages of {size} tokens, and the pool has {group.num_pages}"
        return None

    def max_chunk(self, limit: int) -> int:
        """The most tokens, up to `limit`, that can be fed at once through every window; at least 1."""
        for group in self.groups:
            if group.states:
                limit = min(limit, group.allocator.page_size)
            elif group.window is not None:
                spare = (group.num_pages - 1) * group.allocator.page_size - group.window + 1
                limit = min(limit, max(1, spare))
        return limit

    def add(self, tokens: Sequence[int], salt: Hashable, shared: bool = True) -> tuple[int, int]:
        """A new sequence, and how many of its tokens the prefix cache has; at least the last has to be computed."""
        found: list[tuple[int, int]] = []
        for group in self.groups:
            if shared and group.prefix_cache is not None:
                found.append(group.prefix_cache.add(tokens, salt=salt))
            else:
                found.append((group.allocator.add(), 0))
        seq, computed = found[0][0], min(length for _, length in found)
        computed -= computed % self._border
        assert all(each == seq for each, _ in found), "groups get the same calls, so they give out the same ids"
        for group, (_, length) in zip(self.groups, found, strict=True):
            if length > computed:
                group.allocator.trim(seq, computed)
        return seq, computed

    def make_room(
        self, batch: Sequence[tuple[int, int]], *, spare: int = 0, max_chunk: int | None = None, newcomer: int = 0
    ) -> bool:
        """Whether all (sequence, new tokens) fit with `spare` pages left, after evicting cached prefixes if necessary.

        With `max_chunk`, windowed layers only count a window and so many tokens, since earlier pages are freed before
        later ones are needed. `newcomer` is the number of tokens of one more sample, which has no pages yet.
        """
        for group in self.groups:
            counted, extra = batch, 0
            if group.states:
                counted = [(seq, min(new, group.allocator.page_size)) for seq, new in batch]
            elif max_chunk is not None and group.window is not None:
                counted = [(seq, min(new, group.window + max_chunk)) for seq, new in batch]
            if newcomer:
                extra = group.max_pages(newcomer, newcomer if max_chunk is None else max_chunk)
            extra += 0 if group.states else spare  # a state that is needed is in the batch already
            if not group.allocator.make_room(group.allocator.needs(counted) + extra):
                return False
        return True

    def holds(self, length: int) -> bool:
        """Whether every group has pages for so many tokens at once, without freeing any behind windows."""
        return all(
            -(-length // group.allocator.page_size) <= group.num_pages for group in self.groups if not group.states
        )

    def fork(self, seq: int, n: int) -> list[int]:
        """So many sequences of the same tokens."""
        forks, *_ = [group.allocator.fork(seq, n) for group in self.groups]
        return forks

    def cache_prefix(self, seq: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Let later prompts find the full pages of these tokens."""
        for group in self.groups:
            if group.prefix_cache is not None:
                group.prefix_cache.insert(seq, tokens, salt=salt)

    def release_windows(self, seq: int, computed: int) -> int:
        """Free the pages behind every window of the token after so many; their number."""
        windows = [(group.allocator, group.window) for group in self.groups if group.window is not None]
        return sum(
            allocator.release_window(seq, window + allocator.length(seq) - computed) for allocator, window in windows
        )

    def trim(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        for group in self.groups:
            group.allocator.trim(seq, length)

    def free(self, seq: int) -> None:
        """Give back all pages of a sequence."""
        for group in self.groups:
            group.allocator.free(seq)

    def swap_out(self, seq: int) -> bool:
        """Move a sample to the host, if there is room for all of it; whether there was."""
        if not all(group.allocator.may_swap_out(seq) for group in self.groups):
            return False
        for group in self.groups:
            group.swapper.swap_out(seq)
        return True

    def swap_in(self, seq: int) -> bool:
        """Bring a sample back, if there is room for all of it; whether there was."""
        if not all(group.allocator.may_swap_in(seq) for group in self.groups):
            return False
        for group in self.groups:
            group.swapper.swap_in(seq)
        return True

    def reset(self) -> None:
        """Free all pages and cached prefixes; ids are the same in every group again."""
        next_id = max(group.allocator.next_id for group in self.groups)
        for group in self.groups:
            (group.allocator if group.prefix_cache is None else group.prefix_cache).reset(next_id)

    def check(self) -> None:
        """Check the invariants of every group."""
        for group in self.groups:
            (group.allocator if group.prefix_cache is None else group.prefix_cache).check()
