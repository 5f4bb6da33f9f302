"""Any FlexAttention program, and dropout, block by block, on any device: never more than a block of scores in memory.

Tiles that are certain need no program unless scores are changed, and without dropout go through the CPU's flash
attention whole. All else is computed in blocks of rows and keys in plain torch: scores, then the score_mod, then -inf
where the band or the mask_mod does not allow a pair, then the share of the softmax, and what dropout leaves of it,
merged into what its rows have so far.

Backward computes the same scores again. The gradient of a changed score is probability x (grad @ value - delta), from
the final out and lse (see [Note: final out and lse] in kernel.py); the program is then walked back to the score itself
and to the tensors it captured (`Program.vjp`).

Half precision is computed in float32. Shapes: kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels import cpu_flash
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.kernel import Gradients, MergedOutputs, Spec, StepTiles, Tiles, Traits
from attnspan.kernels.mods import as_slice
from attnspan.masks.program import Program
from attnspan.masks.tile import Tile

name = "blocks"
traits = Traits(order=80, programs=True, needs_mask_program=True, dropout=True, measured=False)

ROWS = 128
"""Rows of a block: more waste scores outside of bands and allowed blocks, fewer waste calls."""

AT_ONCE = 1 << 20
"""Scores of a block, about, over all batch rows and heads."""


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
    """Everything that floats."""
    return f"blocks {reason}" if (reason := traits.misfit(q)) else None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
    """Block by block, in float32, or float64 for float64."""
    wide = lse_dtype(q.dtype)
    for tile in step.tiles:
        rows, cols = as_slice(tile.rows), as_slice(tile.cols)
        if _is_plain(spec, q, k, v, tile):
            total.add(tile.rows, *cpu_flash.forward(spec, q[:, :, rows], k[:, :, cols], v[:, :, cols], tile))
            continue
        for block in _blocks(tile, q):
            scores = _changed(spec, _scores(spec, q, k, block), block, step)
            lse = scores.logsumexp(-1)
            value = v[:, :, as_slice(block.cols)].to(wide)
            shares = _dropped(_shares(scores, lse), _weights(spec, block, step, wide))
            total.add(block.rows, _by_head(_stacked(shares, v) @ value, q), lse)


def backward(
    spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
) -> None:
    """(dq, dk, dv) of all rows and columns, at once."""
    sums = _BlockGradients(spec, merged, q, k, v, step, grads)
    for tile in step.tiles:
        if merged.grad_lse is None and _is_plain(spec, q, k, v, tile):
            sums.add_tile(tile)
        else:
            for block in _blocks(tile, q):
                sums.add_block(block)
    grads.add(range(q.shape[2]), range(k.shape[2]), sums.dq, sums.dk, sums.dv)
    if sums.by_row is not None:
        grads.row_sums.add(range(q.shape[2]), tuple(merged.lse.shape), sums.by_row.sums, sums.by_row.put)


class _BlockGradients:
    """The gradients of a step, added up by tiles and blocks."""

    def __init__(
        self, spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
    ) -> None:
        self.spec, self.merged, self.step, self.captured = spec, merged, step, grads.captured
        self.q, self.k, self.v, self.wide = q, k, v, lse_dtype(q.dtype)
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=self.wide) for x in (q, k, v))
        self.delta = merged.delta()
        self.by_row = _RowsLearned.of(spec, merged, step, grads)

    def add_tile(self, tile: Tile) -> None:
        """A tile of the flash kernel."""
        rows, cols, merged = as_slice(tile.rows), as_slice(tile.cols), self.merged
        grad, query, out, lse = (x[:, :, rows] for x in (merged.grad, self.q, merged.out, merged.lse))
        found = cpu_flash.backward(self.spec, grad, query, self.k[:, :, cols], self.v[:, :, cols], out, lse, tile)
        for total, at, part in zip((self.dq, self.dk, self.dv), (rows, cols, cols), found, strict=True):
            total[:, :, at] += part

    def add_block(self, block: ScoreBlock) -> None:
        """A block of scores."""
        spec, q, k, by_row = self.spec, self.q, self.k, self.by_row
        rows, cols = as_slice(block.rows), as_slice(block.cols)
        grad, query = (_stacked(x[:, :, rows].to(self.wide), k) for x in (self.merged.grad, q))
        key, value = k[:, :, cols].to(self.wide), self.v[:, :, cols].to(self.wide)
        raw, weights = _scores(spec, q, k, block), _weights(spec, block, self.step, self.wide)
        shares: list[Tensor] = []

        def slope(scores: Tensor) -> Tensor:
            """The gradient of changed scores."""
            shares.append(_shares(_hidden(spec, scores, block, self.step), self.merged.lse[:, :, rows]))
            d_shares = _dropped(_by_head(grad @ value.mT, q), weights)
            if by_row is not None:
                by_row.sums[0, :, :, rows] += (shares[0] * d_shares).sum(-1)
            return shares[0] * (d_shares - self.delta[:, :, rows].unsqueeze(-1))

        d_scores, means = _pulled(spec, raw, block, self.step, self.captured, slope, shares)
        for i, mean in enumerate(means):
            assert by_row is not None, "they are those that are learned by row"
            by_row.sums[1 + i, :, :, rows] += mean
        d_scores = _stacked(d_scores.masked_fill_(shares[0] == 0, 0.0) * spec.scale, k)
        self.dq[:, :, rows] += _by_head(d_scores @ key, q)
        self.dk[:, :, cols] += d_scores.mT @ query
        self.dv[:, :, cols] += _stacked(_dropped(shares[0], weights), self.v).mT @ grad


class ScoreBlock(NamedTuple):
    """Some rows and columns of a tile, and which pairs of them its band allows; None: all."""

    rows: range
    cols: range
    allowed: Tensor | None
    needs_mask_mod: bool


def _is_plain(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> bool:
    """Whether a tile is for the flash kernel."""
    changed = spec.mods is not None and spec.mods.score_mod is not None
    return (
        not changed
        and not tile.needs_mask_mod
        and spec.dropout is None
        and cpu_flash.supports(spec, q, k, v, tile) is None
    )


def _blocks(tile: Tile, q: Tensor) -> Iterator[ScoreBlock]:
    width = max(ROWS, AT_ONCE // (ROWS * q.shape[0] * q.shape[1]))
    band = tile.band
    for top in range(0, len(tile.rows), ROWS):
        for left in range(0, len(tile.cols), width):
            piece = band.cut(top, top + ROWS, left, left + width)
            if piece is None:
                continue
            allowed = None
            if not piece.is_rectangle:
                i = torch.arange(piece.q0, piece.q1, device=q.device).unsqueeze(-1)
                distance = torch.arange(piece.k0, piece.k1, device=q.device) - i
                allowed = (distance >= piece.lo) & (distance <= piece.hi)
            yield ScoreBlock(
                tile.rows[piece.q0 : piece.q1], tile.cols[piece.k0 : piece.k1], allowed, tile.needs_mask_mod
            )


def _scores(spec: Spec, q: Tensor, k: Tensor, block: ScoreBlock) -> Tensor:
    """(B, H, n, m), as they are before any program."""
    wide = lse_dtype(q.dtype)
    query, key = q[:, :, as_slice(block.rows)].to(wide), k[:, :, as_slice(block.cols)].to(wide)
    return _by_head(_stacked(query * spec.scale, k) @ key.mT, q)


def _changed(spec: Spec, scores: Tensor, block: ScoreBlock, step: StepTiles) -> Tensor:
    """Scores after the score_mod, -inf where a pair is not allowed."""
    if spec.mods is not None and spec.mods.score_mod is not None:
        indices = step.where.indices(block.rows, block.cols)
        changed = spec.mods.score_mod.over(scores, *indices, captured=step.captured)
        scores = changed.expand(scores.shape).to(scores.dtype)
    return _hidden(spec, scores, block, step)


def _hidden(spec: Spec, scores: Tensor, block: ScoreBlock, step: StepTiles) -> Tensor:
    """Scores, -inf where a pair is not allowed."""
    allowed = block.allowed
    if block.needs_mask_mod:
        assert spec.mods is not None, "such a tile comes with the mask's program"
        assert spec.mods.mask_mod is not None, "such a tile comes with the mask's program"
        chosen = spec.mods.mask_mod.over(*step.where.indices(block.rows, block.cols))
        allowed = chosen if allowed is None else chosen & allowed
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _pulled(
    spec: Spec,
    raw: Tensor,
    block: ScoreBlock,
    step: StepTiles,
    sums: Sequence[Tensor | None],
    slope: Callable[[Tensor], Tensor],
    shares: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of scores as they are before any program, from that of changed scores; and what is learned by row,
    of the shares."""
    if spec.mods is None or spec.mods.score_mod is None:
        return slope(raw), []
    indices = step.where.indices(block.rows, block.cols)

    def widened(changed: Tensor) -> Tensor:
        return slope(changed.to(raw.dtype))

    return spec.mods.score_mod.vjp(raw, indices, step.captured, sums, widened, lambda: shares[0])


