"""Planning computes with real tensors, also where those of a model are none: under FakeTensorMode.

A plan is made of numbers that tensors are asked for, and fake ones have none. Modes belong to a thread, so what would
see one is run in a thread of its own, where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def with_real_tensors(fn: Callable[P, T]) -> Callable[P, T]:
    """A function that computes with real tensors, whatever mode is on.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> total = with_real_tensors(lambda numbers: torch.tensor(numbers).sum().item())
    >>> with FakeTensorMode():
    ...     total([1, 2])
    3
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if type(torch.empty(0, device="cpu")) is torch.Tensor:
            return fn(*args, **kwargs)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(fn, *args, **kwargs).result()

    return wrapped
