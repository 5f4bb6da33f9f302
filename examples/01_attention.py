"""Attention over ranks in ten lines, on virtual ranks: no cluster, no GPU, one process.

Run: python examples/01_attention.py
"""

import torch
import torch.nn.functional as F

import attnspan as span

MASK = span.Causal() & span.Documents([600, 90, 334])
Q, K, V = (torch.randn(1, heads, 1024, 64) for heads in (8, 2, 2))


def rank(world):  # on a cluster, `world` is a DeviceMesh or a process group; nothing else changes
    cp = span.ContextParallel(world, seq_len=1024, mask=MASK)
    q, k, v = (cp.shard(x, dim=2) for x in (Q, K, V))
    return cp.unshard(cp.attention(q, k, v), dim=2)


for ranks in (1, 2, 3, 4):
    out = span.testing.loopback(ranks).run(rank)[0]
    dense = F.scaled_dot_product_attention(Q, K, V, attn_mask=MASK.dense(1024), enable_gqa=True)
    error = (out - dense).abs().max().item()
    print(f"{ranks} ranks: largest difference from one device {error:.1e}")
    assert error < 1e-5
