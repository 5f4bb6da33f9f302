"""Keys beyond a row's length do not exist: right-padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnspan.errors import MaskError
from attnspan.masks.band import Band, tight
from attnspan.masks.first_keys import FirstKeys
from attnspan.masks.mask import Rule, Space
from attnspan.masks.rows import int_per_row, of_row, select, shown


@dataclass(frozen=True, slots=True)
class KeyPadding(FirstKeys):
    """Every query sees the first `lengths[row]` keys; one number serves all batch rows. 0 is a row of
    padding.

    >>> KeyPadding([2, 4]).work(4, row=0), KeyPadding([2, 4]).work(4, row=1)
    (8, 16)
    """

    _field: ClassVar[str] = "lengths"

    lengths: int | Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", int_per_row("lengths", self.lengths, at_least=0))

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor) -> KeyPadding:
        """From ones where tokens are and zeros in the padding behind them, (S,) or (rows, S), as tokenizers write it.

        >>> KeyPadding.from_attention_mask(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
        KeyPadding([2, 4])
        """
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() not in (1, 2):
            found = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else repr(attention_mask)
            raise MaskError(f"attention_mask must be a tensor (S,) or (rows, S), got {found}")
        rows = attention_mask.cpu().view(-1, attention_mask.shape[-1])
        if not ((rows == 0) | (rows == 1)).all():
            raise MaskError("attention_mask must be ones and zeros, got other numbers")
        padding = (rows == 0).nonzero()
        lengths = (rows == 1).sum(1)
        wrong = padding[padding[:, 1] < lengths[padding[:, 0]]]
        if len(wrong):
            row, col = wrong[0].tolist()
            raise MaskError(
                f"attention_mask must be ones and then zeros in every row, got 0 before the last 1 of row {row}, at "
                f"{col}; pad on the right, or give other padding a document of its own"
            )
        return cls(lengths.tolist() if attention_mask.dim() == 2 else int(lengths))

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        length = of_row(self._lengths, row)
        yield tight(0, q_len, 0, length)

    def _rule(self, space: Space) -> Rule:
        lengths = torch.tensor(self._lengths, device=space.device)
        return lambda b, h, q, k: k < select(lengths, b)

    def __repr__(self) -> str:
        return f"KeyPadding({shown(self._lengths)})"
