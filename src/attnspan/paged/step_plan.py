"""The plan of a step over pages: the new tokens of many sequences, their slots, and the pages that each sequence reads.

A plan is made once and refilled at every step. Its tensors are views of buffers that never move and are padded to
the maximum sizes, so that compiled code and CUDA graphs find every step at the same address::

    plan = StepPlan(pool, max_sequences=64, max_tokens=2048, max_length=32768)
    plan.step([(a, 700), (b, 1), (c, 1)])  # a prompt and two tokens: room is made, tables are sent
    for layer, (q, k, v) in enumerate(model):  # packed: (702, heads, dim)
        pool.write(layer, k, v, plan)
        out = pool.attend(layer, q, plan)

[Note: one copy] The host writes everything into one buffer of ints (slots, offsets, lengths, block tables), and one
copy sends it to the device; nothing is computed there. A table is only rewritten if its stamp has changed
(allocator.py, [Note: stamps]). On CUDA the host alternates between two pinned buffers, and waits only if the device is
two steps behind.

[Note: stale plans] A plan describes its sequences as they are after its step. Once one of them grows, is trimmed or
freed, the plan is refused; other sequences may come and go.

[Note: padding] With `pad_to`, empty rows fill a batch up to a fixed size: each has one query at position -1, which sees
nothing and gets 0, and whose key goes to the null page. Kernels are then configured for the longest sequence that the
plan allows, as during graph capture, so that the kernels that are warmed up are those that are captured.

[Note: 32 bits] Positions, lengths and pages are int32 on the device, so no sequence may be longer; slots are int64.

Knows the pool's allocator and the spread of positions; nothing of layers, masks or scores.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress
from operator import ne
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan.errors import PageError, integer
from attnspan.paged.allocator import NULL_PAGE, Growth, SequencePages
from attnspan.paged.metadata import ONE_RANK, PagedMetadata, Spread

if TYPE_CHECKING:
    from attnspan.paged.pool import PagePool

MAX_INT32 = (1 << 31) - 1
"""See [Note: 32 bits]."""

MIN_SHARED = 4
"""Pages that neighbours must have in common before reading them once is worth a second pass."""


class Shared(NamedTuple):
    """Rows [first, last) of a plan that begin with the same pages: these hold `length` positions."""

    first: int
    last: int
    length: int


class StepPlan:
    """Buffers for steps of at most `max_sequences` rows and `max_tokens` new tokens, of sequences up to `max_length`.

    After `step`: `tokens` and `sequences` are counts; `positions`, `slots`, `rows` (per token), `lengths`, `offsets`,
    `tables` (per sequence) are tensors on the pool's device; `shared` lists rows with a common beginning.
    """

    def __init__(
        self, pool: PagePool, *, max_sequences: int, max_tokens: int, max_length: int, spread: Spread = ONE_RANK
    ) -> None:
        self.pool, self.spread = pool, spread
        self.max_sequences = integer("max_sequences", max_sequences, at_least=1, error=PageError)
        self.max_tokens = integer("max_tokens", max_tokens, at_least=1, error=PageError)
        self.max_length = integer("max_length", max_length, at_least=1, error=PageError)
        if max(self.max_sequences, self.max_tokens, self.max_length) > MAX_INT32:
            raise PageError(
                f"max_sequences, max_tokens and max_length must be at most {MAX_INT32}, as positions are 32 bits wide, "
                f"got {max_sequences}, {max_tokens} and {max_length}"
            )
        if pool.page_size * spread.ranks != pool.allocator.page_size:
            raise PageError(
                f"pool must have the allocator's page_size ({pool.allocator.page_size}), got {pool.page_size}; "
                "a pool that holds a part of each page is for ShardedPages, whose plans are made by its plan(...)"
            )
        device, n = pool.device, self.max_sequences
        # One column more than pages: FlexAttention's kernels read one index past the last.
        self.width = -(-self.max_length // pool.allocator.page_size) + 1
        self._buffer = _StepBuffer(n, self.max_tokens, self.width, device)
        self._numbers = array("i", range(n))
        self._seen: tuple[tuple[int, ...], list[SequencePages], list[int], list[int]] = ((), [], [], [])
        self._epoch = -1
        self.tokens = self.sequences = 0
        self.shared: tuple[Shared, ...] = ()
        self.max_window: int | None = None  # the longest window that still finds all its pages
        self.host_lengths: tuple[int, ...] = ()
        self._metadata: PagedMetadata | None = None

    def step(self, batch: Iterable[tuple[int, int]], *, pad_to: int | None = None, share: bool = False) -> StepPlan:
        """Make room for new tokens and describe them: `batch` is (sequence, number of new tokens), each once.

        With `share`, neighbours in the batch that begin with the same pages are found, and `attend` reads those pages
        once for all of them. If anything does not fit, nothing is changed. Returns itself.
        """
        batch = list(batch)
        n = len(batch) if pad_to is None else integer("pad_to", pad_to, error=PageError)
        if max(n, len(batch)) > self.max_sequences:
            raise PageError(f"batch must be at most max_sequences={self.max_sequences}, got {max(n, len(batch))}")
        if n < len(batch):
            raise PageError(f"pad_to must be at least the {len(batch)} sequences of the batch, got {n}")
        growth = self.pool.allocator.prepare(batch)
        self._check_fits(growth, len(batch), n)
        self.pool.allocator.commit(growth, self.pool.copy)
        self._epoch = -1  # until it is filled, it describes nothing
        self._fill(growth, n, share, for_graphs=pad_to is not None)
        return self

    def _check_fits(self, growth: Growth, named: int, n: int) -> None:
        """Refuse a step, of n rows with padding, that the buffers have no room for."""
        if len(growth.rows) < named:
            raise PageError("batch must name each sequence once; give its tokens together")
        tokens = sum(growth.counts) + n - named
        if tokens > self.max_tokens:
            raise PageError(f"batch must hold at most max_tokens={self.max_tokens} new tokens, got {tokens}")
        longest = max(growth.lengths, default=0)
        if longest > self.max_length:
            seq = growth.seqs[growth.lengths.index(longest)]
            raise PageError(f"sequence {seq} would hold {longest} tokens, more than max_length={self.max_length}")

    def _fill(self, growth: Growth, n: int, share: bool, for_graphs: bool) -> None:
        """Write the step to the buffer and send it. See [Note: one copy]. Lists, not loops: every step pays for it."""
        buffer, spread, rows, padding = self._buffer, self.spread, growth.rows, n - len(growth.rows)
        stamps = [row.stamp for row in rows]
        counts = (*growth.counts, *[1] * padding)
        lengths = growth.lengths + [0] * padding
        query_starts = growth.starts + [-1] * padding
        offsets = list(accumulate(counts, initial=0))
        key_ends = lengths if spread.ranks == 1 else [spread.local_length(length) for length in lengths]
        self.shared = self._common(rows) if share else ()
        key_begins = array("i", bytes(4 * n))  # zeros
        for group in self.shared:
            rows_of_group = slice(group.first, group.last)
            key_begins[rows_of_group] = array("i", [spread.local_length(group.length)] * (group.last - group.first))
        buffer.begin()
        buffer.put_tables(rows, stamps, padding)
        slots, numbers, positions = self._located(rows, query_starts, lengths, counts)
        buffer.put(slots=slots, rows=numbers, positions=positions, offsets=array("i", offsets), key_begins=key_begins)
        totals = array("i", lengths)
        buffer.put(lengths=totals, key_ends=totals if key_ends is lengths else array("i", key_ends))
        for place, group in enumerate(self.shared):
            query_len = offsets[group.last] - offsets[group.first]
            buffer.put(3 * place, shared=array("i", (0, query_len, spread.local_length(group.length))))
        buffer.send(n)
        self.tokens, self.sequences, self.host_lengths = offsets[-1], len(rows), tuple(lengths)
        released = [(row, start) for row, start in zip(rows, query_starts, strict=False) if row.first]
        self.max_window = min([start - row.first + 1 for row, start in released], default=None)
        self._metadata = PagedMetadata(
            self.pool.page_size, buffer.tables[:n], buffer.key_begins[:n], buffer.key_ends[:n], buffer.offsets[: n + 1],
            buffer.rows[: self.tokens], buffer.positions[: self.tokens], counts,
            tuple(key_begins), tuple(key_ends), tuple(query_starts), spread=spread,
            merged=bool(self.shared) or spread.ranks > 1, for_graphs=for_graphs,
        )  # fmt: skip
        self._seen = growth.seqs, rows, stamps, growth.lengths
        self._epoch = self.pool.allocator.epoch

    def _located(
        self, rows: list[SequencePages], starts: list[int], lengths: list[int], counts: tuple[int, ...]
    ) -> tuple[array[int], array[int], array[int]]:
        """The slot, row and position of every token. A token that lies elsewhere, or is padding, goes to slot 0."""
        size, padding = self.pool.page_size, len(counts) - len(rows)
        if self.spread.ranks == 1 and set(counts) == {1}:  # decoding: a token each
            found = [row.table[-1] * size + start % size for row, start in zip(rows, starts, strict=False)]
            positions, numbers, slots = array("i", starts), self._numbers[: len(counts)], array("q", found)
        else:
            positions, numbers, slots = array("i"), array("i"), array("q")
            for number, row in enumerate(rows):
                positions.extend(range(starts[number], lengths[number]))
                numbers.extend([number] * counts[number])
                for run in self._runs(row.table, starts[number], lengths[number]):
                    slots.extend(run)
            numbers.extend(range(len(rows), len(counts)))
            positions.extend([-1] * padding)
        slots.extend([NULL_PAGE] * padding)
        return slots, numbers, positions

    def _runs(self, table: array[int], start: int, stop: int) -> Iterator[Sequence[int]]:
        """The slots of positions [start, stop), as runs within a page and an interleave."""
        size, spread = self.pool.page_size, self.spread
        most = size if spread.ranks == 1 else spread.interleave
        while start < stop:
            run, within = divmod(start, most)
            count = min(most - within, stop - start)
            turn, owner = divmod(run, spread.ranks)
            if owner == spread.rank:
                index, slot = divmod(turn * most + within, size)
                first = table[index] * size + slot
                yield range(first, first + count)
            else:
                yield [NULL_PAGE] * count
            start += count

    def _common(self, rows: list[SequencePages]) -> tuple[Shared, ...]:
        """Neighbours that begin with the same pages; a page in which anyone has a new token is not shared."""
        size, groups, first = self.pool.allocator.page_size, [], 0
        while first < len(rows):
            last, pages = first + 1, len(rows[first].table) - 1
            while last < len(rows):
                same = _agreeing(rows[first].table, rows[last].table, min(pages, len(rows[last].table) - 1))
                if same < MIN_SHARED:
                    break
                last, pages = last + 1, same
            if last - first > 1 and rows[first].first == 0:
                groups.append(Shared(first, last, pages * size))
            first = last
        return tuple(groups)

    # ---- what it describes -----------------------------------------------------------------------------------------

    @property
    def metadata(self) -> PagedMetadata:
        """The step as kernels get it; refused when the sequences have changed. See [Note: stale plans]."""
        self.check()
        assert self._metadata is not None, "checked"
        return self._metadata

    def check(self) -> None:
        """Refuse a plan that no longer describes its sequences."""
        allocator = self.pool.allocator
        if self._epoch == allocator.epoch:
            return
        if self._metadata is None or self._epoch < 0:
            raise PageError("the plan describes no step; call plan.step([(sequence, new_tokens), ...]) first")
        for seq, row, stamp, length in zip(*self._seen, strict=True):
            if allocator.sequences.get(seq) is not row:
                raise PageError(f"the plan is stale: sequence {seq} was freed after its step; plan a new step")
            if (row.stamp, row.length) != (stamp, length):
                raise PageError(f"the plan is stale: sequence {seq} was changed after its step; plan a new step")
        self._epoch = allocator.epoch

    def shared_metadata(self, index: int) -> PagedMetadata:
        """The queries of a group of rows as one row over the pages they share; see `shared`."""
        step = self.metadata
        return step.once(("shared", index), lambda: self._shared_metadata(step, index))

    def _shared_metadata(self, step: PagedMetadata, index: int) -> PagedMetadata:
        group = self.shared[index]
        first = sum(step.query_lens[: group.first])
        tokens = sum(step.query_lens[group.first : group.last])
        offsets, end = self._buffer.shared(index)
        some = slice(first, first + tokens)
        rows = slice(group.first, group.last)
        latest = max(step.last(row) for row in range(group.first, group.last))
        length = self.spread.local_length(group.length)
        return PagedMetadata(
            step.page_size, step.tables[group.first : group.first + 1], self._buffer.zero, end, offsets,
            self._buffer.zeros(tokens), step.positions[some], (tokens,), (0,), (length,),
            (min(step.query_starts[rows]),), latest, self.spread, merged=True,
        )  # fmt: skip

    @property
    def positions(self) -> Tensor:
        """(tokens,) int32: the position of every new token in its sequence; for rotary embeddings."""
        return self._buffer.positions[: self.tokens]

    @property
    def slots(self) -> Tensor:
        """(tokens,) int64: where every new token's key goes, page * page_size + slot; 0 if it does not lie here."""
        return self._buffer.slots[: self.tokens]

    @property
    def rows(self) -> Tensor:
        """(tokens,) int32: which sequence of the batch a token is of."""
        return self._buffer.rows[: self.tokens]

    @property
    def lengths(self) -> Tensor:
        """(rows,) int32: the tokens of every sequence, new ones included."""
        return self._buffer.lengths[: len(self.host_lengths)]

    @property
    def offsets(self) -> Tensor:
        """(rows + 1,) int32: the first new token of every sequence, and their number."""
        return self._buffer.offsets[: len(self.host_lengths) + 1]

    @property
    def tables(self) -> Tensor:
        """(rows, width) int32: the pages of every sequence; what lies beyond a sequence's own has no meaning."""
        return self._buffer.tables[: len(self.host_lengths)]

    @property
    def query_starts(self) -> Tensor:
        """(rows,) int32: the position of each sequence's first new token."""
        offsets = self.offsets
        return self.lengths - (offsets[1:] - offsets[:-1])

    @property
    def last_tokens(self) -> Tensor:
        """(rows,) int64: the index of each sequence's last new token, whose logits are wanted."""
        if self._metadata is not None and 0 in self._metadata.query_lens:
            row = self._metadata.query_lens.index(0)
            raise PageError(f"last_tokens needs a new token in every row of the step, got none in row {row}")
        return self.offsets[1:].long() - 1

    def __repr__(self) -> str:
        longest = max(self.host_lengths, default=0)
        return f"StepPlan({self.sequences} sequences, {self.tokens} new tokens, longest {longest})"


