"""torch's module-level options, and what becomes of them here.

torch reads them whenever an attention runs. Here they are defaults: each is read once, when a context is entered or a
styled module is called, and what is under way keeps what it began with::

    enable_load_balance   the order of shards where no load balancer says it: head-tail, or contiguous
    rotate_method         ALL_GATHER is the strategy "gather": all keys come at once, fewest kernels
                          ALL_TO_ALL is "ring": shards rotate, memory for one other shard at a time
    convert_to_f32        without effect: partial results are always merged in float32

Results do not depend on any of them. Knows nothing of meshes or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from attnspan.errors import AttentionError, one_of


class _RotateMethod(Enum):
    """How keys travel."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


class _CausalBehavior(Enum):
    """What torch's ring does with the keys of one hop; its value is what `is_causal` becomes."""

    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


@dataclass
class _ContextParallelOptions:
    """What `_cp_options` holds; see the module."""

    convert_to_f32: bool = True
    enable_load_balance: bool = True
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER

    @property
    def strategy(self) -> str:
        """Our name for the rotate method."""
        return {_RotateMethod.ALL_GATHER: "gather", _RotateMethod.ALL_TO_ALL: "ring"}[self.rotate_method]


_cp_options = _ContextParallelOptions()

ROTATE_METHODS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}


def set_rotate_method(rotate_method: str) -> None:
    """How keys travel in contexts entered from now on: "allgather" or "alltoall"."""
    name = one_of("rotate_method", rotate_method, ROTATE_METHODS, error=AttentionError)
    _cp_options.rotate_method = ROTATE_METHODS[name]


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """What a rank of torch's ring does with the keys that arrive at hop `i`. Plans here decide by bands instead.

    >>> [_is_causal_behavior(rank=1, world_size=4, i=i, is_causal=True).name for i in range(3)]
    ['IS_CAUSAL', 'NOT_IS_CAUSAL', 'NOT_IS_CAUSAL']
    """
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    # Head-tail shards have something for everyone at every hop; contiguous ones only for later ranks.
    earlier = (rank - i) % world_size < rank
    return _CausalBehavior.NOT_IS_CAUSAL if earlier or _cp_options.enable_load_balance else _CausalBehavior.SKIP
