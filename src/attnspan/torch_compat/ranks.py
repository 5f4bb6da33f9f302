"""What is known of a mesh: how sequences lie on its ranks at present, and what was made for them.

[Note: order of sequences] torch's signatures cut a sequence in one place and attend to it in another, and nothing that
is passed from the one to the other tells which positions a shard holds. torch keeps that in a module-level flag, which
the latest `_context_parallel_shard` of any mesh sets. Here it is an `Order`, kept for each mesh, and it answers two
questions:

- How is a sequence cut where no load balancer is given? `context_parallel` and `_create_cp_block_mask` follow the
  flag, and like torch's they follow a later shard call: balanced if it had a load balancer, in spans if not.
- In what order does a shard lie that comes without a load balancer? A tensor straight from `_context_parallel_shard`
  tells by itself. Any other lies in an order that this mesh has cut a sequence of that length in, in contexts or by the
  latest shard call. If there are several, the shard could be of any, and that is refused. Setting
  `_cp_options.enable_load_balance` and then cutting in the order it names is the program's own word that shards are of
  that order: earlier cuts no longer count, as in torch. (A shard from before, unsharded after, is then taken for one of
  the new.) A later cut in any other order displaces nothing.

Attention takes the order when it begins. Two meshes never share one. `ContextParallel` has no such state.

Sessions are made once for each order and remembered for each mesh, so that ranks forget alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import AttentionError, ShardError
from attnspan.layouts import Contiguous, HeadTail, Layout
from attnspan.parallel.handler import AttentionHandler
from attnspan.parallel.sdpa import AttentionMode
from attnspan.parallel.session import ContextParallel
from attnspan.torch_compat.errors import AttentionNotImplemented
from attnspan.torch_compat.options import _cp_options
from attnspan.torch_compat.sdpa import MASKS, CausalOrFull, DeferredHandler, Lifetime
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object
from attnspan.transports.group import Group, transport_of


@dataclass(frozen=True, slots=True)
class Order:
    """How a sequence lies on ranks: its layout, and its length where that is known. See [Note: order of sequences]."""

    layout: Layout
    seq_len: int | None = None


REMEMBERED = 256
"""How many orders of cuts a mesh remembers, so that ranks forget alike."""


class MeshRanks:
    """The ranks of one mesh, seen from this one."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self.cuts: dict[Order, int] = {}  # by contexts, and how often the program had spoken of balance by then
        self.by_call: dict[Order, int] = {}  # by the latest shard call alone
        self.entered: list[Order] = []  # of the contexts around
        self.balanced: tuple[bool, int] | None = None  # what the latest shard call says of later cuts, and when
        self.latest: Order | None = None  # what modules attend to: that of the context around, or of the shard call
        self.handler: CausalOrFull | None = (
            None  # of the latest order, if its length is known: torch.compile cannot ask
        )
        self.lifetimes: list[Lifetime] = []  # of the contexts that are entered
        self.cut: list[Tensor] = []  # buffers that are shards in place, and will be whole again
        self.contexts = 0  # that ended
        self.session = functools.lru_cache(maxsize=256)(self._session)
        self.causal_or_full = functools.lru_cache(maxsize=256)(self._causal_or_full)

    # ---- order ---------------------------------------------------------------------------------------------------

    @property
    def order(self) -> Order:
        """What a module attends to: that of the context around, or of the latest shard call, or the default."""
        return self.latest or self.default(None)

    def default(self, seq_len: int | None) -> Order:
        """How a sequence is cut where no load balancer says it. See [Note: order of sequences]."""
        balanced = _cp_options.enable_load_balance
        if self.balanced is not None and self.balanced[1] == _cp_options.declared:
            balanced = self.balanced[0]
        return Order(self._layout(balanced), seq_len)

    def _layout(self, balanced: bool) -> Layout:
        return HeadTail(self.transport.ranks) if balanced else Contiguous(self.transport.ranks)

    def use(self, order: Order) -> None:
        """From here on modules attend to sequences in this order. The options are read."""
        self.latest = order
        self.handler = None if order.seq_len is None else self.causal_or_full(order, _cp_options.strategy)

    def cut_by_call(self, order: Order, balanced: bool) -> None:
        """`_context_parallel_shard` has cut sequences in this order."""
        self.use(order)
        self.by_call = {order: _cp_options.declared}
        self.balanced = balanced, _cp_options.declared

    @contextmanager
    def ordered(self, order: Order) -> Iterator[None]:
        """Under this order, and then again under the one before; SDPA inside is context parallel."""
        before = self.latest, self.handler
        self.use(order)
        self._remember(order)
        self.entered.append(order)
        mode = AttentionMode(self._handler(order, watched=True), flex=True)
        lifetime = Lifetime(mode)
        self.lifetimes.append(lifetime)
        try:
            with mode:
                yield
        finally:
            lifetime.over = True
            self.lifetimes.pop()
            self._remember(self.entered.pop())  # what is taken out of it is taken out by now
            self.latest, self.handler = before

    # ---- shards that come without a load balancer ------------------------------------------------------------------

    def sizes(self, tokens: int) -> list[int]:
        """How many tokens of a sequence every rank has; they tell each other."""
        return all_gather_object(self.transport, tokens, "the length of a sequence")

    def length(self, layout: Layout, sizes: list[int], wanted: int | None = None) -> int:
        """The length of a sequence in a layout, of which each rank has some tokens. All ranks refuse, or none."""
        length, wanted = sum(sizes), wanted or layout.natural_len
        if not length or wanted not in (None, length) or layout.tokens(length) != sizes:
            of = "" if wanted is None else f" of {wanted}"
            raise ShardError(
                f"shards of {sizes} tokens are no sequence{of} in {layout!r}; pass the load balancer they were cut by"
            )
        return length

    def layout_of_shards(self, sizes: list[int] | None = None) -> Layout:
        """The layout of shards of these sizes, of any if None. See [Note: order of sequences]."""
        orders = self._possible(sizes)
        first = orders[0].layout
        for order in orders[1:]:
            if not _alike(first, order.layout, sizes):
                raise ShardError(
                    f"shards may lie in {first!r} or in {order.layout!r}: sequences were cut in both on this mesh; "
                    "pass load_balancer=, or set _cp_options.enable_load_balance and cut again"
                )
        return first

    def _possible(self, sizes: list[int] | None) -> list[Order]:
        """The orders that shards may lie in: those of cuts of that length, if there are any."""
        around, cuts = self.entered[::-1], [*self.cuts.items(), *self.by_call.items()]
        if sizes is not None:
            around = [order for order in around if _fits(order.layout, sizes)]
            cuts = [(order, declared) for order, declared in cuts if _fits(order.layout, sizes)]
            if any(order.seq_len == sum(sizes) for order in (*around, *dict(cuts))):
                lengths = (None, sum(sizes))
                around = [order for order in around if order.seq_len in lengths]
                cuts = [(order, declared) for order, declared in cuts if order.seq_len in lengths]
        fresh = [order for order, declared in cuts if declared == _cp_options.declared]
        if not around and not fresh:
            around = [self.default(None)]
        if not any(order.layout == self._layout(_cp_options.enable_load_balance) for order in fresh):
            fresh = list(dict(cuts))
        return [*around, *fresh]

    def _remember(self, order: Order) -> None:
        """A context cuts sequences in this order; the latest is the last."""
        self.cuts.pop(order, None)
        self.cuts[order] = _cp_options.declared
        if len(self.cuts) > REMEMBERED:
            del self.cuts[next(iter(self.cuts))]

    # ---- what is made for an order -------------------------------------------------------------------------------

    def mode(self, flex: bool = False) -> AttentionMode:
        """A scope in which SDPA, and flex_attention if asked for, are context parallel, in the latest order."""
        return AttentionMode(self.handler or self._handler(self.order), flex)

    def _handler(self, order: Order, watched: bool = False) -> AttentionHandler:
        strategy = _cp_options.strategy
        if order.seq_len is not None:
            return self.causal_or_full(order, strategy, watched)

        def measured(tokens: int) -> CausalOrFull:
            length = self.length(order.layout, self.sizes(tokens))
            return self.causal_or_full(Order(order.layout, length), strategy, watched)

        return DeferredHandler(measured)

    def _session(self, layout: Layout, seq_len: int, strategy: str = "gather") -> ContextParallel:
        return ContextParallel(self.transport, seq_len=seq_len, mask=MASKS, layout=layout, strategy=strategy)

    def _causal_or_full(self, order: Order, strategy: str, watched: bool = False) -> CausalOrFull:
        assert order.seq_len is not None, "asked once the length is known"
        return CausalOrFull(
            self.session(order.layout, order.seq_len, strategy), self._watch_regions if watched else None
        )

    def _watch_regions(self) -> None:
        if self.lifetimes:  # a compiled backward pass may run the op again when there is none: it has all that it needs
            self.lifetimes[-1].watch_regions()

    def __deepcopy__(self, memo: Any) -> MeshRanks:
        return self  # a copy of a model stays on its mesh