class _StepBuffer:
    """The ints of a step, on the host and on the device, at fixed places, for n sequences and t tokens::

    slots 2 t (64 bits each) | rows t | positions t | offsets n + 1 | lengths n | key_begins n | key_ends n |
    shared 3 n | zero | tables n x width
    """

    def __init__(self, n: int, t: int, width: int, device: torch.device) -> None:
        names = (
            "slots",
            "rows",
            "positions",
            "offsets",
            "lengths",
            "key_begins",
            "key_ends",
            "shared",
            "zero",
            "tables",
        )
        sizes = [2 * t, t, t, n + 1, n, n, n, 3 * n, 1, n * width]
        self.places = dict(zip(names, accumulate(sizes, initial=0), strict=False))
        self.device_ints = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts: tuple[Tensor, ...] = self.device_ints.split(sizes)
        wide, self.rows, self.positions, self.offsets, self.lengths, self.key_begins, self.key_ends = parts[:7]
        self._shared, self.zero, flat = parts[7:]
        self.slots, self.tables = wide.view(torch.int64), flat.view(n, width)
        self._zeros = torch.zeros(1, dtype=torch.int32, device=device)
        self.head, self.width, self._turn = self.places["tables"], width, 0
        hosts = [self.device_ints]
        if device.type != "cpu":
            hosts = [torch.zeros_like(self.device_ints, device="cpu").pin_memory() for _ in range(2)]
        self._sides = [_HostBuffer(host, n, 2 * t) for host in hosts]

    def begin(self) -> None:
        """Turn to the side that was sent longest ago."""
        self._turn = (self._turn + 1) % len(self._sides)
        side = self._sides[self._turn]
        if side.sent is not None:
            side.sent.synchronize()

    def put_tables(self, rows: list[SequencePages], stamps: list[int], padding: int) -> None:
        """Block tables, where they differ from what a side holds. A padding row's first page is the null page."""
        side, width = self._sides[self._turn], self.width
        for place in compress(range(len(rows)), map(ne, stamps, side.stamps)):
            at, table = self.head + place * width, rows[place].table
            side.stamps[place] = 0  # no row's: an interrupt here must not leave half a table under its old stamp
            side.ints[at : at + len(table)] = table
        for place in range(len(rows), len(rows) + padding):
            side.stamps[place] = 0
            side.ints[self.head + place * width] = NULL_PAGE
        side.stamps[: len(rows) + padding] = stamps + [0] * padding

    def put(self, after: int = 0, **numbers: array[int]) -> None:
        """Numbers by the name of their part, so many places after its beginning."""
        side = self._sides[self._turn]
        for name, values in numbers.items():
            part, at = (side.longs if name == "slots" else side.ints), self.places[name] + after
            part[at : at + len(values)] = values

    def send(self, rows: int) -> None:
        """The one copy to the device: numbers, and the tables of so many rows."""
        side = self._sides[self._turn]
        if side.host is self.device_ints:
            return
        used = self.head + rows * self.width
        self.device_ints[:used].copy_(side.host[:used], non_blocking=True)
        side.sent = side.sent or torch.cuda.Event()
        side.sent.record()

    def shared(self, index: int) -> tuple[Tensor, Tensor]:
        """Offsets (2,) and end (1,) of a group."""
        return self._shared[3 * index : 3 * index + 2], self._shared[3 * index + 2 : 3 * index + 3]

    def zeros(self, count: int) -> Tensor:
        """(count,) zeros that are in memory once."""
        return self._zeros.expand(count)


class _HostBuffer:
    """One host buffer: its ints, whose tables it holds, and when it was last sent."""

    def __init__(self, host: Tensor, n: int, wide: int) -> None:
        self.host = host
        raw = memoryview((ctypes.c_int32 * host.numel()).from_address(host.data_ptr())).cast("B")
        self.ints, self.longs = raw.cast("i"), raw[: 4 * wide].cast("q")
        self.stamps = [0] * n  # of the tables in each place; no row has a stamp of 0
        self.sent: torch.cuda.Event | None = None


def _agreeing(a: array[int], b: array[int], most: int) -> int:
    """The number of leading pages that two tables have in common, up to `most`; a sequence without pages has none.

    >>> _agreeing(array("i", [1, 2, 3]), array("i", [1, 2, 5]), 3)
    2
    """
    if most > 0 and a[:most] == b[:most]:
        return most
    return next((i for i in range(most) if a[i] != b[i]), 0)
