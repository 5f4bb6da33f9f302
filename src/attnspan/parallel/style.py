"""A ParallelStyle for torch's parallelize_module: attention modules of a model become context parallel.

    parallelize_module(model, mesh, {"layers.*.attention": ContextParallelStyle(cp)})

The module is attached (attach.py). Arguments that are DTensors over the session's ranks, sharded along the sequence or
replicated, are passed to it as local tensors; if any was sharded, tensors that the module returns become DTensors with
its placements. [Note: order in DTensors] in dtensors.py says what such a DTensor stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_leaves, tree_map_only

from attnspan.errors import AttentionError
from attnspan.parallel.attach import Attachment, attach
from attnspan.parallel.dtensors import as_dtensor, check_sizes, sequence_dim, sharded_dim
from attnspan.parallel.session import ContextParallel


class ContextParallelStyle(ParallelStyle):
    """SDPA inside the module is the session's attention, and with `flex=True` flex_attention is too.

    `mask` names one of the session's masks, if it has several.

    ::

        parallelize_module(model, mesh["cp"], {"layers.*.attention": ContextParallelStyle(session)})
    """

    def __init__(self, session: ContextParallel, *, mask: str | None = None, flex: bool = False):
        if not isinstance(session, ContextParallel):
            raise AttentionError(f"ContextParallelStyle needs a ContextParallel, got {type(session).__name__}")
        super().__init__()
        self.session, self.mask, self.flex = session, session.spec.mask_name(mask), flex
        self.attached: list[Attachment] = []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.attached.append(attach(self.session, module, None, self.mask, self.flex, _forward))
        return module

    def use(self, session: ContextParallel) -> ContextParallelStyle:
        """From here on attention is that of another session, in all modules that have the style: see `Attachment.use`.

        Style them all with one ContextParallelStyle.
        """
        for each in self.attached:
            each.use(session)
        self.session = session
        return self

    def __repr__(self) -> str:
        flex = ", flex=True" if self.flex else ""
        return f"ContextParallelStyle({self.session!r}, mask={self.mask!r}{flex})"


def _forward(
    session: ContextParallel, theirs: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """A module's forward on local tensors."""
    sharded = [
        x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor) and sequence_dim(session.spec, x) is not None
    ]
    args, kwargs = tree_map_only(DTensor, functools.partial(_local, session), (args, kwargs))
    out = theirs(*args, **kwargs)
    if not sharded:
        return out
    check_sizes(session.spec)
    return tree_map_only(Tensor, functools.partial(_like, sharded[0]), out)


def _local(session: ContextParallel, tensor: DTensor) -> Tensor:
    dim = sequence_dim(session.spec, tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise AttentionError(f"a DTensor argument must be sharded or replicated, got {tensor.placements}")
    if dim is not None and tensor.shape[dim] != session.seq_len:
        raise AttentionError(
            f"a DTensor argument must be sharded on its {session.seq_len} tokens over the session's ranks, got shape "
            f"{tuple(tensor.shape)} sharded on dim {dim}"
        )
    return tensor.to_local()


def _like(given: DTensor, local: Tensor) -> Tensor:
    """A result as a DTensor placed as an argument was."""
    if isinstance(local, DTensor):
        return local
    shape, theirs = list(local.shape), given.to_local().shape
    for placement in given.placements:
        dim = sharded_dim(placement)
        if dim is not None:
            if dim >= local.dim() or local.shape[dim] != theirs[dim]:
                raise AttentionError(
                    f"a result must have its tokens in dim {dim} like the argument of shape {tuple(theirs)}, got shape "
                    f"{tuple(local.shape)}"
                )
            shape[dim] = given.shape[dim]
    return as_dtensor(local, given.device_mesh, given.placements, tuple(shape))