@dataclass(frozen=True, slots=True)
class _RowsLearned:
    """What is taken away from the gradients of what is learned by row. See [Note: exact sums] in row_sums.py."""

    program: Program
    merged: MergedOutputs
    step: StepTiles
    captured: Sequence[Tensor | None]
    sums: Tensor  # of p * d_share, and of p * f for each lookup, (1 + lookups, B, H, n)

    @staticmethod
    def of(spec: Spec, merged: MergedOutputs, step: StepTiles, grads: Gradients) -> _RowsLearned | None:
        """None where nothing is."""
        if spec.mods is None or spec.mods.score_mod is None:
            return None
        program = spec.mods.score_mod
        count = len(program.row_lookups(grads.captured))
        if not count:
            return None
        sums = merged.lse.new_zeros(1 + count, *merged.lse.shape)
        return _RowsLearned(program, merged, step, grads.captured, sums)

    def put(self, total: Tensor) -> None:
        """With the sums of all steps."""
        off = total[0] - replace(self.merged, grad_lse=None).delta()
        where = self.step.where
        indices = where.indices(range(len(where.rows)), range(len(where.cols)))
        self.program.put_rows(indices, self.step.captured, self.captured, list(-off * total[1:]))


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), and 0 where there is no score to speak of, or no key in the whole row."""
    lse = lse.unsqueeze(-1)
    return (scores - lse).exp_().masked_fill_((scores == -torch.inf) | (lse == -torch.inf), 0.0)


def _weights(spec: Spec, block: ScoreBlock, step: StepTiles, dtype: torch.dtype) -> Tensor | None:
    """What dropout multiplies the probabilities of a block by; None without it."""
    if spec.dropout is None:
        return None
    return spec.dropout.at(step.where.indices(block.rows, block.cols)).weights(dtype)


def _dropped(x: Tensor, weights: Tensor | None) -> Tensor:
    """Probabilities, or their gradients, after dropout. See [Note: backward of dropout] in dropout.py."""
    return x if weights is None else x * weights


def _stacked(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, n, ...) as (B, Hk, G * n, ...): the query heads of a key head as further rows of it."""
    by_group: Tensor = x.unflatten(1, (k.shape[1], -1))
    return by_group.flatten(2, 3)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, Hk, G * n, ...) as (B, H, n, ...)."""
    by_group: Tensor = x.unflatten(2, (q.shape[1] // x.shape[1], -1))
    return by_group.flatten(1, 2)
