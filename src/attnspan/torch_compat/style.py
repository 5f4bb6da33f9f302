"""`_ContextParallel`: a style for `parallelize_module`, for modules that call SDPA or flex_attention on shards.

>>> import torch
>>> import torch.nn.functional as F
>>> from attnspan.testing import loopback
>>> from attnspan.torch_compat import _context_parallel_shard, context_parallel_unshard
>>> class Inner(torch.nn.Module):
...     def forward(self, query, key, value):
...         return F.scaled_dot_product_attention(query, key, value, is_causal=True)
>>> whole = torch.randn(1, 2, 7, 8)
>>> def rank(mesh):
...     inner = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)._apply(Inner(), mesh)
...     (part,) = _context_parallel_shard(mesh, [whole], [2])
...     return context_parallel_unshard(mesh, [inner(part, part, part)], [2])[0]
>>> expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
>>> [torch.allclose(out, expected, atol=1e-6) for out in loopback(ranks=2).run(rank)]
[True, True]

The module's forward runs in a scope of its own, for the order in which `_context_parallel_shard` last cut a batch (see
[Note: order of sequences] in ranks.py). Checkpointing a module that contains it runs that scope again; if another batch
was cut in between, that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import finalize

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_leaves, tree_map_only

from attnspan.errors import AttentionError
from attnspan.parallel import flex_dispatch
from attnspan.torch_compat.allgather import flex_cp_allgather
from attnspan.torch_compat.errors import AttentionAssertion, ShardAssertion
from attnspan.torch_compat.ranks import MeshRanks, ranks_of
from attnspan.torch_compat.ring import check_seq_dim
from attnspan.transports.group import Group


class _ContextParallel(ParallelStyle):
    """Attention of a module over the shards of all ranks; `seq_dim` is that of query, key and value."""

    class AttentionType(Enum):
        """Which attention the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        if not isinstance(attention_type, self.AttentionType):
            names = " or ".join(f"AttentionType.{kind.name}" for kind in self.AttentionType)
            raise AttentionError(f"attention_type must be {names}, got {attention_type!r}")
        check_seq_dim(seq_dim)
        self.seq_dim = seq_dim
        self.attention_type = attention_type

    def _apply(self, module: nn.Module, mesh: Group) -> nn.Module:
        flex = self.attention_type is self.AttentionType.FLEX
        if flex:
            flex_dispatch.install()  # while there is such a module: torch.compile follows a scope without entering it
            finalize(module, flex_dispatch.uninstall)
        ours = functools.partial(_forward, ranks_of(mesh), flex, module.forward)
        module.forward = functools.update_wrapper(ours, module.forward)
        return module

    # ---- torch's hooks, for programs that register them themselves -----------------------------------------------

    def flex_input_fn(self, module: nn.Module | None, args: Any, kwargs: Any, mesh: Group) -> Any:
        """The arguments of flex_attention, with keys and values of all ranks; its BlockMask is this rank's rows."""
        names = ("query", "key", "value")
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        for name in names:
            if not isinstance(given.get(name), Tensor):
                raise AttentionAssertion(f"{name} must be a tensor, got {type(given.get(name)).__name__}")
        group: Any = mesh.get_group().group_name if isinstance(mesh, DeviceMesh) else mesh
        given["key"], given["value"] = flex_cp_allgather(given["key"], given["value"], self.seq_dim, group)
        placed = tuple(given[name] for name in names[: len(args)])
        return placed + tuple(args[len(names) :]), kwargs | {name: given[name] for name in names[len(args) :]}

    def sdpa_input_fn(self, module: nn.Module | None, args: Any, kwargs: Any, mesh: Group) -> Any:
        """The arguments of SDPA as tensors of which SDPA is context parallel: see `SequenceShard`."""
        ranks = ranks_of(mesh)
        placed = [self._placed(each, ranks) for each in (*args, *kwargs.values())]
        return tuple(placed[: len(args)]), dict(zip(kwargs, placed[len(args) :], strict=True))

    def _placed(self, each: Any, ranks: MeshRanks) -> Any:
        if isinstance(each, DTensor):
            if tuple(each.placements) != (Shard(self.seq_dim),):
                raise ShardAssertion(f"a DTensor must be Shard({self.seq_dim}), got {tuple(each.placements)}")
            each = each.to_local()
        return SequenceShard.of(each, ranks) if isinstance(each, Tensor) else each

    def sdpa_output_fn(self, module: nn.Module | None, inputs: Any, outputs: Any, mesh: Group) -> Any:
        """What SDPA returned, as plain tensors."""
        if isinstance(outputs, Tensor):
            return local(outputs)
        return tuple(local(each) if isinstance(each, Tensor) else each for each in outputs)


class SequenceShard(Tensor):
    """A rank's part of a sequence, of which SDPA attends to all ranks' parts. Everything else is as of a plain tensor.

    torch has DTensors here, of which SDPA is context parallel while a dispatcher is enabled. That is on and off
    for the whole process; this is for the tensors that came through the hook.
    """

    ranks: MeshRanks

    @staticmethod
    def of(tensor: Tensor, ranks: MeshRanks) -> SequenceShard:
        """The same tensor, with its ranks."""
        shard = local(tensor).as_subclass(SequenceShard)
        shard.ranks = ranks
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        ranks = next(each.ranks for each in tree_leaves(given) if isinstance(each, SequenceShard))
        args, kwargs = tree_map_only(SequenceShard, local, given)
        if func is not F.scaled_dot_product_attention:
            out = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda x: SequenceShard.of(x, ranks), out)
        with ranks.mode():
            return SequenceShard.of(func(*args, **kwargs), ranks)


def local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, SequenceShard) else tensor


def _forward(ranks: MeshRanks, flex: bool, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ranks.mode(flex):
        out = theirs(*args, **kwargs)
    return tree_map_only(DTensor, DTensor.to_local, out)


def _enable_context_parallel_dispatcher() -> None:
    """For programs that call it. Styled modules work without, and nothing global changes."""


def _disable_context_parallel_dispatcher() -> None:
    """For programs that call it: there is nothing to disable."""
