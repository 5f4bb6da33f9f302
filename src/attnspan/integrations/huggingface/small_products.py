"""Products of few rows with a matrix, in Triton: the time of a decode step is that of reading its weights.

    y = x W^T (+ bias) (+ residual)           product
    y = act(x gate^T) * (x up^T)              gated_product, of the rows of gate and then those of up in one matrix

x has up to 64 rows, W is (N, K) as modules keep it. A product of a large library reaches half to three quarters of the
memory's bandwidth here: each starts when the one before has ended, and then waits for its first weights. These are
launched earlier (dependent_launch.py), and ask for the first weights while the kernel before them still runs::

    program (block of N, split of K)    prefetch the first `ahead` numbers of each of its rows of W
                                        wait for the kernels before
                                        multiply, block of K after block of K
    program (block of N, row)           where K is split: sum the parts, in their order

[Note: splits] A program reads some rows of W, and all programs together must keep the memory busy. Where N is small
there are too few, and K is split: the parts are summed in float32 by a second kernel, always in the same order, so that
the same numbers give the same bits.

[Note: rounding] A sum over K is in float32, and rounded once, after the bias; with a residual the sum is rounded, added
to it, and rounded again: as modules do it. So results differ from theirs by the order of sums alone.

Rows of x may lie apart; a function returns None for what it does not support.

Shapes: R rows, N and K of a matrix, S splits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.integrations.huggingface.dependent_launch import dependent_launch
from attnspan.integrations.huggingface.fused_kernels import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float16)

MAX_ROWS = 64

JOINED = 256
"""Numbers of a row that a program joins."""


class Tiling(NamedTuple):
    """How a product is cut into programs: a block of N and of K, the parts of K, and how far a program prefetches."""

    block_n: int
    block_k: int
    splits: int = 1
    ahead: int = 512  # numbers of a row, a multiple of 64
    stages: int = 4
    warps: int = 4
    summed: bool = False  # multiplied one by one and summed, for very few rows; else by the matrix units


def tiling(rows: int, n: int, k: int) -> Tiling:
    """The one that is used."""
    block_n = 128 if rows > 32 else 64
    splits = 1
    while -(-n // block_n) * splits < 256 and k // (2 * splits) >= 512:
        splits *= 2
    return Tiling(block_n, 64, splits, stages=4 if rows > 32 else 6)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    cut: Tiling | None = None,
) -> Tensor | None:
    """(..., N) of (..., K), if there is a kernel for it."""
    sized = _rows_of(x, weight)
    if sized is None or any(each is not None and _is_unlike(each, x) for each in (bias, residual)):
        return None
    n, k = weight.shape
    rows, x_t = sized
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if residual is not None and residual.shape != out.shape:
        return None
    if bias is not None and bias.shape != (n,):
        return None
    cut = cut or tiling(rows, n, k)
    ends: dict[str, Any] = {"has_bias": bias is not None, "has_residual": residual is not None}
    added = [out if each is None else each for each in (bias, residual)]
    if cut.splits == 1:
        _multiply(cut, (out, x, weight, *added), rows, n, x_t, **ends)
        return out
    parts = torch.empty(cut.splits, rows, n, dtype=torch.float32, device=x.device)
    _multiply(cut, (parts, x, weight, *added), rows, n, x_t, has_bias=False, has_residual=False)
    _launch(
        "join", (-(-n // JOINED), rows), x.device, out, parts, *added, rows, n, cut.splits,
        block=JOINED, block_s=_next_power_of_2(cut.splits), num_warps=4, **ends,
    )  # fmt: skip
    return out


def gated_product(x: Tensor, weight: Tensor, activation: str, cut: Tiling | None = None) -> Tensor | None:
    """(..., N) of (..., K), by the rows of gate and those of up in one matrix (2 N, K), if there is a kernel for it."""
    sized = _rows_of(x, weight)
    if sized is None or weight.shape[0] % 2:
        return None
    (rows, x_t), n, k = sized, weight.shape[0] // 2, weight.shape[1]
    cut = cut or tiling(rows, n, k)
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    kind = list(ACTIVATIONS).index(activation)
    _multiply(cut._replace(splits=1), (out, x, weight, out, out), rows, n, x_t, kind=kind)
    return out


def _rows_of(x: Tensor, weight: Tensor) -> tuple[int, int] | None:
    """The rows of x and how far apart they lie; None if there is no kernel for these."""
    if x.dtype not in DTYPES or x.dim() < 2 or weight.dim() != 2 or _is_unlike(weight, x):
        return None
    (n, k), rows = weight.shape, x.shape[-2]
    if x.shape[-1] != k or k % 16 or not n or not 0 < rows <= MAX_ROWS or x.numel() != rows * k or x.stride(-1) != 1:
        return None
    apart = x.stride(-2) if rows > 1 else k
    return None if (x.data_ptr() | weight.data_ptr() | 2 * apart) % 16 else (rows, apart)


def _is_unlike(other: Tensor, x: Tensor) -> bool:
    return other.dtype != x.dtype or other.device != x.device or not other.is_contiguous()


def _multiply(
    cut: Tiling, tensors: tuple[Tensor, ...], rows: int, n: int, x_t: int, kind: int = -1,
    has_bias: bool = False, has_residual: bool = False,
) -> None:  # fmt: skip
    k = tensors[2].shape[1]
    blocks = -(-k // (cut.block_k * cut.splits))
    _launch(
        "multiply_few" if cut.summed else "multiply", (-(-n // cut.block_n), cut.splits), tensors[0].device,
        *tensors, rows, n, k, x_t, blocks, cut.ahead,
        block_r=_next_power_of_2(rows) if cut.summed else max(16, _next_power_of_2(rows)),
        block_n=cut.block_n, block_k=cut.block_k, pieces=max(1, 32 * cut.warps // cut.block_n),
        even=k % cut.block_k == 0, kind=kind, has_bias=has_bias, has_residual=has_residual,
        num_warps=cut.warps, num_stages=1 if cut.summed else cut.stages,
    )  # fmt: skip


def _launch(name: str, grid: tuple[int, ...], device: torch.device, *args: object, **options: object) -> None:
    on_device: Any = torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
    with on_device:
        _compiled()[name][grid](*args, **options, **dependent_launch(device))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


PREFETCH = """
{
.reg .pred some;
setp.gt.s32 some, $2, 0;
@some cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}
"""
"""PTX that asks for bytes at an address, if there are any."""

tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _compiled() -> dict[str, Any]:
    global tl
    import triton
    import triton.language as tl

    prefetch = tl.constexpr(PREFETCH)

    # fmt: off
    @triton.jit
    def fetch(rows_at, many, ahead, pieces: tl.constexpr):
        """Ask for the first numbers of each row, `ahead` or as many as there are, in so many pieces."""
        piece = ahead // pieces
        first = tl.arange(0, pieces) * piece
        size = tl.maximum(tl.minimum(many - first, piece), 0)
        at = (rows_at[:, None] + first[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(prefetch, "=r,l,r", [at, tl.broadcast_to(2 * size[None, :], at.shape)],
                                  dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def announce(rows_at, up, many, ahead, pieces: tl.constexpr, kind: tl.constexpr):
        """Let the next kernel be launched, prefetch, and wait for those before."""
        tl.extra.cuda.gdc_launch_dependents()
        if ahead > 0:
            fetch(rows_at, many, ahead, pieces)
            if kind >= 0:
                fetch(rows_at + up, many, ahead, pieces)
        tl.extra.cuda.gdc_wait()

    @triton.jit
    def ended(acc, kind: tl.constexpr):
        """The activation of gates, as fused_kernels.py has it."""
        if kind == 0:  # silu
            return acc / (1.0 + tl.exp(-acc))
        elif kind == 1:  # gelu
            return acc * 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))
        else:  # its approximation by tanh
            u = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
            return acc / (1.0 + tl.exp(-2.0 * u))

    @triton.jit
    def finish(out, bias, residual, total, total_2, col, r, rows, n,
               kind: tl.constexpr, has_bias: tl.constexpr, has_residual: tl.constexpr):
        """Store sums (block of N, R); each function rounds."""
        inside = (col < n)[:, None] & (r < rows)[None, :]
        to = (tl.program_id(1) * rows + r).to(tl.int64)[None, :] * n + col[:, None]
        dtype = out.dtype.element_ty
        if kind >= 0:
            total = ended(total.to(dtype).to(tl.float32), kind).to(dtype).to(tl.float32)
            total = total * total_2.to(dtype).to(tl.float32)
        if has_bias:
            total += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)[:, None]
        if has_residual:
            total = total.to(dtype).to(tl.float32) + tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + to, total.to(dtype), mask=inside)

    @triton.jit(do_not_specialize=["rows", "n", "blocks", "ahead"])
    def multiply(out, x, weight, bias, residual, rows, n, k, x_t, blocks, ahead,
                 block_r: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, pieces: tl.constexpr,
                 even: tl.constexpr, kind: tl.constexpr,
                 has_bias: tl.constexpr, has_residual: tl.constexpr, pdl: tl.constexpr):
        col = tl.program_id(0) * block_n + tl.arange(0, block_n)
        begin = tl.program_id(1) * blocks * block_k
        stop = tl.minimum(begin + blocks * block_k, k)
        rows_at = weight + tl.minimum(col, n - 1).to(tl.int64) * k
        if pdl:
            announce(rows_at + begin, n.to(tl.int64) * k, stop - begin, ahead, pieces, kind)
        r = tl.arange(0, block_r)
        at_k = tl.arange(0, block_k)
        w_at = rows_at[:, None] + at_k[None, :]
        x_at = x + r.to(tl.int64)[:, None] * x_t + at_k[None, :]
        real = (r < rows)[:, None]
        up = n.to(tl.int64) * k
        total = tl.zeros([block_n, block_r], tl.float32)
        total_2 = total
        for at in range(begin, stop, block_k):
            if even:
                w = tl.load(w_at + at)
                tokens = tl.load(x_at + at, mask=real, other=0.0)
                if kind >= 0:
                    w_2 = tl.load(w_at + up + at)
            else:
                inside = (at + at_k < stop)[None, :]
                w = tl.load(w_at + at, mask=inside, other=0.0)
                tokens = tl.load(x_at + at, mask=real & inside, other=0.0)
                if kind >= 0:
                    w_2 = tl.load(w_at + up + at, mask=inside, other=0.0)
            total = tl.dot(w, tl.trans(tokens), total)
            if kind >= 0:
                total_2 = tl.dot(w_2, tl.trans(tokens), total_2)
        finish(out, bias, residual, total, total_2, col, r, rows, n, kind, has_bias, has_residual)

    @triton.jit(do_not_specialize=["rows", "n", "blocks", "ahead"])
    def multiply_few(out, x, weight, bias, residual, rows, n, k, x_t, blocks, ahead,
                     block_r: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, pieces: tl.constexpr,
                     even: tl.constexpr, kind: tl.constexpr,
                     has_bias: tl.constexpr, has_residual: tl.constexpr, pdl: tl.constexpr):
        """`multiply` without the matrix units: the next weights are loaded while these are multiplied."""
        col = tl.program_id(0) * block_n + tl.arange(0, block_n)
        begin = tl.program_id(1) * blocks * block_k
        stop = tl.minimum(begin + blocks * block_k, k)
        rows_at = weight + tl.minimum(col, n - 1).to(tl.int64) * k
        if pdl:
            announce(rows_at + begin, n.to(tl.int64) * k, stop - begin, ahead, pieces, kind)
        r = tl.arange(0, block_r)
        at_k = tl.arange(0, block_k)
        w_at = rows_at[:, None] + at_k[None, :]
        x_at = x + r.to(tl.int64)[:, None] * x_t + at_k[None, :]
        real = (r < rows)[:, None]
        up = n.to(tl.int64) * k
        acc = tl.zeros([block_r, block_n, block_k], tl.float32)
        acc_2 = acc
        inside = (begin + at_k < stop)[None, :]
        w = tl.load(w_at + begin, mask=inside, other=0.0, eviction_policy="evict_first")
        if kind >= 0:
            w_2 = tl.load(w_at + up + begin, mask=inside, other=0.0, eviction_policy="evict_first")
        for at in range(begin, stop, block_k):
            tokens = tl.load(x_at + at, mask=real & (at + at_k < stop)[None, :], other=0.0).to(tl.float32)
            inside = (at + block_k + at_k < stop)[None, :]
            following = tl.load(w_at + at + block_k, mask=inside, other=0.0, eviction_policy="evict_first")
            acc += tokens[:, None, :] * w.to(tl.float32)[None, :, :]
            w = following
            if kind >= 0:
                following = tl.load(w_at + up + at + block_k, mask=inside, other=0.0, eviction_policy="evict_first")
                acc_2 += tokens[:, None, :] * w_2.to(tl.float32)[None, :, :]
                w_2 = following
        total = tl.trans(tl.sum(acc, 2))
        total_2 = total
        if kind >= 0:
            total_2 = tl.trans(tl.sum(acc_2, 2))
        finish(out, bias, residual, total, total_2, col, r, rows, n, kind, has_bias, has_residual)

    @triton.jit(do_not_specialize=["rows", "n", "splits"])
    def join(out, parts, bias, residual, rows, n, splits, block: tl.constexpr, block_s: tl.constexpr,
             has_bias: tl.constexpr, has_residual: tl.constexpr, pdl: tl.constexpr):
        if pdl:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        col = tl.program_id(0) * block + tl.arange(0, block)
        row = tl.program_id(1)
        s = tl.arange(0, block_s)
        at = (s * rows + row).to(tl.int64)[:, None] * n + col[None, :]
        total = tl.sum(tl.load(parts + at, mask=(s < splits)[:, None] & (col < n)[None, :], other=0.0), 0)
        dtype = out.dtype.element_ty
        to = row.to(tl.int64) * n + col
        if has_bias:
            total += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
        if has_residual:
            total = total.to(dtype).to(tl.float32) + tl.load(residual + to, mask=col < n, other=0.0).to(tl.float32)
        tl.store(out + to, total.to(dtype), mask=col < n)
    # fmt: on

    return {"multiply": multiply, "multiply_few": multiply_few, "join": join}
