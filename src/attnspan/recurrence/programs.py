"""Triton programs over states: maps applied one after another, and the maps of chunks of a delta rule.

GPUs wait for launches where states are small, and a scan in torch is a launch or more for every step (maps.py). Here a
program takes some columns of one head's state through all steps of its stretch::

    scan         state = a state + b, step after step; what is before each is left behind
    delta_maps   columns of zeros become B, and those of the identity A, token by token as the rule says

Products of the scan are as exact as float32's (three products of TF32). Those of `delta_maps` are of the tokens' dtype,
as they are when outputs are computed from the states; sums are float32.

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
    """The maps of a scan: a matrix (n, H, K, K) or a factor of states, what is added, and whether it goes backwards."""

    a: Tensor
    b: Tensor | None
    matrix: bool
    back: bool = False


def scan(maps: Scanned, state: Tensor, sizes: tuple[int, ...], passed: Tensor) -> Tensor:
    """The states (s, H, K, V) at the other ends of stretches; those before maps are written to `passed`.

    Backwards, stretches begin with their last map, and `passed` is what is after maps.
    """
    count, heads, rows, columns = state.shape
    ends, steps = torch.empty(state.shape, device=state.device), steps_of(sizes, count, state.device)
    a = maps.a if maps.matrix else maps.a.expand(len(passed), *state.shape[1:])
    width = 32 if maps.matrix else min(64, _power(columns))
    with _on(state.device):
        _programs().scan_maps[count * heads, -(-columns // width)](
            a, a if maps.b is None else maps.b.contiguous(), state, ends, passed, *steps,
            *a.stride(), *state.stride(), heads, rows, columns,
            matrix=maps.matrix, adds=maps.b is not None, back=maps.back,
            block_k=max(16, _power(rows)) if maps.matrix else _power(rows), block_v=width,
            num_warps=8 if maps.matrix and rows > 64 else 4, num_stages=2,
        )  # fmt: skip
    return ends


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
            heads, heads // x.k.shape[2], rows, columns,
            gates=kind, piece=PIECE, block_k=max(16, _power(rows)), block_v=width, num_warps=4,
            num_stages=2 if x.k.element_size() == 2 and rows <= MAX_KEY_DIM else 1,
        )  # fmt: skip
    return a, b


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (n - 1).bit_length()


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


class Programs(NamedTuple):
    """The compiled programs."""

    scan_maps: Any
    delta_maps: Any


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _programs() -> Programs:
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def scan_maps(
        a, b, begin, end, passed, places, counts, a_n, a_h, a_k, a_v, s_n, s_h, s_k, s_v, heads, rows, columns,
        matrix: tl.constexpr, adds: tl.constexpr, back: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    ):
        stretch = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        k = tl.arange(0, block_k)
        v = tl.program_id(1) * block_v + tl.arange(0, block_v)
        real = (k < rows)[:, None] & (v < columns)[None, :]
        here = k[:, None] * columns + v[None, :]
        state = tl.load(
            begin + stretch * s_n + head * s_h + k[:, None] * s_k + v[None, :] * s_v, mask=real, other=0.0
        )
        steps = tl.load(counts + stretch)
        for i in range(steps):
            step = steps - 1 - i if back else i
            at = tl.load(places + step) + stretch
            one = (at * heads + head) * rows * columns
            tl.store(passed + one + here, state, mask=real)
            of_a = a + at * a_n + head * a_h
            if matrix:
                square = (k < rows)[:, None] & (k < rows)[None, :]
                if back:
                    factor = tl.load(of_a + k[:, None] * a_v + k[None, :] * a_k, mask=square, other=0.0)
                else:
                    factor = tl.load(of_a + k[:, None] * a_k + k[None, :] * a_v, mask=square, other=0.0)
                state = tl.dot(factor, state, input_precision="tf32x3")
            else:
                state *= tl.load(of_a + k[:, None] * a_k + v[None, :] * a_v, mask=real, other=0.0)
            if adds:
                state += tl.load(b + one + here, mask=real, other=0.0)
        tl.store(end + (stretch * heads + head) * rows * columns + here, state, mask=real)

    @triton.jit
    def delta_maps(
        keys, w, u, gate, a, b, starts, order, heads, group, rows, columns,
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
    # fmt: on

    return Programs(scan_maps, delta_maps)
