"""Merge partial attention results by their log-sum-exp.

Attention over keys A and B can be computed apart and joined exactly::

    lse = log(e^lse_a + e^lse_b)
    out = out_a + share * (out_b - out_a)         share = e^lse_b / (e^lse_a + e^lse_b)

A row that saw no key has lse = -inf and out = 0; it leaves the other side as it is, and two of them stay one.
The join is done in place, in the accumulator's dtype; on CUDA by one Triton kernel that reads and writes each number
once, elsewhere by the same formula in torch. Knows nothing of ranks or masks.

Shapes: out (B, H, n, D), lse (B, H, n); any strides, so that rows of a larger buffer can be merged into.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Join (part_out, part_lse) into (out, lse), in place.

    >>> out, lse = torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]])
    >>> merge_into(out, lse, torch.tensor([[[[4.0]]]]), torch.tensor([[[2.0]]]).log())  # two keys more
    >>> out.item(), lse.exp().item()
    (3.0, 3.0)
    """
    if out.is_cuda and _has_triton():
        _merge_fused(out, lse, part_out, part_lse)
    else:
        _merge_plain(out, lse, part_out, part_lse)


def _merge_plain(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    # An empty part has the share 0, also beside another empty one, where the difference would be NaN.
    lead = torch.where(part_lse == -torch.inf, -torch.inf, part_lse - lse)
    out.lerp_(part_out.to(out.dtype), lead.sigmoid_().to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, part_lse.to(lse.dtype), out=lse)


def _merge_fused(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    batch, heads, rows, dim = out.shape
    if out.numel() == 0:
        return
    block_d = 1 << (dim - 1).bit_length()
    block_n = max(1, 4096 // block_d)
    strides = (*out.stride(), *lse.stride(), *part_out.stride(), *part_lse.stride())
    grid = (-(-rows // block_n), batch * heads)
    with torch.cuda.device(out.device):
        _fused()[grid](out, lse, part_out, part_lse, heads, rows, dim, *strides, block_n, block_d)


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


tl: Any = None  # triton.language: Triton looks names up among the globals of what it compiles, so it must be one


@cache
def _fused() -> Any:
    """The Triton kernel: one program for `block_n` rows of one head."""
    global tl
    import triton
    import triton.language as tl

    # fmt: off
    @triton.jit
    def merge(
        out, lse, part_out, part_lse, heads, rows, dim,
        out_b, out_h, out_n, out_d, lse_b, lse_h, lse_n,
        part_b, part_h, part_n, part_d, part_lse_b, part_lse_h, part_lse_n,
        block_n: tl.constexpr, block_d: tl.constexpr,
    ):
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
        d = tl.arange(0, block_d)
        row = n < rows
        cell = row[:, None] & (d < dim)[None, :]

        lse_at = lse + b * lse_b + h * lse_h + n * lse_n
        out_at = out + b * out_b + h * out_h + n[:, None] * out_n + d[None, :] * out_d
        part_at = part_out + b * part_b + h * part_h + n[:, None] * part_n + d[None, :] * part_d

        empty = float("-inf")
        old = tl.load(lse_at, mask=row, other=0.0)
        new = tl.load(part_lse + b * part_lse_b + h * part_lse_h + n * part_lse_n, mask=row, other=0.0)
        new = new.to(old.dtype)

        # e^-|difference| is at most 1 and never NaN, but where both are empty.
        most = tl.maximum(old, new)
        base = tl.where(most == empty, 0.0, most)
        old_weight = tl.exp(old - base)
        new_weight = tl.exp(new - base)
        total = old_weight + new_weight
        share = tl.where(new == empty, 0.0, new_weight / total)

        a = tl.load(out_at, mask=cell, other=0.0)
        p = tl.load(part_at, mask=cell, other=0.0).to(a.dtype)
        tl.store(out_at, a + share[:, None].to(a.dtype) * (p - a), mask=cell)
        tl.store(lse_at, tl.where(most == empty, empty, base + tl.log(total)), mask=row)
    # fmt: on

    return merge


class Accumulator:
    """Attention of S rows, gathered tile by tile: rows first seen are copied, rows seen before are merged.

    >>> rows = Accumulator((1, 1, 3, 1), torch.float32)
    >>> rows.add(range(0, 2), torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2))
    >>> rows.add(range(1, 2), torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 1))
    >>> out, lse = rows.result(torch.float32)
    >>> out.flatten().tolist(), lse.exp().flatten().tolist()  # the last row never saw a key
    ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0])

    What is added belongs to the accumulator from then on: the first tile that covers all rows is kept as it is, and if
    no other follows it is the result, in its own dtype, without a copy.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._seen = bytearray(shape[2])  # for each row: whether it holds anything
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: range, out: Tensor, lse: Tensor) -> None:
        """Join a tile's result into `rows`."""
        if self._out is None and rows == range(self._shape[2]):
            self._out, self._lse, self._seen = out, lse, bytearray(b"\1" * len(rows))
            return
        own_out, own_lse = self._buffers()
        for first, last, seen in self._stretches(rows):
            at = _rows(rows[first:last])
            if seen:
                merge_into(own_out[at], own_lse[at], out[:, :, first:last], lse[:, :, first:last])
            else:
                own_out[at], own_lse[at] = out[:, :, first:last], lse[:, :, first:last]
        self._seen[_slice(rows)] = b"\1" * len(rows)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse); a row that was never added has out 0 and lse -inf."""
        if self._out is None or self._lse is None or 0 in self._seen:
            out, lse = self._buffers()
            for first, last, seen in self._stretches(range(self._shape[2])):
                if not seen:
                    out[:, :, first:last], lse[:, :, first:last] = 0.0, -torch.inf
            return out.to(dtype), lse
        return self._out.to(dtype), self._lse

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """The out and lse to join into, in the accumulator's dtype."""
        if self._out is None or self._lse is None:
            self._out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._lse = torch.empty(self._shape[:3], dtype=self._dtype, device=self._device)
        self._out, self._lse = self._out.to(self._dtype), self._lse.to(self._dtype)
        return self._out, self._lse

    def _stretches(self, rows: range) -> list[tuple[int, int, bool]]:
        """(first, last, seen) of the stretches of `rows` that were all seen, or all not.

        Where they are many, as for striped rows beside plain ones, the unseen rows are made empty, to be merged too.
        """
        seen = self._seen[_slice(rows)]
        edges = _edges(seen)
        if len(edges) <= _MANY or self._out is None or self._lse is None:
            return [(first, last, bool(seen[first])) for first, last in pairwise(edges)]
        unseen = torch.tensor([row for row, had in zip(rows, seen, strict=True) if not had]).to(self._device)
        self._out.index_fill_(2, unseen, 0.0)
        self._lse.index_fill_(2, unseen, -torch.inf)
        return [(0, len(seen), True)]


_MANY = 16


def _edges(seen: bytearray) -> list[int]:
    """Where the value changes, both ends included.

    >>> _edges(bytearray([0, 0, 1, 1, 1, 0]))
    [0, 2, 5, 6]
    """
    edges = [0] if seen else []
    while edges and edges[-1] < len(seen):
        change = seen.find(1 - seen[edges[-1]], edges[-1])
        edges.append(change if change >= 0 else len(seen))
    return edges


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


def _rows(rows: range) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), _slice(rows)
