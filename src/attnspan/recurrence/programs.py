"""Triton programs over states: maps applied one after another, and the chunks of a delta rule.

GPUs wait for launches where states are small, and a scan in torch is a launch or more for every step (maps.py). Here a
program takes some columns of one head's state through all steps of its stretch::

    scan            state = a state + b, step after step; what is before each is left behind
    compose         the same from zero, and the products of a
    delta_maps      columns of zeros become B, and those of the identity A, token by token as the rule says
    delta_outputs   the same from the states before chunks, and what tokens read out of them

Products of a scan are as exact as float32's (three products of TF32), or those of TF32. Those of delta rules are of the
tokens' dtype, with sums in float32.

Shapes: n chunks, s stretches, T tokens, G and H heads, K and V head dims; as in maps.py and fla.py.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.packages import has_triton

MAX_KEY_DIM = 128
"""The largest K of a matrix that a program holds."""

PIECE = 64
"""Tokens that a delta rule's program multiplies at once: between them the rule is solved already."""


def can_scan(a: Tensor, state: Tensor) -> bool:
    """Whether programs take maps and states like these."""
    known = state.is_cuda and has_triton() and a.dtype == state.dtype == torch.float32
    return known and state.shape[2] <= MAX_KEY_DIM and state.numel() > 0


def can_read(x: SolvedPieces) -> bool:
    """Whether `delta_outputs` holds what it must of tokens like these in shared memory and registers."""
    return x.k.element_size() == 2 and x.k.shape[-1] <= MAX_KEY_DIM and _roomy(x.k.device)


@cache
def _roomy(device: torch.device) -> bool:
    """Whether a program has the shared memory of data centre GPUs, from A100 on."""
    if device.type != "cuda":
        return True
    from triton.runtime import driver

    most: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return most >= 160 * 1024


class Steps(NamedTuple):
    """Where the maps of each step lie, and how many steps each stretch has; on a device."""

    places: Tensor  # (steps,): of the first map of each step
    counts: Tensor  # (s,): those of later stretches are no more than those of earlier ones


@lru_cache(maxsize=256)
def steps_of(sizes: tuple[int, ...], stretches: int, device: torch.device) -> Steps:
    """The steps of so many stretches, of which the first `sizes[i]` have a step i."""
    places = [0, *accumulate(sizes)][:-1]
    counts = [sum(size > stretch for size in sizes) for stretch in range(stretches)]
    with torch.inference_mode(False):
        return Steps(*(torch.tensor(each, dtype=torch.int64, device=device) for each in (places, counts)))


class Scanned(NamedTuple):
    """The maps of a scan: a matrix (n, H, K, K) or a factor of states, and what is added, if anything."""

    a: Tensor
    b: Tensor | None
    matrix: bool
    exact: bool = True  # whether products are as float32's, or TF32's


def scan(maps: Scanned, state: Tensor, sizes: tuple[int, ...], passed: Tensor, back: bool = False) -> Tensor:
    """The states (s, H, K, V) at the other ends of stretches; those before maps are written to `passed`.

    Backwards, stretches begin with their last map, and `passed` is what is after maps.
    """
    ends = torch.empty(state.shape, device=state.device)
    _scan(maps, state, sizes, (passed, ends), back=back)
    return ends


