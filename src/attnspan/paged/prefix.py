"""Pages found by what is in them: a prompt that begins like an earlier one starts with the earlier one's pages.

A full page is addressed by its own tokens and all tokens before it: it is a node below the node of the page before,
found by hash and compared token by token, so that two prompts meet on a page only if they are equal up to its end::

    cache = PrefixCache(allocator)
    seq, length = cache.add(tokens)  # a sequence that holds tokens[:length] already
    allocator.step([(seq, len(tokens) - length)])
    ...  # compute and write the rest
    cache.keep(seq, tokens)  # its full pages can be found from now on

At least one token is always left to compute, since a model wants a query. Where a page agrees only in its first
tokens, these are a hit too: the sequence shares the page and gets a copy of it when it first writes.

The cache is one more reader of each page it keeps. A page that has no other reader is idle and may be given up: least
recently used first, and never before the pages that come after it, so that what is kept can be found. Sequences whose
own early pages were released behind a sliding window do not matter here: the cache reads them still.

[Note: salts] What is kept under one salt is never found under another. Where tenants must not learn from the speed of
an answer what others have asked, each has its own.

[Note: stale entries] Idle pages wait in a heap. An entry is not removed when its page is used again: it no longer
tells the truth about its page's last use, its readers or its children, and is passed over when it comes up. When most
of the heap must be such entries they are swept out, so that it does not grow where no page is ever given up.

Ints only. Time: O(tokens) to add or keep, O(log pages) for each page given up.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnspan.errors import PageError, whole_list
from attnspan.paged.allocator import NULL_PAGE, PageAllocator

MOST_COMPARED = 16
"""How many pages that begin with the same token are compared, newest first, for a partial hit."""

FEW_ENTRIES = 64
"""How many stale entries are never worth a sweep."""


class Hit(NamedTuple):
    """A new sequence and how many of its tokens it holds already."""

    seq: int
    length: int


@dataclass(slots=True)
class Metrics:
    """What a cache was asked and what it had: counts since it was made."""

    lookups: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    partial_hits: int = 0
    kept_pages: int = 0
    evicted_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of tokens that were there already."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(slots=True, eq=False)
class Node:
    """A kept page: its tokens, what comes before it, and what comes after, by first token and then by all."""

    page: int
    tokens: tuple[int, ...]
    parent: Node | None
    used: int = 0
    after: dict[int, dict[tuple[int, ...], Node]] = field(default_factory=dict)
    children: int = 0
    salt: Hashable = None  # of a root, which has no page and no parent

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        """The page with exactly these tokens."""
        return self.after.get(tokens[0], {}).get(tokens)

    def nearest(self, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The page that agrees with the most of `tokens` from their start, and with how many."""
        best: tuple[Node | None, int] = (None, 0)
        for _, child in zip(range(MOST_COMPARED), reversed(self.after.get(tokens[0], {}).values()), strict=False):
            pairs = zip(child.tokens, tokens, strict=False)
            agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(child.tokens), len(tokens)))
            if agreed > best[1]:
                best = (child, agreed)
        return best


Entry = tuple[int, int, Node]
"""An idle page in the heap: when it was last used, a number that tells apart what was used at once, and the page."""


