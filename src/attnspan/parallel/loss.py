"""Losses and metrics over tokens that lie on many ranks.

[Note: averages] DDP and FSDP2 average gradients over ranks. A mean over a rank's own tokens would then weigh a token on
a rank with few valid ones more than another, and a rank with none would give NaN. Here the value is the mean over the
valid tokens of all ranks, the same on each, and the gradient of each rank's tokens is `ranks / count`: averaged over
ranks, the gradients of all parameters are those of one device. Training without DDP or FSDP2 averages them with
`ContextParallel.average_gradients`.

[Note: a count of many] A mean over several micro-batches has one count, that of all of them, known before the first
backward. Given as `count`, each micro-batch's loss is its part of the mean, and the parts and their gradients add up.

Shapes: per_token and valid have one shape, any. Sums and counts are taken in float64, so that 2^24 tokens are not one
too few; the result has the values' dtype, float32 for half precision and whole numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import ShardError
from attnspan.parallel.together import heard
from attnspan.transports import Transport

BUCKET = 1 << 25
"""How many bytes of gradients are averaged at once."""


def mean_loss(per_token: Tensor, valid: Tensor | None, transport: Transport, count: Tensor | float | None) -> Tensor:
    """The mean over valid tokens of all ranks; 0 where no rank has any. See [Note: averages]."""
    _check(per_token, transport)
    if not per_token.is_floating_point():
        raise ShardError(f"per_token must be floating point, got {_named(per_token.dtype)}")
    if per_token.dim() == 0:
        raise ShardError("per_token must be one loss for each token, got a single number; use reduction='none'")
    own, number = _summed(per_token, valid)
    loss: Tensor = _Mean.apply(own, number, None if count is None else _counted(count, own), transport)
    return loss.to(_result(per_token))


def mean(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The mean over the valid values of all ranks, without a gradient; NaN where no rank has any."""
    _check(values, transport)
    both = torch.stack([each.double() for each in _summed(values.detach(), valid)])
    transport.all_reduce(both, "a mean").wait()
    return (both[0] / both[1]).to(_result(values))


def total(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The sum over the valid values of all ranks, without a gradient; that of whole numbers is whole."""
    _check(values, transport)
    value, _ = _summed(values.detach(), valid)
    transport.all_reduce(value, "a sum").wait()
    return value.to(_result(values)) if values.is_floating_point() else value


class _Mean(torch.autograd.Function):
    """Sums to the mean over all ranks; each rank's sum has the gradient `ranks / count`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, number: Tensor, count: Tensor | None, transport: Transport) -> Tensor:
        counts = [] if count is None else [count, count * count]
        sums = torch.stack([own, number, *counts])
        transport.all_reduce(sums, "a mean loss").wait()
        count = sums[1] if count is None else _agreed_count(count, sums, transport.ranks)
        ctx.ranks, ctx.count = transport.ranks, count.where(count != 0, 1.0)  # nothing, shared by nobody, is nothing
        return sums[0] / ctx.count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.ranks / ctx.count, None, None, None


def _summed(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the valid values, their number), in float64. What is not valid may be anything, NaN too.

    The sum of whole numbers is a whole number.
    """
    wide = torch.float64 if values.is_floating_point() else torch.int64
    if valid is None:
        return values.sum(dtype=wide), values.new_full((), values.numel(), dtype=torch.float64)
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        said = _named(valid.dtype) if isinstance(valid, Tensor) else type(valid).__name__
        raise ShardError(f"valid must be a bool tensor such as labels != -100, got {said}")
    if valid.shape != values.shape:
        raise ShardError(f"valid must have the shape of the values, {tuple(values.shape)}, got {tuple(valid.shape)}")
    kept = torch.where(valid, values, values.new_zeros(()))
    return kept.sum(dtype=wide), valid.sum(dtype=torch.float64)


def _counted(count: Tensor | float, like: Tensor) -> Tensor:
    """A count of tokens, as a number on the device."""
    given = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    if given.numel() != 1:
        raise ShardError(f"count must be one number, the valid tokens of all ranks, got shape {tuple(given.shape)}")
    return given.detach().reshape(())


def _agreed_count(count: Tensor, sums: Tensor, ranks: int) -> Tensor:
    """A count that is the same on all ranks and above 0, or they all raise; costs a wait for the device."""
    _, number, total, squares = sums.tolist()
    if not (total > 0 and ranks * squares == total * total) and (number or total):
        raise ShardError(
            f"count must be the valid tokens of all micro-batches and ranks, the same number on each, got "
            f"{float(count):g} here and {total / ranks:g} on average"
        )
    return count


def _check(values: Tensor, transport: Transport) -> None:
    if not isinstance(values, Tensor) or values.is_complex():
        said = _named(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        raise ShardError(f"values must be a tensor of real numbers, one of each token, got {said}")
    if values.device != transport.device:
        raise ShardError(f"values must be on {transport.device}, where the group is, got {values.device}")


def _result(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- gradients -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def average_gradients(parameters: Iterable[torch.nn.Parameter], transport: Transport) -> None:
    """Replace every gradient by its average over ranks, in place; one that is missing here counts as zero.

    Ranks must have the same parameters that require gradients. A gradient that no rank has stays None. Sums are taken
    in float32 at least, in rank order: every rank gets the same bits. Of DTensors, local parts are averaged.
    """
    wanting = [parameter for parameter in parameters if parameter.requires_grad]
    flags = "".join("01"[parameter.grad is not None] for parameter in wanting)
    told = heard(transport, _misfit(wanting, transport) or f"{_digest(wanting)} {flags}", "which gradients there are")
    for rank, text in enumerate(told):
        if text.partition(" ")[0] != told[0].partition(" ")[0]:
            raise ShardError(f"ranks must have the same parameters, in one order; those of rank {rank} and 0 differ")
    anywhere = ["1" in column for column in zip(*(text.partition(" ")[2] for text in told), strict=True)]
    for bucket in _buckets(_gradient(parameter) for parameter, there in zip(wanting, anywhere, strict=True) if there):
        _average(bucket, transport)


def _average(grads: Sequence[Tensor], transport: Transport) -> None:
    """Each rank averages its part of all gradients, laid end to end, and hands it to the others."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    parts = flat.tensor_split(transport.ranks)
    own = torch.empty_like(parts[transport.rank], dtype=torch.promote_types(flat.dtype, torch.float32))
    transport.reduce_scatter(parts, own, "gradients of parameters").wait()
    transport.gather((own / transport.ranks).to(flat.dtype), parts, "gradients of parameters").wait()
    for grad, average in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(average.view_as(grad))


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to `BUCKET` bytes together, or one that is larger."""
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or sum(each.nbytes for each in bucket) + grad.nbytes > BUCKET):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """What is stored here of a gradient, made of zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # to import DTensor takes a second
    return local


def _misfit(parameters: Sequence[torch.nn.Parameter], transport: Transport) -> ShardError | None:
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            return ShardError("gradients must be dense to be averaged, got a sparse one; use sparse=False")
        if parameter.device != transport.device:
            return ShardError(f"parameters must be on {transport.device}, where the group is, got {parameter.device}")
    return None


def _digest(parameters: Sequence[torch.nn.Parameter]) -> str:
    told = [(tuple(_local(parameter).shape), _named(parameter.dtype)) for parameter in parameters]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


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
