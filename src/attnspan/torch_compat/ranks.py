"""What is known of a mesh: how sequences lie on its ranks at present, and what was made for them.

[Note: order] torch's signatures cut a sequence in one place and attend to it in another, and nothing that is passed
from the one to the other tells which positions a shard holds. torch keeps that in a module-level flag, which the latest
`_context_parallel_shard` of any mesh sets. Here it is an `Order`, kept for each mesh: `context_parallel` sets it for as
long as it lasts, `_context_parallel_shard` until the next call. Attention that runs under either takes the order when
it begins. Two meshes never share one; two batches in different order on one mesh, sharded before either is attended to,
cannot be told apart by these signatures: use `ContextParallel`, which has no such state.

Sessions are made once for each order and remembered for each mesh, so that ranks forget alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import AttentionError, ShardError
from attnspan.layouts import Contiguous, HeadTail, Layout
from attnspan.parallel.sdpa import Scope
from attnspan.parallel.session import ContextParallel
from attnspan.torch_compat.options import _cp_options
from attnspan.torch_compat.sdpa import MASKS, Either, Later, Lifetime
from attnspan.transports import Transport
from attnspan.transports.group import Group, transport_of


@dataclass(frozen=True, slots=True)
class Order:
    """How a sequence lies on ranks: its layout, and its length where that is known. See [Note: order]."""

    layout: Layout
    seq_len: int | None = None


class Ranks:
    """The ranks of one mesh, seen from this one."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self.latest: Order | None = None
        self.served: Either | None = None  # of the latest order, if its length is known: torch.compile cannot ask
        self.lifetimes: list[Lifetime] = []  # of the contexts that are entered
        self.cut: list[Tensor] = []  # buffers that are shards in place, and will be whole again
        self.contexts = 0  # that ended
        self.session = functools.lru_cache(maxsize=256)(self._session)
        self.either = functools.lru_cache(maxsize=256)(self._either)

    # ---- order ---------------------------------------------------------------------------------------------------

    @property
    def order(self) -> Order:
        """That of the context around, or of the latest shard call, or the options'."""
        return self.latest or self.default(None)

    def default(self, seq_len: int | None) -> Order:
        """Where no load balancer says it: head-tail, unless the options balance nothing."""
        ranks = self.transport.ranks
        return Order(HeadTail(ranks) if _cp_options.enable_load_balance else Contiguous(ranks), seq_len)

    def use(self, order: Order) -> None:
        """From here on sequences lie in this order. The options are read."""
        self.latest = order
        self.served = None if order.seq_len is None else self.either(order, _cp_options.strategy)

    @contextmanager
    def ordered(self, order: Order) -> Iterator[None]:
        """Under this order, and then again under the one before; SDPA inside is context parallel."""
        before = self.latest, self.served
        self.use(order)
        scope = Scope(self._serving(order, guarded=True))
        lifetime = Lifetime(scope)
        self.lifetimes.append(lifetime)
        try:
            with scope:
                yield
        finally:
            lifetime.over = True
            self.lifetimes.pop()
            self.latest, self.served = before

    def length(self, layout: Layout, tokens: int, wanted: int | None = None) -> int:
        """The length of a sequence of which each rank has some tokens; they tell each other. All refuse, or none."""
        sizes = [int(said) for said in self.transport.agree(str(tokens).encode(), "the length of a sequence")]
        length, wanted = sum(sizes), wanted or layout.natural_len
        if not length or wanted not in (None, length) or layout.tokens(length) != sizes:
            of = "" if wanted is None else f" of {wanted}"
            raise ShardError(
                f"shards of {sizes} tokens are no sequence{of} in {layout!r}; pass the load balancer they were cut by"
            )
        return length

    # ---- what is made for an order -------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """A block in which SDPA is context parallel, for sequences in the latest order."""
        return Scope(self.served or self._serving(self.order))

    def _serving(self, order: Order, guarded: bool = False) -> Any:
        strategy = _cp_options.strategy
        if order.seq_len is not None:
            return self.either(order, strategy, guarded)
        return Later(lambda tokens: self.either(self._measured(order, tokens), strategy, guarded))

    def _measured(self, order: Order, tokens: int) -> Order:
        return Order(order.layout, self.length(order.layout, tokens))

    def _session(self, layout: Layout, seq_len: int, strategy: str = "gather") -> ContextParallel:
        return ContextParallel(self.transport, seq_len=seq_len, mask=MASKS, layout=layout, strategy=strategy)

    def _either(self, order: Order, strategy: str, guarded: bool = False) -> Either:
        assert order.seq_len is not None, "asked once the length is known"
        return Either(self.session(order.layout, order.seq_len, strategy), self._guard if guarded else None)

    def _guard(self) -> None:
        if self.lifetimes:  # a compiled backward pass may run the op again when there is none: it has all that it needs
            self.lifetimes[-1].guard()

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copy of a model stays on its mesh


def ranks_of(mesh: Group) -> Ranks:
    """The ranks of a mesh of one axis; a process group or a virtual world will do as well."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f"take the one that splits the sequence, as in mesh[{names[-1]!r}]" if names else "take one of them"
        raise AttentionError(f"mesh must have one axis, got {mesh.ndim} of {tuple(mesh.shape)}; {hint}")
    return _known(transport_of(mesh))


@functools.lru_cache(maxsize=1024)
def _known(transport: Transport) -> Ranks:
    return Ranks(transport)
