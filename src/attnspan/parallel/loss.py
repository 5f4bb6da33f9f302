"""Losses and metrics over tokens that lie on many ranks.

[Note: averages] DDP and FSDP2 average gradients over ranks. With a mean over each rank's own tokens, tokens on ranks
with few valid ones would weigh more, and a rank with none would give NaN. Here the value is the mean over the valid
tokens of all ranks, the same on each, and the gradient of each rank's tokens is `ranks / count`: averaged over ranks,
the gradients of all parameters are those of one device. Training without DDP or FSDP2 averages them with
`ContextParallel.average_gradients`.

[Note: a count of many] With gradient accumulation, the mean is over the tokens of all micro-batches, whose number must
be known before the first backward. With that number as `count`, the losses of micro-batches, and their gradients, add
up to the mean's. The count must be taken over the same ranks as the mean. So a sum remembers its ranks (in a table by
identity, like marks.py), and a count summed over other ranks is refused. With `over`, a count must be such a sum: a
plain number does not tell whose tokens it counts.

[Note: one row each] Each rank sends a record of what it computes, or that it refuses, from host to host, and
contributes one row of three integers: the bits of its sum, its number of valid tokens, and the bits of its count. Every
rank compares all records and rows, so all proceed or all raise. Only counts are read on the host, which waits for the
device. The text of an error is exchanged only after a refusal.

Shapes: per_token and valid have one shape, any. Sums are taken in float64 and numbers of tokens in int64, so that 2^24
tokens are not one too few; the result has the values' dtype, float32 for half precision and whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnspan.attention.transforms import check_untransformed
from attnspan.dtypes import dtype_name, dtype_or_type, lse_dtype
from attnspan.errors import ShardError, TransportError
from attnspan.masks.versions import version_of
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object, differing_ranks, digest
from attnspan.transports.operations import enter_operation

BUCKET = 1 << 25
"""How many bytes of gradients are averaged at once."""

STOPS = tuple(filter(None, [getattr(torch.utils.checkpoint, "_StopRecomputationError", None)]))
"""How activation checkpointing ends a second run that has computed enough, on every rank at the same place."""

KINDS = ("a mean loss", "a mean", "a sum", "a sum of whole numbers")
"""What is computed over ranks."""


def mean_loss(
    per_token: Tensor, valid: Tensor | None, transport: Transport, count: Tensor | float | None, within: Transport
) -> Tensor:
    """The mean over valid tokens of all ranks; 0 where no rank has any. See [Note: averages].

    `within` are the session's ranks, among those of `transport`.
    """

    def share() -> LocalSum:
        _check(per_token, transport)
        if not per_token.is_floating_point():
            raise ShardError(f"per_token must be floating point, got {dtype_name(per_token.dtype)}")
        if per_token.dim() == 0:
            raise ShardError("per_token must be one loss for each token, got a single number; use reduction='none'")
        found = _summed(per_token, valid)
        return found if count is None else found._replace(divisor=_counted(count, transport, within))

    own, rows = _exchanged("a mean loss", share, transport)
    by = rows.number.sum() if own.divisor is None else own.divisor
    by = by.where(by != 0, 1).double()  # the mean over no tokens is 0
    loss: Tensor = _Mean.apply(own.sum, rows.sum.sum() / by, transport.ranks / by)
    return loss.to(lse_dtype(per_token.dtype))


def mean(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The mean over the valid values of all ranks, without a gradient; NaN where no rank has any."""

    def share() -> LocalSum:
        _check(values, transport)
        found = _summed(values.detach(), valid)
        return found._replace(sum=found.sum.double())

    _, rows = _exchanged("a mean", share, transport)
    return (rows.sum.sum() / rows.number.sum()).to(lse_dtype(values.dtype))


def total(values: Tensor, valid: Tensor | None, transport: Transport) -> Tensor:
    """The sum over the valid values of all ranks, without a gradient; that of whole numbers is whole."""

    def share() -> LocalSum:
        _check(values, transport)
        return _summed(values.detach(), valid)

    real = isinstance(values, Tensor) and values.is_floating_point()
    _, rows = _exchanged("a sum" if real else "a sum of whole numbers", share, transport)
    value = rows.sum.sum()
    return summed_over(value.to(lse_dtype(values.dtype)) if real else value, transport)


class _Mean(torch.autograd.Function):
    """The mean over all ranks as a function of this rank's sum, whose gradient is `ranks / count`."""

    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor, slope: Tensor) -> Tensor:
        ctx.slope = slope
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.slope, None, None


