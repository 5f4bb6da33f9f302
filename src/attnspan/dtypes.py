"""Dtypes: their names, in messages, tables of measured times and where ranks compare; and what sums are kept in."""

from __future__ import annotations

import torch

LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What short names of dtypes stand for."""

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a number, by the names of dtypes that attention is planned for."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype, or of a layout, without torch's.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_or_type(value: object) -> str:
    """What was given where a tensor of some dtype is expected: its dtype, or its type.

    >>> dtype_or_type(torch.ones(2)), dtype_or_type([1.0])
    ('float32', 'list')
    """
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """What lse and sums of gradients are kept in, for tensors of a dtype.

    >>> lse_dtype(torch.bfloat16), lse_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
