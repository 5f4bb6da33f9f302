"""Products of few rows with matrices, in Triton: the time of a decode step is that of reading its weights.

    y = x W^T (+ bias) (+ residual)           product; products, of up to three matrices at once
    y = act(x gate^T) * (x up^T)              gated_product

x has up to 64 rows, W is (N, K) as modules keep it. A product of a large library reaches half to three quarters of the
memory's bandwidth here: each starts when the one before has ended, and then waits for its first weights. These are
launched earlier (dependent_launch.py), and ask for the first weights while the kernel before them still runs::

    program (block of N, split of K)    choose the matrix
                                        prefetch the first `ahead` numbers of each of its rows of W
                                        wait for the kernels before
                                        multiply, block of K after block of K
    program (block of numbers)          where K is split: sum the parts, in their order

[Note: splits] A program reads some rows of W, and all programs together must keep the memory busy. Where N is small
there are too few, and K is split: the parts are summed in float32 by a second kernel, always in the same order, so that
the same numbers give the same bits.

[Note: several matrices] Matrices of one x are one launch: programs of the first matrix come first, then those of the
second. Weights stay where their modules keep them. Results lie one behind the other, each contiguous.

[Note: rounding] A sum over K is in float32, and rounded once, after the bias; with a residual the sum is rounded, added
to it, and rounded again: as modules do it. So results differ from theirs by the order of sums alone.

Rows of x may lie apart; a function returns None for what it does not support.

Shapes: R rows, N and K of a matrix, S splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.integrations.huggingface.dependent_launch import dependent_launch
from attnspan.integrations.huggingface.fused_kernels import ACTIVATIONS, is_available
from attnspan.paged.slot_writes import next_power_of_2

DTYPES = (torch.bfloat16, torch.float16)

MAX_ROWS = 64

MAX_MATRICES = 3

JOINED = 256
"""Numbers that a program joins."""

MULTIPROCESSORS = 132
"""Of an H200, on which tilings were measured."""

MAX_SPLITS = 4


SHARED_MEMORY = 147456
"""Bytes that a program takes at most."""


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has products: NVIDIA's of compute capability 8 and 9 with enough shared memory."""
    if dtype not in DTYPES or not is_available(device):
        return False
    if device.type != "cuda":  # the interpreter
        return True
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return torch.version.cuda is not None and properties.major in (8, 9) and shared >= SHARED_MEMORY


class Tiling(NamedTuple):
    """How a product is cut into programs: a block of N and of K, the parts of K, and how far a program prefetches."""

    block_n: int
    block_k: int
    splits: int = 1
    ahead: int = 128  # numbers of a row, a multiple of 64
    stages: int = 4
    warps: int = 4


LARGE, SMALL = Tiling(64, 128), Tiling(64, 64, stages=6)
"""Blocks of which a multiprocessor holds two, and three; of more than 32 rows two of either."""


def tiling(rows: int, n: int, k: int) -> Tiling:
    """The one that is used, as measured (benchmarks/results/small_products.md): all programs at once, if they fit.

    >>> tiling(1, 4096, 4096), tiling(1, 28672, 4096).splits
    (Tiling(block_n=64, block_k=128, splits=4, ahead=128, stages=4, warps=4), 1)
    """
    blocks, fit = -(-n // LARGE.block_n), 2 * MULTIPROCESSORS
    if rows > 32:
        cut = LARGE._replace(stages=3) if 64 <= blocks <= fit else SMALL
        return cut._replace(splits=_splits(blocks, fit, k))
    cuts = ((LARGE, fit), (SMALL, 3 * MULTIPROCESSORS))
    found = [(cut._replace(splits=_splits(blocks, fit, k)), fit) for cut, fit in cuts]
    return max(found, key=lambda each: min(1.0, blocks * each[0].splits / each[1]))[0]


def _splits(blocks: int, fit: int, k: int) -> int:
    """Of those whose programs all fit, the most of those that keep multiprocessors most equally busy."""

    def busy(splits: int) -> tuple[float, int]:
        programs = blocks * splits
        return programs / -(-programs // MULTIPROCESSORS), splits

    return max(
        (each for each in range(1, MAX_SPLITS + 1) if blocks * each <= fit and k >= 512 * each), key=busy, default=1
    )


def gated_tiling(rows: int, n: int) -> Tiling:
    """Of a gated product, which is never split."""
    return LARGE._replace(stages=3) if rows <= 16 and n > 64 * MULTIPROCESSORS else SMALL


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    cut: Tiling | None = None,
) -> Tensor | None:
    """(..., N) of (..., K), if there is a kernel for it."""
    found = _products(x, [weight], None if bias is None else [bias], residual, cut)
    return None if found is None else found[0]


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, cut: Tiling | None = None
) -> list[Tensor] | None:
    """(..., N) of (..., K) for each of several matrices, if there is a kernel for it. See [Note: several matrices]."""
    return _products(x, weights, biases, None, cut)


