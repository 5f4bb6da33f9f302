"""What dtypes are called: in messages, in tables of measured times, and where ranks compare what they have."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """The name of a dtype, or of a layout, without torch's.

    >>> import torch
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
