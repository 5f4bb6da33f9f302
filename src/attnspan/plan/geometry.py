"""One batch row of a plan, laid out for asking: which pieces of the mask fall on which ranks.

Everything a strategy needs to know about mask and layouts is here; strategies only decide who sends when.
All answers for one rank cost about (bands + runs), not ranks x ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, Runs
from attnspan.masks.algebra import Bands
from attnspan.masks.band import Band
from attnspan.masks.columns import Columns, counted
from attnspan.masks.profile import RowWork
from attnspan.masks.ranges import Ranges
from attnspan.masks.restriction import Piece, restrict_column, restrict_rows, row_pieces
from attnspan.masks.spans import Span, merged
from attnspan.masks.tile import Tile, tiles_of

AT_ONCE = 1 << 14
"""About how many pairs of a run of queries and a run of keys are looked at at once."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The bands of one batch row, and the runs of queries and of keys that each rank holds.

    `columns` are all of them; in `partial` ones only some pairs count (masks/cover.py).
    """

    columns: Columns
    q_shards: Shards
    k_shards: Shards
    partial: Bands = ()
    # What was found out about ranks, kept: a ring asks once per hop.
    _rows: dict[int, list[tuple[int, Band]]] = field(default_factory=dict, repr=False)
    _needs: dict[int, dict[int, Runs]] = field(default_factory=dict, repr=False)
    _serves: dict[int, dict[int, Runs]] = field(default_factory=dict, repr=False)

    @property
    def ranks(self) -> int:
        return len(self.q_shards)

    def work(self, rank: int) -> int:
        """The number of pairs whose query a rank holds."""
        return sum(self._row_work.over(run.positions) for run in self.q_shards[rank])

    def tiles(self, rank: int, arena: Runs) -> tuple[Tile, ...]:
        """What the queries of a rank compute over the keys in an arena."""
        if not self.partial:
            return self._tiles(rank, arena, self._rows_of(rank), needs_mask_mod=False)
        certain, partial = (
            Geometry(Columns.of(bands), self.q_shards, self.k_shards)
            for bands in (sorted({*self.columns.bands()} - {*self.partial}), self.partial)
        )
        return (
            *self._tiles(rank, arena, certain._rows_of(rank), needs_mask_mod=False),
            *self._tiles(rank, arena, partial._rows_of(rank), needs_mask_mod=True),
        )

    def _tiles(self, rank: int, arena: Runs, rows: list[tuple[int, Band]], needs_mask_mod: bool) -> tuple[Tile, ...]:
        queries = self.q_shards[rank]
        row_at, col_at = _offsets(queries), _offsets(arena)
        together: list[Band] = []
        strided: list[Tile] = []
        for piece in restrict_rows(rows, _ranges(queries), Ranges(_ranges(arena))):
            row, col = row_at[piece.row_range], col_at[piece.col_range]
            if piece.rows.step == piece.cols.step == 1:
                together.append(piece.band.shift(row, col))
            else:
                strided.append(_strided(piece, row, col)._replace(needs_mask_mod=needs_mask_mod))
        return (*tiles_of(together, needs_mask_mod), *strided)

    def needs(self, rank: int) -> dict[int, Runs]:
        """For each rank that owns keys which this rank's queries see: those keys."""
        if rank not in self._needs:
            self._needs[rank] = self._found_needs(rank)
        return self._needs[rank]

    def serves(self, rank: int) -> dict[int, Runs]:
        """For each rank whose queries see this rank's keys: those keys. The other end of `needs`."""
        if rank not in self._serves:
            self._serves[rank] = self._found_serves(rank)
        return self._serves[rank]

    def _found_needs(self, rank: int) -> dict[int, Runs]:
        runs, owners, table = self._keys
        if not self._is_strided:
            spans = merged((piece.k0, piece.k1) for _, piece in self._rows_of(rank))
            near = ((j, start, stop) for start, stop in spans for j in table.meeting(start, stop))
            return _by_owner((owners[j], (_shared(runs[j], start, stop),)) for j, start, stop in near)
        seen: dict[int, list[Piece]] = defaultdict(list)
        for piece in restrict_rows(self._rows_of(rank), _ranges(self.q_shards[rank]), table):
            seen[piece.col_range].append(piece)
        return _by_owner((owners[j], _touched(runs[j], pieces)) for j, pieces in seen.items())

    def _found_serves(self, rank: int) -> dict[int, Runs]:
        mine = self.k_shards[rank]
        if not self._is_strided:
            return _by_owner(each for run in mine for each in self._users(run))
        seen: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        _, owners, table = self._queries
        for j, run in enumerate(mine):
            bands = self.columns.some(self.columns.cols_meeting(run.start, run.stop))
            for piece in restrict_column(bands, table, j, run.positions):
                seen[owners[piece.row_range], j].append(piece)
        return _by_owner((target, _touched(mine[j], pieces)) for (target, j), pieces in seen.items())

    def _users(self, run: Run) -> Iterator[tuple[int, Runs]]:
        """For each rank whose queries see keys of a run: those keys."""
        queries, owners, table = self._queries
        seen: dict[int, list[Span]] = defaultdict(list)
        for band in self.columns.some(self.columns.cols_meeting(run.start, run.stop)):
            piece = band.cut(band.q0, band.q1, run.start, run.stop)
            if piece is None:
                continue
            q0, q1, k0, k1, lo, hi = piece
            for i in table.meeting(q0, q1):
                start, stop, _ = queries[i]
                # Every row of a band sees a key: the first row the first ones, the last row the last.
                first, last = max(k0, max(q0, start) + lo), min(k1, min(q1, stop) + hi)
                seen[owners[i]].append((first, last))
        return ((target, tuple(Run(*span) for span in merged(spans))) for target, spans in seen.items())

    @cached_property
    def shifts(self) -> frozenset[int]:
        """The distances d > 0 for which some rank r needs keys of rank r - d: the hops a ring must make."""
        if self._is_strided:
            wanted = (set(self.needs(rank)) for rank in range(self.ranks))
            return frozenset((r - s) % self.ranks for r, sources in enumerate(wanted) for s in sources) - {0}
        askers = self._askers
        used = torch.zeros(self.ranks, dtype=torch.bool, device="cpu")
        # Those that see most come first: under a causal mask the last queries see keys of all ranks.
        most = max(1, int(askers.run_counts.max())) if len(askers.run_counts) else 1
        for some in askers.run_counts.argsort(descending=True).split(max(1, AT_ONCE // most)):
            asking, keys = askers.runs_of(some)
            used[(askers.ranks[asking] - self._key_owners[keys]) % self.ranks] = True
            if bool(used.all()):
                break
        return frozenset(used.nonzero().squeeze(1).tolist()) - {0}

    def traffic(self) -> list[int]:
        """About how many keys each rank receives or sends, whichever are more; those seen twice are counted twice."""
        if self._is_strided:
            return [0] * self.ranks
        ranks, owners, keys = self._demands
        keys = torch.where(ranks == owners, 0, keys)
        received, sent = (keys.new_zeros(self.ranks).index_add(0, each, keys) for each in (ranks, owners))
        most: list[int] = torch.maximum(received, sent).tolist()
        return most

    @property
    def _is_strided(self) -> bool:
        return self._queries[2].are_striped or self._keys[2].are_striped

    @cached_property
    def _demands(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each run of queries and run of keys that a band joins: both their ranks, and how many keys it is."""
        askers, k_starts, k_stops = self._askers, *_ends(self._keys[0])
        asking, keys = askers.runs_of(torch.arange(len(askers.ranks), device="cpu"))
        shared = torch.minimum(askers.high[asking], k_stops[keys]) - torch.maximum(askers.low[asking], k_starts[keys])
        return askers.ranks[asking], self._key_owners[keys], shared

    @cached_property
    def _askers(self) -> _Askers:
        """Every band with each run of queries that it meets, and the keys that those queries see."""
        queries, owners, _ = self._queries
        (q_starts, q_stops), (k_starts, k_stops) = _ends(queries), _ends(self._keys[0])
        q0, q1, k0, k1, lo, hi = self.columns
        first = torch.searchsorted(q_stops, q0, right=True)
        band, turn = counted(torch.searchsorted(q_starts, q1) - first)
        query = first[band] + turn
        low = torch.maximum(k0[band], torch.maximum(q0[band], q_starts[query]) + lo[band])
        high = torch.minimum(k1[band], torch.minimum(q1[band], q_stops[query]) + hi[band])
        first = torch.searchsorted(k_stops, low, right=True)
        count = torch.searchsorted(k_starts, high) - first
        return _Askers(torch.tensor(owners, device="cpu")[query], low, high, first, count)

    def _rows_of(self, rank: int) -> list[tuple[int, Band]]:
        """The bands cut to each run of a rank's queries, with the number of the run."""
        if rank not in self._rows:
            found: list[tuple[int, Band]] = []
            for number, run in enumerate(self.q_shards[rank]):
                bands = self.columns.some(self.columns.rows_meeting(run.start, run.stop))
                found += [(number, piece) for _, piece in row_pieces(bands, [run.positions])]
            self._rows[rank] = found
        return self._rows[rank]

    @cached_property
    def _row_work(self) -> RowWork:
        return RowWork(self.columns.bands())

    @cached_property
    def _key_owners(self) -> Tensor:
        return torch.tensor(self._keys[1], device="cpu")

    @cached_property
    def _keys(self) -> tuple[Runs, list[int], Ranges]:
        return _table(self.k_shards)

    @cached_property
    def _queries(self) -> tuple[Runs, list[int], Ranges]:
        return self._keys if self.q_shards == self.k_shards else _table(self.q_shards)


class _Askers(NamedTuple):
    """Queries that see the keys [low, high): their rank, and the number of the first run of those keys and how many."""

    ranks: Tensor
    low: Tensor
    high: Tensor
    first_run: Tensor
    run_counts: Tensor

    def runs_of(self, some: Tensor) -> tuple[Tensor, Tensor]:
        """For some of them, each with each of its runs of keys: the numbers of both."""
        asking, turn = counted(self.run_counts[some])
        asking = some[asking]
        return asking, self.first_run[asking] + turn


def _ends(runs: Runs) -> tuple[Tensor, Tensor]:
    """Where runs start, and where they stop."""
    starts, stops = torch.tensor([run[:2] for run in runs], dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    return starts.contiguous(), stops.contiguous()


def _shared(run: Run, start: int, stop: int) -> Run:
    """What a plain run has of [start, stop)."""
    return Run(max(run.start, start), min(run.stop, stop))


def _ranges(runs: Runs) -> list[range]:
    return [run.positions for run in runs]


def _offsets(runs: Runs) -> list[int]:
    """Where each run begins in a buffer that holds them one after another."""
    return list(accumulate((len(run.positions) for run in runs), initial=0))[:-1]


def _table(shards: Shards) -> tuple[Runs, list[int], Ranges]:
    """All runs of all ranks by position, the owner of each, and where to look them up."""
    owned = sorted([(run.start, rank, run) for rank, runs in enumerate(shards) for run in runs])
    runs = tuple([run for _, _, run in owned])
    return runs, [rank for _, rank, _ in owned], Ranges(_ranges(runs))


def _strided(piece: Piece, row: int, col: int) -> Tile:
    """A piece whose rows or columns are every n-th of a run, as a tile of the buffers."""
    band = piece.band
    rows, cols = piece.rows[band.q0 : band.q1], piece.cols[band.k0 : band.k1]
    corner = band.k0 - band.q0
    return Tile(
        range(rows.start + row, rows.stop + row, rows.step),
        range(cols.start + col, cols.stop + col, cols.step),
        band.lo - corner,
        band.hi - corner,
    )


def _touched(run: Run, pieces: list[Piece]) -> Runs:
    """The positions of a run that pieces use, each once."""
    plain = [(piece.band.k0, piece.band.k1) for piece in pieces if piece.cols.step == 1]
    strided = [piece.cols[piece.band.k0 : piece.band.k1] for piece in pieces if piece.cols.step > 1]
    if strided:  # strides of several residues overlap and interleave: count the entries themselves
        plain += [(j, j + 1) for j in {j for cols in strided for j in cols}]
    return tuple(Run.of(run.positions[start:stop]) for start, stop in merged(plain))


def _by_owner(found: Iterable[tuple[int, Runs]]) -> dict[int, Runs]:
    keys: dict[int, list[Run]] = defaultdict(list)
    for owner, runs in found:
        keys[owner].extend(runs)
    # Not joined: neighbours in the sequence may lie far apart in a striped shard, and a run travels as one piece.
    return {owner: tuple(sorted(keys[owner])) for owner in sorted(keys)}
