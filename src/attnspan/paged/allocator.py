"""Which pages belong to which sequence: a page table of ints, and nothing else.

A sequence's tokens lie in pages of `page_size` slots; token p is in slot ``p % page_size`` of the page
``table[p // page_size]``. Pages are counted by their readers, so that sequences share what they have in common::

    a = allocator.add()  # a sequence without tokens
    allocator.step([(a, 5)])  # room for 5 tokens more
    b, c = allocator.fork(a, 2)  # all three read the same pages
    allocator.step([(a, 1), (b, 1), (c, 1)])  # two get a copy of the last page, the third keeps it

What has to be done to the tensors (`copies`, swaps) is returned as pairs of page numbers; pool.py does it. Page 0 is
the null page: it belongs to nobody, stands in tables where there is nothing, and takes writes that do not count.

[Note: limits] A step is mostly "one token more, and there is room". Each sequence therefore knows the length up to
which it may grow with no question asked: the end of its last page while it is the page's only reader, its own length
as soon as anyone else might be. Whatever makes a page shared lowers that limit; who meets it looks more closely.

[Note: all or nothing] `step` goes ahead and takes pages as it meets the need for them; when one cannot be had, or an
item makes no sense, what was done is undone in reverse, and the error is raised. Other operations look first.

Time: O(1) for each page that changes hands, and nothing follows the size of the pool but making it, `check` and
`stats`. Knows nothing of tensors, devices, layers or what tokens are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, NoReturn

from attnspan.errors import PageError, PoolExhausted, UnknownSequence, whole

NULL_PAGE = 0

Copies = list[tuple[int, int]]
"""(from, to) pages, to be copied in order, before anything is written."""


class Given(NamedTuple):
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
class Row:
    """One sequence: its length, the length it may grow to unasked, its pages, and how often earlier entries changed."""

    length: int
    limit: int
    table: array[int]
    edits: int = 0
    first: int = 0  # the first position whose page was not released
    version: int = 0
    host: array[int] | None = None  # where its pages lie while it is swapped out


class PageAllocator:
    """`num_pages` pages of `page_size` slots, page 0 among them as the null page; `host_pages` more to swap to.

    >>> allocator = PageAllocator(num_pages=8, page_size=4)
    >>> a = allocator.add()
    >>> allocator.step([(a, 6)])
    Given(pages=[(0, 0, 1), (0, 1, 2)], copies=[])
    >>> [b] = allocator.fork(a, 1)
    >>> allocator.step([(a, 1), (b, 1)])  # a writes to a copy of page 2; b is then its only reader
    Given(pages=[], copies=[(2, 3)])
    >>> allocator.table(a), allocator.table(b)
    ([1, 3], [1, 2])
    """

    def __init__(self, *, num_pages: int, page_size: int, host_pages: int = 0):
        hint = "page 0 is the null page, so that one page for tokens is num_pages=2"
        self.num_pages = whole("num_pages", num_pages, at_least=2, hint=hint, error=PageError)
        self.page_size = whole("page_size", page_size, at_least=1, error=PageError)
        self.host_pages = whole("host_pages", host_pages, error=PageError)
        self.epoch = 0  # counts changes, so that a plan can tell at a glance that there were none
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._host_free = list(range(self.host_pages - 1, -1, -1))
        self._readers = [0] * self.num_pages
        self._rows: dict[int, Row] = {}
        self._next = 0
        # A prefix cache is one more reader of its pages. It is told when it is the last, and asked for pages when
        # none are free: the pages it would give up for so many more, or None if it cannot.
        self._kept: dict[int, object] = {}
        self._when_idle: Callable[[int], None] | None = None
        self._reclaim: Callable[[int], bool] | None = None

    # ---- sequences come and grow ---------------------------------------------------------------------------------

    def add(self, tokens: int | None = None) -> int:
        """A new sequence, without tokens or with room for so many; its id, which is never given out again."""
        count = 0 if tokens is None else whole("tokens", tokens, error=PageError)
        self._take(-(-count // self.page_size))
        seq = self._next
        self._next += 1
        self._rows[seq] = Row(0, 0, array("i"))
        self.epoch += 1
        if count:
            self.step([(seq, count)])
        return seq

    def step(self, batch: Iterable[tuple[int, int]]) -> Given:
        """Make room for new tokens of many sequences: for all of them, or for none.

        Raises PoolExhausted with the pages that the whole batch needs and those there are.
        """
        batch = batch if isinstance(batch, list) else list(batch)
        if set(map(type, map(itemgetter(1), batch))) - {int}:
            batch = [(seq, whole("new_tokens", new, error=PageError)) for seq, new in batch]
        given = self._stepped(batch)
        if given is None:
            needed = self._needed(batch)
            if not self._reclaimed(needed):
                raise PoolExhausted(needed, len(self._free))
            given = self._stepped(batch)
            assert given is not None, "as many pages are free as were counted"
        self.epoch += 1
        return given

    def _stepped(self, batch: list[tuple[int, int]]) -> Given | None:
        """The step, or None and no trace of it where pages ran out. The loop is written for speed."""
        rows = self._rows
        given = Given([], [])
        asked: list[tuple[int, int, int, int]] = []  # (place in batch, old limit, old pages, old last page or 0)
        place = 0
        try:
            for place, (seq, new) in enumerate(batch):  # read after the loop
                row = rows[seq]
                length = row.length + new
                if length > row.limit:
                    asked.append((place, row.limit, len(row.table), 0))
                    self._grow(seq, row, length, given, asked)
                elif new < 0 or row.host is not None:
                    raise ValueError
                row.length = length
                row.version += 1
        except (IndexError, KeyError, ValueError) as error:
            self._undo(batch, place, asked)
            if isinstance(error, IndexError):
                return None
            self._explain(*batch[place])
        return given

    def _grow(self, seq: int, row: Row, length: int, given: Given, asked: list[tuple[int, int, int, int]]) -> None:
        """Give a row the pages up to `length`; IndexError, after any part of the work, if there are none left."""
        if row.host is not None:
            raise ValueError
        table, free, readers, size = row.table, self._free, self._readers, self.page_size
        index = len(table)
        if row.length < index * size and readers[table[-1]] > 1:
            page, last = free.pop(), table[-1]
            asked[-1] = (*asked[-1][:3], last)
            readers[page], table[-1] = 1, page
            row.edits += 1
            readers[last] -= 1  # at least one reader stays: neither free nor idle, unless a cache is that one
            if readers[last] == 1 and last in self._kept:
                self._when_idle(last)  # type: ignore[misc]  # set by whoever keeps pages
            given.copies.append((last, page))
        row.limit = index * size
        while row.limit < length:
            page = free.pop()
            readers[page] = 1
            table.append(page)
            row.limit += size
            given.pages.append((seq, index, page))
            index += 1

    def _undo(self, batch: list[tuple[int, int]], place: int, asked: list[tuple[int, int, int, int]]) -> None:
        """Take back the items before `place`, and what was begun of the one there."""
        done = place  # items before it have their new length
        for at in range(place, -1, -1):
            row = self._rows.get(batch[at][0])
            if row is None:
                continue
            if at < done:
                row.length -= batch[at][1]
                row.version -= 1
            if asked and asked[-1][0] == at:
                _, row.limit, pages, last = asked.pop()
                while len(row.table) > pages:
                    self._drop(row.table.pop())
                if last:
                    self._drop(row.table[-1])
                    row.table[-1] = last
                    self._readers[last] += 1
                    row.edits -= 1

    def _explain(self, seq: int, new: int) -> NoReturn:
        row = self._row(seq)
        if row.host is not None:
            raise PageError(f"sequence {seq} is swapped out; swap_in({seq}) before it grows")
        raise PageError(f"new_tokens must be a whole number >= 0, got {new} for sequence {seq}; to shorten it, trim")

    def _needed(self, batch: list[tuple[int, int]]) -> int:
        """The pages a step takes, counted without taking any."""
        needed, lengths, copied, readers = 0, dict[int, int](), set[int](), dict[int, int]()
        for seq, new in batch:
            row = self._row(seq)
            if new < 0 or row.host is not None:
                self._explain(seq, new)  # before a page is reclaimed for a batch that is refused after all
            old = lengths.get(seq, row.length)
            lengths[seq] = old + new
            if not new:
                continue
            pages = max(len(row.table), -(-old // self.page_size))
            last = row.table[-1] if row.table else NULL_PAGE
            if seq not in copied and row.length < len(row.table) * self.page_size:
                left = readers.get(last, self._readers[last])
                needed += left > 1
                readers[last] = left - (left > 1)
                copied.add(seq)
            needed += max(0, -(-(old + new) // self.page_size) - pages)
        return needed

    def fork(self, seq: int, n: int = 1) -> list[int]:
        """`n` sequences that read the same pages; whoever writes first writes to a copy."""
        row = self._present(seq, "fork")
        n = whole("n", n, at_least=1, error=PageError)
        for page in row.table:
            if page:
                self._readers[page] += n
        row.limit = row.length
        forks = range(self._next, self._next + n)
        self._next += n
        for fork in forks:
            self._rows[fork] = Row(row.length, row.length, row.table[:], first=row.first)
        self.epoch += 1
        return list(forks)

    def _adopt(self, pages: Sequence[int], length: int) -> int:
        """A new sequence of `length` tokens on pages that hold them already; for the prefix cache."""
        for page in pages:
            self._readers[page] += 1
        seq = self._next
        self._next += 1
        self._rows[seq] = Row(length, length, array("i", pages))
        self.epoch += 1
        return seq

    # ---- and shrink ----------------------------------------------------------------------------------------------

    def trim(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected guess."""
        row = self._present(seq, "trim")
        length = whole("length", length, error=PageError)
        if length > row.length:
            raise PageError(
                f"length must be at most the {row.length} tokens of sequence {seq}, got {length}; to grow, step"
            )
        if length < row.first:
            raise PageError(
                f"length must be at least {row.first}: earlier pages of sequence {seq} were released, got {length}"
            )
        if length == row.length:
            return
        pages = -(-length // self.page_size)
        while len(row.table) > pages:
            self._drop(row.table.pop())
        row.length = row.limit = length
        row.edits += 1
        self._changed(row)

    def release_window(self, seq: int, window: int) -> int:
        """Give up the pages that no later token sees through a window of `window` keys, its own among them.

        Their entries become the null page. Returns how many pages were given up.
        """
        row = self._present(seq, "release pages of")
        window = whole("window", window, at_least=1, error=PageError)
        before = max(0, row.length - window + 1) // self.page_size
        given_up = 0
        for index in range(row.first // self.page_size, before):
            self._drop(row.table[index])
            row.table[index] = NULL_PAGE
            given_up += 1
        if given_up:
            row.first = before * self.page_size
            row.edits += 1
            self._changed(row)
        return given_up

    def free(self, seq: int) -> None:
        """Give up a sequence and its share of every page."""
        row = self._row(seq)
        for page in row.table:
            self._drop(page)
        if row.host is not None:
            self._host_free.extend(reversed([page for page in row.host if page >= 0]))
        del self._rows[seq]
        self.epoch += 1

    # ---- out of the pool and back --------------------------------------------------------------------------------

    def swap_out(self, seq: int) -> Copies:
        """Move a sequence to host pages: (page, host page) to copy before anything else is written."""
        row = self._present(seq, "swap out")
        pages = [page for page in row.table if page]
        if len(pages) > len(self._host_free):
            raise PoolExhausted(len(pages), len(self._host_free), "host pages")
        row.host = array("i", (self._host_free.pop() if page else -1 for page in row.table))
        moves = [(page, there) for page, there in zip(row.table, row.host, strict=True) if page]
        for page in pages:
            self._drop(page)
        row.table = array("i")
        row.limit = row.length  # it meets its limit, and is found to be elsewhere
        row.edits += 1
        self._changed(row)
        return moves

    def swap_in(self, seq: int) -> Copies:
        """Bring a sequence back: (host page, page) to copy before anything else is written."""
        row = self._row(seq)
        if row.host is None:
            raise PageError(f"sequence {seq} is not swapped out; only what was swapped out can be swapped in")
        self._take(sum(page >= 0 for page in row.host))
        row.table = array("i", (self._free.pop() if there >= 0 else NULL_PAGE for there in row.host))
        moves = [(there, page) for page, there in zip(row.table, row.host, strict=True) if page]
        for there, page in moves:
            self._readers[page] = 1
            self._host_free.append(there)
        row.host = None
        row.limit = len(row.table) * self.page_size
        row.edits += 1
        self._changed(row)
        return moves

    # ---- what it knows -------------------------------------------------------------------------------------------

    def __contains__(self, seq: object) -> bool:
        return seq in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def length(self, seq: int) -> int:
        """The tokens of a sequence."""
        return self._row(seq).length

    def table(self, seq: int) -> list[int]:
        """The pages of a sequence, in order; null pages where they were released."""
        return self._row(seq).table.tolist()

    @property
    def free_pages(self) -> int:
        """Pages that nobody reads. A prefix cache may give up more."""
        return len(self._free)

    def stats(self) -> Stats:
        """Counts of pages, sequences and tokens; it looks at every page."""
        taken = [(page, readers) for page, readers in enumerate(self._readers) if readers]
        alone = sum(readers == 1 and page in self._kept for page, readers in taken)
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
            shared=sum(readers - (page in self._kept) > 1 for page, readers in taken),
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
        for page in self._kept:
            readers[page] += 1
        assert readers == self._readers, "readers are miscounted"
        free = {page for page in range(1, self.num_pages) if not readers[page]}
        assert len(self._free) == len(free), "a page is free twice, or never"
        assert set(self._free) == free, "a page is free and read"
        assert sorted(host) == list(range(self.host_pages)), "a host page is free twice, or lost"

    # ---- within ----------------------------------------------------------------------------------------------------

    def _row(self, seq: int) -> Row:
        row = self._rows.get(seq)
        if row is not None:
            return row
        if type(seq) is int and 0 <= seq < self._next:
            raise UnknownSequence(f"sequence {seq} was freed; its id names nothing any more")
        raise UnknownSequence(f"sequence {seq!r} is unknown; add() and fork() give out ids")

    def _present(self, seq: int, what: str) -> Row:
        row = self._row(seq)
        if row.host is not None:
            raise PageError(f"cannot {what} sequence {seq}: it is swapped out; swap_in({seq}) first")
        return row

    def _changed(self, row: Row) -> None:
        row.version += 1
        self.epoch += 1

    def _take(self, needed: int) -> None:
        if not self._reclaimed(needed):
            raise PoolExhausted(needed, len(self._free))

    def _reclaimed(self, needed: int) -> bool:
        """Whether so many pages are free, if need be after a prefix cache gave some up."""
        short = needed - len(self._free)
        return short <= 0 or (self._reclaim is not None and self._reclaim(short))

    def _drop(self, page: int) -> None:
        """One reader fewer."""
        if page == NULL_PAGE:
            return
        readers = self._readers
        readers[page] -= 1
        if readers[page] == 0:
            self._free.append(page)
        elif readers[page] == 1 and page in self._kept:
            self._when_idle(page)  # type: ignore[misc]  # set by whoever keeps pages
