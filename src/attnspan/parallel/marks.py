"""Marks of shards, which reveal tensors that are sharded twice or used with another layout.

A mark is kept in a table with weak keys, not on the tensor: copies, saved tensors and results computed from a shard
have none. So a mark can prove a mistake, and its absence proves nothing.
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
