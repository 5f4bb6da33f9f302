"""What a tensor remembers of being sharded, so that a second time, or another layout, is noticed.

A mark is kept beside the tensor and not on it: copies, files and what is computed from a shard know nothing of it, and
it goes when the tensor goes. So a mark proves a mistake; that there is none proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnspan.layouts import Layout
from attnspan.masks import Mask


class Mark(NamedTuple):
    """Of which sequence a tensor is a rank's part, how that is laid out, and the masks of the session that cut it."""

    layout: Layout
    seq_len: int
    rank: int
    masks: Mapping[str, Mask]

    @property
    def place(self) -> tuple[Layout, int, int]:
        """Which tokens it holds, whatever attends to them."""
        return self[:3]


def marked(tensor: Tensor, mark: Mark) -> Tensor:
    """The tensor, with its mark."""
    _MARKS[tensor] = mark
    return tensor


def mark_of(tensor: Tensor) -> Mark | None:
    """How a tensor was sharded, if it comes straight from `shard`, `shard_from` or `shift`."""
    mark: Mark | None = _MARKS.get(tensor)
    return mark


_MARKS = WeakTensorKeyDictionary()
