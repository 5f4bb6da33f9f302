"""Whether all ranks have the same model: weights compared by sums of their bits.

Ranks whose models were made with other random numbers, or loaded from another checkpoint, would compute parts of
different models, and nobody would notice. Bits are added as whole numbers, whose sum no order changes: equal weights
have equal sums on any device. Weights that lie in parts on the ranks (DTensors, FSDP and the like) are passed over.

Not seen: the same numbers in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnspan.errors import ModelError
from attnspan.transports import Transport

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


def checksum(model: nn.Module) -> str:
    """The same for the same weights.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> checksum(one) == checksum(other)
    False
    >>> _ = other.load_state_dict(one.state_dict())
    >>> checksum(one) == checksum(other)
    True
    """
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        return ""  # FSDP1: parts that look like wholes
    whole = [each.detach() for each in model.parameters() if _is_whole(each)]
    with torch.no_grad():
        sums = [_bits(each).sum(dtype=torch.int64).cpu() for each in whole]
    return " ".join(f"{int(each):x}" for each in sums)


def check_same(model: nn.Module, transport: Transport) -> None:
    """ModelError on every rank if their weights differ."""
    told = transport.agree(checksum(model).encode(), "sums of weights")
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise ModelError(
            f"weights differ between rank 0 and ranks {others}; every rank must have the same: load one checkpoint, or "
            "set one seed (virtual ranks share torch's random numbers: make the model first, and give each rank a copy)"
        )


def _bits(weight: Tensor) -> Tensor:
    numbers = torch.view_as_real(weight) if weight.is_complex() else weight
    return numbers.contiguous().view(BITS[numbers.element_size()])


def _is_whole(weight: Tensor) -> bool:
    """Not a DTensor or another tensor that wraps some, nor one of ZeRO-3's, nor one without numbers yet."""
    wraps = is_traceable_wrapper_subclass(weight) or hasattr(weight, "to_local") or hasattr(weight, "ds_id")
    return not (wraps or weight.is_meta or weight.layout != torch.strided)
