"""Values that hold for the whole batch or differ per batch row.

A mask argument such as a prefix length is one value (every row alike) or a list with one value per row.
Stored as a tuple with one entry per row; one entry stands for all rows.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TypeVar

import torch

from attnspan.errors import MaskError, integer, integers

T = TypeVar("T")


def int_per_row(name: str, value: object, *, at_least: int) -> tuple[int, ...]:
    """One whole number, or one per batch row.

    >>> int_per_row("length", 3, at_least=0), int_per_row("length", [3, 5], at_least=0)
    ((3,), (3, 5))
    """
    value = listed(value)
    if not isinstance(value, list | tuple):
        return (integer(name, value, at_least=at_least, error=MaskError),)
    if len(value) == 0:
        raise MaskError(f"{name} must be a whole number or one per batch row, got an empty list")
    return integers(name, value, at_least=at_least, error=MaskError)


def as_table(name: str, given: object, wanted: str) -> torch.Tensor:
    """A tensor on the host; MaskError for what is no table, such as text and ragged rows."""
    try:
        return given.cpu() if isinstance(given, torch.Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{name} must be {wanted}, got {reprlib.repr(given)}") from error


def listed(values: object) -> object:
    """Tensors and arrays as lists of Python numbers, ranges as lists; anything else as it came.

    >>> listed(torch.tensor([3, 5])), listed(range(2)), listed(4)
    ([3, 5], [0, 1], 4)
    """
    if isinstance(values, range):
        return list(values)
    return values.tolist() if hasattr(values, "tolist") else values


def of_row(values: Sequence[T], row: int) -> T:
    """The value of a batch row; a single entry serves every row.

    >>> of_row((3,), 7), of_row((3, 5), 1)
    (3, 5)
    """
    return values[0] if len(values) == 1 else values[row]


def select(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`of_row` for a tensor whose first dim is the row, inside a mask rule."""
    return values[0] if values.shape[0] == 1 else values[b]


def shown(values: Sequence[object]) -> str:
    """Back to how the user wrote it.

    >>> shown((3,)), shown((3, 5))
    ('3', '[3, 5]')
    """
    return repr(values[0]) if len(values) == 1 else repr(list(values))
