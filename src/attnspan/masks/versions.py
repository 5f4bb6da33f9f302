"""The version of a tensor, which torch counts up with every write in place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from attnspan.assumptions import Assumption


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for those of inference mode, which are not counted."""
    VERSIONS.verify()
    return 0 if tensor.is_inference() else tensor._version


def _counts() -> bool:
    tensor, found = torch.zeros(2, device="cpu"), []
    writes: list[Callable[[], object]] = [
        lambda: None,
        lambda: tensor.add_(1.0),
        lambda: tensor[1:].mul_(2.0),  # through a view
        lambda: tensor.copy_(torch.ones(2, device="cpu")),
    ]
    for write in writes:
        write()
        found.append(tensor._version)
    return all(before < after for before, after in pairwise(found))


VERSIONS = Assumption(
    "a write in place raises the version of a tensor",
    "masks/versions.py",
    "`Tensor._version`",
    _counts,
)