def ranks_of(mesh: Group) -> MeshRanks:
    """The ranks of a mesh of one axis; a process group or a virtual world will do as well."""
    simulated = sys.modules.get("torch.distributed._local_tensor")  # not imported: no mode is on
    if simulated is not None and simulated.local_tensor_mode() is not None:
        raise AttentionNotImplemented(
            "LocalTensorMode is not served: every rank it stands for would be taken for one; ranks in one process are "
            "attnspan.testing.loopback(ranks=...).run(fn)"
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f"take the one that splits the sequence, as in mesh[{names[-1]!r}]" if names else "take one of them"
        raise AttentionError(f"mesh must have one axis, got {mesh.ndim} of {tuple(mesh.shape)}; {hint}")
    transport = transport_of(mesh)
    memo = transport.memo
    known: MeshRanks = memo.get(MeshRanks) or memo.setdefault(MeshRanks, MeshRanks(transport))
    return known


def _fits(layout: Layout, sizes: list[int]) -> bool:
    """Whether a layout deals so many tokens to every rank."""
    return layout.natural_len in (None, sum(sizes)) and layout.tokens(sum(sizes)) == sizes


def _alike(one: Layout, other: Layout, sizes: list[int] | None) -> bool:
    """Whether two layouts put every token at the same place, as far as shards can tell."""
    if one == other:
        return True
    if sizes is None or not (_fits(one, sizes) and _fits(other, sizes)):
        return False
    rows = range(max(one.rows, other.rows))
    return all(
        one.permutation(sum(sizes), row % one.rows).equal(other.permutation(sum(sizes), row % other.rows))
        for row in rows
    )
