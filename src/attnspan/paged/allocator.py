"""The page allocator: which pages belong to which sequence, in ints alone.

A sequence's tokens lie in pages of `page_size` slots; token p is in slot ``p % page_size`` of the page
``table[p // page_size]``. Pages have reference counts, so that sequences can share them::

    a = allocator.add()  # a sequence without tokens
    allocator.step([(a, 5)])  # room for 5 tokens more
    b, c = allocator.fork(a, 2)  # all three read the same pages
    allocator.step([(a, 1), (b, 1), (c, 1)])  # two get a copy of the last page, the third keeps it

The copies and swaps that the tensors need are returned as pairs of page numbers; pool.py executes them. Page 0 is the
null page: it belongs to no sequence, is the placeholder in tables, and takes writes that do not count.

[Note: limits] Most steps append one token to a page with room. So each sequence has a limit up to which it may grow
without further checks: the end of its last page while it is the page's only reader, or its own length once the page may
have another reader. Sharing a page lowers the limit; growth beyond it takes the slow path.

[Note: all or nothing] Every operation validates first and then acts. `step` reads its whole batch, refuses invalid
ones, and counts pages exactly only if the worst case might not fit; after that nothing can fail. Copies and swaps first
move contents to free pages, which no sequence reads, then change the tables. A move that fails leaves everything
unchanged.

[Note: allocator reset] An exception in the middle of an operation (KeyboardInterrupt can come at any line) leaves
inconsistent counts. `reset` forgets all sequences, so that their owner can start them again.

[Note: stamps] Stamps show whether a copy of a table is current: each row has one, a unique number that is replaced when
an entry of the table changes or the row is trimmed. A row is unchanged if its stamp and its length are.

Time: O(1) for each page that is taken or freed. Only the constructor, `check` and `stats` take time in proportion to
the pool. Knows nothing of tensors, devices, layers or what tokens are.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from attnspan.errors import PageError, PoolExhausted, UnknownSequence, integer

NULL_PAGE = 0

Copies = list[tuple[int, int]]
"""(from, to) pages, to be copied in order, before anything is written."""


class Allocation(NamedTuple):
    """What a step gave: new pages as (sequence, index in its table, page), and pages to copy before writing."""

    pages: list[tuple[int, int, int]]
    copies: Copies


class Stats(NamedTuple):
    """The pool at a glance. `used` are pages that some sequence reads, `cached` those that only a prefix cache keeps;
    `waste` is the share of slots in used pages that hold no token."""

    pages: int
    free: int
    used: int
    shared: int
    cached: int
    sequences: int
    swapped: int
    tokens: int
    host_pages: int
    host_free: int
    waste: float


@dataclass(slots=True, eq=False)
class SequencePages:
    """One sequence: its length, the length it may grow to unasked, its pages. See [Note: limits], [Note: stamps]."""

    length: int
    limit: int
    table: array[int]
    stamp: int
    first: int = 0  # the first position whose page was not released
    host: array[int] | None = None  # where its pages lie while it is swapped out


class Growth(NamedTuple):
    """A batch that makes sense: each sequence once, its new tokens, its row, its length before and after."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: list[SequencePages]
    starts: list[int]
    lengths: list[int]