# ---- what ranks bring ------------------------------------------------------------------------------------------------


class LocalSum(NamedTuple):
    """What one rank brings: the sum of its valid values, their number, and a count if one was given."""

    sum: Tensor  # float64, or int64 for whole numbers
    number: Tensor  # int64
    divisor: Tensor | None = None  # float64


class RankSums(NamedTuple):
    """What all ranks brought, by rank."""

    sum: Tensor
    number: Tensor


def _exchanged(kind: str, share: Callable[[], LocalSum], transport: Transport) -> tuple[LocalSum, RankSums]:
    """This rank's share and everybody's, or an error on all ranks. See [Note: one row each]."""
    wrong, own, row = None, None, torch.ones(3, dtype=torch.int64, device=transport.device)
    try:
        own = share()
        row = _row(own)
    except STOPS:
        raise
    except Exception as error:  # whatever it is, the others wait for this rank's row
        wrong = error
    rows = row.new_empty(transport.ranks, len(row))
    said = [wrong is not None, KINDS.index(kind), own is not None and own.divisor is not None]
    try:
        with enter_operation(transport, "a sum or a mean over ranks"):
            transport.gather(row, list(rows), kind).wait()  # on a device, in the order of its stream
            told = _told(said, transport.hosts)
        _check_said(told, wrong, transport)
        if said[-1]:
            _check_counts(rows[:, 2].view(torch.float64).tolist(), int(rows[:, 1].sum()))
    except (TransportError, ShardError) as heard_of:
        if wrong is None:
            raise
        raise wrong from (heard_of if isinstance(heard_of, TransportError) else None)
    finally:
        del wrong  # its traceback holds this frame, and whatever autograd holds would never be freed
    assert own is not None, "a rank that has none refuses, and so do all"
    sums = rows[:, 0]
    return own, RankSums(sums.view(torch.float64) if own.sum.is_floating_point() else sums, rows[:, 1])


def _row(share: LocalSum) -> Tensor:
    """See [Note: one row each]."""
    count = share.number if share.divisor is None else _bits(share.divisor)
    return torch.stack([_bits(share.sum.detach()), share.number, count])


def _told(said: Sequence[int], hosts: Transport) -> list[list[int]]:
    """What every rank says, by rank."""
    own = torch.tensor(said, dtype=torch.int64, device=hosts.device)
    every = own.new_empty(hosts.ranks, len(said))
    hosts.gather(own, list(every), "what is asked for").wait()
    return every.tolist()


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.int64)


def _check_said(told: list[list[int]], wrong: Exception | None, transport: Transport) -> None:
    """Raise on every rank if any refuses, or if they do not ask for the same."""
    refused, kinds, given = zip(*told, strict=True)
    if any(refused):
        said = wrong if isinstance(wrong, ShardError) else ShardError(f"{type(wrong).__name__}: {wrong}")
        all_gather_object(transport, "nothing" if wrong is None else said, "what is wrong")
    for rank in differing_ranks(kinds):
        kind, usual = KINDS[kinds[rank]], KINDS[kinds[0]]
        raise ShardError(f"all ranks must ask for the same; rank {rank} asks for {kind}, rank 0 for {usual}")
    for rank in differing_ranks(given):
        raise ShardError(f"count must be given on all ranks or on none; ranks {rank} and 0 differ")


def _check_counts(counts: list[float], number: int) -> None:
    """Refuse counts that differ, and one of nothing where there are tokens."""
    odd = next((rank for rank, count in enumerate(counts) if count != counts[0]), 0)
    here = counts[0]
    if odd or not (0 < here < math.inf or (here == 0 and number == 0)):
        said = f"{here:.17g} on rank 0 and {counts[odd]:.17g} on rank {odd}" if odd else f"{here:.17g}"
        raise ShardError(
            f"count must be the valid tokens of all micro-batches and ranks, the same number on each, got {said}"
        )


def _summed(values: Tensor, valid: Tensor | None) -> LocalSum:
    """The sum of the valid values, and their number. What is not valid may be anything, NaN too.

    The sum of whole numbers is a whole number.
    """
    wide = torch.float64 if values.is_floating_point() else torch.int64
    if valid is None:
        return LocalSum(values.sum(dtype=wide), values.new_full((), values.numel(), dtype=torch.int64))
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        raise ShardError(f"valid must be a bool tensor such as labels != -100, got {dtype_or_type(valid)}")
    if valid.shape != values.shape:
        raise ShardError(f"valid must have the shape of the values, {tuple(values.shape)}, got {tuple(valid.shape)}")
    if valid.device != values.device:
        raise ShardError(f"valid must be on {values.device} like the values, got {valid.device}")
    kept = torch.where(valid, values, values.new_zeros(()))
    return LocalSum(kept.sum(dtype=wide), valid.sum())


