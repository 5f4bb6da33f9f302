"""What attends to what, as data: the base of every mask (combined.py has those that are made of others).

A mask says which (query, key) pairs count, for any lengths, per batch row where rows differ. It says so
twice, and the two are written independently so that each checks the other:

    _bands   a few disjoint bands        what plans, layouts and block masks are made from, never S x S
    _rule    a predicate on indices      what `dense` and `mask_mod` evaluate, the oracle

>>> from attnspan.masks import Causal, Documents
>>> print(Causal() & Documents([3, 5]))
Causal() & Documents([3, 5])
█ · · · · · · ·
█ █ · · · · · ·
█ █ █ · · · · ·
· · · █ · · · ·
· · · █ █ · · ·
· · · █ █ █ · ·
· · · █ █ █ █ ·
· · · █ █ █ █ █

[Note: lengths] Masks that compare a query's position with a key's put both on one axis. Where q_len and
kv_len differ, somebody must say how the two ends meet: `align="top"` counts both from 0, `align="bottom"`
makes the last query meet the last key (decoding, chunked prefill). Nothing is assumed: without it, such
lengths are refused.
"""

from __future__ import annotations

import functools
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnspan.errors import MaskError, integer
from attnspan.masks.algebra import Bands, area
from attnspan.masks.band import Band
from attnspan.masks.columns import Columns
from attnspan.masks.cover import Cover
from attnspan.masks.drawing import shortened
from attnspan.masks.real_tensors import with_real_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch row, head, query index, key index) -> bool, for one pair; runs under vmap.

It closes over numbers and tensors only, never over a mask, so that compilers can lift them out."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A FlexAttention mask_mod: (batch row, head, query index, key index) -> bool."""


@dataclass(frozen=True, slots=True)
class Space:
    """The lengths a mask is asked about (None: not known yet) and the device its tensors live on."""

    q_len: int | None
    kv_len: int | None
    device: torch.device


