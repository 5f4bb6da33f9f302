"""Merge partial attention results by their log-sum-exp.

Attention over keys A and B can be computed apart and joined exactly::

    lse = log(e^lse_a + e^lse_b)
    out = out_a + share * (out_b - out_a)         share = e^lse_b / (e^lse_a + e^lse_b)

A row that saw no key has lse = -inf and out = 0; it leaves the other side as it is, and two of them stay one.
The join is done in place, in the accumulator's dtype; on CUDA by one Triton kernel that reads and writes each number
once, elsewhere by the same formula in torch. Knows nothing of ranks or masks.

A sink is a part that has a logit and no value: it takes its share of every softmax (`with_sinks`).

Shapes: out (B, H, n, D), lse (B, H, n); any strides, so that rows of a larger buffer can be merged into.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.packages import has_triton


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Join (part_out, part_lse) into (out, lse), in place.

    >>> out, lse = torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]])
    >>> merge_into(out, lse, torch.tensor([[[[4.0]]]]), torch.tensor([[[2.0]]]).log())  # two keys more
    >>> out.item(), lse.exp().item()
    (3.0, 3.0)
    """
    merge(PartialResult(out, lse), PartialResult(out, lse), PartialResult(part_out, part_lse))


class PartialResult(NamedTuple):
    """A result over some keys: out (B, H, n, D) and lse (B, H, n)."""

    out: Tensor
    lse: Tensor

    def rows(self, first: int, last: int) -> "PartialResult":
        """Some of its rows, as views."""
        return PartialResult(self.out[:, :, first:last], self.lse[:, :, first:last])


def merge(into: PartialResult, a: PartialResult, b: PartialResult) -> None:
    """Write the join of two parts into a third, which may be one of them; all three may differ in dtype.

    What is read is widened to lse's dtype, joined there and rounded once.
    """
    if into.out.is_cuda and has_triton():
        _merge_fused(into, a, b)
    else:
        _merge_plain(into, a, b)


def _merge_plain(into: PartialResult, a: PartialResult, b: PartialResult) -> None:
    dtype = into.lse.dtype
    a_lse, b_lse = a.lse.to(dtype), b.lse.to(dtype)
    # An empty part has the share 0, also beside another empty one, where the difference would be NaN.
    share = torch.where(b_lse == -torch.inf, -torch.inf, b_lse - a_lse).sigmoid_().unsqueeze(-1)
    if into.out is a.out and a.out.dtype == dtype:
        into.out.lerp_(b.out.to(dtype), share)
    else:
        into.out.copy_(torch.lerp(a.out.to(dtype), b.out.to(dtype), share))
    torch.logaddexp(a_lse, b_lse, out=into.lse)


def _merge_fused(into: PartialResult, a: PartialResult, b: PartialResult) -> None:
    batch, heads, rows, dim = into.out.shape
    if into.out.numel() == 0:
        return
    block_d = 1 << (dim - 1).bit_length()
    block_n = max(1, 4096 // block_d)
    strides = [stride for part in (into, a, b) for tensor in part for stride in tensor.stride()]
    grid = (-(-rows // block_n), batch * heads)
    with torch.cuda.device(into.out.device):
        _fused()[grid](*into, *a, *b, heads, rows, dim, *strides, block_n, block_d)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> PartialResult:
    """Fold logits into every softmax: lse' = log(e^lse + e^sink), out' = out e^(lse - lse'). `sinks` broadcasts to lse.

    >>> out, lse = torch.tensor([[[[3.0]]]]), torch.tensor([[[2.0]]]).log()
    >>> folded = with_sinks(out, lse, torch.tensor(0.0))  # as one key more, of value 0
    >>> round(folded.out.item(), 5), round(folded.lse.exp().item(), 5)
    (2.0, 3.0)
    """
    folded = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return PartialResult((out * share_of(lse, folded).unsqueeze(-1)).to(out.dtype), folded)


def share_of(part: Tensor, whole: Tensor) -> Tensor:
    """e^part / e^whole of two lse; nothing of nothing is nothing."""
    return (part - whole).exp().masked_fill(part == -torch.inf, 0.0)


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _fused() -> Any:
    """The Triton kernel: one program for `block_n` rows of one head."""
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def join(
        out, lse, a_out, a_lse, b_out, b_lse, heads, rows, dim,
        out_b, out_h, out_n, out_d, lse_b, lse_h, lse_n,
        a_out_b, a_out_h, a_out_n, a_out_d, a_lse_b, a_lse_h, a_lse_n,
        b_out_b, b_out_h, b_out_n, b_out_d, b_lse_b, b_lse_h, b_lse_n,
        block_n: tl.constexpr, block_d: tl.constexpr,
    ):
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
        d = tl.arange(0, block_d)
        row = n < rows
        cell = row[:, None] & (d < dim)[None, :]

        wide = lse.dtype.element_ty
        empty = float("-inf")
        old = tl.load(a_lse + b * a_lse_b + h * a_lse_h + n * a_lse_n, mask=row, other=0.0).to(wide)
        new = tl.load(b_lse + b * b_lse_b + h * b_lse_h + n * b_lse_n, mask=row, other=0.0).to(wide)

        # e^-|difference| is at most 1 and never NaN, but where both are empty.
        most = tl.maximum(old, new)
        base = tl.where(most == empty, 0.0, most)
        old_weight = tl.exp(old - base)
        new_weight = tl.exp(new - base)
        total = old_weight + new_weight
        share = tl.where(new == empty, 0.0, new_weight / total)

        a_at = a_out + b * a_out_b + h * a_out_h + n[:, None] * a_out_n + d[None, :] * a_out_d
        b_at = b_out + b * b_out_b + h * b_out_h + n[:, None] * b_out_n + d[None, :] * b_out_d
        x = tl.load(a_at, mask=cell, other=0.0).to(wide)
        y = tl.load(b_at, mask=cell, other=0.0).to(wide)
        joined = x + share[:, None] * (y - x)
        out_at = out + b * out_b + h * out_h + n[:, None] * out_n + d[None, :] * out_d
        tl.store(out_at, joined.to(out.dtype.element_ty), mask=cell)
        lse_at = lse + b * lse_b + h * lse_h + n * lse_n
        tl.store(lse_at, tl.where(most == empty, empty, base + tl.log(total)), mask=row)
    # fmt: on

    return join
