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

Maps that are factors have no matrix to multiply (maps.py): such are those of ranks without step 1, all of whose
stretches begin or end a chain. Their scans leave behind what goes through the factors too.

Both passes cost one scan of each chunk and one exchange. A scan goes step by step, over all stretches at once.

Shapes: n chunks, s stretches, H heads (batch rows among them if all lie alike), (K, V) a state; A is (n, H, K, K), or
anything that (n, H, K, V) can be multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from attnspan.recurrence.backward import backward_once
from attnspan.recurrence.maps import AffineMaps, Maps, Passed, T, split
from attnspan.recurrence.plan import Chunks, Route
from attnspan.transports import Transport
from attnspan.transports.abort import abort_on_error
from attnspan.transports.operations import enter_operation


@dataclass(frozen=True)
class Scan:
    """What a scan runs over: chunks of a rank, the ways of maps, its group, and the name that all ranks know it by."""

    mapped: int  # how many stretches are needed as maps; they are the first
    waiting: int  # how many wait for a state: these and the next
    chunks: Chunks
    routes: tuple[Route, Route]  # forward, backward
    transport: Transport
    name: str
    maps: AffineMaps

    def by_kind(self, chunks: T) -> list[T]:
        """Those of stretches in the middle of a chain, at its end, and at its beginning."""
        return split(chunks, [sum(sizes) for sizes in self.chunks.sizes])


class SavedScan(NamedTuple):
    """What backward must know of a scan, beside its maps."""

    product: Tensor  # of matrices on the way, in the middle of chains
    whole: Tensor  # of all of a stretch there
    states: Tensor  # before every chunk
    inner: Tensor | None  # what goes through the factors of every chunk, where maps are those


def states_of(scan: Scan, given: Maps, initial: Tensor) -> tuple[SavedScan, Tensor, int]:
    """The states before every chunk and after every stretch, and what the exchange is known by."""
    maps, mapped, (middle, last, first) = scan.maps, scan.mapped, scan.chunks.sizes
    nothing = initial.new_zeros(scan.waiting, *initial.shape[1:])
    passed = Passed.empty(given, initial)
    (of_middle, of_last, of_first), (before, later, known) = scan.by_kind(given), scan.by_kind(passed)
    (product, whole), after = maps.compose(of_middle, nothing[:mapped], middle, before.states)
    ends = maps.scan(of_first, initial, first, known)
    every = torch.cat([after, nothing[mapped:], ends])
    header, arrived = _exchange_maps(scan, scan.routes[0], whole, every, scan.name)
    maps.add(before.states, product, _rows(arrived, scan.chunks.stretch[: len(product)]))
    maps.add(after, whole, arrived[:mapped])
    ended = maps.scan(of_last, arrived[mapped:], last, later)
    return SavedScan(product, whole, *passed), torch.cat([after, ended, ends]), header


def gradients(
    scan: Scan, given: Maps, known: SavedScan, header: int, grads: Passed, d_after: Tensor
) -> tuple[Passed, Tensor]:
    """After every chunk and of what goes through factors, and of the states at the beginnings.

    From those of what `states_of` gave: before every chunk and of what goes through factors, and after stretches.
    """
    given = given._replace(b=grads.states, new=grads.inner)
    maps, (middle, last, first) = scan.maps, scan.chunks.sizes
    mapped, waiting, route = scan.mapped, scan.waiting, scan.routes[1]
    passed = Passed.empty(given, known.states)
    (of_middle, of_last, of_first), (before, later, begun) = scan.by_kind(given), scan.by_kind(passed)
    ended = maps.scan_back(of_last, d_after[mapped:waiting], last, later)
    whole, d_middle = maps.transposed(known.whole), scan.by_kind(grads)[0].states
    added = maps.act(whole, d_after[:mapped])
    for size, part in _steps(middle, maps.act(maps.transposed(known.product), d_middle)):
        added[:size] += part
    _, arrived = _exchange_maps(scan, route, whole, torch.cat([added, ended]), header)
    d_after = d_after.index_add(0, route.targets, arrived)
    maps.scan_back(of_middle, d_after[:mapped], middle, before)
    return passed, maps.scan_back(of_first, d_after[waiting:], first, begun)


