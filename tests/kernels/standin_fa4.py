"""A stand-in for `flash_attn.cute.interface` of flash-attn-4 4.0.0b36: the two calls that `flash4` makes, in float64.

The signatures are the package's own, to the letter; `test_flash4.py` compares them where the package is installed. What
the GPU kernels get wrong without a word, this one refuses: segments that share rows, segments of backward that share
keys, and sums at padded offsets that would overlap (`padded_offset_q` in the package's seqlen_info.py). It writes to
nothing but the rows and columns of segments.

Shapes: (B, n, H, D) and lse (B, H, n), or (T, H, D) and lse (H, T) with offsets and lengths.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import NamedTuple

import torch

TILES = (64, 128)
"""Rows and columns that the package's backward sums at once, for a head dim of 128 under a causal mask."""

log: list[str] = []
"""Which calls were made."""


class Segment(NamedTuple):
    row: int | None
    rows: slice
    cols: slice


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
    intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
    q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
    seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    log.append("forward")
    _only(_flash_attn_fwd, locals(), "q k v softmax_scale window_size_left window_size_right out lse")
    found = segments(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == ((q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0]))
    assert out.dtype == q.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, out))
    for at in found:
        allowed = window(at, window_size_left, window_size_right)
        query = _heads(q, at.row, at.rows).double()
        key, value = (_heads(x, at.row, at.cols).double() for x in (k, v))
        scores = _scores(query, key, softmax_scale).masked_fill(~allowed, -torch.inf)
        total = scores.logsumexp(-1)
        _heads(out, at.row, at.rows).copy_((scores - total.unsqueeze(-1)).exp() @ _each(value, query))
        _numbers(lse, at).copy_(total)
    return out, lse, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    log.append("backward")
    assert q.shape[-1] % 32 in (0, *range(17, 32)), "gradients that the package gets wrong"
    known = "q k v out dout lse softmax_scale window_size_left window_size_right deterministic dq dk dv dlse"
    _only(_flash_attn_bwd, locals(), known)
    found = segments(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    if cu_seqlens_q is not None:
        apart([at.cols for at in found])
        sums_apart([at.rows for at in found], TILES[0], q.shape[0])
        sums_apart([at.cols for at in found], TILES[1], k.shape[0])
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert dv.shape == v.shape
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    assert all(x.dtype == q.dtype for x in (k, v, out, dout, dq, dk, dv))
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    for at in found:
        allowed = window(at, window_size_left, window_size_right)
        query, result, grad = (_heads(x, at.row, at.rows).double() for x in (q, out, dout))
        key, value = (_heads(x, at.row, at.cols).double() for x in (k, v))
        lses = _numbers(lse, at).unsqueeze(-1)
        shares = (_scores(query, key, softmax_scale) - lses).exp().masked_fill(~allowed, 0.0)
        delta = (result * grad).sum(-1) - (0 if dlse is None else _numbers(dlse, at))
        d_scores = shares * (grad @ _each(value, query).mT - delta.unsqueeze(-1)) * softmax_scale
        _heads(dq, at.row, at.rows).copy_(d_scores @ _each(key, query))
        _heads(dk, at.row, at.cols).copy_(_grouped(d_scores.mT @ query, key))
        _heads(dv, at.row, at.cols).copy_(_grouped(shares.mT @ grad, value))
    return dq, dk, dv


def segments(q, k, cu_q, cu_k, used_q, used_k, max_q, max_k):
    """What a call computes; with offsets the rows of segments must not meet."""
    if cu_q is None:
        assert (cu_k, used_q, used_k) == (None, None, None)
        return [Segment(row, slice(0, q.shape[1]), slice(0, k.shape[1])) for row in range(q.shape[0])]
    if used_q is None:
        used_q, used_k = cu_q.diff(), cu_k.diff()
    count = len(used_q)
    assert all(x.dtype == torch.int32 for x in (cu_q, cu_k, used_q, used_k))
    assert len(cu_q) == len(cu_k) == count + 1 == len(used_k) + 1
    assert (max_q, max_k) == (max(used_q.tolist()), max(used_k.tolist()))
    rows, cols = (
        [slice(at, at + length) for at, length in zip(cu.tolist(), used.tolist(), strict=False)]
        for cu, used in ((cu_q, used_q), (cu_k, used_k))
    )
    assert all(each.stop <= len(q) for each in rows)
    assert all(each.stop <= len(k) for each in cols)
    apart(rows)
    return [Segment(None, *each) for each in zip(rows, cols, strict=True)]


def apart(spans):
    ordered = sorted((span.start, span.stop) for span in spans)
    assert all(a[1] <= b[0] for a, b in pairwise(ordered)), "segments of a call share rows or keys"


def sums_apart(spans, tile, total):
    """Sums are kept in whole tiles, at offsets that are padded by a tile for every segment before."""
    starts = [(span.start + number * tile) // tile * tile for number, span in enumerate(spans)]
    apart(
        [
            slice(start, start + -(-(span.stop - span.start) // tile) * tile)
            for start, span in zip(starts, spans, strict=True)
        ]
    )
    room = (total + (len(spans) + 1) * tile - 1) // tile * tile
    assert all(start + span.stop - span.start <= room for start, span in zip(starts, spans, strict=True))


def window(at, left, right):
    """Which pairs of a segment count: aligned at the bottom right, as `_resolve_causal_local_window` reads it."""
    n, m = at.rows.stop - at.rows.start, at.cols.stop - at.cols.start
    assert left is None or left >= 0
    assert right is None or right >= 0
    distance = torch.arange(m) - torch.arange(n).unsqueeze(-1) - (m - n)
    allowed = torch.ones(n, m, dtype=torch.bool)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    assert allowed.any(-1).all(), "a row of a segment sees no key"
    return allowed


def _only(call, given, known):
    """The arguments that are used are those that are known; all others are as by default."""
    segments = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"
    parameters = inspect.signature(call).parameters
    other = [name for name in parameters if name not in f"{known} {segments}".split()]
    assert all(given[name] is parameters[name].default for name in other), "an argument that the stand-in does not know"


def _heads(x, row, span):
    """(H, n, D) of a segment, a view."""
    return (x[span] if row is None else x[row, span]).transpose(0, 1)


def _numbers(x, at):
    return x[:, at.rows] if at.row is None else x[at.row]


def _each(x, query):
    return x.repeat_interleave(len(query) // len(x), dim=0)


def _grouped(x, key):
    return x.unflatten(0, (len(key), -1)).sum(1)


def _scores(query, key, scale):
    return query @ _each(key, query).mT * scale
