"""Autograd inside of a custom op, where torch has switched it off for everything below.

For what a user's function computes there: a score_mod, or the expansion of a latent, and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnspan.assumptions import Assumption

_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor,
)


@contextmanager
def differentiable() -> Iterator[None]:
    """Autograd, inside of a custom op, where torch has switched it off for everything below."""
    _BELOW.verify()
    with _autograd_back():
        yield


@contextmanager
def _autograd_back() -> Iterator[None]:
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.inference_mode(False), torch.enable_grad():
        yield


def _comes_back() -> bool:
    """Whether autograd, switched off as in a custom op, records inside of `_autograd_back`, and not after it."""
    x = torch.ones(1, device="cpu", requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        with _autograd_back():
            inside = x * 2
            (grad,) = torch.autograd.grad(inside.sum(), x)
        outside = x * 2
    return inside.requires_grad and grad.item() == 2.0 and not outside.requires_grad


_BELOW = Assumption(
    "autograd can be switched on inside a custom op",
    "kernels/autograd.py",
    "`torch._C._ForceDispatchKeyGuard`, the dispatcher's local keys, `DispatchKey.Autograd*`",
    _comes_back,
)
