"""Integers on the host, in memory from which a device can fetch them while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Integers for a device, as int64: pinned if it is a CUDA device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
