"""The arguments by which `band` runs score_mods and mask_mods, and where gradients of captured tensors go.

Shapes: q (B, H, n, D), k (B, Hk, m, D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from attnspan.kernels.agenda import Runs
from attnspan.kernels.kernel import Gradients, MergedOutputs, Spec, StepTiles, Tiles
from attnspan.kernels.mod_lookups import Lookup, by_pairs, learned, places
from attnspan.kernels.mods import Mods
from attnspan.kernels.split import split
from attnspan.kernels.split import tables as prepared_tables
from attnspan.kernels.triton_mods import NO_CODE, ModsCode, mods_code, prepared, uncompilable
from attnspan.masks.program import Program
from attnspan.masks.tile import Tile

AT_ONCE = 1 << 26
"""Numbers that the sums by distance of one launch may have."""


def refusal(spec: Spec, tiles: Tiles) -> str | None:
    """Why a program that the tiles need cannot be compiled."""
    for program in _needed(spec.mods, tiles):
        if program is not None and (reason := _refused(program)) is not None:
            return reason
    return None


def explain_programs(mods: Mods | None, *, needs_mask_mod: bool) -> list[str]:
    """What of a score_mod, and of a mask_mod that is needed, `band` compiles, and why not."""
    programs = () if mods is None else (mods.score_mod, mods.mask_mod if needs_mask_mod else None)
    compiled = 'compiled by kernel="band"'
    return [f"{program.name}: {_refused(program) or compiled}" for program in programs if program is not None]


def _refused(program: Program) -> str | None:
    reason = uncompilable(program)
    return (
        None if reason is None else f"band cannot compile {reason} in {program.name}; flex can on CUDA, blocks anywhere"
    )


def _needed(mods: Mods | None, tiles: Tiles) -> tuple[Program | None, Program | None]:
    """The score_mod, and the mask_mod where tiles need it."""
    if mods is None:
        return None, None
    return mods.score_mod, mods.mask_mod if any(tile.needs_mask_mod for tile in tiles) else None


@dataclass(frozen=True, slots=True)
class ModsArgs:
    """The functions of a step's programs, and their arguments: first batch row and head, tables, sizes of those."""

    code: ModsCode = NO_CODE
    batch: int = 0
    head: int = 0
    tables: tuple[Tensor, ...] = ()
    dims: tuple[int, ...] = ()
    runs: Runs | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.batch, self.head, self.tables, self.dims

    @staticmethod
    def of(spec: Spec, step: StepTiles, found: tuple[Lookup, ...] = ()) -> ModsArgs:
        """Nothing where the step needs no program."""
        score, mask = _needed(spec.mods, step.tiles)
        if score is mask is None:
            return NO_MODS
        where = step.where
        looked: list[Tensor] = []
        with torch.no_grad():
            if score is not None:
                looked += prepared_tables(score, step.captured)
            if mask is not None:
                looked += prepared_tables(mask, mask.captured)
        code, first = mods_code(score, mask, found), (where.batch.start, where.heads.start)
        return ModsArgs(code, *first, *prepared(looked), Runs(*where.runs))

    def at(self, tile: Tile) -> ModsArgs:
        """The same of a tile's rows and columns alone."""
        if self.runs is None:
            return self
        return ModsArgs(self.code, self.batch, self.head, self.tables, self.dims, self.runs.of(tile))


NO_MODS = ModsArgs()


