"""What masks have in common that speak of a row's first keys: a prefix that all see, a length that padding follows."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from attnspan.errors import MaskError
from attnspan.masks.mask import Mask
from attnspan.masks.rows import of_row


class FirstKeys(Mask):
    """A number of keys per batch row, or one for all; never more than there are."""

    __slots__ = ()

    _field: ClassVar[str]
    """The name of the field that holds the numbers, one per row, as `int_per_row` gives them."""

    @property
    def _lengths(self) -> tuple[int, ...]:
        lengths = getattr(self, self._field)
        assert isinstance(lengths, tuple), "normalised in __post_init__"
        return lengths

    @property
    def rows(self) -> int:
        return len(self._lengths)

    @property
    def least_len(self) -> int:
        return max(self._lengths)

    def typical(self, q_len: int) -> Mask:
        """Rows between the shortest and the longest, evenly, both rounded up to an eighth of the sequence."""
        eighth, most = -(-q_len // 8), len(self._lengths) - 1
        low, high = (-(-length // eighth) * eighth for length in (min(self._lengths), max(self._lengths)))
        spaced = [min(low + (high - low) * row // max(most, 1), q_len) for row in range(most + 1)]
        return self if most == 0 else replace(self, **{self._field: spaced})  # type: ignore[type-var]

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        length = of_row(self._lengths, row)
        if length > kv_len:
            raise MaskError(f"{self._field} must be at most kv_len ({kv_len}), got {length} for batch row {row}")
