"""A tiny module of a class of transformers, with random parameters that take nothing from the process's own numbers.

Classes are compared with what is written here on such modules, before a model is enabled or served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Unfilled(TorchFunctionMode):
    """Parameters of modules that are built inside are on the meta device, and draw no random numbers."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        return func(*args, **(given | {"device": "meta"} if func is torch.empty else given))


def filled(build: Callable[[], nn.Module], drawn: torch.Generator) -> nn.Module:
    """What is built, in evaluation mode, its parameters random numbers in float32 on the CPU; buffers are its own."""
    with torch.device("cpu"), _Unfilled():
        whole = build()
    for module in whole.modules():
        for name, each in module.named_parameters(recurse=False):
            numbers = torch.randn(each.shape, generator=drawn, device="cpu", dtype=torch.float32)
            setattr(module, name, nn.Parameter(numbers))
    return whole.eval()