class CapturedSums:
    """The sums that programs write for the gradients of captured tensors, of some rows and columns."""

    def __init__(self, mods: ModsArgs, shape: tuple[int, int, int, int], device: torch.device):
        batch, heads, n, m = shape
        self.mods, self.found, self.shape = mods, mods.code.learned, shape
        rows, cols, pairs, distances = (len(mods.code.along(way)) for way in ("rows", "cols", "pairs", "distances"))
        self.row_sums = torch.empty(1 + 2 * rows, batch, heads, n if self.found else 0, device=device)
        self.col_sums = torch.zeros(cols, batch, heads, m, device=device)
        self.pairs = torch.zeros(pairs, batch, heads, n if pairs else 0, m, device=device)
        self.lowest, self.count = 0, 1
        if distances:
            assert mods.runs is not None, "programs come with runs"
            q, k = ([edge for run in side for edge in (run[0], run[-1])] for side in mods.runs)
            self.lowest = min(q) - max(k)
            self.count = max(q) - min(k) - self.lowest + 1
        self.distances = torch.zeros(distances, batch, heads, self.count, device=device)
        self.partial = self.distances

    def launches(self, blocks: int) -> Iterator[range]:
        """Blocks of an agenda, as many at a time as there is room for the sums of each."""
        each = self.distances.numel()
        most = max(1, AT_ONCE // each) if each else blocks
        for first in range(0, blocks, most):
            some = range(first, min(blocks, first + most))
            if each:
                self.partial = self.distances.new_zeros(len(self.distances), len(some), *self.distances.shape[1:])
            yield some
            if each:
                self.distances += self.partial.sum(1)

    @property
    def by_distance(self) -> tuple[Tensor, int, int, int]:
        """The sums of a launch, how far apart those of two lookups are, how many each program has, the lowest."""
        return self.partial, self.partial[0].numel() if len(self.partial) else 0, self.count, self.lowest


def add_captured_gradients(
    sums: CapturedSums, spec: Spec, merged: MergedOutputs, step: StepTiles, grads: Gradients, tile: tuple[range, range]
) -> None:
    """Add what was summed for a tile's rows and columns to the gradients of captured tensors, or keep it for later."""
    assert spec.mods is not None, "learned by a score_mod"
    assert spec.mods.score_mod is not None, "learned by a score_mod"
    rows, cols = tile
    b, h, q, k = step.where.indices(rows, cols)
    put = _TableGradients(spec.mods.score_mod, step.captured, grads.captured)
    nowhere, code = q.new_zeros(1), sums.mods.code
    if found := code.along("cols"):
        put(found, [b, h, nowhere, k], sums.col_sums.unsqueeze(-2))
    if found := code.along("distances"):
        distances = torch.arange(sums.lowest, sums.lowest + sums.count, device=q.device)
        put(found, [b, h, distances, nowhere], sums.distances.unsqueeze(-1))
    if found := code.along("pairs"):
        put(found, [b, h, q, k], sums.pairs)
    if found := code.along("rows"):
        every = step.where.rows

        def by_row(total: Tensor) -> None:
            """See [Note: exact sums] in row_sums.py."""
            off = total[0] - (merged.grad.to(total.dtype) * merged.out.to(total.dtype)).sum(-1)
            exact = total[1::2] - off * total[2::2]
            put(found, [b, h, every, nowhere], exact.unsqueeze(-1))

        grads.row_sums.add(rows, tuple(merged.lse.shape), sums.row_sums, by_row)


@dataclass(frozen=True, slots=True)
class _TableGradients:
    """From gradients of what was looked up to those of captured tensors."""

    program: Program
    captured: Sequence[Tensor]
    into: Sequence[Tensor | None]

    def __call__(self, found: tuple[Lookup, ...], indices: Sequence[Tensor], parts: Tensor) -> None:
        """`parts` (lookups, B, H, n, m), where an index that no lookup depends on has one place."""
        wanted = [i for i, total in enumerate(self.into) if total is not None]
        prepare, tables = split(self.program).prepare, sorted({each.table for each in found})

        def prepared(*some: Tensor) -> tuple[Tensor, ...]:
            given = list(self.captured)
            for i, x in zip(wanted, some, strict=True):
                given[i] = x
            looked_into = prepare(*given)
            return tuple(looked_into[table] for table in tables)

        vjp: Any = torch.func.vjp
        looked_into, back = vjp(prepared, *(self.captured[i] for i in wanted))
        sums = [torch.zeros_like(x, dtype=parts.dtype) for x in looked_into]
        spread = [index.reshape(-1, *[1] * (3 - dim)) for dim, index in enumerate(indices)]
        score = torch.zeros((), device=parts.device)
        at = places(self.program.graph, found)(score, *spread, *self.captured)
        for each, where, part in zip(found, at, parts, strict=True):
            _add_at(sums[tables.index(each.table)], where, part)
        grads = back(tuple(total.to(x.dtype) for total, x in zip(sums, looked_into, strict=True)))
        for i, grad in zip(wanted, grads, strict=True):
            total = self.into[i]
            assert total is not None, "wanted are those that have one"
            total += grad


def _add_at(total: Tensor, where: Sequence[Tensor], part: Tensor) -> None:
    """Add to entries; what was looked up beyond the table belongs to no pair."""
    if not where:
        total += part.sum()
        return
    at = torch.broadcast_tensors(*where)
    part = part.sum_to_size(at[0].shape)
    inside = torch.stack(
        list(starmap(lambda i, size: (-size <= i) & (i < size), zip(at, total.shape, strict=True)))
    ).all(0)
    at = [i.masked_fill(~inside, 0) for i in at]
    total.index_put_(tuple(at), part.masked_fill(~inside, 0.0), accumulate=True)


def wanted(spec: Spec, step: StepTiles, grads: Gradients) -> tuple[Lookup, ...]:
    """The lookups whose gradients are wanted, as they can be summed there."""
    if spec.mods is None or spec.mods.score_mod is None:
        return ()
    some = [i for i, total in enumerate(grads.captured) if total is not None]
    found = learned(spec.mods.score_mod, some)
    return found if Runs(*step.where.runs).in_step else by_pairs(found)