def _check(values: Tensor, transport: Transport) -> None:
    if not isinstance(values, Tensor) or values.is_complex():
        got = dtype_or_type(values)
        raise ShardError(f"values must be a tensor of real numbers, one of each token, got {got}")
    if values.device != transport.device:
        raise ShardError(f"values must be on {transport.device}, where the group is, got {values.device}")
    check_untransformed("a mean or a sum over ranks", values, error=ShardError)


# ---- counts ----------------------------------------------------------------------------------------------------------


class _Ranks(NamedTuple):
    """Over which ranks a tensor was summed, and its version then: what is changed in place is no longer that sum."""

    transport: Transport
    version: int


_SUMS = WeakTensorKeyDictionary()


def summed_over(count: Tensor, transport: Transport) -> Tensor:
    """The tensor, known to be a sum over these ranks. See [Note: a count of many]."""
    _SUMS[count] = _Ranks(transport, version_of(count))
    return count


def _counted(count: Tensor | float, transport: Transport, within: Transport) -> Tensor:
    """A count of tokens, as a number on the device; refused unless it was taken over the ranks of `transport`."""
    ranks: _Ranks | None = None
    if isinstance(count, Tensor):
        ranks = _SUMS.get(count)
        if ranks is not None and ranks.version != version_of(count):
            ranks = None
    if ranks is not None and not _same(ranks.transport, transport):
        raise ShardError(
            f"count must be taken over the ranks of the mean, {transport!r}, got a sum over {ranks.transport!r}; give "
            "cp.sum and cp.mean_loss the same over="
        )
    if ranks is None and not _same(within, transport):
        said = "a tensor that cp.sum did not return" if isinstance(count, Tensor) else repr(count)
        raise ShardError(
            "count must be what cp.sum(..., over=) returned for the same ranks where over= is given, got "
            f"{said}; count all micro-batches in one call, cp.sum(torch.cat([valid.flatten() for valid in valids]), "
            "over=...), or hand in a number of your own, cp.sum(torch.tensor(tokens of this rank), over=...)"
        )
    try:
        given = torch.as_tensor(count, dtype=torch.float64, device=transport.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShardError(f"count must be one number, the valid tokens of all ranks, got {count!r}") from error
    if given.numel() != 1:
        raise ShardError(f"count must be one number, the valid tokens of all ranks, got shape {tuple(given.shape)}")
    return given.detach().reshape(())


def _same(first: Transport, second: Transport) -> bool:
    """Whether two groups have the same ranks."""
    return first.ranks == second.ranks and first.contains(second)


# ---- gradients -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def average_gradients(parameters: Iterable[torch.nn.Parameter], transport: Transport) -> None:
    """Replace every gradient by its average over ranks, in place; one that is missing here counts as zero.

    Ranks must have the same parameters that require gradients. A gradient that no rank has stays None. Sums are taken
    in float32 at least, in rank order: every rank gets the same bits. Of DTensors, local parts are averaged.
    """
    wanting = [parameter for parameter in parameters if parameter.requires_grad]
    flags = "".join("01"[parameter.grad is not None] for parameter in wanting)
    own = _misfit(wanting, transport) or (_digest(wanting), flags)
    told = all_gather_object(transport, own, "which gradients there are")
    digests, flags_by_rank = zip(*told, strict=True)
    for rank in differing_ranks(digests):
        raise ShardError(f"ranks must have the same parameters, in one order; those of rank {rank} and 0 differ")
    anywhere = ["1" in column for column in zip(*flags_by_rank, strict=True)]
    for bucket in _buckets(_gradient(parameter) for parameter, there in zip(wanting, anywhere, strict=True) if there):
        _average(bucket, transport)


def _average(grads: Sequence[Tensor], transport: Transport) -> None:
    """Each rank averages its part of all gradients, laid end to end, and hands it to the others."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    parts = flat.tensor_split(transport.ranks)
    own = torch.empty_like(parts[transport.rank], dtype=torch.promote_types(flat.dtype, torch.float32))
    with enter_operation(transport, f"the average of {len(flat)} gradients"):
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
    told = [(tuple(_local(parameter).shape), dtype_name(parameter.dtype)) for parameter in parameters]
    return digest(told)
