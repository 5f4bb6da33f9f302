"""Run an attention of a session on this rank's tensors: the one way from `parallel` into `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attnspan.attention import Attention
from attnspan.attention.inputs import Inputs
from attnspan.attention.latent import Expand
from attnspan.attention.transforms import check_no_tangents, check_no_transform
from attnspan.errors import AttentionError
from attnspan.parallel.dtensors import PLAIN, as_dtensor, check_dtensors, is_dtensor

if TYPE_CHECKING:
    from attnspan.parallel.session_spec import SessionSpec


def run_attention(
    spec: SessionSpec, attend: Attention, inputs: Inputs, expand: Expand | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of plain tensors, or of DTensors as DTensors. With `expand`, key and value are a latent.

    Sinks and captured tensors are the same on every rank and get the sum of all ranks' gradients; each rank takes its
    part, see [Note: averages] in loss.py.
    """
    tensors = inputs[:3]
    plain = all(type(x) in PLAIN for x in tensors)
    sharded = [] if plain else [x for x in tensors if is_dtensor(x)]
    if sharded and expand is not None:
        raise AttentionError("query and latent must be plain tensors, got DTensors; give to_local() of each")
    if sharded:
        check_dtensors(spec, tensors, sharded)
        query, key, value = (x.to_local() for x in sharded)
        inputs = inputs._replace(query=query, key=key, value=value)
    if inputs.sinks is not None:
        inputs = inputs._replace(sinks=_averaged(inputs.sinks, spec.ranks))
    if inputs.captured:
        parts = [_averaged(x, spec.ranks) if x.requires_grad else x for x in inputs.captured]
        inputs = inputs._replace(captured=parts)
    out, lse = attend.run(inputs, expand)
    if not sharded:
        return out, lse
    given = sharded[0]
    mesh, placements, shape = given.device_mesh, given.placements, tuple(given.shape[:3])
    return as_dtensor(out, mesh, placements, (*shape, out.shape[3])), as_dtensor(lse, mesh, placements, shape)


def _averaged(parameter: Tensor, ranks: int) -> Tensor:
    """The parameter, for a use that sums its gradient over ranks: in backward each rank takes 1 / ranks of the sum.

    So averaging gradients over ranks, as DDP and FSDP2 do, is right for it as for every other parameter.
    """
    check_no_transform("attention")
    check_no_tangents("attention", parameter)
    part: Tensor = _AveragedGradient.apply(parameter, ranks)
    return part


class _AveragedGradient(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None
