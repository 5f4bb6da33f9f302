"""The small functions between a model's matrices, one Triton kernel each: norms, rotary embeddings, gated activations.

In eager torch each of these is up to ten kernels that read and write the same numbers. Here each is defined twice: as
a formula, written as in the modeling files, and as a kernel that rounds where the formula does::

    formula    kernel
    normed     fused_norm, and fused_add_norm with a sum before it
    rotated    fused_rotary
    gated      fused_gate

Results differ from the formula's only by the order of sums and by the two libraries' exponentials: see `agree`.

A kernel returns None for a call that it does not support, such as another dtype, layout or device.

Shapes: T tokens, N numbers of a token, H query heads, Hk key heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnspan.integrations.huggingface.dependent_launch import dependent_launch
from attnspan.packages import has_triton
from attnspan.paged.slot_writes import next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MAX_NUMBERS = 16384
"""Numbers of a token that one program holds."""

BLOCK = 1024
"""Numbers that a program of an elementwise function takes; a program of a norm takes at least as many."""

HEADS = 4
"""Heads that a program rotates."""

NORMS = ("rounded", "wide", "plus_one")
"""How a norm ends: rounded before it is scaled (Llama), after it (OLMo), or scaled by 1 + weight (Gemma)."""

ROTARIES = ("rounded", "wide")
"""Whether products are rounded before they are added (Llama), or only their sum (Cohere)."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def is_available(device: torch.device) -> bool:
    """Whether kernels run there."""
    return has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether a kernel's result is the formula's: two roundings apart at most, or eight where all is float32.

    A sum in another order changes the last bits of float32. So a number that the formula rounds in between may be
    rounded to the neighbour, and the product with another such may come to two. Where numbers cancel, as in the tail of
    an activation, what counts is the rounding of float32.
    """
    eps, apart = torch.finfo(expected.dtype).eps, 8 if expected.dtype == torch.float32 else 2
    if found.dtype != expected.dtype or not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    found, expected = (each.float().nan_to_num(0.0, 0.0, 0.0) for each in (found, expected))
    allowed = apart * eps * expected.abs() + 8 * torch.finfo(torch.float32).eps * expected.abs().amax()
    return bool(((found - expected).abs() <= allowed).all())


# ---- formulas --------------------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, eps: float, how: str) -> Tensor:
    """RMSNorm of (..., N)."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if how == "plus_one":
        return (wide * (1.0 + weight.float())).type_as(x)
    return weight * wide.to(x.dtype) if how == "rounded" else (weight * wide).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, how: str) -> Tensor:
    """Rotary embedding of (1, H, T, D), by halves; cos and sin are (1, T, D)."""
    numbers = x.float() if how == "wide" else x
    first, second = numbers.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (numbers * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up."""
    return ACTIVATIONS[activation](gate) * up


# ---- kernels ---------------------------------------------------------------------------------------------------------


def fused_norm(x: Tensor, weight: Tensor, eps: float, how: str) -> Tensor | None:
    """`normed`, if there is a kernel for it."""
    n = x.shape[-1]
    if x.dtype not in DTYPES or weight.dtype != x.dtype or n > MAX_NUMBERS:
        return None
    if not (x.is_contiguous() and weight.is_contiguous() and weight.device == x.device and x.numel()):
        return None
    out = torch.empty_like(x)
    _launch_norm((out, x, x, x), weight, eps, how, added=False)
    return out


def fused_add_norm(x: Tensor, other: Tensor, weight: Tensor, eps: float, how: str) -> tuple[Tensor, Tensor] | None:
    """x + other, and `normed` of that, if there is a kernel for it."""
    n, likes = x.shape[-1], {(each.dtype, each.device) for each in (x, other, weight)}
    if x.dtype not in DTYPES or len(likes) > 1 or other.shape != x.shape or n > MAX_NUMBERS or not x.numel():
        return None
    if not (x.is_contiguous() and other.is_contiguous() and weight.is_contiguous()):
        return None
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm((out, total, x, other), weight, eps, how, added=True)
    return total, out


def _launch_norm(tokens: tuple[Tensor, ...], weight: Tensor, eps: float, how: str, added: bool) -> None:
    n = weight.shape[0]
    rows, block = tokens[0].numel() // n, next_power_of_2(n)
    per = max(1, BLOCK // block)
    _launch(
        "norm", (-(-rows // per),), weight.device, 4 if block <= 1024 else 8 if block <= 8192 else 16,
        *tokens, weight, rows, eps, 1.0 / n, n=n, block=block, per=per, how=NORMS.index(how), added=added,
    )  # fmt: skip


def fused_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, how: str) -> tuple[Tensor, Tensor] | None:
    """`rotated`, of (1, H, T, D) and (1, Hk, T, D), if there is a kernel for it."""
    if q.dim() != 4 or k.dim() != 4 or len({q.dtype, k.dtype, cos.dtype, sin.dtype}) > 1 or q.dtype not in DTYPES:
        return None
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    if batch != 1 or k.shape != (1, kv_heads, tokens, dim) or dim % 2 or dim > 1024 or not q.numel():
        return None
    if not cos.shape == sin.shape == (1, tokens, dim) or len({q.device, k.device, cos.device, sin.device}) > 1:
        return None
    strides = q.stride(1), q.stride(2), k.stride(1), k.stride(2)
    if not (q.stride(3) == k.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous()) or 1 in strides:
        return None
    outs = [torch.empty(1, tokens, x.shape[1], dim, dtype=x.dtype, device=x.device).transpose(1, 2) for x in (q, k)]
    q_blocks, k_blocks = -(-heads // HEADS), -(-kv_heads // HEADS)
    _launch(
        "rotary", (tokens, q_blocks + k_blocks), q.device, 2,
        *outs, q, k, cos, sin, *strides, heads, kv_heads, q_blocks,
        half=dim // 2, block=next_power_of_2(dim // 2), per=HEADS, wide=how == "wide",
    )  # fmt: skip
    return outs[0], outs[1]


def fused_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    """`gated`, of (..., N) whose rows may lie apart, if there is a kernel for it."""
    n = gate.shape[-1]
    if gate.dtype not in DTYPES or up.dtype != gate.dtype or up.shape != gate.shape or up.device != gate.device:
        return None
    if not gate.numel() or {gate.stride(-1), up.stride(-1)} != {1}:
        return None
    if gate.dim() < 2 or gate.numel() != gate.shape[-2] * n:  # a packed row
        return None
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(
        "gate", (gate.shape[-2], -(-n // BLOCK)), gate.device, 4,
        out, gate, up, gate.stride(-2), up.stride(-2), n, block=BLOCK, kind=list(ACTIVATIONS).index(activation),
    )  # fmt: skip
    return out


def _launch(
    name: str, grid: tuple[int, ...], device: torch.device, warps: int, *args: object, **constants: object
) -> None:
    on_device: Any = torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
    options = {"enable_fp_fusion": False} if device.type == "cuda" else {}  # the interpreter does not know the word
    with on_device:
        _compiled()[name][grid](*args, **constants, num_warps=warps, **options, **dependent_launch(device))


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _compiled() -> dict[str, Any]:
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit(do_not_specialize=["rows"])
    def norm(out, total, x, other, weight, rows, eps, share,
             n: tl.constexpr, block: tl.constexpr, per: tl.constexpr, how: tl.constexpr, added: tl.constexpr,
             pdl: tl.constexpr):
        if pdl:  # see dependent_launch.py
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64) * per + tl.arange(0, per)
        col = tl.arange(0, block)
        real = (row < rows)[:, None] & (col < n)[None, :]
        at = row[:, None] * n + col[None, :]
        numbers = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        if added:
            numbers += tl.load(other + at, mask=real, other=0.0).to(tl.float32)
            tl.store(total + at, numbers.to(out.dtype.element_ty), mask=real)
            numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
        mean = tl.sum(numbers * numbers, 1) * share
        numbers = numbers * tl.rsqrt(mean + eps)[:, None]
        factor = tl.load(weight + col, mask=col < n, other=0.0).to(tl.float32)
        if how == 0:  # rounded before it is scaled
            numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
        if how == 2:
            factor = factor + 1.0
        tl.store(out + at, (numbers * factor[None, :]).to(out.dtype.element_ty), mask=real)

    @triton.jit(do_not_specialize=["heads", "kv_heads", "q_blocks"])
    def rotary(q_out, k_out, q, k, cos, sin, q_h, q_t, k_h, k_t, heads, kv_heads, q_blocks,
               half: tl.constexpr, block: tl.constexpr, per: tl.constexpr, wide: tl.constexpr, pdl: tl.constexpr):
        if pdl:  # see dependent_launch.py
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        token = tl.program_id(0).to(tl.int64)
        part = tl.program_id(1)
        dtype = q.dtype.element_ty
        d = tl.arange(0, block)
        angle = token * 2 * half + d
        cos_1 = tl.load(cos + angle, mask=d < half, other=0.0).to(tl.float32)[None, :]
        cos_2 = tl.load(cos + angle + half, mask=d < half, other=0.0).to(tl.float32)[None, :]
        sin_1 = tl.load(sin + angle, mask=d < half, other=0.0).to(tl.float32)[None, :]
        sin_2 = tl.load(sin + angle + half, mask=d < half, other=0.0).to(tl.float32)[None, :]
        if part < q_blocks:
            many, given, into, by_head, by_token = heads, q, q_out, q_h, q_t
        else:
            many, given, into, by_head, by_token = kv_heads, k, k_out, k_h, k_t
            part -= q_blocks
        head = part * per + tl.arange(0, per)
        real = (head < many)[:, None] & (d < half)[None, :]
        at = given + token * by_token + head.to(tl.int64)[:, None] * by_head + d[None, :]
        first = tl.load(at, mask=real, other=0.0).to(tl.float32)
        second = tl.load(at + half, mask=real, other=0.0).to(tl.float32)
        a, b, c, e = first * cos_1, -second * sin_1, second * cos_2, first * sin_2
        if not wide:  # each product is rounded
            a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
            c, e = c.to(dtype).to(tl.float32), e.to(dtype).to(tl.float32)
        to = into + (token * many + head.to(tl.int64))[:, None] * 2 * half + d[None, :]
        tl.store(to, (a + b).to(dtype), mask=real)
        tl.store(to + half, (c + e).to(dtype), mask=real)

    @triton.jit
    def gate(out, gate, up, gate_t, up_t, n, block: tl.constexpr, kind: tl.constexpr,
             pdl: tl.constexpr):
        if pdl:  # see dependent_launch.py
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * block + tl.arange(0, block)
        x = tl.load(gate + row * gate_t + col, mask=col < n, other=0.0).to(tl.float32)
        y = tl.load(up + row * up_t + col, mask=col < n, other=0.0).to(tl.float32)
        if kind == 0:  # silu
            x = x / (1.0 + tl.exp(-x))
        elif kind == 1:  # gelu
            x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        else:  # its approximation by tanh: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
            u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            x = x / (1.0 + tl.exp(-2.0 * u))
        x = x.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * n + col, (x * y).to(out.dtype.element_ty), mask=col < n)
    # fmt: on

    return {"norm": norm, "rotary": rotary, "gate": gate}