class Mask(ABC):
    """A set of (query, key) pairs. Combine with `&`, `|` and `~`; every answer is exact."""

    __slots__ = ()

    # ---- what a new mask defines -----------------------------------------------------------------------

    @abstractmethod
    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        """Disjoint bands of one batch row; None entries are dropped."""

    @abstractmethod
    def _rule(self, space: Space) -> Rule:
        """The predicate, with any tensors it needs already on the device."""

    def _check(self, q_len: int, kv_len: int, row: int) -> None:  # noqa: B027  # most masks take any lengths
        """Refuse lengths that this mask cannot have."""

    def check_fresh(self) -> None:  # noqa: B027  # most masks are numbers, which do not change
        """Refuse a mask whose functions compute another by now than when it was made."""

    @property
    def is_current(self) -> bool:
        """Whether the functions in it, if any, compute what they did when the mask was made."""
        try:
            self.check_fresh()
        except MaskError:
            return False
        return True

    def _cover(self, q_len: int, kv_len: int, row: int) -> Cover:
        """Where a mask has no few bands: those that hold its pairs, see cover.py."""
        return Cover(self.bands(q_len, kv_len, row))

    def _band_columns(self, q_len: int, kv_len: int, row: int) -> Columns | None:
        """Its bands as columns, ascending, where it has thousands and no function; None where objects are as good."""
        return None

    @property
    def rows(self) -> int:
        """How many batch rows the mask tells apart; 1 means that all rows are alike."""
        return 1

    @property
    def single(self) -> tuple[bool, bool]:
        """Whether it is for one batch row alone, and for one head. See parallel/block_masks.py."""
        return False, False

    @property
    def heads(self) -> int:
        """How many heads the mask tells apart; 1 means that all heads are alike."""
        return 1

    @property
    def natural_len(self) -> int | None:
        """The query length the mask was written for, if it fixes one."""
        return None

    @property
    def natural_kv_len(self) -> int | None:
        """The key length the mask was written for, if it fixes one."""
        return self.natural_len

    @property
    def least_len(self) -> int:
        """The shortest length the mask can be drawn at, where it fixes none."""
        return 1

    def typical(self, q_len: int) -> Mask:
        """The mask that stands for others of its kind, where a strategy is chosen; most are of no kind but their own.

        >>> from attnspan.masks import Causal, Documents
        >>> Causal().typical(8), len({(Causal() & Documents([20 - n, 20, n])).typical(40) for n in range(9, 12)})
        (Causal(), 1)
        """
        return self

    # ---- what everyone asks ----------------------------------------------------------------------------

    def bands(self, q_len: int, kv_len: int | None = None, row: int = 0) -> Bands:
        """The allowed pairs of one batch row as disjoint bands.

        >>> from attnspan.masks import Causal
        >>> Causal().bands(4)
        (Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0),)
        """
        q_len, kv_len = _lengths(q_len, kv_len)
        row = self._checked_row(row)
        if self.heads > 1:
            raise MaskError(f"{self!r} differs between its {self.heads} heads; ask cover(), or dense(head=...)")
        return _cached_bands(self, q_len, kv_len, row)

    def cover(self, q_len: int, kv_len: int | None = None, row: int = 0) -> Cover:
        """Bands that hold every allowed pair of one batch row and any head: what plans are made from.

        Those of a mask that is written as a pattern are exact; of a function, some may be `partial`.

        >>> from attnspan.masks import Causal, MaskMod
        >>> (Causal() & MaskMod(lambda b, h, q, k: q - k < 3)).cover(8).is_exact
        True
        """
        q_len, kv_len = _lengths(q_len, kv_len)
        return _cached_cover(self, q_len, kv_len, self._checked_row(row))

    def band_columns(self, q_len: int, kv_len: int | None = None, row: int = 0) -> tuple[Columns, Bands]:
        """The bands of `cover`, a tensor for each of their bounds, and those of them that are partial.

        >>> from attnspan.masks import Causal, Documents
        >>> columns, partial = (Causal() & Documents([3, 5])).band_columns(8)
        >>> columns.q0.tolist(), columns.q1.tolist(), partial
        ([0, 3], [3, 8], ())
        """
        q_len, kv_len = _lengths(q_len, kv_len)
        return _cached_columns(self, q_len, kv_len, self._checked_row(row))

    def work(self, q_len: int, kv_len: int | None = None, row: int = 0) -> int:
        """The exact number of allowed pairs of one batch row.

        >>> from attnspan.masks import Causal
        >>> Causal().work(1_000_000)
        500000500000
        """
        return area(self.bands(q_len, kv_len, row))

    def dense(self, q_len: int, kv_len: int | None = None, row: int = 0, head: int = 0) -> torch.Tensor:
        """The mask of one batch row and head as a bool tensor (q_len, kv_len): the oracle, for tests and small
        lengths.

        >>> from attnspan.masks import Causal
        >>> Causal().dense(3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        q_len, kv_len = _lengths(q_len, kv_len)
        row = self._checked_row(row)
        self._check(q_len, kv_len, row)
        rule = self._rule(Space(q_len, kv_len, torch.device("cpu")))
        return evaluated(rule, row, range(q_len), kv_len, head=self._checked_head(head))

    def mask_mod(
        self, q_len: int | None = None, kv_len: int | None = None, *, device: torch.device | str = "cpu"
    ) -> MaskFunction:
        """The mask as a FlexAttention mask_mod; tensors it captures live on `device`.

        The lengths are needed only by masks that are aligned at the bottom; where given, they are checked.

        >>> from attnspan.masks import Causal
        >>> Causal().mask_mod()(0, 0, torch.tensor(2), torch.tensor(3)).item()
        False
        """
        if q_len is not None:
            q_len, kv_len = _lengths(q_len, kv_len)
            for row in range(self.rows):
                self._check(q_len, kv_len, row)
        elif kv_len is not None:
            raise MaskError(f"q_len must be given with kv_len, got None and {kv_len!r}")
        rule = self._rule(Space(q_len, kv_len, torch.device(device)))

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return rule(b, h, q_idx, kv_idx)

        return mask_mod

    def block_mask(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """A FlexAttention BlockMask of all batch rows, made from bands in O(blocks), never S x S.

        >>> from attnspan.masks import Causal
        >>> Causal().block_mask(512).kv_num_blocks.tolist()  # the partial blocks: one on each diagonal
        [[[1, 1, 1, 1]]]
        """
        from attnspan.masks.blocks import block_mask

        q_len, kv_len = _lengths(q_len, kv_len)
        return block_mask(self, Space(q_len, kv_len, torch.device(device)), block_size)

    def draw(self, q_len: int, kv_len: int | None = None, row: int = 0) -> str:
        """One batch row as text: █ allowed, · not, ▒ partly (when a cell stands for several pairs)."""
        from attnspan.masks.drawing import draw

        return draw(self.bands(q_len, kv_len, row), *_lengths(q_len, kv_len))

    def check_rows(self, batch: int) -> None:
        """Refuse a batch whose number of rows is not the mask's.

        >>> from attnspan.masks import KeyPadding
        >>> KeyPadding([3, 4]).check_rows(3)
        Traceback (most recent call last):
        attnspan.errors.MaskError: batch must be the mask's 2 batch rows, got 3; give one entry per row
        """
        batch = integer("batch", batch, at_least=1, error=MaskError)
        if self.rows not in (1, batch):
            raise MaskError(f"batch must be the mask's {self.rows} batch rows, got {batch}; give one entry per row")

    def check_lengths(self, q_len: int, kv_len: int | None = None) -> None:
        """Refuse lengths that the mask cannot be drawn over, without drawing it.

        >>> from attnspan.masks import Documents
        >>> Documents([3, 5]).check_lengths(7)
        Traceback (most recent call last):
        attnspan.errors.MaskError: lengths must sum to q_len (7), got 2 documents with sum 8; give the padding at the \
