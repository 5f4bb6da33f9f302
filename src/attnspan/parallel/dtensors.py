"""DTensors that hold the shards of a session.

A DTensor that is sharded on the sequence over the session's ranks holds, on each rank, that rank's tokens in the order
of the session's layout; its other mesh axes may shard batch or heads. Attention takes the local tensors, and returns a
DTensor with the query's placements (run_attention.py).

[Note: order in DTensors] `Shard(2)` stands for contiguous chunks in the order of ranks. The tokens here are the
layout's, which are usually not contiguous: ``full_tensor()`` of a result is in the layout's order. Computations on
single tokens are not affected, and `ContextParallel.unshard` of the local tensors restores the order. But DTensor
derives sizes from placements, so a layout whose ranks hold other numbers of tokens than DTensor's chunks is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import AttentionError
from attnspan.transports.distributed import Distributed

if TYPE_CHECKING:  # importing DTensor takes as long as all of this package: only sessions with DTensors pay for it
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from attnspan.parallel.session_spec import SessionSpec

PLAIN = (Tensor, torch.nn.Parameter)

SEQ = 2
"""The dim of the sequence in (B, H, S, D)."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_split(tensor: Tensor) -> bool:
    """Whether it is a DTensor that is sharded on batch rows or heads."""
    return (
        type(tensor) not in PLAIN
        and is_dtensor(tensor)
        and any(p.is_shard(0) or p.is_shard(1) for p in tensor.placements)
    )


def check_dtensors(spec: SessionSpec, tensors: tuple[Tensor, ...], sharded: list[DTensor]) -> None:
    """Refuse DTensors beside plain tensors, and DTensors that do not hold the session's shards."""
    if len(sharded) < len(tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise AttentionError(f"query, key and value must all be DTensors or all plain tensors, got {kinds}")
    for name, x in zip(("query", "key", "value"), sharded, strict=True):
        _check(spec, name, x)
    if len({(x.device_mesh, x.placements) for x in sharded}) > 1:
        placed = ", ".join(str(x.placements) for x in sharded)
        raise AttentionError(f"query, key and value must have one mesh and the same placements, got {placed}")


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    """A DTensor of a known global shape, without asking other ranks."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _check(spec: SessionSpec, name: str, tensor: DTensor) -> None:
    """Refuse a DTensor whose placements are not those of the session's shards."""
    for axis, placement in enumerate(tensor.placements):
        ours = is_ours(spec, tensor.device_mesh, axis)
        if ours and not placement.is_shard(SEQ):
            raise AttentionError(f"{name} must be sharded on dim {SEQ} over the session's ranks, got {placement}")
        if not ours and not (placement.is_replicate() or placement.is_shard(0) or placement.is_shard(1)):
            raise AttentionError(
                f"{name} must be replicated, or sharded on batch or heads, over other mesh axes, got {placement} on "
                f"axis {axis}"
            )
    check_sizes(spec)


def is_ours(spec: SessionSpec, mesh: DeviceMesh, axis: int) -> bool:
    """Whether the ranks along an axis of a mesh are the session's."""
    transport = spec.transport
    if not isinstance(transport, Distributed):
        raise AttentionError("DTensors need a process group; the session's ranks are virtual")
    return dist.get_process_group_ranks(mesh.get_group(axis)) == dist.get_process_group_ranks(transport.group)


def check_sizes(spec: SessionSpec) -> None:
    """Refuse a layout that deals other numbers of tokens than DTensor's chunks have. See [Note: order in DTensors]."""
    found, each = spec.sharding.sizes, -(-spec.seq_len // spec.ranks)
    chunks = [max(0, min(each, spec.seq_len - rank * each)) for rank in range(spec.ranks)]
    if found != chunks:
        raise AttentionError(
            f"a DTensor of {spec.seq_len} tokens has {chunks} on its ranks, the session's layout {found}; use plain "
            f"tensors, or a seq_len that is a multiple of {spec.ranks} and a layout that deals tokens evenly"
        )


def sequence_dim(spec: SessionSpec, tensor: DTensor) -> int | None:
    """The dim that a DTensor is sharded on over the session's ranks; None if it is replicated there."""
    for axis, placement in enumerate(tensor.placements):
        if is_ours(spec, tensor.device_mesh, axis):
            return sharded_dim(placement)
    return None


def sharded_dim(placement: Placement) -> int | None:
    """The dim of a tensor that a placement cuts."""
    dim: int | None = getattr(placement, "dim", None) if placement.is_shard() else None
    return dim
