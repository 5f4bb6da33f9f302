"""Dtypes: their names, in messages, tables of measured times and where ranks compare; and what sums are kept in."""

from __future__ import annotations

import torch

LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What short names of dtypes stand for."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype, or of a layout, without torch's.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """What lse and sums of gradients are kept in, for tensors of a dtype.

    >>> lse_dtype(torch.bfloat16), lse_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
