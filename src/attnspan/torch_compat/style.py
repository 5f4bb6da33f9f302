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

The module's forward runs in a block of its own, for the order in which `_context_parallel_shard` last cut a batch (see
[Note: order] in ranks.py). Checkpointing a module that contains it runs that block again; if another batch was cut in
between, that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import finalize

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only

from attnspan.errors import AttentionError
from attnspan.parallel import seen
from attnspan.torch_compat.ranks import Ranks, ranks_of
from attnspan.transports.group import Group

SEQ_DIM = 2


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
        if seq_dim != SEQ_DIM:
            raise AttentionError(
                f"seq_dim must be {SEQ_DIM}, that of (batch, heads, tokens, head dim), got {seq_dim!r}"
            )
        self.seq_dim = seq_dim
        self.attention_type = attention_type

    def _apply(self, module: nn.Module, mesh: Group) -> nn.Module:
        if self.attention_type is self.AttentionType.FLEX:
            seen.watch()  # for as long as there is such a module: torch.compile follows a block without entering it
            finalize(module, seen.unwatch)
        ours = functools.partial(_forward, ranks_of(mesh), module.forward)
        module.forward = functools.update_wrapper(ours, module.forward)
        return module


def _forward(ranks: Ranks, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ranks.scope():
        out = theirs(*args, **kwargs)
    return tree_map_only(DTensor, DTensor.to_local, out)


def _enable_context_parallel_dispatcher() -> None:
    """For programs that call it. Styled modules work without, and nothing global changes."""


def _disable_context_parallel_dispatcher() -> None:
    """For programs that call it: there is nothing to disable."""