end a document of its own
        """
        for row in range(self.rows):
            self._check(*_lengths(q_len, kv_len), row)

    def _checked_row(self, row: int) -> int:
        row = integer("row", row, error=MaskError)
        if self.rows == 1:
            return 0
        if row >= self.rows:
            raise MaskError(f"row must be below the mask's {self.rows} batch rows, got {row}")
        return row

    def _checked_head(self, head: int) -> int:
        head = integer("head", head, error=MaskError)
        if self.heads > 1 and head >= self.heads:
            raise MaskError(f"head must be below the mask's {self.heads} heads, got {head}")
        return head

    def check_heads(self, heads: int) -> None:
        """Refuse a number of query heads that is not the mask's."""
        if self.heads not in (1, heads):
            raise MaskError(f"heads must be the mask's {self.heads} heads, got {heads}; give one entry per head")

    # ---- from other people's formats -------------------------------------------------------------------

    @staticmethod
    def from_dense(allowed: torch.Tensor) -> Mask:
        """The mask of a bool tensor (q_len, kv_len) or (rows, q_len, kv_len); for tests and small masks.

        >>> Mask.from_dense(torch.ones(4, 4).tril().bool()).bands(4)
        (Band(q0=0, q1=4, k0=0, k1=4, lo=-3, hi=0),)
        """
        from attnspan.masks.block_sparse import BlockSparse

        is_bool = isinstance(allowed, torch.Tensor) and allowed.dtype == torch.bool
        if not is_bool or allowed.dim() not in (2, 3) or allowed.numel() == 0:
            raise MaskError(
                f"allowed must be a bool tensor (q_len, kv_len) or (rows, q_len, kv_len), got {_described(allowed)}"
            )
        return BlockSparse(allowed, block=1)

    @staticmethod
    def from_block_mask(block_mask: BlockMask) -> Mask:
        """The mask that FlexAttention applies when given this BlockMask.

        That is not always its mask_mod: blocks it does not list are skipped, and it is not evaluated in full ones.

        >>> from attnspan.masks import Causal
        >>> Mask.from_block_mask(Causal().block_mask(5, block_size=2)).bands(5)
        (Band(q0=0, q1=5, k0=0, k1=5, lo=-4, hi=0),)
        """
        from attnspan.masks.listed import from_block_mask

        return from_block_mask(block_mask)

    # ---- combining -------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        from attnspan.masks.combined import And  # they are masks themselves

        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        from attnspan.masks.combined import Or

        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        from attnspan.masks.combined import Not

        return self.inner if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise MaskError(f"a mask is neither true nor false; combine masks with &, | and ~, not with words: {self!r}")

    def __str__(self) -> str:
        """The expression, and a drawing at the mask's own length (8 or a little more where it has none)."""
        q_len = self.natural_len or max(8, 2 * self.least_len)
        try:
            drawing = self.draw(q_len, self.natural_kv_len)
        except MaskError as error:
            drawing = f"(cannot be drawn: {error})"
        return f"{shortened(repr(self))}\n{drawing}"


def evaluated(
    rule: Rule, row: int, queries: range, kv_len: int, device: torch.device | str = "cpu", head: int = 0
) -> torch.Tensor:
    """A rule over a strip of queries, (queries, kv_len): asked as FlexAttention asks, by vmap."""
    from torch.nn.attention.flex_attention import create_mask

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return rule(b + row, h + head, q + queries.start, k)

    return create_mask(mask_mod, 1, 1, len(queries), kv_len, device)[0, 0].cpu()


@functools.lru_cache(maxsize=64)
@with_real_tensors
def _cached_bands(mask: Mask, q_len: int, kv_len: int, row: int) -> Bands:
    # A memo of a pure function: masks are frozen and compare by value. Small, because a pack of 10,000 documents
    # is 3 MB of bands, and training brings a new one every step.
    mask._check(q_len, kv_len, row)
    return tuple(sorted(band for band in mask._bands(q_len, kv_len, row) if band is not None))


@functools.lru_cache(maxsize=64)
@with_real_tensors
def _cached_cover(mask: Mask, q_len: int, kv_len: int, row: int) -> Cover:
    mask._check(q_len, kv_len, row)
    return mask._cover(q_len, kv_len, row)


@functools.lru_cache(maxsize=64)
@with_real_tensors
def _cached_columns(mask: Mask, q_len: int, kv_len: int, row: int) -> tuple[Columns, Bands]:
    mask._check(q_len, kv_len, row)
    columns = mask._band_columns(q_len, kv_len, row)
    if columns is not None:
        return columns, ()
    cover = mask.cover(q_len, kv_len, row)
    return Columns.of(cover.bands), cover.partial


def _lengths(q_len: int, kv_len: int | None) -> tuple[int, int]:
    q_len = integer("q_len", q_len, at_least=1, error=MaskError)
    return q_len, q_len if kv_len is None else integer("kv_len", kv_len, at_least=1, error=MaskError)


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return reprlib.repr(value)
