"""A transport that moves nothing: what one rank computes, without the others.

Receives are left as they were found, so results are meaningless and times are compute alone. Because the speed of a GPU
depends on the numbers it multiplies, the buffers that keys would arrive in hold random ones (`random_arenas`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from attnspan.attention import lane, wire
from attnspan.transports import Pending, Transport


class Silent(Transport):
    """Rank `rank` of `ranks`, alone."""

    def __init__(self, rank: int, ranks: int, device: torch.device | str):
        self.rank, self.ranks, self.device, self.name = rank, ranks, torch.empty(0, device=device).device, "silent"

    def _post(self, sends, receives, what) -> Pending:
        return Pending()

    def all_gather_bytes(self, payload: bytes, what: str = "an agreement") -> list[bytes]:
        return [payload] * self.ranks


@contextmanager
def random_arenas() -> Iterator[None]:
    """Arenas for keys are made once per size and filled with random numbers; those for sums are as always."""
    made: dict[tuple[int, ...], Tensor] = {}

    def empty(key: Tensor, value: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        buffer = wire.empty_packed(key, value, 0 if dtype is None else rows, dtype)
        if dtype is not None:
            return buffer
        shape = (rows, *buffer.shape[1:])
        if shape not in made:
            made[shape] = torch.randn(shape, dtype=buffer.dtype, device=buffer.device)
        return made[shape]

    with patch.object(lane, "empty_packed", empty):
        yield
