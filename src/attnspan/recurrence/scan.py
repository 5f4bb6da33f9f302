"""States along chains of affine maps, on all ranks: the one place where a recurrence meets the group.

A chunk maps the state before it to the one after: ``after = A @ before + B``, or ``A * before + B`` where A is a decay.
`states` takes the maps of this rank's chunks and gives the state before each of them::

    1. scan     stretches that begin a chain from their states, and those in the middle of one from zero, with the
                product of their matrices so far
    2. exchange the maps of stretches, as the plan says, in one message to each rank that needs any
    3. compose  the maps before each stretch: the state it starts from
    4. correct  states of chunks: what was scanned from zero, plus the product so far times that state
    5. scan     stretches that end a chain from their states: nobody needs their maps

Gradients are the same from the end to the beginning, with transposed matrices: b, what a stretch adds, is a sum over
its chunks; maps are exchanged and composed along the other route; then one scan backwards gives the gradient after
each chunk, which is B's, and with the states A's. The products of step 1 are kept for that.

Both passes cost one scan of each chunk and one exchange. A scan goes step by step, over all stretches at once.

Shapes: n chunks, s stretches, H heads (batch rows among them if all lie alike), (K, V) a state; A is (n, H, K, K), or
anything that (n, H, K, V) can be multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from attnspan.recurrence.backward import backward_once
from attnspan.recurrence.plan import Chunks, Route
from attnspan.transports import Transport
from attnspan.transports.operations import under_way
from attnspan.transports.unbroken import unbroken


@dataclass(frozen=True)
class Scan:
    """What a scan runs over: chunks of a rank, the ways of maps, its group, and the name that all ranks know it by."""

    mapped: int  # how many stretches are needed as maps; they are the first
    waiting: int  # how many wait for a state: these and the next
    chunks: Chunks
    routes: tuple[Route, Route]  # forward, backward
    transport: Transport
    name: str
    matrix: bool  # whether A is one, or a decay

    def by_kind(self, chunks: Tensor) -> tuple[Tensor, ...]:
        """Those of stretches in the middle of a chain, at its end, and at its beginning."""
        kinds: tuple[Tensor, ...] = chunks.split([sum(sizes) for sizes in self.chunks.sizes])
        return kinds


class SavedScan(NamedTuple):
    """What backward must know of a scan."""

    a: Tensor
    product: Tensor  # of matrices on the way, in the middle of chains
    whole: Tensor  # of all of a stretch there
    states: Tensor  # before every chunk


def states_of(scan: Scan, a: Tensor, b: Tensor, initial: Tensor) -> tuple[SavedScan, Tensor, int]:
    """The states before every chunk and after every stretch, and what the exchange is known by."""
    maps, mapped, (middle, last, first) = AffineMaps(scan.matrix), scan.mapped, scan.chunks.sizes
    states = b.new_empty(b.shape)
    (a_middle, a_last, a_first), (b_middle, b_last, b_first) = scan.by_kind(a), scan.by_kind(b)
    before, later, known = scan.by_kind(states)
    product, whole = maps.products(a_middle, mapped, middle)
    after = maps.scan(a_middle, b_middle, b.new_zeros(mapped, *b.shape[1:]), middle, before)
    ends = maps.scan(a_first, b_first, initial, first, known)
    nobodys = b.new_zeros(scan.waiting - mapped, *b.shape[1:])
    every = torch.cat([after, nobodys, ends])
    header, arrived = _exchange_maps(scan, scan.routes[0], whole, every, scan.name)
    before += maps.act(product, _rows(arrived, scan.chunks.stretch[: len(before)]))
    after += maps.act(whole, arrived[:mapped])
    ended = maps.scan(a_last, b_last, arrived[mapped:], last, later)
    return SavedScan(a, product, whole, states), torch.cat([after, ended, ends]), header


def gradients(scan: Scan, known: SavedScan, header: int, d_states: Tensor, d_after: Tensor) -> tuple[Tensor, Tensor]:
    """After every chunk, and of the states at the beginnings, from those of what `states_of` gave."""
    maps, (middle, last, first) = AffineMaps(scan.matrix), scan.chunks.sizes
    mapped, waiting, route = scan.mapped, scan.waiting, scan.routes[1]
    d_chunks = d_states.new_empty(d_states.shape)
    (a_middle, a_last, a_first), (d_middle, d_last, d_first) = scan.by_kind(known.a), scan.by_kind(d_states)
    d_before, d_later, d_known = scan.by_kind(d_chunks)
    ended = maps.scan_back(a_last, d_last, d_after[mapped:waiting], last, d_later)
    whole = maps.transposed(known.whole)
    added = maps.act(whole, d_after[:mapped])
    for size, part in _steps(middle, maps.act(maps.transposed(known.product), d_middle)):
        added[:size] += part
    _, arrived = _exchange_maps(scan, route, whole, torch.cat([added, ended]), header)
    d_after = d_after.index_add(0, route.targets, arrived)
    maps.scan_back(a_middle, d_middle, d_after[:mapped], middle, d_before)
    return d_chunks, maps.scan_back(a_first, d_first, d_after[waiting:], first, d_known)


class _Apply(Protocol):
    def __call__(self, a: Tensor, b: Tensor, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]: ...


class StateScan(torch.autograd.Function):
    """The state before every chunk, and after every stretch, from their maps and the states at the beginnings."""

    apply: ClassVar[_Apply]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        known, after, ctx.header = states_of(scan, a, b, initial)
        ctx.save_for_backward(*known)
        ctx.scan = scan
        return known.states, after

    @staticmethod
    @backward_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        known = SavedScan(*ctx.saved_tensors)
        d_b, d_initial = gradients(ctx.scan, known, ctx.header, *(each.contiguous() for each in grads))
        d_a = AffineMaps(ctx.scan.matrix).outer(d_b, known.states).sum_to_size(known.a.shape)
        return d_a, d_b, d_initial, None


@dataclass(frozen=True)
class AffineMaps:
    """What can be done with maps whose A is a matrix, or a decay."""

    matrix: bool

    def act(self, a: Tensor, state: Tensor) -> Tensor:
        """A of a state."""
        return a @ state if self.matrix else a * state

    def transposed(self, a: Tensor) -> Tensor:
        return a.mT if self.matrix else a

    def outer(self, grad: Tensor, state: Tensor) -> Tensor:
        """The gradient of A, from those of what it made of states; of a decay before it is summed to its shape."""
        return grad @ state.mT if self.matrix else grad * state

    def apply(self, a: Tensor, state: Tensor, b: Tensor | None, out: Tensor) -> None:
        """What maps make of states, with nothing added if b is none, into a part of a tensor; heads are maps too."""
        if self.matrix:
            torch.bmm(a, state, out=out) if b is None else torch.baddbmm(b, a, state, out=out)
        else:
            torch.mul(a, state, out=out) if b is None else torch.addcmul(b, a, state, out=out)

    def products(self, a: Tensor, count: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of A: those before each map, and of all of a stretch."""
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) if self.matrix else a.new_ones(1)
        before = a.new_empty(a.shape)
        return before, self.scan(a, None, one.expand(count, *a.shape[1:]), sizes, before)

    def scan(self, a: Tensor, b: Tensor | None, state: Tensor, sizes: Sequence[int], before: Tensor) -> Tensor:
        """The states at the ends, for maps that follow each other step by step; those before each map into `before`."""
        ends = state.clone(memory_format=torch.contiguous_format)
        steps, last = _by_step(before, sizes), ends.flatten(0, 1)
        if steps:
            steps[0].copy_(last[: len(steps[0])])
        adds = repeat(None) if b is None else _by_step(b, sizes)
        for each, now, add, then in zip(_by_step(a, sizes), steps, adds, [*steps[1:], last[:0]], strict=False):
            more, count = len(then), len(now)  # so many go on
            for part, out in ((slice(more), then), (slice(more, count), last[more:count])):
                if len(out):
                    self.apply(each[part], now[part], None if add is None else add[part], out)
        return ends

    def scan_back(self, a: Tensor, grads: Tensor, ends: Tensor, sizes: Sequence[int], after: Tensor) -> Tensor:
        """Gradients at the beginnings, and those after each map into `after`; `grads` are those of the states before
        maps, as such.
        """
        begins = ends.clone(memory_format=torch.contiguous_format)
        steps, first = _by_step(after, sizes), ends.flatten(0, 1)
        into = [begins.flatten(0, 1), *steps]
        maps = list(zip(_by_step(self.transposed(a), sizes), steps, _by_step(grads, sizes), into, strict=False))
        more = 0
        for each, now, grad, out in reversed(maps):
            now[more:] = first[more : len(now)]  # these end here
            more = len(now)
            self.apply(each, now, grad, out[:more])
        return begins


