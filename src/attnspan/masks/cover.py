"""What a plan is made from where a mask is a function: the pairs that are certain, and those that must be asked.

Bands say exactly which pairs count. A function can only be asked, pair by pair, and what it answers may need a band for
every few pairs. So a plan is content with less: two disjoint sets of bands, where every allowed pair lies in one of
them::

    certain   every pair of them counts                       any kernel computes them
    asked     some of their pairs count, the function knows    a kernel that can ask computes them

Layouts, transfers and work are decided by both together, which is never less than what is needed; results stay exact,
because the function is asked again where it matters. A mask of our own has nothing to be asked.

The two combine like the masks they stand for. With the outer set (certain and asked) and the inner one (certain)::

    a & b    outer & outer,  inner & inner
    a | b    outer | outer,  inner | inner
    ~a       all but inner,  all but outer

Knows nothing of tiles or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from attnspan.masks.algebra import Bands, intersect, joined, subtract, union
from attnspan.masks.band import Band, tight
from attnspan.masks.spans import spans_of

FEW = 512
"""So many bands are never too many: short sequences are always exact."""

MOST_SPANS = 8
"""A function that allows more spans of keys per row than this, on average over a strip, is not turned into bands."""


class Cover(NamedTuple):
    """Disjoint bands: all pairs of `certain` count, of `asked` perhaps; no others do.

    >>> Cover((tight(0, 4, 0, 4),)).is_exact
    True
    """

    certain: Bands
    asked: Bands = ()

    @property
    def bands(self) -> Bands:
        """Where an allowed pair can be."""
        return tuple(sorted((*self.certain, *self.asked))) if self.asked else self.certain

    @property
    def is_exact(self) -> bool:
        """Whether nothing needs to be asked."""
        return not self.asked

    @classmethod
    def between(cls, inner: Bands, outer: Bands) -> Cover:
        """From the pairs that surely count and those that may."""
        return cls(inner, subtract(outer, inner))

    def __and__(self, other: Cover) -> Cover:
        return Cover.between(intersect(self.certain, other.certain), intersect(self._outer, other._outer))

    def __or__(self, other: Cover) -> Cover:
        return Cover.between(union(self.certain, other.certain), union(self._outer, other._outer))

    def complement(self, everything: Band) -> Cover:
        """The other pairs of everything."""
        return Cover.between(subtract([everything], self._outer), subtract([everything], self.certain))

    @property
    def _outer(self) -> Bands:
        return joined(self.bands)


class Strip(NamedTuple):
    """Some query rows from `start` on against all keys, (rows, kv_len): allowed for any head, and for all of them."""

    start: int
    some: torch.Tensor
    every: torch.Tensor


def cover_of_strips(strips: Iterable[Strip], k_size: int) -> Cover:
    """The cover of a function that was asked strip by strip, each a row of blocks whose width is `k_size`.

    Exact where that takes no more bands than there are blocks to be asked; else by blocks.
    """
    certain: list[Band] = []
    asked: list[Band] = []
    exact: list[Band] | None = []
    for start, some, every in strips:
        rows, kv_len = some.shape
        touched, whole = _by_block(some.any(0), k_size).any(-1), _by_block(every.all(0), k_size, pad=True).all(-1)
        certain += _blocks(start, rows, whole, k_size, kv_len)
        partial = list(_blocks(start, rows, touched & ~whole, k_size, kv_len))
        asked += partial
        if exact is not None:
            exact = exact + bands_in(start, some) if _is_plain(some, every) else None
            if exact is not None and len(exact) > 2 * FEW + 4 * len(asked):
                exact = list(joined(exact))
                if len(exact) > FEW + len(asked):
                    exact = None
    if exact is not None:
        bands = joined(exact)
        if len(bands) <= max(FEW, len(asked)):
            return Cover(bands)
    return Cover(joined(certain), joined(asked))


def bands_of_strips(strips: Iterable[Strip]) -> Bands:
    """The exact bands of strips in which all heads are alike, however many they are."""
    return joined(band for start, allowed, _ in strips for band in bands_in(start, allowed))


def bands_in(start: int, allowed: torch.Tensor) -> list[Band]:
    """The exact bands of one strip.

    >>> bands_in(4, torch.tensor([[1, 1, 0], [1, 1, 1]]).bool())
    [Band(q0=4, q1=6, k0=0, k1=3, lo=-5, hi=-3)]
    """
    spans = enumerate(spans_of(allowed.cpu()))
    rows = (tight(start + i, start + i + 1, k0, k1) for i, each in spans for k0, k1 in each)
    return list(joined(band for band in rows if band is not None))


def blocks_cover(certain: torch.Tensor, asked: torch.Tensor, size: tuple[int, int], lengths: tuple[int, int]) -> Cover:
    """From maps of blocks, (I, J) each: those that are certain, and those to be asked."""
    q_len, kv_len = lengths

    def bands(map: torch.Tensor) -> Bands:
        rows = range(0, q_len, size[0])
        return joined(
            band
            for start, blocks in zip(rows, map, strict=True)
            for band in _blocks(start, min(size[0], q_len - start), blocks, size[1], kv_len)
        )

    return Cover(bands(certain), bands(asked & ~certain))


def _by_block(keys: torch.Tensor, k_size: int, pad: bool = False) -> torch.Tensor:
    """(kv_len,) as (blocks, k_size)."""
    return torch.nn.functional.pad(keys, (0, -len(keys) % k_size), value=pad).view(-1, k_size)


def _blocks(start: int, rows: int, chosen: torch.Tensor, k_size: int, kv_len: int) -> Iterator[Band]:
    for j0, j1 in next(iter(spans_of(chosen.unsqueeze(0).cpu()))):
        band = tight(start, start + rows, j0 * k_size, min(j1 * k_size, kv_len))
        assert band is not None, "a block holds at least one pair"
        yield band


def _is_plain(some: torch.Tensor, every: torch.Tensor) -> bool:
    """Whether heads are alike and rows allow few spans of keys."""
    if some is not every and not torch.equal(some, every):
        return False
    begins = int(some[:, 0].sum()) + int((some[:, 1:] & ~some[:, :-1]).sum())
    return begins <= max(4 * FEW, MOST_SPANS * len(some))