def gated_product(x: Tensor, gate: Tensor, up: Tensor, activation: str, cut: Tiling | None = None) -> Tensor | None:
    """(..., N) of (..., K), if there is a kernel for it."""
    sized = _rows_of(x, [gate, up])
    if sized is None or gate.shape != up.shape:
        return None
    rows, x_t = sized
    cut = (cut or gated_tiling(rows, len(gate)))._replace(splits=1)
    out = torch.empty(*x.shape[:-1], len(gate), dtype=x.dtype, device=x.device)
    _multiply(cut, out, x, [gate], rows, x_t, up=up, kind=list(ACTIVATIONS).index(activation))
    return out


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, residual: Tensor | None, cut: Tiling | None
) -> list[Tensor] | None:
    sized, sizes = _rows_of(x, weights), [weight.shape[0] for weight in weights]
    if sized is None or len(weights) > MAX_MATRICES or any(n % 8 for n in sizes[:-1]):  # results are aligned
        return None
    if biases is not None and [bias.shape for bias in biases] != [(n,) for n in sizes]:
        return None
    if residual is not None and residual.shape != (*x.shape[:-1], sum(sizes)):
        return None
    if any(_is_unlike(each, x) for each in (*(biases or ()), *(() if residual is None else (residual,)))):
        return None
    (rows, x_t), n = sized, sum(sizes)
    cut = cut or tiling(rows, n, x.shape[-1])
    out = torch.empty(rows * n, dtype=x.dtype, device=x.device)
    if cut.splits == 1:
        _multiply(cut, out, x, weights, rows, x_t, biases, residual)
    else:
        parts = torch.empty(cut.splits, rows * n, dtype=torch.float32, device=x.device)
        _multiply(cut, parts, x, weights, rows, x_t, biases)
        _launch(
            "join", (-(-rows * n // JOINED),), x.device, out, parts, out if residual is None else residual,
            rows * n, cut.splits, block=JOINED, block_s=next_power_of_2(cut.splits),
            has_residual=residual is not None, num_warps=4,
        )  # fmt: skip
    return [each.view(*x.shape[:-1], -1) for each in out.split([rows * size for size in sizes])]


def _rows_of(x: Tensor, weights: Sequence[Tensor]) -> tuple[int, int] | None:
    """The rows of x and how far apart they lie; None if there is no kernel for these."""
    if x.dtype not in DTYPES or x.dim() < 2 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return None
    rows, k = x.shape[-2:]
    if k % 16 or not 0 < rows <= MAX_ROWS or x.numel() != rows * k:
        return None
    for weight in weights:
        if (
            weight.dim() != 2
            or weight.shape[1] != k
            or not len(weight)
            or _is_unlike(weight, x)
            or weight.data_ptr() % 16
        ):
            return None
    apart = x.stride(-2) if rows > 1 else k
    return None if apart % 8 else (rows, apart)


def _is_unlike(other: Tensor, x: Tensor) -> bool:
    same = other.dtype == x.dtype and other.device == x.device and other.layout == torch.strided
    return not (same and other.is_contiguous())


def _multiply(
    cut: Tiling, out: Tensor, x: Tensor, weights: Sequence[Tensor], rows: int, x_t: int,
    biases: Sequence[Tensor] | None = None, residual: Tensor | None = None, up: Tensor | None = None, kind: int = -1,
) -> None:  # fmt: skip
    k, none = x.shape[-1], MAX_MATRICES - len(weights)
    sizes = [len(weight) for weight in weights]
    given = [*weights, *[weights[0] if up is None else up] * none]
    added = [out] * MAX_MATRICES if biases is None else [*biases, *[biases[0]] * none]
    _launch(
        "multiply", (sum(-(-n // cut.block_n) for n in sizes), cut.splits), x.device,
        out, x, *given, *added, out if residual is None else residual, rows, *sizes, *[0] * none, k, x_t,
        -(-k // (cut.block_k * cut.splits)), cut.ahead,
        block_r=max(16, next_power_of_2(rows)), block_n=cut.block_n, block_k=cut.block_k,
        pieces=max(1, 32 * cut.warps // cut.block_n), even=k % cut.block_k == 0, matrices=len(weights), kind=kind,
        has_bias=biases is not None, has_residual=residual is not None, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def _launch(name: str, grid: tuple[int, ...], device: torch.device, *args: object, **options: object) -> None:
    on_device: Any = torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
    with on_device:
        _compiled()[name][grid](*args, **options, **dependent_launch(device))


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
    def announce(rows_at, up_at, many, ahead, pieces: tl.constexpr, kind: tl.constexpr):
        """Let the next kernel be launched, prefetch, and wait for those before."""
        tl.extra.cuda.gdc_launch_dependents()
        if ahead > 0:
            fetch(rows_at, many, ahead, pieces)
            if kind >= 0:
                fetch(up_at, many, ahead, pieces)
        tl.extra.cuda.gdc_wait()

    @triton.jit
    def activated(acc, kind: tl.constexpr):
        """The activation of gates, as fused_kernels.py has it."""
        if kind == 0:  # silu
            return acc / (1.0 + tl.exp(-acc))
        elif kind == 1:  # gelu
            return acc * 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))
        else:  # its approximation by tanh
            u = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
            return acc / (1.0 + tl.exp(-2.0 * u))

    @triton.jit(do_not_specialize=["rows", "n", "n_2", "n_3", "blocks", "ahead"])
    def multiply(out, x, weight, weight_2, weight_3, bias, bias_2, bias_3, residual,
                 rows, n, n_2, n_3, k, x_t, blocks, ahead,
                 block_r: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, pieces: tl.constexpr,
                 even: tl.constexpr, matrices: tl.constexpr, kind: tl.constexpr,
                 has_bias: tl.constexpr, has_residual: tl.constexpr, pdl: tl.constexpr):
        """A block of rows of a matrix, and a part of K; `weight_2` is that of up, if `kind` is a gate's activation."""
        split = tl.program_id(1)
        program = tl.program_id(0)
        block, before, size, up = program, program * 0, n, weight_2
        if matrices > 1:  # see [Note: several matrices]
            end = tl.cdiv(n, block_n)
            if program >= end:
                block, before, size, weight, bias = program - end, n, n_2, weight_2, bias_2
        if matrices > 2:
            end = tl.cdiv(n, block_n) + tl.cdiv(n_2, block_n)
            if program >= end:
                block, before, size, weight, bias = program - end, n + n_2, n_3, weight_3, bias_3
        col = block * block_n + tl.arange(0, block_n)
        begin = split * blocks * block_k
        stop = tl.minimum(begin + blocks * block_k, k)
        row_at = tl.minimum(col, size - 1).to(tl.int64) * k
        if pdl:
            announce(weight + row_at + begin, up + row_at + begin, stop - begin, ahead, pieces, kind)
        r = tl.arange(0, block_r)
        at_k = tl.arange(0, block_k)
        w_at = weight + row_at[:, None] + at_k[None, :]
        up_at = up + row_at[:, None] + at_k[None, :]
        x_at = x + r.to(tl.int64)[:, None] * x_t + at_k[None, :]
        real = (r < rows)[:, None]
        total = tl.zeros([block_n, block_r], tl.float32)
        total_2 = total
        for at in range(begin, stop, block_k):
            if even:
                w = tl.load(w_at + at)
                tokens = tl.load(x_at + at, mask=real, other=0.0)
                if kind >= 0:
                    w_2 = tl.load(up_at + at)
            else:
                inside = (at + at_k < stop)[None, :]
                w = tl.load(w_at + at, mask=inside, other=0.0)
                tokens = tl.load(x_at + at, mask=real & inside, other=0.0)
                if kind >= 0:
                    w_2 = tl.load(up_at + at, mask=inside, other=0.0)
            total = tl.dot(w, tl.trans(tokens), total)
            if kind >= 0:
                total_2 = tl.dot(w_2, tl.trans(tokens), total_2)
        dtype = out.dtype.element_ty
        if kind >= 0:  # each function rounds
            total = activated(total.to(dtype).to(tl.float32), kind).to(dtype).to(tl.float32)
            total = total * total_2.to(dtype).to(tl.float32)
        if has_bias:  # once
            once = tl.load(bias + col, mask=(col < size) & (split == 0), other=0.0)
            total += once.to(tl.float32)[:, None]
        inside = (col < size)[:, None] & (r < rows)[None, :]
        first = (split.to(tl.int64) * (n + n_2 + n_3) + before) * rows
        to = first + r.to(tl.int64)[None, :] * size + col[:, None]
        if has_residual:
            total = total.to(dtype).to(tl.float32) + tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + to, total.to(dtype), mask=inside)

    @triton.jit(do_not_specialize=["many", "splits"])
    def join(out, parts, residual, many, splits, block: tl.constexpr, block_s: tl.constexpr,
             has_residual: tl.constexpr, pdl: tl.constexpr):
        """The sum of all parts, number by number."""
        if pdl:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        s = tl.arange(0, block_s).to(tl.int64)
        total = tl.sum(tl.load(parts + s[:, None] * many + at[None, :],
                               mask=(s < splits)[:, None] & (at < many)[None, :], other=0.0), 0)
        dtype = out.dtype.element_ty
        if has_residual:
            total = total.to(dtype).to(tl.float32) + tl.load(residual + at, mask=at < many, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(dtype), mask=at < many)
    # fmt: on

    return {"multiply": multiply, "join": join}
