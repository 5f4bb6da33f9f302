"""The base of layouts that look at the work: one mask, or several with weights.

A model that mixes full and windowed layers, or head groups with different masks, has one layout for all of
them. What such a layout divides is the weighted sum of the masks' work, piecewise linear over rows: no S x S, no
row by row. Knows nothing of how the work is then divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, isfinite

from attnspan.errors import LayoutError
from attnspan.layouts.layout import Layout, check_ranks
from attnspan.masks import Mask
from attnspan.masks.columns import Columns

FINENESS = 1 << 16
"""Weights that are not whole are kept to one part in this many of the smallest."""


@dataclass(frozen=True, slots=True)
class ByWork(Layout):
    """Holds masks and their weights, as the smallest whole numbers of the same ratio."""

    masks: Mask | Sequence[Mask]
    ranks: int = field(kw_only=True)
    weights: Sequence[float] | None = field(default=None, kw_only=True)
    per_row: bool = field(default=False, kw_only=True)
    _masks: tuple[Mask, ...] = field(init=False, repr=False, compare=False)
    _weights: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        masks = checked_masks(self.masks)
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "_masks", masks)
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        weights = checked_weights(self.weights, len(masks))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "_weights", weights)
        if not isinstance(self.per_row, bool):
            raise LayoutError(f"per_row must be True or False, got {self.per_row!r}")

    @property
    def rows(self) -> int:
        return self._mask_rows if self.per_row else 1

    @property
    def natural_len(self) -> int | None:
        return next((mask.natural_len for mask in self._masks if mask.natural_len), None)

    @property
    def least_len(self) -> int:
        return max(mask.least_len for mask in self._masks)

    def over(self, masks: Callable[[Mask], Mask]) -> ByWork:
        """The same layout of other masks, each in the place of one."""
        return replace(self, masks=[masks(mask) for mask in self._masks])

    @property
    def _mask_rows(self) -> int:
        return max(mask.rows for mask in self._masks)

    def _weighted(self, seq_len: int, row: int) -> list[tuple[int, Columns]]:
        """(weight, bands) of what is divided: one batch row, or all of them together."""
        rows = [row] if self.per_row else range(self._mask_rows)
        return [
            (weight, mask.band_columns(seq_len, row=r)[0])
            for mask, weight in zip(self._masks, self._weights, strict=True)
            for r in rows
        ]

    def _shown(self, **options: object) -> str:
        """The constructor call, with the options that are not None."""
        masks = repr(self._masks[0]) if len(self._masks) == 1 else repr(list(self._masks))
        said = {
            "ranks": self.ranks,
            "weights": list(self._weights) if set(self._weights) != {1} else None,
            **options,
            "per_row": self.per_row or None,
        }
        told = (f"{name}={value}" for name, value in said.items() if value is not None)
        return f"{type(self).__name__}({', '.join([masks, *told])})"


def checked_masks(masks: object) -> tuple[Mask, ...]:
    """One mask or a list of them, as a tuple whose batch rows agree."""
    listed: tuple[object, ...] = (masks,)
    if isinstance(masks, Sequence) and not isinstance(masks, str | bytes):
        listed = tuple(masks)
    found = tuple(mask for mask in listed if isinstance(mask, Mask))
    if not found or len(found) != len(listed):
        raise LayoutError(f"masks must be a mask or a list of masks, got {masks!r}")
    rows = [mask.rows for mask in found]
    if len({*rows} - {1}) > 1:
        raise LayoutError(f"masks must describe the same batch rows, or one for all, got {rows}")
    return found


def checked_weights(weights: object, count: int) -> tuple[int, ...]:
    """One weight per mask, as the smallest whole numbers of the same ratio.

    >>> checked_weights([2, 10], 2), checked_weights([0.1, 0.25], 2), checked_weights(None, 2)
    ((1, 5), (2, 5), (1, 1))
    """
    if weights is None:
        return (1,) * count
    listed = list(weights) if isinstance(weights, Sequence) and not isinstance(weights, str | bytes) else None
    if listed is None or len(listed) != count:
        raise LayoutError(f"weights must be a list with one number per mask ({count}), got {weights!r}")
    for i, weight in enumerate(listed):
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not isfinite(weight) or weight <= 0:
            raise LayoutError(f"weights[{i}] must be a number above 0, got {weight!r}; leave such a mask out")
    if not all(isinstance(weight, int) for weight in listed):
        listed = [round(weight / min(listed) * FINENESS) for weight in listed]
    common = gcd(*listed)
    return tuple(weight // common for weight in listed)
