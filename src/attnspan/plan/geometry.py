"""One batch row of a plan, laid out for asking: which pieces of the mask fall on which ranks.

Everything a strategy needs to know about mask and layouts is here; strategies only decide who sends when.
All answers for one rank cost about (bands + runs), not ranks x ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from attnspan.layouts.layout import Shards
from attnspan.layouts.run import Run, Runs
from attnspan.masks.algebra import Bands
from attnspan.masks.band import Band
from attnspan.masks.columns import Columns, counted
from attnspan.masks.finding import Ranges
from attnspan.masks.profile import RowWork
from attnspan.masks.restriction import Piece, restrict_column, restrict_rows, row_pieces
from attnspan.masks.spans import merged
from attnspan.masks.tile import Tile, tiles_of


@dataclass(frozen=True, eq=False)
class Geometry:
    """The bands of one batch row, and the runs of queries and of keys that each rank holds.

    `bands` are all of them; inside `asked` ones only some pairs count (masks/cover.py).
    """

    bands: Bands
    q_shards: Shards
    k_shards: Shards
    asked: Bands = ()
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
        if not self.asked:
            return self._tiles(rank, arena, self._rows_of(rank), asked=False)
        certain = Geometry(tuple(sorted({*self.bands} - {*self.asked})), self.q_shards, self.k_shards)
        asked = Geometry(self.asked, self.q_shards, self.k_shards)
        return (
            *self._tiles(rank, arena, certain._rows_of(rank), asked=False),
            *self._tiles(rank, arena, asked._rows_of(rank), asked=True),
        )

    def _tiles(self, rank: int, arena: Runs, rows: list[tuple[int, Band]], asked: bool) -> tuple[Tile, ...]:
        queries = self.q_shards[rank]
        row_at, col_at = _offsets(queries), _offsets(arena)
        together: list[Band] = []
        strided: list[Tile] = []
        for piece in restrict_rows(rows, _ranges(queries), Ranges(_ranges(arena))):
            row, col = row_at[piece.row_range], col_at[piece.col_range]
            if piece.rows.step == piece.cols.step == 1:
                together.append(piece.band.shift(row, col))
            else:
                strided.append(_strided(piece, row, col)._replace(asked=asked))
        return (*tiles_of(together, asked), *strided)

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
        seen: dict[int, list[Piece]] = defaultdict(list)
        for piece in restrict_rows(self._rows_of(rank), _ranges(self.q_shards[rank]), table):
            seen[piece.col_range].append(piece)
        return _by_owner((owners[j], _touched(runs[j], pieces)) for j, pieces in seen.items())

    def _found_serves(self, rank: int) -> dict[int, Runs]:
        mine = self.k_shards[rank]
        seen: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        _, owners, table = self._queries
        for j, run in enumerate(mine):
            bands = [self.bands[i] for i in self._columns.cols_meeting(run.start, run.stop)]
            for piece in restrict_column(bands, table, j, run.positions):
                seen[owners[piece.row_range], j].append(piece)
        return _by_owner((target, _touched(mine[j], pieces)) for (target, j), pieces in seen.items())

    @cached_property
    def shifts(self) -> frozenset[int]:
        """The distances d > 0 for which some rank r needs keys of rank r - d: the hops a ring must make."""
        if self._is_strided:
            wanted = (set(self.needs(rank)) for rank in range(self.ranks))
            return frozenset((r - s) % self.ranks for r, sources in enumerate(wanted) for s in sources) - {0}
        ranks, owners, _ = self._asked
        return frozenset(((ranks - owners) % self.ranks).unique().tolist()) - {0}

    def traffic(self) -> list[int]:
        """About how many keys each rank receives or sends, whichever are more; those seen twice are counted twice."""
        if self._is_strided:
            return [0] * self.ranks
        ranks, owners, keys = self._asked
        keys = torch.where(ranks == owners, 0, keys)
        received, sent = (keys.new_zeros(self.ranks).index_add(0, each, keys) for each in (ranks, owners))
        most: list[int] = torch.maximum(received, sent).tolist()
        return most

    @property
    def _is_strided(self) -> bool:
        return any(run.step > 1 for runs in (*self.q_shards, *self.k_shards) for run in runs)

    @cached_property
    def _asked(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each run of queries and run of keys that a band joins: both their ranks, and how many keys it is."""
        queries, q_owners, _ = self._queries
        keys, k_owners, _ = self._keys
        q0, q1, k0, k1, lo, hi = self._columns
        q_starts, q_stops, k_starts, k_stops = (
            torch.tensor([run[side] for run in runs], device="cpu") for runs in (queries, keys) for side in (0, 1)
        )
        # Every band with each run of queries that it meets, then with each run of keys that those queries see.
        first = torch.searchsorted(q_stops, q0, right=True)
        band, turn = counted(torch.searchsorted(q_starts, q1) - first)
        query = first[band] + turn
        low = torch.maximum(k0[band], torch.maximum(q0[band], q_starts[query]) + lo[band])
        high = torch.minimum(k1[band], torch.minimum(q1[band], q_stops[query]) + hi[band])
        first = torch.searchsorted(k_stops, low, right=True)
        asking, turn = counted(torch.searchsorted(k_starts, high) - first)
        key = first[asking] + turn
        ranks, owners = (torch.tensor(each, device="cpu") for each in (q_owners, k_owners))
        shared = torch.minimum(high[asking], k_stops[key]) - torch.maximum(low[asking], k_starts[key])
        return ranks[query[asking]], owners[key], shared

    def _rows_of(self, rank: int) -> list[tuple[int, Band]]:
        """The bands cut to each run of a rank's queries, with the number of the run."""
        if rank not in self._rows:
            runs = self.q_shards[rank]
            near = {i for run in runs for i in self._columns.rows_meeting(run.start, run.stop)}
            self._rows[rank] = list(row_pieces([self.bands[i] for i in sorted(near)], _ranges(runs)))
        return self._rows[rank]

    @cached_property
    def _columns(self) -> Columns:
        return Columns.of(self.bands)

    @cached_property
    def _row_work(self) -> RowWork:
        return RowWork(self.bands)

    @cached_property
    def _keys(self) -> tuple[Runs, list[int], Ranges]:
        return _table(self.k_shards)

    @cached_property
    def _queries(self) -> tuple[Runs, list[int], Ranges]:
        return self._keys if self.q_shards == self.k_shards else _table(self.q_shards)


def _ranges(runs: Runs) -> list[range]:
    return [run.positions for run in runs]


def _offsets(runs: Runs) -> list[int]:
    """Where each run begins in a buffer that holds them one after another."""
    return list(accumulate((len(run.positions) for run in runs), initial=0))[:-1]


def _table(shards: Shards) -> tuple[Runs, list[int], Ranges]:
    """All runs of all ranks by position, the owner of each, and where to look them up."""
    owned = sorted((run, rank) for rank, runs in enumerate(shards) for run in runs)
    runs = tuple(run for run, _ in owned)
    return runs, [rank for _, rank in owned], Ranges(_ranges(runs))


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