def compose(
    maps: Scanned, zero: Tensor, sizes: tuple[int, ...], passed: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A scan of matrices from zero, and beside it their products: before each map, and of all of a stretch."""
    count, heads, rows, _ = zero.shape
    before, whole = (zero.new_empty(some, heads, rows, rows) for some in (len(passed), count))
    ends = torch.empty_like(zero)
    _scan(maps, zero, sizes, (passed, ends), products=(before, whole))
    return (before, whole), ends


def _scan(
    maps: Scanned,
    state: Tensor,
    sizes: tuple[int, ...],
    into: tuple[Tensor, Tensor],
    products: tuple[Tensor, Tensor] | None = None,
    back: bool = False,
) -> None:
    count, heads, rows, columns = state.shape
    a = maps.a if maps.matrix else maps.a.expand(len(into[0]), *state.shape[1:])
    width = 32 if maps.matrix else min(64, _next_power_of_2(columns))
    programs = -(-columns // width) + (0 if products is None else -(-rows // width))
    with _on(state.device):
        _programs().scan_maps[count * heads, programs](
            a, a if maps.b is None else maps.b.contiguous(), state, *into, *(products or into),
            *steps_of(sizes, count, state.device), *a.stride(), *state.stride(), heads, rows, columns,
            matrix=maps.matrix, adds=maps.b is not None, back=back, products=products is not None,
            precision="tf32x3" if maps.exact else "tf32",
            block_k=max(16, _next_power_of_2(rows)) if maps.matrix else _next_power_of_2(rows), block_v=width,
            num_warps=8 if maps.matrix and rows > 64 else 4, num_stages=2,
        )  # fmt: skip


class SolvedPieces(NamedTuple):
    """What pieces of a delta rule know alone: ``(1 + L) [u w] = beta [v, k exp(prefix)]`` is solved (chunked.py)."""

    k: Tensor  # (1, T, G, K)
    w: Tensor  # (1, T, H, K)
    u: Tensor  # (1, T, H, V)
    gates: (
        Tensor | None
    )  # to base two, summed within pieces: (1, T, H), or (1, T, H, K), which k has decayed by already


def delta_maps(x: SolvedPieces, starts: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """A (n, H, K, K) and B (n, H, K, V) of the chunks that begin at `starts` (n + 1,), written to rows `order` (n,)."""
    (heads, rows), columns, count = x.w.shape[2:], x.u.shape[3], len(order)
    a, b = (torch.empty(count, heads, rows, width, device=x.k.device) for width in (rows, columns))
    width = 64 if rows <= MAX_KEY_DIM else 32
    kind = 0 if x.gates is None else x.gates.dim() - 2
    with _on(x.k.device):
        _programs().delta_maps[-(-rows // width) + -(-columns // width), heads, count](
            x.k, x.w, x.u, x.k if x.gates is None else x.gates, a, b, starts, order,
            heads, heads // x.k.shape[2], rows=rows, columns=columns,
            gates=kind, piece=PIECE, block_k=max(16, _next_power_of_2(rows)), block_v=width, num_warps=4,
            num_stages=2 if can_read(x) else 1,
        )  # fmt: skip
    return a, b


class Queries(NamedTuple):
    """What reads the states of a delta rule."""

    q: Tensor  # (1, T, G, K)
    pairs: Tensor | None  # with gates by channel: of queries and keys within pieces, (1, T, H, PIECE), times the scale
    scale: float


def delta_outputs(x: SolvedPieces, queries: Queries, states: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """The outputs (1, T, H, V) of chunks that begin with rows `order` of the states (n, H, K, V)."""
    (heads, rows), columns = x.w.shape[2:], x.u.shape[3]
    out, width = torch.empty_like(x.u), 32
    with _on(x.k.device):
        _programs().delta_outputs[-(-columns // width), heads, len(order)](
            queries.q, x.k, x.w, x.u, x.k if x.gates is None else x.gates,
            x.k if queries.pairs is None else queries.pairs, states, out, starts, order,
            heads, heads // x.k.shape[2], heads // queries.q.shape[2], queries.scale, rows=rows, columns=columns,
            gates=0 if x.gates is None else x.gates.dim() - 2, piece=PIECE,
            block_k=max(16, _next_power_of_2(rows)), block_v=width, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def _next_power_of_2(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (n - 1).bit_length()


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


class Programs(NamedTuple):
    """The compiled programs."""

    scan_maps: Any
    delta_maps: Any
    delta_outputs: Any


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _programs() -> Programs:
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def scan_maps(
        a, b, begin, passed, end, product, whole, places, counts,
        a_n, a_h, a_k, a_v, s_n, s_h, s_k, s_v, heads, rows, columns,
        matrix: tl.constexpr, adds: tl.constexpr, back: tl.constexpr, products: tl.constexpr,
        precision: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    ):
        stretch = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        k = tl.arange(0, block_k)
        block = tl.program_id(1)
        if products:  # the last programs have columns of a product, and add nothing
            of_state = block < tl.cdiv(columns, block_v)
            v = tl.where(of_state, block, block - tl.cdiv(columns, block_v)) * block_v + tl.arange(0, block_v)
            width = tl.where(of_state, columns, rows)
            state = tl.where((k[:, None] == v[None, :]) & (block >= tl.cdiv(columns, block_v)), 1.0, 0.0)
            real = (k < rows)[:, None] & (v < width)[None, :]
            added = real & of_state
            multiplied = real & (block >= tl.cdiv(columns, block_v))
        else:
            v = block * block_v + tl.arange(0, block_v)
            width = columns
            real = (k < rows)[:, None] & (v < width)[None, :]
            added = real
            state = tl.load(
                begin + stretch * s_n + head * s_h + k[:, None] * s_k + v[None, :] * s_v, mask=real, other=0.0
            )
        here = k[:, None] * width + v[None, :]
        steps = tl.load(counts + stretch)
        for i in range(steps):
            step = steps - 1 - i if back else i
            at = tl.load(places + step) + stretch
            one = (at * heads + head) * rows * width
            tl.store(passed + one + here, state, mask=added)
            if products:
                tl.store(product + one + here, state, mask=multiplied)
            of_a = a + at * a_n + head * a_h
            if matrix:
                square = (k < rows)[:, None] & (k < rows)[None, :]
                if back:
                    factor = tl.load(of_a + k[:, None] * a_v + k[None, :] * a_k, mask=square, other=0.0)
                else:
                    factor = tl.load(of_a + k[:, None] * a_k + k[None, :] * a_v, mask=square, other=0.0)
                state = tl.dot(factor, state, input_precision=precision)
            else:
                state *= tl.load(of_a + k[:, None] * a_k + v[None, :] * a_v, mask=real, other=0.0)
            if adds:
                state += tl.load(b + one + here, mask=added, other=0.0)
        last = (stretch * heads + head) * rows * width
        tl.store(end + last + here, state, mask=added)
        if products:
            tl.store(whole + last + here, state, mask=multiplied)

    @triton.jit
    def delta_maps(
        keys, w, u, gate, a, b, starts, order, heads, group, rows: tl.constexpr, columns: tl.constexpr,
        gates: tl.constexpr, piece: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    ):
        head = tl.program_id(1).to(tl.int64)
        chunk = tl.program_id(2)
        to = tl.load(order + chunk) * heads + head
        begin = tl.load(starts + chunk).to(tl.int64)
        stop = tl.load(starts + chunk + 1).to(tl.int64)
        of_b = tl.cdiv(columns, block_v)
        adds = tl.program_id(0) < of_b
        k = tl.arange(0, block_k)
        v = (tl.program_id(0) - tl.where(adds, 0, of_b)) * block_v + tl.arange(0, block_v)
        state = tl.where((k[:, None] == v[None, :]) & (tl.program_id(0) >= of_b), 1.0, 0.0)
        keyed = heads // group
        for at in range(begin, stop, piece):
            token = at + tl.arange(0, piece)
            there = token < stop
            both = there[:, None] & (k < rows)[None, :]
            known = tl.load(w + (token * heads + head)[:, None] * rows + k[None, :], mask=both, other=0.0)
            new = tl.load(
                u + (token * heads + head)[:, None] * columns + v[None, :],
                mask=there[:, None] & (v < columns)[None, :] & adds, other=0.0,
            ).to(tl.float32) - tl.dot(known, state.to(known.dtype))
            last = tl.minimum(at + piece, stop) - 1
            if gates == 1:
                total = tl.load(gate + last * heads + head)
                until = tl.load(gate + token * heads + head, mask=there, other=0.0)
                new *= tl.where(there, tl.exp2(total - until), 0.0)[:, None]
                state *= tl.exp2(total)
            if gates == 2:
                total = tl.load(gate + (last * heads + head) * rows + k, mask=k < rows, other=0.0)
                state *= tl.exp2(total)[:, None]
            key = tl.load(keys + (token * keyed + head // group)[:, None] * rows + k[None, :], mask=both, other=0.0)
            state = tl.dot(tl.trans(key), new.to(key.dtype), state)
        real = (k < rows)[:, None]
        if adds:
            tl.store(b + (to * rows + k)[:, None] * columns + v[None, :], state, mask=real & (v < columns)[None, :])
        else:
            tl.store(a + (to * rows + k)[:, None] * rows + v[None, :], state, mask=real & (v < rows)[None, :])
    @triton.jit
    def delta_outputs(
        queries, keys, w, u, gate, pairs, states, out, starts, order,
        heads, group, query_group, scale, rows: tl.constexpr, columns: tl.constexpr,
        gates: tl.constexpr, piece: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    ):
        head = tl.program_id(1).to(tl.int64)
        chunk = tl.program_id(2)
        begin = tl.load(starts + chunk).to(tl.int64)
        stop = tl.load(starts + chunk + 1).to(tl.int64)
        k = tl.arange(0, block_k)
        v = tl.program_id(0) * block_v + tl.arange(0, block_v)
        at_state = (tl.load(order + chunk) * heads + head) * rows
        real = (k < rows)[:, None] & (v < columns)[None, :]
        state = tl.load(states + (at_state + k)[:, None] * columns + v[None, :], mask=real, other=0.0)
        keyed = heads // group
        asked = heads // query_group
        within = tl.arange(0, piece)
        for at in range(begin, stop, piece):
            token = at + within
            there = token < stop
            both = there[:, None] & (k < rows)[None, :]
            seen = there[:, None] & (v < columns)[None, :]
            known = tl.load(w + (token * heads + head)[:, None] * rows + k[None, :], mask=both, other=0.0)
            here = state.to(known.dtype)
            new = tl.load(u + (token * heads + head)[:, None] * columns + v[None, :], mask=seen, other=0.0)
            new = new.to(tl.float32) - tl.dot(known, here)
            query = tl.load(
                queries + (token * asked + head // query_group)[:, None] * rows + k[None, :], mask=both, other=0.0
            )
            key = tl.load(keys + (token * keyed + head // group)[:, None] * rows + k[None, :], mask=both, other=0.0)
            last = tl.minimum(at + piece, stop) - 1
            if gates == 2:
                until = tl.load(
                    gate + (token * heads + head)[:, None] * rows + k[None, :], mask=both, other=0.0
                )
                query = (query * tl.exp2(until)).to(known.dtype)
                found = tl.dot(query, here) * scale
                pair = tl.load(
                    pairs + (token * heads + head)[:, None] * piece + within[None, :], mask=there[:, None], other=0.0
                )
                pair = tl.where(within[:, None] >= within[None, :], pair, 0.0).to(known.dtype)
                found = tl.dot(pair, new.to(known.dtype), found)
                total = tl.load(gate + (last * heads + head) * rows + k, mask=k < rows, other=0.0)
                state *= tl.exp2(total)[:, None]
            else:
                found = tl.dot(query, here)
                pair = tl.dot(query, tl.trans(key))
                below = (within[:, None] >= within[None, :]) & there[None, :]
                if gates == 1:
                    total = tl.load(gate + last * heads + head)
                    until = tl.load(gate + token * heads + head, mask=there, other=0.0)
                    found *= tl.exp2(until)[:, None]
                    pair *= tl.exp2(tl.where(below, until[:, None] - until[None, :], 0.0))
                found = tl.dot(tl.where(below, pair, 0.0).to(known.dtype), new.to(known.dtype), found) * scale
                if gates == 1:
                    new *= tl.where(there, tl.exp2(total - until), 0.0)[:, None]
                    state *= tl.exp2(total)
            state = tl.dot(tl.trans(key), new.to(key.dtype), state)
            tl.store(
                out + (token * heads + head)[:, None] * columns + v[None, :], found.to(out.dtype.element_ty), mask=seen
            )
    # fmt: on

    return Programs(scan_maps, delta_maps, delta_outputs)
