"""cuDNN's attention: the fastest full and causal tiles in half precision on recent GPUs, with grouped key heads.

Its causal mask is aligned at the top left, as a causal tile is. A window it does not have here.

Its backward sums dq by atomics: two runs differ in the last bits, whatever torch is told. Where torch is told to use
deterministic algorithms, it is refused.

[Note: layouts that cuDNN remembers] torch compiles a cuDNN graph for each new shape and strides of q, k and v, and
keeps it under these alone. The strides of out and grad are part of the graph but not of the key: a later call with
other strides would run the old graph and read the wrong numbers, in silence. So backward gives both the layout that
torch's own forward gives its output, which follows from q; lse is dense.

Shapes: kernel.py; cuDNN's lse is (B, H, n, 1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnspan.kernels.aten import CUDNN, CUDNN_BACKWARD
from attnspan.kernels.kernel import Spec, Traits
from attnspan.kernels.parts import backward_by_parts, cut_rows, forward_by_parts
from attnspan.masks.tile import Tile

name = "cudnn"
traits = Traits(devices=("cuda",), dtypes=(torch.float16, torch.bfloat16), order=10, rounds_gradients=True)


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Full and causal tiles in half precision with head dims that are multiples of 8 up to 128."""
    if reason := traits.misfit(q):
        return f"cudnn {reason}"
    if tile.kind == "general":
        return f"cudnn computes full and causal tiles, got {tile}"
    for head_dim in (q.shape[3], v.shape[3]):
        if head_dim % 8 or head_dim > 128:
            return f"cudnn needs head dims that are multiples of 8 up to 128, got {head_dim}"
    if len(tile.cols) == 1:
        return "cudnn needs more than one key, got 1"
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "cudnn's backward is not deterministic, which torch.use_deterministic_algorithms(True) asks for"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        out, lse, *_ = CUDNN(q, k, v, None, True, 0.0, tile.kind == "causal", scale=spec.scale)
        return out, lse.squeeze(-1) if lse.dim() == 4 else lse

    return forward_by_parts(call, q, k, v, cut_rows(tile))


def backward(
    spec: Spec, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state, without dropout

    def call(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend: Callable[..., tuple[Tensor, Tensor, Tensor]] = CUDNN_BACKWARD
        grad, out, lse = laid_out_as(q, grad), laid_out_as(q, out), lse.contiguous().unsqueeze(-1)
        sizes = (q.shape[2], k.shape[2], 0.0, tile.kind == "causal")
        state = (unused, unused, None, None, None)
        return attend(grad, q, k, v, out, lse, *state, *sizes, scale=spec.scale)

    return backward_by_parts(call, grad, q, k, v, out, lse, cut_rows(tile))


def laid_out_as(q: Tensor, x: Tensor) -> Tensor:
    """x with its dims in memory in the order of q's, without gaps. See [Note: layouts that cuDNN remembers].

    >>> q = torch.empty(1, 8, 4, 16).transpose(1, 2)  # (B, S, H, D) in memory
    >>> laid_out_as(q, torch.empty(1, 4, 8, 32)).stride()
    (1024, 32, 128, 1)
    """
    same = q.shape == x.shape
    wanted = torch.empty_like(q, device="meta").stride() if same else _dense_strides(q, x)
    if x.stride() == wanted:
        return x
    return torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device).copy_(x)


def _dense_strides(q: Tensor, x: Tensor) -> tuple[int, ...]:
    strides, reach = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=q.stride):  # the innermost first; equal strides keep their order
        strides[dim] = reach
        reach *= x.shape[dim]
    return tuple(strides)