def _by_step(maps: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Those of each step, and heads as maps of their own."""
    return maps.flatten(0, 1).split([size * maps.shape[1] for size in sizes]) if sizes else ()


def _steps(sizes: Sequence[int], tensor: Tensor) -> list[tuple[int, Tensor]]:
    """The part of each step, and its size."""
    return list(zip(sizes, tensor.split(list(sizes)), strict=True)) if sizes else []


@torch._disable_dynamo  # compiled autograd looks into backward passes, and has no business in transports
def _exchange_maps(scan: Scan, route: Route, a: Tensor, b: Tensor, name: str | int) -> tuple[int, Tensor]:
    """Send maps of stretches where they are needed, and compose what came: the states that arrive at targets."""
    transport, maps = scan.transport, AffineMaps(scan.matrix)
    leaving = [
        (peer, torch.cat([_rows(a, route.sent_matrices[peer]).flatten(), _rows(b, route.sends[peer]).flatten()]))
        for peer in range(transport.ranks)
    ]
    counts = list(zip(route.received_matrices, route.receives, strict=True))
    shapes = [((matrices, *a.shape[1:]), (states, *b.shape[1:])) for matrices, states in counts]
    split = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    arriving = [(peer, b.new_empty(sum(sizes))) for peer, sizes in enumerate(split)]
    with unbroken(transport), under_way(transport, name) as operation:
        transport.exchange(leaving, arriving, "maps of runs").wait()
    came = [buffer.split(sizes) for (_, buffer), sizes in zip(arriving, split, strict=True)]
    all_a = torch.cat([a, *(part.view(shape) for (part, _), (shape, _) in zip(came, shapes, strict=True))])
    all_b = torch.cat([b, *(part.view(shape) for (_, part), (_, shape) in zip(came, shapes, strict=True))])
    matrices, states = _rows(all_a, route.link_matrices), _rows(all_b, route.links)
    before = states.new_empty(states.shape)
    ends = maps.scan(matrices, states, _rows(all_b, route.heads), route.sizes, before)
    return operation.header, _rows(torch.cat([before, ends]), route.reads)


def _rows(tensor: Tensor, which: Tensor) -> Tensor:
    return tensor.index_select(0, which)