class PageAllocator:
    """`num_pages` pages of `page_size` slots, page 0 among them as the null page; `host_pages` more to swap to.

    >>> allocator = PageAllocator(num_pages=8, page_size=4)
    >>> a = allocator.add()
    >>> allocator.step([(a, 6)])
    Allocation(pages=[(0, 0, 1), (0, 1, 2)], copies=[])
    >>> [b] = allocator.fork(a, 1)
    >>> allocator.step([(a, 1), (b, 1)])  # a writes to a copy of page 2; b is then its only reader
    Allocation(pages=[], copies=[(2, 3)])
    >>> allocator.table(a), allocator.table(b)
    ([1, 3], [1, 2])
    """

    def __init__(self, *, num_pages: int, page_size: int, host_pages: int = 0):
        hint = "page 0 is the null page, so that one page for tokens is num_pages=2"
        self.num_pages = integer("num_pages", num_pages, at_least=2, hint=hint, error=PageError)
        self.page_size = integer("page_size", page_size, at_least=1, error=PageError)
        self.host_pages = integer("host_pages", host_pages, error=PageError)
        self.epoch = 0  # counts changes: a plan made at the same epoch is current
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._host_free = list(range(self.host_pages - 1, -1, -1))
        self._readers = [0] * self.num_pages
        self._rows: dict[int, SequencePages] = {}
        self._next, self._stamps = 0, count(1)
        self._kept = bytearray(self.num_pages)  # 1 for those that a prefix cache reads
        self._on_idle: Callable[[list[int]], None] | None = None
        self._reclaim: Callable[[int], bool] | None = None

    # ---- sequences come and grow ---------------------------------------------------------------------------------

    def add(self, tokens: int | None = None) -> int:
        """A new sequence, without tokens or with room for so many; its id, which is never given out again."""
        tokens = 0 if tokens is None else integer("tokens", tokens, error=PageError)
        self._take(-(-tokens // self.page_size))
        seq = self._new(0, array("i"))
        if tokens:
            self.step([(seq, tokens)])
        return seq

    def step(self, batch: Iterable[tuple[int, int]], copy: Callable[[Copies], None] | None = None) -> Allocation:
        """Make room for new tokens of many sequences: for all of them, or for none.

        Raises PoolExhausted with the pages that the whole batch needs and those there are. `copy` is called with the
        copies, if there are any, before anything changes: if it raises, nothing has.
        """
        return self.commit(self.prepare(batch), copy)

    def prepare(self, batch: Iterable[tuple[int, int]]) -> Growth:
        """A batch of `step` as `commit` takes it, or a refusal; nothing changes. Lists, not loops: every step pays."""
        try:
            seqs, counts = zip(*batch, strict=True) if (batch := list(batch)) else ((), ())
            found = list(map(self._rows.get, seqs))
        except (TypeError, ValueError):
            raise PageError(
                f"batch must be pairs of a sequence and its new tokens, got {reprlib.repr(batch)}"
            ) from None
        if set(map(type, counts)) - {int}:
            counts = tuple(integer("new_tokens", new, error=PageError) for new in counts)
        rows = [row for row in found if row is not None and row.host is None]
        if len(rows) < len(found) or min(counts, default=0) < 0:
            for seq, new in zip(seqs, counts, strict=True):
                self.resident(seq, "make room for")
                if new < 0:
                    raise PageError(
                        f"new_tokens must be a whole number >= 0, got {new} for sequence {seq}; to shorten it, trim"
                    )
        if len(set(seqs)) < len(seqs):
            total = dict.fromkeys(seqs, 0)
            for seq, new in zip(seqs, counts, strict=True):
                total[seq] += new
            return self.prepare(total.items())
        starts = [row.length for row in rows]
        return Growth(seqs, counts, rows, starts, list(map(add, starts, counts)))

    def commit(self, growth: Growth, copy: Callable[[Copies], None] | None = None) -> Allocation:
        """Give the rows of a prepared batch their pages, as `step`. See [Note: all or nothing]."""
        growing = self._growing(growth)
        # New tokens fill at most so many pages, and begin at most one more; the last page may have to be copied.
        if sum(growth.counts) // self.page_size + 2 * len(growing) > len(self._free):
            self._take(self._needed(growth))
        writing = self._sharing(growing)
        free, readers, size, stamps = self._free, self._readers, self.page_size, self._stamps
        given = Allocation([], [(row.table[-1], free[~place]) for place, row in enumerate(writing)])
        if copy is not None and writing:
            copy(given.copies)
        for row in writing:
            page, last = free.pop(), row.table[-1]
            readers[page], row.table[-1] = 1, page
            self._drop([last])
        for seq, row, length in growing:
            table, index = row.table, len(row.table)
            limit = index * size
            while limit < length:
                page = free.pop()
                readers[page] = 1
                table.append(page)
                given.pages.append((seq, index, page))
                limit += size
                index += 1
            row.limit, row.stamp = limit, next(stamps)
        for row, length in zip(growth.rows, growth.lengths, strict=True):
            row.length = length
        self.epoch += 1
        return given

    def _sharing(self, growing: list[tuple[int, SequencePages, int]]) -> list[SequencePages]:
        """The rows that write to a last page which others read, so that each needs a copy; the last reader does not."""
        found: list[SequencePages] = []
        left: dict[int, int] = {}
        for _, row, _ in growing:
            if row.length < len(row.table) * self.page_size:
                last = row.table[-1]
                readers = left.get(last, self._readers[last])
                if readers > 1:
                    found.append(row)
                    left[last] = readers - 1
        return found

    def _needed(self, growth: Growth) -> int:
        """The pages a step takes, counted without taking any."""
        growing = self._growing(growth)
        new = sum(max(0, -(-length // self.page_size) - len(row.table)) for _, row, length in growing)
        return len(self._sharing(growing)) + new

    def _growing(self, growth: Growth) -> list[tuple[int, SequencePages, int]]:
        """The rows that grow beyond their limits, and to which length. See [Note: limits]."""
        found = zip(growth.seqs, growth.rows, growth.lengths, strict=True)
        return [(seq, row, length) for seq, row, length in found if length > row.limit]

    def skip(self, seq: int, length: int) -> None:
        """Let a sequence without tokens begin at `length`, as if all pages before were released."""
        row = self.resident(seq, "skip pages of")
        length = integer("length", length, error=PageError)
        if row.length or length % self.page_size:
            raise PageError(
                f"length must be whole pages of {self.page_size} tokens, of a sequence without tokens, got {length} "
                f"for sequence {seq} of {row.length}"
            )
        row.table = array("i", [NULL_PAGE]) * (length // self.page_size)
        row.length = row.limit = row.first = length
        self._changed(row)

    def fork(self, seq: int, n: int = 1) -> list[int]:
        """`n` sequences that read the same pages; the first to write writes to a copy."""
        row = self.resident(seq, "fork")
        n = integer("n", n, at_least=1, error=PageError)
        for page in row.table:
            if page:
                self._readers[page] += n
        row.limit = row.length
        return [self._new(row.length, row.table[:], row.first) for _ in range(n)]

    # ---- and shrink ----------------------------------------------------------------------------------------------

    def trim(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected guess; with 0, all of them."""
        row = self.resident(seq, "trim")
        length = integer("length", length, error=PageError)
        if length > row.length:
            raise PageError(
                f"length must be at most the {row.length} tokens of sequence {seq}, got {length}; to grow, step"
            )
        if 0 < length < row.first:
            raise PageError(
                f"length must be at least {row.first}: earlier pages of sequence {seq} were released, got {length}"
            )
        if length == row.length:
            return
        pages = -(-length // self.page_size)
        self._drop(reversed(row.table[pages:]))
        del row.table[pages:]
        row.length = row.limit = length
        row.first = min(row.first, length)
        self._changed(row)

    def release_window(self, seq: int, window: int) -> int:
        """Give up the pages that no later token sees through a window of `window` keys, its own among them.

        Their entries become the null page. Returns how many pages were given up.
        """
        row = self.resident(seq, "release pages of")
        window = integer("window", window, at_least=1, error=PageError)
        before = max(0, row.length - window + 1) // self.page_size
        passed = slice(row.first // self.page_size, before)
        pages = row.table[passed]
        if pages:
            self._drop(pages)
            row.table[passed] = array("i", [NULL_PAGE]) * len(pages)
            row.first = before * self.page_size
            self._changed(row)
        return len(pages)

    def free(self, seq: int) -> None:
        """Give up a sequence and its share of every page."""
        row = self._row(seq)
        self._drop(row.table)
        if row.host is not None:
            self._host_free.extend(reversed([page for page in row.host if page >= 0]))
        del self._rows[seq]
        self.epoch += 1

    # ---- out of the pool and back --------------------------------------------------------------------------------

    def may_swap_out(self, seq: int) -> bool:
        """Whether there are host pages for all of a sequence."""
        return sum(map(bool, self.resident(seq, "swap out").table)) <= len(self._host_free)

    def may_swap_in(self, seq: int) -> bool:
        """Whether there are pages for all of a swapped sequence, if need be after a prefix cache gave some up."""
        return self._reclaimed(sum(page >= 0 for page in self._swapped(seq)))

    def swap_out(self, seq: int, copy: Callable[[Copies], None] | None = None) -> Copies:
        """Move a sequence to host pages: (page, host page) to copy before anything else is written.

        `copy` is called with them before anything changes: if it raises, nothing has.
        """
        row = self.resident(seq, "swap out")
        pages = [page for page in row.table if page]
        if len(pages) > len(self._host_free):
            raise PoolExhausted(len(pages), len(self._host_free), "host pages")
        free = reversed(self._host_free)
        host = array("i", (next(free) if page else -1 for page in row.table))
        moves = [(page, there) for page, there in zip(row.table, host, strict=True) if page]
        if copy is not None:
            copy(moves)
        del self._host_free[len(self._host_free) - len(pages) :]
        self._drop(pages)
        row.table, row.host = array("i"), host
        row.limit = row.length  # it meets its limit, and is found to be elsewhere
        self._changed(row)
        return moves

    def swap_in(self, seq: int, copy: Callable[[Copies], None] | None = None) -> Copies:
        """Bring a sequence back: (host page, page) to copy before anything else is written; `copy` as in swap_out."""
        host = self._swapped(seq)
        row, needed = self._rows[seq], sum(page >= 0 for page in host)
        self._take(needed)
        free = reversed(self._free)
        table = array("i", (next(free) if there >= 0 else NULL_PAGE for there in host))
        moves = [(there, page) for page, there in zip(table, host, strict=True) if page]
        if copy is not None:
            copy(moves)
        del self._free[len(self._free) - needed :]
        for there, page in moves:
            self._readers[page] = 1
            self._host_free.append(there)
        row.table, row.host = table, None
        row.limit = len(row.table) * self.page_size
        self._changed(row)
        return moves

    def reset(self, next_id: int = 0) -> None:
        """Forget every sequence: all pages are free. Stamps are not given out again, nor ids, which go on from
        `next_id` if that is later. See [Note: allocator reset]."""
        self._rows.clear()
        self._next = max(self._next, next_id)
        self._free[:] = range(self.num_pages - 1, 0, -1)
        self._host_free[:] = range(self.host_pages - 1, -1, -1)
        self._readers[:] = [0] * self.num_pages
        self._kept[:] = bytes(self.num_pages)
        self.epoch += 1

    # ---- for a prefix cache --------------------------------------------------------------------------------------

    def attach_cache(self, on_idle: Callable[[list[int]], None], reclaim: Callable[[int], bool]) -> None:
        """A prefix cache is one more reader of the pages that it keeps; there is at most one.

        `on_idle` is called with kept pages that no sequence reads any more. `reclaim` is called when pages are short:
        it gives up so many, by `evict`, or returns False and keeps them all.
        """
        if self._reclaim is not None:
            raise PageError(
                "allocator already has a prefix cache; one serves all its sequences, with a salt for each tenant"
            )
        self._on_idle, self._reclaim = on_idle, reclaim

    def adopt(self, pages: Sequence[int], length: int) -> int:
        """A new sequence of `length` tokens on kept pages that hold them already."""
        for page in pages:
            self._readers[page] += 1
        return self._new(length, array("i", pages))

    def keep(self, pages: Iterable[int]) -> None:
        """The cache reads these pages of sequences from now on."""
        for page in pages:
            self._kept[page] = 1
            self._readers[page] += 1

    def evict(self, pages: Sequence[int]) -> None:
        """The cache no longer reads these pages, which were idle: they are free, the last the first to be taken."""
        for page in pages:
            self._kept[page] = self._readers[page] = 0
        self._free += pages

    @property
    def kept(self) -> memoryview:
        """By page, 1 if the cache reads it; not to be written."""
        return memoryview(self._kept).toreadonly()

    def is_idle(self, page: int) -> bool:
        """Whether the cache is the only reader of a page that it keeps."""
        return self._readers[page] == 1

    def idle_tail(self, pages: Sequence[int]) -> int:
        """How many kept pages at the end of these are idle."""
        readers = self._readers
        if max(map(readers.__getitem__, pages)) == 1:
            return len(pages)
        return next(count for count, page in enumerate(reversed(pages)) if readers[page] > 1)

    # ---- what it knows -------------------------------------------------------------------------------------------

    def __contains__(self, seq: object) -> bool:
        return seq in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        pages = f"{self.num_pages - 1} pages of {self.page_size} slots"
        return f"PageAllocator({len(self)} sequences, {self.free_pages} free of {pages})"

    @property
    def sequences(self) -> Mapping[int, SequencePages]:
        """Every sequence as it is now; not to be written. See [Note: stamps]."""
        return MappingProxyType(self._rows)

    @property
    def next_id(self) -> int:
        """The id that the next sequence gets."""
        return self._next

    def resident(self, seq: int, what: str) -> SequencePages:
        """A sequence that is in the pool; of one that is swapped out, refused: cannot do `what`."""
        row = self._row(seq)
        if row.host is not None:
            raise PageError(f"cannot {what} sequence {seq}: it is swapped out; swap_in({seq}) first")
        return row

    def length(self, seq: int) -> int:
        """The tokens of a sequence."""
        return self._row(seq).length

    def table(self, seq: int) -> list[int]:
        """The pages of a sequence, in order; null pages where they were released."""
        return self._row(seq).table.tolist()

    def needs(self, batch: Iterable[tuple[int, int]]) -> int:
        """The pages that `step` would take for a batch, copies of shared pages among them; nothing changes."""
        return self._needed(self.prepare(batch))

    def make_room(self, pages: int) -> bool:
        """Whether so many pages are free, after evicting cached prefixes if necessary: enough of them, or none."""
        return self._reclaimed(integer("pages", pages, error=PageError))

    @property
    def free_pages(self) -> int:
        """Pages without a reader. A prefix cache may give up more."""
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Pages that only a prefix cache reads."""
        return list(compress(self._readers, self._kept)).count(1)

    def stats(self) -> Stats:
        """Counts of pages, sequences and tokens; it looks at every page."""
        taken = [(page, readers) for page, readers in enumerate(self._readers) if readers]
        alone = self.cached_pages
        rows = list(self._rows.values())
        held = {page: 0 for row in rows for page in row.table if page}
        for row in rows:
            for index, page in enumerate(row.table):
                if page:
                    held[page] = max(held[page], min(self.page_size, row.length - index * self.page_size))
        slots = len(held) * self.page_size
        return Stats(
            pages=self.num_pages - 1,
            free=len(self._free),
            used=len(taken) - alone,
            shared=sum(readers - self._kept[page] > 1 for page, readers in taken),
            cached=alone,
            sequences=len(rows),
            swapped=sum(row.host is not None for row in rows),
            tokens=sum(row.length for row in rows),
            host_pages=self.host_pages,
            host_free=len(self._host_free),
            waste=1 - sum(held.values()) / slots if slots else 0.0,
        )

    def check(self) -> None:
        """Hold every page and sequence to what must be true of them; AssertionError if anything is not."""
        readers = [0] * self.num_pages
        host: list[int] = list(self._host_free)
        for seq, row in self._rows.items():
            table = row.table if row.host is None else row.host
            assert len(table) == -(-row.length // self.page_size), f"sequence {seq}: {row.length} tokens in {table}"
            assert row.length <= row.limit <= max(row.length, len(table) * self.page_size), f"sequence {seq}: {row}"
            missing = row.first // self.page_size
            holes = [page <= 0 if row.host is None else page < 0 for page in table]
            assert holes == [True] * missing + [False] * (len(table) - missing), f"sequence {seq}: released {row}"
            assert row.host is None or not row.table, f"sequence {seq} is in two places"
            host += [page for page in row.host or () if page >= 0]
            for page in row.table:
                readers[page] += page != NULL_PAGE
            if row.host is None and row.limit > row.length:
                assert self._readers[row.table[-1]] == 1, f"sequence {seq} may write to shared page {row.table[-1]}"
        readers = list(map(add, readers, self._kept))
        assert readers == self._readers, "readers are miscounted"
        free = {page for page in range(1, self.num_pages) if not readers[page]}
        assert len(self._free) == len(free), "a page is free twice, or never"
        assert set(self._free) == free, "a page is free and read"
        assert sorted(host) == list(range(self.host_pages)), "a host page is free twice, or lost"

    # ---- within ----------------------------------------------------------------------------------------------------

    def _new(self, length: int, table: array[int], first: int = 0) -> int:
        """A sequence on pages that count it as a reader already."""
        seq = self._next
        self._next += 1
        self._rows[seq] = SequencePages(length, length, table, next(self._stamps), first)
        self.epoch += 1
        return seq

    def _row(self, seq: int) -> SequencePages:
        row = self._rows.get(seq)
        if row is not None:
            return row
        if type(seq) is int and 0 <= seq < self._next:
            raise UnknownSequence(f"sequence {seq} was freed; its id names nothing any more")
        raise UnknownSequence(f"sequence {seq!r} is unknown; add() and fork() give out ids")

    def _swapped(self, seq: int) -> array[int]:
        """Where a sequence lies on the host."""
        host = self._row(seq).host
        if host is None:
            raise PageError(f"sequence {seq} is not swapped out; only what was swapped out can be swapped in")
        return host

    def _changed(self, row: SequencePages) -> None:
        row.stamp = next(self._stamps)
        self.epoch += 1

    def _take(self, needed: int) -> None:
        if not self._reclaimed(needed):
            raise PoolExhausted(needed, len(self._free))

    def _reclaimed(self, needed: int) -> bool:
        """Whether so many pages are free, if need be after a prefix cache gave some up."""
        short = needed - len(self._free)
        return short <= 0 or (self._reclaim is not None and self._reclaim(short))

    def _drop(self, pages: Iterable[int]) -> None:
        """One reader fewer of each of these pages; null pages have none."""
        readers, kept, idle = self._readers, self._kept, []
        for page in pages:
            if page != NULL_PAGE:
                readers[page] = left = readers[page] - 1
                if left == 0:
                    self._free.append(page)
                elif left == 1 and kept[page]:
                    idle.append(page)
        if idle:
            assert self._on_idle is not None, "set by the cache that keeps pages"
            self._on_idle(idle)
