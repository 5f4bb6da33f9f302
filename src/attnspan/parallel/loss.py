"""Losses and metrics over tokens that lie on many ranks.

[Note: averages] DDP and FSDP2 average gradients over ranks. A mean over a rank's own tokens would then weigh a token on
a rank with few valid ones more than another, and a rank with none would give NaN. Here the value is the mean over the
valid tokens of all ranks, the same on each, and the gradient of each rank's tokens is `ranks / count`: averaged over
ranks, the gradients of all parameters are those of one device. Training without DDP or FSDP2 averages them with
`ContextParallel.average_gradients`.

Shapes: per_token and valid have one shape, any; sums are taken in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import ShardError
from attnspan.transports import Transport


def mean_loss(per_token: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The mean over valid tokens of all ranks; 0 where no rank has any. See [Note: averages]."""
    total, count = _summed(per_token, valid)
    loss: Tensor = _Mean.apply(total, count, transport)
    return loss


def mean(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The mean over the valid values of all ranks, without a gradient; NaN where no rank has any."""
    both = torch.stack(_summed(values.detach(), valid))
    transport.all_reduce(both, "a mean").wait()
    return both[0] / both[1]


def total(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The sum over the valid values of all ranks, without a gradient."""
    value, _ = _summed(values.detach(), valid)
    transport.all_reduce(value, "a sum").wait()
    return value


def average_gradients(parameters: Iterable[torch.nn.Parameter], transport: Transport) -> None:
    """Replace every gradient by its average over ranks; one that is missing here counts as zero.

    Ranks must have the same parameters that require gradients. A gradient that no rank has stays None.
    """
    tensors = [parameter for parameter in parameters if parameter.requires_grad]
    has = torch.tensor([float(p.grad is not None) for p in tensors], device=transport.device)
    transport.all_reduce(has, "which gradients there are").wait()
    for parameter, anyone in zip(tensors, has.tolist(), strict=True):
        if anyone:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            transport.all_reduce(grad, "gradients of parameters").wait()
            parameter.grad = grad / transport.ranks


class _Mean(torch.autograd.Function):
    """Sums to the mean over all ranks; each rank's sum has the gradient `ranks / count`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, transport: Transport) -> Tensor:
        both = torch.stack([total, count])
        transport.all_reduce(both, "a mean loss").wait()
        ctx.ranks = transport.ranks
        ctx.save_for_backward(both[1])
        return both[0] / both[1].clamp(min=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (count,) = ctx.saved_tensors
        return grad * ctx.ranks / count.clamp(min=1), None, None


def _summed(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the valid values, their number). A value that is not valid may be anything, NaN too."""
    if not values.is_floating_point():
        values = values.to(torch.float32)
    if valid is None:
        valid = torch.ones_like(values, dtype=torch.bool)
    if valid.shape != values.shape:
        raise ShardError(f"valid must have the shape of the values, {tuple(values.shape)}, got {tuple(valid.shape)}")
    if valid.dtype != torch.bool:
        raise ShardError(f"valid must be a bool tensor, got {str(valid.dtype).removeprefix('torch.')}")
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.where(valid, values, 0.0).to(wide).sum(), valid.sum().to(wide)


def shared(parameter: Tensor, ranks: int) -> Tensor:
    """The parameter, for a use that sums its gradient over ranks: each rank then takes its part of the sum.

    So what averages gradients over ranks finds `ranks` equal parts, as it finds for every other parameter.
    """
    part: Tensor = _Shared.apply(parameter, ranks)
    return part


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None
