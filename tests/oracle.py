"""The oracle: dense attention in float64, and its gradients by autograd. Shares no code with what it judges.

Shapes: q (B, H, n, D), k (B, Hk, m, D), v (B, Hk, m, Dv); masks (n, m) of bools, True where a pair attends.
"""

import numpy as np
import torch


def attention(q, k, v, mask, scale):
    """(out, lse) in float64; a row that sees no key has out 0 and lse -inf."""
    q, k, v = double(q), per_query_head(k, q), per_query_head(v, q)
    return dense(q @ k.mT * scale, mask, [(mask, v)])


def gradients(q, k, v, mask, scale, grad):
    """(dq, dk, dv) in float64."""
    return share(q, k, v, mask, mask, scale, grad)


def share(q, k, v, mask, tile, scale, grad):
    """What the pairs in `tile` contribute to the gradients of an attention over all pairs in `mask`.

    The pairs inside and outside the tile use different copies of q, k and v. They hold the same numbers, so the
    attention is the same, but autograd tells their gradients apart.
    """
    inside = [double(x).clone().requires_grad_() for x in (q, k, v)]
    scores, values = 0.0, []
    for where, (q_w, k_w, v_w) in ((tile, inside), (~tile, [double(x) for x in (q, k, v)])):
        scores = scores + (q_w @ per_query_head(k_w, q_w).mT * scale) * where
        values.append((where, per_query_head(v_w, q_w)))
    out, _ = dense(scores, mask, values)
    return torch.autograd.grad(out, inside, double(grad))


def dense(scores, mask, values, drop=1.0):
    sees = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(~sees, 0.0)  # no NaN, and none in the gradient
    weights = scores.softmax(-1) * mask * drop
    out = sum((weights * where) @ v for where, v in values)
    return out, scores.logsumexp(-1).masked_fill(~sees.squeeze(-1), -torch.inf)


def dropped(p, seed, shape):
    """What dropout multiplies probabilities (B, H, n, m) by, in float64, as docs/attention.md defines it.

    Pair by pair: Philox 4x32-10 in unsigned arithmetic of numpy, one word of four.
    """
    b, h, q, k = np.indices(shape, dtype=np.uint64)
    words = philox([k // np.uint64(4), q, h, b], seed)
    word = np.choose((k % np.uint64(4)).astype(np.int64), words)
    kept = word >= np.uint64(round(p * 2**32))
    return torch.from_numpy(np.where(kept, 1 / (1 - p), 0.0))


def philox(counter, seed):
    """Four words of Philox 4x32-10."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = [np.uint64(seed) & low, np.uint64(seed) >> half]
    for _ in range(10):
        a = counter[0] * np.uint64(0xD2511F53)
        b = counter[2] * np.uint64(0xCD9E8D57)
        counter = [(b >> half) ^ counter[1] ^ key[0], b & low, (a >> half) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return counter


def scored(score_mod, scores):
    """Scores (B, H, n, m) after a score_mod that is written so that indices broadcast: no vmap, no tracing."""
    sizes = enumerate(scores.shape)
    indices = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in sizes]
    return score_mod(scores, *indices).expand(scores.shape)


def per_query_head(x, q):
    return double(x).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def double(x):
    return x if x.dtype == torch.float64 else x.double()


def tile_mask(tile, device="cpu"):
    """The pairs of a tile, counted from its corner, as a dense mask."""
    rows, cols = torch.arange(len(tile.rows), device=device), torch.arange(len(tile.cols), device=device)
    distance = cols - rows.unsqueeze(-1)
    return (tile.lo <= distance) & (distance <= tile.hi)
