"""Which rows of a batch an option is for: all of them, or some. Made once, and used in every step of that batch.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class RowSelection:
    """Some of R rows, in order; `places` are their numbers.

    >>> some = RowSelection([1], rows=2, device=torch.device("cpu"))
    >>> some.read(torch.tensor([5, 6])), some.write(torch.tensor([5, 6]), torch.tensor([7]))
    (tensor([6]), tensor([5, 7]))
    """

    def __init__(self, places: Iterable[int], rows: int, device: torch.device) -> None:
        self.places = tuple(places)
        self.indices = None if len(self.places) == rows else torch.tensor(self.places, device=device)

    @classmethod
    def where(cls, asks: Iterable[object], rows: int, device: torch.device) -> RowSelection | None:
        """The rows for which this is true; None if there are none."""
        places = [place for place, each in enumerate(asks) if each]
        return cls(places, rows, device) if places else None

    def read(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor (R, ...)."""
        return tensor if self.indices is None else tensor[self.indices]

    def write(self, tensor: Tensor, values: Tensor) -> Tensor:
        """A tensor (R, ...) with other values in these rows; the tensor itself stays as it is."""
        return values if self.indices is None else tensor.index_put((self.indices,), values)
