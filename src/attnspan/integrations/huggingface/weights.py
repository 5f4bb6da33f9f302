"""Whether all ranks have the same model: weights and buffers compared by checksums of their bits.

Ranks whose models have other random weights, or another checkpoint, would compute parts of different models without an
error. Weights that are sharded over ranks are skipped.
"""

from __future__ import annotations

from torch import nn

from attnspan.errors import ModelError
from attnspan.parallel.checksum import Weights
from attnspan.transports import Transport
from attnspan.transports.consensus import heard, odd


def check_same(model: nn.Module, transport: Transport) -> None:
    """ModelError on every rank if their weights or buffers differ."""
    others = odd(heard(transport, Weights(model).content().whole, "checksums of weights"))
    if others:
        raise ModelError(
            f"weights or buffers differ between rank 0 and ranks {others}; every rank must have the same: load one "
            "checkpoint, or set one seed (virtual ranks share torch's random numbers: make the model first, and give "
            "each rank a copy)"
        )