class PrefixCache:
    """Pages of an allocator by content.

    >>> allocator = PageAllocator(num_pages=8, page_size=2)
    >>> cache = PrefixCache(allocator)
    >>> first, length = cache.add([7, 8, 9, 1, 5])
    >>> given = allocator.step([(first, 5 - length)])
    >>> cache.keep(first, [7, 8, 9, 1, 5])  # two full pages
    2
    >>> cache.add([7, 8, 9, 2])  # one page, and the first token of another
    Hit(seq=1, length=3)
    """

    def __init__(self, allocator: PageAllocator):
        if allocator._reclaim is not None:
            raise PageError(
                "allocator already has a prefix cache; one serves all its sequences, with a salt for each tenant"
            )
        self.allocator, self.metrics = allocator, Metrics()
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._pushed = 0
        self._idle: list[Entry] = []
        self._kept: dict[int, Node] = {}
        allocator._kept = self._kept  # type: ignore[assignment]  # read there, written here
        allocator._when_idle = lambda page: self._wait(self._kept[page])
        allocator._reclaim = self._reclaim

    def add(self, tokens: Iterable[int], *, salt: Hashable = None) -> Hit:
        """A new sequence that begins with what is kept of `tokens`, but for at least the last of them."""
        prompt = _tokens(tokens)
        pages, length = self._match(prompt[:-1], salt)
        seq = self.allocator._adopt(pages, length)
        counts = self.metrics
        counts.lookups += 1
        counts.tokens += len(prompt)
        counts.hit_tokens += length
        counts.partial_hits += length % self.allocator.page_size > 0
        return Hit(seq, length)

    def peek(self, tokens: Iterable[int], *, salt: Hashable = None) -> int:
        """How many of these tokens `add` would find; nothing changes, not even what was used last."""
        return self._match(_tokens(tokens)[:-1], salt, touch=False)[1]

    def keep(self, seq: int, tokens: Iterable[int], *, salt: Hashable = None) -> int:
        """Keep the full pages of a sequence, whose first tokens are `tokens`; how many pages were new.

        Call it when their keys are written. Pages that were released already, and what comes after, are left out.
        """
        prompt, size = _tokens(tokens), self.allocator.page_size
        row = self.allocator._present(seq, "keep pages of")
        if len(prompt) > row.length:
            raise PageError(f"tokens must be at most the {row.length} that sequence {seq} holds, got {len(prompt)}")
        path = self._path(prompt, salt)
        full = len(prompt) // size
        for index in range(full):
            page, node = row.table[index], path[index] if index < len(path) else None
            if page in self._kept and self._kept[page] is not node:
                raise PageError(
                    f"page {page} of sequence {seq} is kept with other tokens or another salt; "
                    "give the tokens and the salt that the sequence was added with"
                )
        parent, new = self._roots.get(salt) or Node(NULL_PAGE, (), None, salt=salt), 0
        self._clock += 1
        for index in range(full):
            page, here = row.table[index], prompt[index * size : (index + 1) * size]
            child = path[index] if index < len(path) else None
            if child is None:
                if page == NULL_PAGE:
                    break
                child = self._insert(parent, here, page)
                new += 1
            self._touch(child)
            parent = child
        self.metrics.kept_pages += new
        return new

    def clear(self) -> int:
        """Give up every idle page; how many there were."""
        before = len(self._kept)
        for node in self._victims(before):
            self._remove(node)
        return before - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"PrefixCache({len(self)} pages kept, {self.metrics.hit_rate:.0%} of {self.metrics.tokens} tokens found)"

    def check(self) -> None:
        """Hold the pages to what must be true of them, the allocator included."""
        self.allocator.check()
        found: dict[int, Node] = {}
        waiting = {id(node): used for used, _, node in self._idle if used == node.used}
        for root in self._roots.values():
            nodes = [root]
            while nodes:
                node = nodes.pop()
                below = [child for same in node.after.values() for child in same.values()]
                assert len(below) == node.children, "children are miscounted"
                assert all(child.parent is node for child in below), "a page is below another's"
                nodes += below
                if node is root:
                    continue
                assert found.setdefault(node.page, node) is node, f"page {node.page} is kept twice"
                idle = self.allocator._readers[node.page] == 1 and not node.children
                assert not idle or id(node) in waiting, f"page {node.page} is idle and could never be given up"
        assert found == self._kept, "a kept page cannot be found"

    # ---- within ----------------------------------------------------------------------------------------------------

    def _path(self, tokens: tuple[int, ...], salt: Hashable) -> list[Node]:
        """The kept pages that hold `tokens`, as far as they go."""
        size, node, path = self.allocator.page_size, self._roots.get(salt), list[Node]()
        for start in range(0, len(tokens) - size + 1, size):
            node = node.child(tokens[start : start + size]) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _match(self, tokens: tuple[int, ...], salt: Hashable, touch: bool = True) -> tuple[list[int], int]:
        path, size = self._path(tokens, salt), self.allocator.page_size
        length = len(path) * size
        last = path[-1] if path else self._roots.get(salt)
        if last is not None and length < len(tokens):
            partly, agreed = last.nearest(tokens[length : length + size])
            if partly is not None:
                path, length = [*path, partly], length + agreed
        if touch:
            self._clock += 1
            for node in path:
                self._touch(node)
        return [node.page for node in path], length

    def _insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        node = Node(page, tokens, parent)
        if parent.parent is None:
            self._roots[parent.salt] = parent
        parent.after.setdefault(tokens[0], {})[tokens] = node
        parent.children += 1
        self._kept[page] = node
        self.allocator._readers[page] += 1
        return node

    def _touch(self, node: Node) -> None:
        node.used = self._clock
        if self.allocator._readers[node.page] == 1:
            self._wait(node)

    def _wait(self, node: Node) -> None:
        """Queue a page that may be given up, if nothing comes after it."""
        if node.children:
            return
        if len(self._idle) > 2 * len(self._kept) + FEW_ENTRIES:
            self._idle = list({id(entry[2]): entry for entry in self._idle if self._is_true(entry)}.values())
            heapq.heapify(self._idle)
        self._push(node)

    def _push(self, node: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._idle, (node.used, self._pushed, node))

    def _is_true(self, entry: Entry) -> bool:
        """Whether an entry tells of a page that is idle, as it was last used. See [Note: stale entries]."""
        used, _, node = entry
        return self._kept.get(node.page) is node and used == node.used and self.allocator._readers[node.page] == 1

    def _reclaim(self, short: int) -> bool:
        """Give up so many pages, or none if there are not so many."""
        victims = self._victims(short)
        if len(victims) < short:
            for node in victims:
                self._wait(node)
            return False
        for node in victims:
            self._remove(node)
        return True

    def _victims(self, most: int) -> list[Node]:
        """Up to `most` pages to give up, in order, taken out of the heap. See [Note: stale entries]."""
        victims: list[Node] = []
        chosen: set[int] = set()
        left: dict[int, int] = {}  # children that would remain, by node
        readers = self.allocator._readers
        while self._idle and len(victims) < most:
            entry = heapq.heappop(self._idle)
            node = entry[2]
            if not self._is_true(entry) or left.get(id(node), node.children) or id(node) in chosen:
                continue
            victims.append(node)
            chosen.add(id(node))
            parent = node.parent
            assert parent is not None, "a root is never queued"
            left[id(parent)] = left.get(id(parent), parent.children) - 1
            if not left[id(parent)] and parent.page != NULL_PAGE and readers[parent.page] == 1:
                self._push(parent)
        return victims

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root holds no page"
        same = parent.after[node.tokens[0]]
        del same[node.tokens]
        if not same:
            del parent.after[node.tokens[0]]
        parent.children -= 1
        del self._kept[node.page]
        self.metrics.evicted_pages += 1
        self.allocator._drop(node.page)
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.salt]
        elif self.allocator._readers[parent.page] == 1:
            self._wait(parent)


def _tokens(tokens: Iterable[int]) -> tuple[int, ...]:
    given = tuple(tokens)
    return given if set(map(type, given)) == {int} else whole_list("tokens", given, error=PageError)
