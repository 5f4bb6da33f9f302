"""How the autograd functions of recurrences are differentiated: once, and outside of autocast.

Gradients are sums in float32, which autocast would round; a second derivative is refused by torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def backward_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``backward`` of an autograd function, to be wrapped by ``staticmethod``."""

    @functools.wraps(backward)
    def outside_autocast(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    found: Callable[..., Any] = once_differentiable(outside_autocast)  # type: ignore[no-untyped-call, unused-ignore]
    return found
