"""Pages found by what is in them: a prompt that begins like an earlier one starts with the earlier one's pages.

A full page is addressed by its own tokens and all tokens before it, found by hash and compared token by token, so that
two prompts meet on a page only if they are equal up to its end::

    cache = PrefixCache(allocator)
    seq, length = cache.add(tokens)  # a sequence that holds tokens[:length] already
    allocator.step([(seq, len(tokens) - length)])
    ...  # compute and write the rest
    cache.insert(seq, tokens)  # its full pages can be found from now on

At least one token is always left to compute, since a model wants a query. Where a page agrees only in its first
tokens, these are a hit too: the sequence shares the page and gets a copy of it when it first writes.

The cache is one more reader of each page it keeps. A page that has no other reader is idle and may be given up: least
recently used first, and never before the pages that come after it, so that what is kept can be found. Sequences whose
own early pages were released behind a sliding window do not matter here: the cache reads them still.

[Note: salts] What is kept under one salt is never found under another. Where tenants must not learn from the speed of
an answer what others have asked, each has its own. Values of different types are different salts, though Python takes
1, 1.0 and True for equal.

[Note: runs] The pages form a radix tree. Pages that were kept together and not split since are one node, a run. Most
prompts are like no other, and so cost a node each, however many pages they have. A run is split where another prompt
leaves it, or uses only its beginning: all pages of a run were last used at the same time.

[Note: stale entries] Runs whose last page is idle wait in a heap. An entry is not removed when its run is used again:
it is out of date about the run's last use, its readers or its children, and is passed over when it comes up. When most
of the heap must be such entries they are swept out, so that it does not grow where no page is given up.

[Note: bytes] Tokens are kept as bytes, `WIDTH` for each: one pass over a list finds what is no token, and from there on
parts of a prompt are cut, compared and hashed as a whole. An array of "Q" is such bytes already.

Ints only. Time: O(tokens) to add or insert, O(log pages) for each run that pages are given up of.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnspan.errors import PageError, integers
from attnspan.paged.allocator import NULL_PAGE, PageAllocator

MAX_COMPARED = 16
"""How many pages that begin with the same token are compared, newest first, for a partial hit."""

FEW_ENTRIES = 64
"""How many stale entries are never worth a sweep."""

WIDTH = array("Q").itemsize
"""Bytes of a token. See [Note: bytes]."""


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
    evicted_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of tokens that were there already."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(slots=True, eq=False)
class PageRun:
    """Kept pages in a row and their tokens, what comes before, and what comes after, by first token and first page."""

    pages: list[int]
    tokens: bytes
    parent: PageRun | None
    used: int = 0
    after: dict[bytes, dict[bytes, PageRun]] = field(default_factory=dict)
    children: int = 0
    salt: Hashable = None  # of a root, which has no pages and no parent

    def child(self, page: bytes) -> PageRun | None:
        """The run whose first page has exactly these tokens."""
        return self.after.get(page[:WIDTH], {}).get(page)

    def matching_pages(self, tokens: bytes, width: int) -> int:
        """How many pages of so many bytes agree with tokens, the first of which does."""
        if tokens.startswith(self.tokens):
            return len(self.pages)
        count = 1
        while self.tokens[count * width : (count + 1) * width] == tokens[count * width : (count + 1) * width]:
            count += 1
        return count

    def nearest(self, tokens: bytes) -> tuple[PageRun | None, int]:
        """The run below whose first page agrees with the most of `tokens` from their start, and with how many."""
        best: tuple[PageRun | None, int] = (None, 0)
        for _, run in zip(range(MAX_COMPARED), reversed(self.after.get(tokens[:WIDTH], {}).values()), strict=False):
            agreed = _common_prefix(run.tokens, tokens)
            if agreed > best[1]:
                best = (run, agreed)
        return best


def _common_prefix(a: bytes, b: bytes) -> int:
    """How many leading tokens are the same."""
    pairs = zip(memoryview(a).cast("Q"), memoryview(b).cast("Q"), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // WIDTH)


Entry = tuple[int, int, PageRun]
"""A run whose last page is idle: when it was used, a number that orders what was used at once, and the run."""

Path = list[tuple[PageRun, int]]
"""From a root on: runs, and how many of their pages; of all but the last, all."""


class PrefixCache:
    """Pages of an allocator by content.

    >>> allocator = PageAllocator(num_pages=8, page_size=2)
    >>> cache = PrefixCache(allocator)
    >>> first, length = cache.add([7, 8, 9, 1, 5])
    >>> given = allocator.step([(first, 5 - length)])
    >>> cache.insert(first, [7, 8, 9, 1, 5])  # two full pages
    2
    >>> cache.add([7, 8, 9, 2])  # one page, and the first token of another
    Hit(seq=1, length=3)
    """

    def __init__(self, allocator: PageAllocator):
        allocator.attach_cache(on_idle=self._on_idle, reclaim=self._reclaim)
        self.allocator, self.metrics = allocator, Metrics()
        self._width = allocator.page_size * WIDTH  # bytes of a page's tokens
        self._roots: dict[Hashable, PageRun] = {}
        self._clock = 0
        self._pushed = 0
        self._idle: list[Entry] = []
        self._count = 0
        self._tails: dict[int, PageRun] = {}  # by the last page of each

    def add(self, tokens: Iterable[int], *, salt: Hashable = None) -> Hit:
        """A new sequence that begins with what is kept of `tokens`, except for at least the last of them."""
        prompt = _packed(tokens)
        pages, length = self._match(prompt[:-WIDTH], _typed(salt))
        seq = self.allocator.adopt(pages, length)
        counts = self.metrics
        counts.lookups += 1
        counts.tokens += len(prompt) // WIDTH
        counts.hit_tokens += length
        counts.partial_hits += length % self.allocator.page_size > 0
        return Hit(seq, length)

    def peek(self, tokens: Iterable[int], *, salt: Hashable = None) -> int:
        """How many of these tokens `add` would find; nothing changes, not even what was used last."""
        return self._match(_packed(tokens)[:-WIDTH], _typed(salt), touch=False)[1]

    def insert(self, seq: int, tokens: Iterable[int], *, salt: Hashable = None) -> int:
        """Keep the full pages of a sequence, whose first tokens are `tokens`; how many pages were new.

        Call it when their keys are written. Pages that were released already, and what comes after, are left out.
        """
        prompt, width, salt = _packed(tokens), self._width, _typed(salt)
        row = self.allocator.resident(seq, "keep pages of")
        if len(prompt) > row.length * WIDTH:
            given = len(prompt) // WIDTH
            raise PageError(f"tokens must be at most the {row.length} that sequence {seq} holds, got {given}")
        path, pages = self._path(prompt, salt), row.table[: len(prompt) // width].tolist()
        known = [page for run, count in path for page in run.pages[:count]]
        new = pages[len(known) :]
        if pages[: len(known)] != known or any(map(self.allocator.kept.__getitem__, new)):
            self._check_own(seq, pages, known)
        self._clock += 1
        last = self._roots.get(salt) or PageRun([], b"", None, salt=salt)
        for run, count in path:
            last = self._touch(run, count)
        if NULL_PAGE in new:
            del new[new.index(NULL_PAGE) :]
        if new:
            first = len(known) * width
            self._append(last, prompt[first : first + len(new) * width], new)
        return len(new)

    def _check_own(self, seq: int, pages: list[int], known: list[int]) -> None:
        """Refuse pages of a sequence that are kept with other tokens than the ones given."""
        kept = self.allocator.kept
        for index, page in enumerate(pages):
            if kept[page] and (index >= len(known) or page != known[index]):
                raise PageError(
                    f"page {page} of sequence {seq} is kept with other tokens or another salt; "
                    "give the tokens and the salt that the sequence was added with"
                )

    def clear(self) -> int:
        """Give up every idle page; how many there were."""
        before = self._count
        for run, count in self._victims(before):
            self._evict(run, count)
        return before - self._count

    def reset(self, next_id: int = 0) -> None:
        """Forget everything, the allocator's sequences included; for what was broken off halfway (allocator.py)."""
        self.allocator.reset(next_id)
        self._roots.clear()
        self._tails.clear()
        self._idle, self._count = [], 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"PrefixCache({len(self)} pages kept, {self.metrics.hit_rate:.0%} of {self.metrics.tokens} tokens found)"

    def check(self) -> None:
        """Hold the pages to what must be true of them, the allocator included."""
        self.allocator.check()
        found: dict[int, PageRun] = {}
        waiting = {id(run): used for used, _, run in self._idle if used == run.used}
        for root in self._roots.values():
            runs = [root]
            while runs:
                run = runs.pop()
                below = [child for same in run.after.values() for child in same.values()]
                assert len(below) == run.children, "children are miscounted"
                assert all(child.parent is run for child in below), "a page is below another's"
                assert all(child is run.child(child.tokens[: self._width]) for child in below), "misplaced"
                assert all(child.used <= run.used for child in below if run is not root), (
                    "used later than what is before"
                )
                runs += below
                if run is root:
                    continue
                assert 0 < len(run.pages) * self._width == len(run.tokens), "tokens are not those of pages"
                for page in run.pages:
                    assert found.setdefault(page, run) is run, f"page {page} is kept twice"
                assert self._tails.get(run.pages[-1]) is run, f"page {run.pages[-1]} is last, and not known for it"
                idle = self.allocator.is_idle(run.pages[-1]) and not run.children
                assert not idle or id(run) in waiting, f"page {run.pages[-1]} is idle and could never be given up"
        assert found.keys() == {page for page, kept in enumerate(self.allocator.kept) if kept}, (
            "a kept page cannot be found"
        )
        assert len(found) == self._count, "kept pages are miscounted"
        assert len({id(run) for run in found.values()}) == len(self._tails), "a run is known that is not there"

    # ---- within ----------------------------------------------------------------------------------------------------

    def _path(self, tokens: bytes, salt: Hashable) -> Path:
        """The kept pages that hold `tokens`, as far as they go."""
        width, run = self._width, self._roots.get(salt)
        path: Path = []
        while run is not None and len(tokens) >= width:
            run = run.child(tokens[:width])
            if run is not None:
                count = run.matching_pages(tokens, width)
                path.append((run, count))
                if count < len(run.pages):
                    break
                tokens = tokens[count * width :]
        return path

    def _match(self, tokens: bytes, salt: Hashable, touch: bool = True) -> tuple[list[int], int]:
        """The pages that begin with `tokens`, and how many tokens they agree with."""
        root, width = self._roots.get(salt), self._width
        if root is None or tokens[:WIDTH] not in root.after:  # so it is with most prompts
            return [], 0
        path = self._path(tokens, salt)
        pages = sum(count for _, count in path)
        length = pages * self.allocator.page_size
        rest = tokens[pages * width : (pages + 1) * width]
        if rest:
            last, count = path[-1] if path else (root, 0)
            if count < len(last.pages):
                partly: PageRun | None = last
                agreed = _common_prefix(last.tokens[count * width : (count + 1) * width], rest)
                beyond = [*path[:-1], (last, count + 1)]
            else:
                partly, agreed = last.nearest(rest)
                beyond = [*path, (partly, 1)] if partly is not None else path
            if agreed:
                path, length = beyond, length + agreed
        found = [page for run, count in path for page in run.pages[:count]]
        if touch:
            self._clock += 1
            for run, count in path:
                self._touch(run, count)
        return found, length

    def _append(self, last: PageRun, tokens: bytes, pages: list[int]) -> None:
        """Keep pages that come after a run, which was just used."""
        if last.pages and not last.children:
            del self._tails[last.pages[-1]]
            last.tokens += tokens
            last.pages += pages
        else:
            if last.parent is None:
                self._roots[last.salt] = last
            run = PageRun(pages, tokens, last, self._clock)
            last.after.setdefault(tokens[:WIDTH], {})[tokens[: self._width]] = run
            last.children += 1
            last = run
        self._tails[pages[-1]] = last
        self._count += len(pages)
        self.allocator.keep(pages)

    def _touch(self, run: PageRun, count: int) -> PageRun:
        """Use the first `count` pages of a run; the run that has those and no others."""
        if count < len(run.pages):
            run = self._split(run, count)
        run.used = self._clock
        if self.allocator.is_idle(run.pages[-1]):
            self._queue_idle(run)
        return run

    def _split(self, run: PageRun, count: int) -> PageRun:
        """A run of the first `count` pages, which the rest comes after. See [Note: runs]."""
        width, parent = self._width, run.parent
        assert parent is not None, "a root has no pages"
        head = PageRun(run.pages[:count], run.tokens[: count * width], parent, run.used, children=1)
        parent.after[head.tokens[:WIDTH]][head.tokens[:width]] = head
        run.pages, run.tokens, run.parent = run.pages[count:], run.tokens[count * width :], head
        head.after[run.tokens[:WIDTH]] = {run.tokens[:width]: run}
        self._tails[head.pages[-1]] = head
        return head

    def _on_idle(self, pages: list[int]) -> None:
        """Pages have no reader any more but the cache."""
        for run in filter(None, map(self._tails.get, pages)):
            self._queue_idle(run)

    def _queue_idle(self, run: PageRun) -> None:
        """Queue a run whose last page may be given up, if nothing comes after it."""
        if run.children:
            return
        if len(self._idle) > 2 * self._count + FEW_ENTRIES:
            self._idle = list({id(entry[2]): entry for entry in self._idle if self._is_current(entry)}.values())
            heapq.heapify(self._idle)
        self._push(run)

    def _push(self, run: PageRun) -> None:
        self._pushed += 1
        heapq.heappush(self._idle, (run.used, self._pushed, run))

    def _is_current(self, entry: Entry) -> bool:
        """Whether an entry is of a run whose last page is idle, as it was last used. See [Note: stale entries]."""
        used, _, run = entry
        return bool(run.pages) and used == run.used and self.allocator.is_idle(run.pages[-1])

    def _reclaim(self, short: int) -> bool:
        """Give up so many pages, or none if there are not so many."""
        victims = self._victims(short)
        if sum(count for _, count in victims) < short:
            for run, _ in victims:
                self._queue_idle(run)
            return False
        for run, count in victims:
            self._evict(run, count)
        return True

    def _victims(self, most: int) -> Path:
        """Runs and how many last pages of each to give up, in order, at most so many; whole runs leave the heap."""
        victims: Path = []
        chosen: set[int] = set()
        left: dict[int, int] = {}  # children that would remain, by run
        while self._idle and most:
            entry = heapq.heappop(self._idle)
            run = entry[2]
            if not self._is_current(entry) or left.get(id(run), run.children) or id(run) in chosen:
                continue
            count = self.allocator.idle_tail(run.pages[-most:])  # a sequence may read those before
            victims.append((run, count))
            chosen.add(id(run))
            most -= count
            if count < len(run.pages):
                self._push(run)  # for what it has left
            else:
                parent = run.parent
                assert parent is not None, "a root is never queued"
                left[id(parent)] = left.get(id(parent), parent.children) - 1
                if not left[id(parent)] and parent.pages and self.allocator.is_idle(parent.pages[-1]):
                    self._push(parent)
        return victims

    def _evict(self, run: PageRun, count: int) -> None:
        """Give up the last pages of a run, which have no other reader."""
        pages, parent = run.pages[: -count - 1 : -1], run.parent
        assert parent is not None, "a root holds no page"
        self.allocator.evict(pages)
        self._count -= count
        self.metrics.evicted_pages += count
        del self._tails[pages[0]]
        if count < len(run.pages):
            del run.pages[-count:]
            run.tokens = run.tokens[: len(run.pages) * self._width]
            self._tails[run.pages[-1]] = run
            return
        same = parent.after[run.tokens[:WIDTH]]
        del same[run.tokens[: self._width]]
        if not same:
            del parent.after[run.tokens[:WIDTH]]
        run.pages, run.tokens = [], b""  # entries of it may still wait
        parent.children -= 1
        if not parent.children and parent.parent is None:
            del self._roots[parent.salt]
        elif parent.pages and self.allocator.is_idle(parent.pages[-1]):
            self._queue_idle(parent)


def _typed(salt: Hashable) -> Hashable:
    """A salt that is equal to others of its own type alone, what is in a tuple included. See [Note: salts]."""
    if isinstance(salt, tuple):
        return type(salt), tuple(map(_typed, salt))
    if isinstance(salt, frozenset):
        return type(salt), frozenset(map(_typed, salt))
    return type(salt), salt


def _packed(tokens: Iterable[int]) -> bytes:
    """See [Note: bytes]."""
    if isinstance(tokens, array) and tokens.typecode == "Q":
        return tokens.tobytes()
    given = tokens if type(tokens) is list else list(tokens)
    try:
        return array("Q", given).tobytes()
    except (TypeError, OverflowError):
        integers("tokens", given, error=PageError)
        raise PageError(f"tokens must be below 2**{8 * WIDTH}, got {max(given)}") from None
