"""torch's module-level options, and what becomes of them here.

torch reads them whenever an attention runs. Here they are defaults: each is read once, when a context is entered or a
styled module is called, and what is under way keeps what it began with::

    enable_load_balance   the order of shards where no load balancer says it: head-tail, or contiguous
    rotate_method         ALL_GATHER is the strategy "gather": all keys come at once, fewest kernels
                          ALL_TO_ALL is "ring": shards rotate, memory for one other shard at a time
    convert_to_f32        without effect: partial results are always merged in float32

Results do not depend on any of them. Knows nothing of meshes or tensors.

[Note: a process each] torch's options belong to a process, and a real rank is one. A virtual rank shares its process
with others, so what it sets is its own; what it has not set is the process's.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

from attnspan.errors import one_of
from attnspan.torch_compat.errors import AttentionNotImplemented
from attnspan.transports.loopback import VIRTUAL, World


class _RotateMethod(Enum):
    """How keys travel."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


class _CausalBehavior(Enum):
    """What torch's ring does with the keys of one hop; its value is what `is_causal` becomes."""

    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


class _Option:
    """An attribute that virtual ranks set for themselves. See [Note: a process each]."""

    def __init__(self, default: Any):
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, options: _ContextParallelOptions | None, owner: type | None = None) -> Any:
        return self.default if options is None else options._value(self.name)

    def __set__(self, options: _ContextParallelOptions, value: Any) -> None:
        options._values()[self.name] = value
        if self.name == "enable_load_balance":
            options._values()["declared"] = options.declared + 1


class _ContextParallelOptions:
    """What `_cp_options` holds; see the module."""

    convert_to_f32 = _Option(True)
    enable_load_balance = _Option(True)
    rotate_method = _Option(_RotateMethod.ALL_GATHER)

    def __init__(self) -> None:
        options = [each for each in vars(_ContextParallelOptions).values() if isinstance(each, _Option)]
        self._process: dict[str, Any] = {option.name: option.default for option in options} | {"declared": 0}
        self._virtual: WeakKeyDictionary[World, dict[str, Any]] = WeakKeyDictionary()

    @property
    def strategy(self) -> str:
        """Our name for the rotate method."""
        return {_RotateMethod.ALL_GATHER: "gather", _RotateMethod.ALL_TO_ALL: "ring"}[self.rotate_method]

    @property
    def declared(self) -> int:
        """How often the program has said whether sequences are balanced. See [Note: order of sequences] in ranks.py."""
        times: int = self._value("declared")
        return times

    def _value(self, name: str) -> Any:
        return self._values().get(name, self._process[name])

    def _values(self) -> dict[str, Any]:
        world = VIRTUAL.get()
        return self._process if world is None else self._virtual.setdefault(world, {})


_cp_options = _ContextParallelOptions()

ROTATE_METHODS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}


def set_rotate_method(rotate_method: str) -> None:
    """How keys travel in contexts entered from now on: "allgather" or "alltoall"."""
    name = one_of("rotate_method", rotate_method, ROTATE_METHODS, error=AttentionNotImplemented)
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