class _Apply(Protocol):
    def __call__(self, initial: Tensor, scan: Scan, *maps: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]: ...


class StateScan(torch.autograd.Function):
    """The states before every chunk and after every stretch, and what goes through factors.

    From the states at the beginnings and the tensors of `Maps`.
    """

    apply: ClassVar[_Apply]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, initial: Tensor, scan: Scan, *maps: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        given = Maps(*maps)  # type: ignore[arg-type]
        known, after, ctx.header = states_of(scan, given, initial)
        ctx.save_for_backward(given.a, given.left, given.right, *known)
        ctx.scan = scan
        return known.states, after, known.inner

    @staticmethod
    @backward_once
    def backward(ctx: Any, d_states: Tensor, d_after: Tensor, d_inner: Tensor | None) -> tuple[Tensor | None, ...]:
        a, left, right, *saved = ctx.saved_tensors
        known, maps = SavedScan(*saved), ctx.scan.maps
        grads = Passed(d_states.contiguous(), None if d_inner is None else d_inner.contiguous())
        given = Maps(a, left=left, right=right)
        (d_chunks, d_new), d_initial = gradients(ctx.scan, given, known, ctx.header, grads, d_after.contiguous())
        if d_new is None or known.inner is None:
            d_a = maps.outer(d_chunks, known.states).sum_to_size(a.shape)
            return d_initial, None, d_a, d_chunks, None, None, None
        d_a = (d_chunks * known.states).sum_to_size(a.shape)
        return d_initial, None, d_a, None, maps.outer(known.inner, d_chunks), maps.outer(d_new, known.states), d_new


def _steps(sizes: Sequence[int], tensor: Tensor) -> list[tuple[int, Tensor]]:
    """The part of each step, and its size."""
    return list(zip(sizes, tensor.split(list(sizes)), strict=True)) if sizes else []


@torch._disable_dynamo  # compiled autograd looks into backward passes, and has no business in transports
def _exchange_maps(scan: Scan, route: Route, a: Tensor, b: Tensor, name: str | int) -> tuple[int, Tensor]:
    """Send maps of stretches where they are needed, and compose what came: the states that arrive at targets."""
    transport, maps = scan.transport, scan.maps
    messages = [torch.cat([_rows(a, some).flatten(), _rows(b, all_).flatten()]) for some, all_ in route.messages]
    messages.append(b.new_empty(0))  # number -1
    leaving = [(peer, messages[number]) for peer, number in enumerate(route.message_to)]
    counts = list(zip(route.received_matrices, route.receives, strict=True))
    shapes = [((matrices, *a.shape[1:]), (states, *b.shape[1:])) for matrices, states in counts]
    split = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    arriving = [(peer, b.new_empty(sum(sizes))) for peer, sizes in enumerate(split)]
    with abort_on_error(transport), enter_operation(transport, name) as operation:
        transport.exchange(leaving, arriving, "maps of runs").wait()
    came = [buffer.split(sizes) for (_, buffer), sizes in zip(arriving, split, strict=True)]
    all_a = torch.cat([a, *(part.view(shape) for (part, _), (shape, _) in zip(came, shapes, strict=True))])
    all_b = torch.cat([b, *(part.view(shape) for (_, part), (_, shape) in zip(came, shapes, strict=True))])
    matrices, states = _rows(all_a, route.link_matrices), _rows(all_b, route.links)
    before = states.new_empty(states.shape)
    ends = maps.scan(Maps(matrices, states), _rows(all_b, route.heads), route.sizes, Passed(before))
    return operation.header, _rows(torch.cat([before, ends]), route.reads)


def _rows(tensor: Tensor, which: Tensor) -> Tensor:
    return tensor.index_select(0, which)
