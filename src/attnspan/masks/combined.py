"""How masks combine: `&`, `|` and `~`, as what they stand for pair by pair, and as bands.

Both sides speak of the same lengths, batch rows and heads; where one has a single row or head it stands for all.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from attnspan.errors import MaskError
from attnspan.masks.algebra import Bands, intersect, subtract, union
from attnspan.masks.band import Band
from attnspan.masks.columns import Columns
from attnspan.masks.cover import Cover
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.real_tensors import with_real_tensors


class Combination(Mask):
    """Masks over the same lengths, batch rows and heads, made into one."""

    __slots__ = ()

    @property
    @abstractmethod
    def parts(self) -> tuple[Mask, ...]:
        """The masks it is made of."""

    @abstractmethod
    def _covered(self, covers: list[Cover], q_len: int, kv_len: int) -> Cover:
        """Its cover from those of its parts, where a part is a function."""

    @property
    def rows(self) -> int:
        return max(part.rows for part in self.parts)

    @property
    def heads(self) -> int:
        return max(part.heads for part in self.parts)

    @property
    def natural_len(self) -> int | None:
        return next((part.natural_len for part in self.parts if part.natural_len), None)

    @property
    def natural_kv_len(self) -> int | None:
        return next((part.natural_kv_len for part in self.parts if part.natural_kv_len), None)

    @property
    def least_len(self) -> int:
        return max(part.least_len for part in self.parts)

    def check_fresh(self) -> None:
        for part in self.parts:
            part.check_fresh()

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        for part in self.parts:
            part._check(q_len, kv_len, row)

    def _cover(self, q_len: int, kv_len: int, row: int) -> Cover:
        covers = [part.cover(q_len, kv_len, row) for part in self.parts]
        if self.heads == 1 and all(cover.is_exact for cover in covers):
            return Cover(self.bands(q_len, kv_len, row))
        return self._covered(covers, q_len, kv_len)


@dataclass(frozen=True, slots=True, repr=False)
class TwoSided(Combination):
    """Two masks, joined by a sign."""

    _sign: ClassVar[str]

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        left, right = self.left.rows, self.right.rows
        if left != right and 1 not in (left, right):
            raise MaskError(
                f"both sides of {self._sign} must describe the same batch rows, got {left} and {right}; "
                "give one entry per row, or one for all"
            )
        if self.left.heads != self.right.heads and 1 not in (self.left.heads, self.right.heads):
            raise MaskError(
                f"both sides of {self._sign} must describe the same heads, got {self.left.heads} and {self.right.heads}"
            )

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def typical(self, q_len: int) -> Mask:
        return type(self)(self.left.typical(q_len), self.right.typical(q_len))


@dataclass(frozen=True, slots=True, repr=False)
class And(TwoSided):
    """The pairs in both masks; what `left & right` makes."""

    _sign: ClassVar[str] = "&"

    def _bands(self, q_len: int, kv_len: int, row: int) -> Bands:
        left, right = self.left, self.right
        if isinstance(left, Not):
            left, right = right, left
        if isinstance(right, Not):  # a difference is cheaper than meeting a complement
            return subtract(left.bands(q_len, kv_len, row), right.inner.bands(q_len, kv_len, row))
        many = _many_bands(self, q_len, kv_len, row)
        return intersect(left.bands(q_len, kv_len, row), right.bands(q_len, kv_len, row)) if many is None else many

    def _band_columns(self, q_len: int, kv_len: int, row: int) -> Columns | None:
        """Those of one side, where the other is a single band, as causal is."""
        for one, many in ((self.left, self.right), (self.right, self.left)):
            columns = many._band_columns(q_len, kv_len, row if many.rows > 1 else 0)
            if columns is not None and one.heads == 1:
                cover = one.cover(q_len, kv_len, row)
                return columns & cover.certain[0] if cover.is_exact and len(cover.certain) == 1 else None
        return None

    def _rule(self, space: Space) -> Rule:
        left, right = self.left._rule(space), self.right._rule(space)
        return lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k)

    def _covered(self, covers: list[Cover], q_len: int, kv_len: int) -> Cover:
        return covers[0] & covers[1]

    def __repr__(self) -> str:
        return f"{_grouped(self.left, Or)} & {_grouped(self.right, Or, And)}"


@dataclass(frozen=True, slots=True, repr=False)
class Or(TwoSided):
    """The pairs in either mask; what `left | right` makes."""

    _sign: ClassVar[str] = "|"

    def _bands(self, q_len: int, kv_len: int, row: int) -> Bands:
        return union(self.left.bands(q_len, kv_len, row), self.right.bands(q_len, kv_len, row))

    def _rule(self, space: Space) -> Rule:
        left, right = self.left._rule(space), self.right._rule(space)
        return lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k)

    def _covered(self, covers: list[Cover], q_len: int, kv_len: int) -> Cover:
        return covers[0] | covers[1]

    def __repr__(self) -> str:
        return f"{self.left!r} | {_grouped(self.right, Or)}"


@dataclass(frozen=True, slots=True, repr=False)
class Not(Combination):
    """The pairs that are not in the mask; what `~mask` makes."""

    inner: Mask

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.inner,)

    def typical(self, q_len: int) -> Mask:
        return ~self.inner.typical(q_len)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Bands:
        return subtract([_everything(q_len, kv_len)], self.inner.bands(q_len, kv_len, row))

    def _rule(self, space: Space) -> Rule:
        inner = self.inner._rule(space)
        return lambda b, h, q, k: ~inner(b, h, q, k)

    def _covered(self, covers: list[Cover], q_len: int, kv_len: int) -> Cover:
        return covers[0].complement(_everything(q_len, kv_len))

    def __repr__(self) -> str:
        return f"~{_grouped(self.inner, And, Or)}"


@with_real_tensors
def _many_bands(mask: Mask, q_len: int, kv_len: int, row: int) -> Bands | None:
    columns = mask._band_columns(q_len, kv_len, row)
    return None if columns is None else columns.bands()


def _everything(q_len: int, kv_len: int) -> Band:
    return Band(0, q_len, 0, kv_len, 1 - q_len, kv_len - 1)


def _grouped(mask: Mask, *loose: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, loose) else repr(mask)
