"""Cut buffers, and put them back together: out of place, and both with a gradient.

`_context_parallel_shard` also tells its mesh the order in which sequences lie from then on: see [Note: order of
sequences] in ranks.py.

[Note: tables] Where a length is given, by a load balancer or by a context's first buffer, a buffer whose sequence is
its first dim may be longer: it is a table, such as that of rotary embeddings, and its first rows are those of the
sequence, as in torch. Anything else must have that length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import ShardError
from attnspan.parallel.marks import mark_of
from attnspan.parallel.session import ContextParallel
from attnspan.torch_compat.balancers import _LoadBalancer, layout_of
from attnspan.torch_compat.errors import ShardAssertion
from attnspan.torch_compat.flex import block_mask_part
from attnspan.torch_compat.ranks import Order, ranks_of
from attnspan.transports.group import Group

CPBuffer = Tensor | BlockMask
CPBufferContainer = Sequence[CPBuffer] | Mapping[str, CPBuffer]
CPBufferSeqDims = Sequence[int] | Mapping[str, int]


def _context_parallel_shard(
    mesh: Group,
    buffers: CPBufferContainer,
    seq_dims: CPBufferSeqDims,
    load_balancer: _LoadBalancer | None = None,
) -> Any:
    """This rank's part of every buffer, in the container that they came in.

    Without a load balancer each rank gets one span of each buffer, whatever its length. With one, buffers have the load
    balancer's length; see [Note: tables]. Of a BlockMask it is this rank's rows, in the order of the other buffers.
    """
    pairs = paired(buffers, seq_dims)
    ranks = ranks_of(mesh)
    layout, seq_len = layout_of(load_balancer, ranks.transport.ranks)
    devices = {str(_device(buffer)) for buffer, _ in pairs.values()}
    if len(devices) > 1:
        raise ShardAssertion(f"buffers must be on one device, got {sorted(devices)}")
    lengths = {
        buffer.seq_lengths[0] if isinstance(buffer, BlockMask) else length_of(buffer, dim)
        for buffer, dim in pairs.values()
    }
    parts: dict[Any, CPBuffer] = {}
    for name, (buffer, dim) in pairs.items():
        if isinstance(buffer, BlockMask):
            parts[name] = block_mask_part(buffer, ranks, layout)
        else:
            parts[name] = part_of(buffer, dim, ranks.session(layout, seq_len or length_of(buffer, dim)))
    order = Order(layout, seq_len or (lengths.pop() if len(lengths) == 1 else None))
    ranks.cut_by_call(order, balanced=load_balancer is not None)
    kind: Any = type(buffers)
    return parts if isinstance(buffers, Mapping) else kind(parts.values())


def context_parallel_unshard(
    mesh: Group,
    buffers: list[Tensor],
    seq_dims: list[int],
    load_balancer: _LoadBalancer | None = None,
) -> list[Tensor]:
    """The whole tensors on every rank, from everybody's parts. Differentiable.

    Without a load balancer, parts lie in the order that this mesh has cut in; where it has cut in several, that is
    refused: see [Note: order of sequences] in ranks.py.
    """
    ranks = ranks_of(mesh)
    said = None if load_balancer is None else layout_of(load_balancer, ranks.transport.ranks)
    whole = []
    for buffer, dim in paired(buffers, seq_dims).values():
        sizes, mark = ranks.sizes(length_of(buffer, dim)), mark_of(buffer)
        if said is not None:
            layout, wanted = said
        else:
            layout, wanted = ranks.layout_of_shards(sizes) if mark is None else mark.layout, None
        whole.append(ranks.session(layout, ranks.length(layout, sizes, wanted)).unshard(buffer, dim))
    return whole


# ---- one buffer ----------------------------------------------------------------------------------------------------


def _device(buffer: object) -> object:
    if isinstance(buffer, BlockMask):
        return buffer.kv_num_blocks.device
    return buffer.device if isinstance(buffer, Tensor) else None


def paired(buffers: Any, seq_dims: Any, name: str = "seq_dims") -> dict[Any, tuple[Any, Any]]:
    """Every buffer and its dim, by place, or by name where they have names."""
    listed = isinstance(buffers, Sequence) and isinstance(seq_dims, Sequence)
    if not listed and not (isinstance(buffers, Mapping) and isinstance(seq_dims, Mapping)):
        kinds = f"{type(buffers).__name__} and {type(seq_dims).__name__}"
        raise ShardError(f"buffers and {name} must be two lists or two dicts, got {kinds}")
    places, dims = (range(len(buffers)), range(len(seq_dims))) if listed else (list(buffers), list(seq_dims))
    if set(places) != set(dims):
        raise ShardError(f"{name} must have one dim for each of the buffers, {list(places)}, got {list(dims)}")
    return {place: (buffers[place], seq_dims[place]) for place in places}


def length_of(buffer: object, dim: object) -> int:
    """How long a buffer is along the sequence."""
    if not isinstance(buffer, Tensor):
        raise ShardError(f"buffers must be tensors, got {type(buffer).__name__}")
    if not isinstance(dim, int) or not -buffer.dim() <= dim < buffer.dim():
        raise ShardError(
            f"a buffer's dim must be one of its {buffer.dim()}, got {dim!r} for shape {tuple(buffer.shape)}"
        )
    return buffer.shape[dim]


def part_of(buffer: Tensor, dim: int, session: ContextParallel) -> Tensor:
    """This rank's part of a buffer. See [Note: tables]."""
    part: Tensor = session.shard(_rows_of(buffer, dim, session), dim)
    return part


def part_on(rank: int, buffer: Tensor, dim: int, session: ContextParallel) -> Tensor:
    """A rank's part of a buffer that is whole here, to compare with."""
    return session.sharding.shard_on(rank, _rows_of(buffer, dim, session), dim)


def _rows_of(buffer: Tensor, dim: int, session: ContextParallel) -> Tensor:
    """Those of the sequence. See [Note: tables]."""
    is_table = dim in (0, -buffer.dim()) and length_of(buffer, dim) > session.seq_len
    return buffer.narrow(0, 0, session.seq_len) if is_table else buffer
