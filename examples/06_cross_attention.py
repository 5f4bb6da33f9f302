"""Cross-attention: queries and keys of different lengths, each with a layout of its own; pairs of documents.

Run: python examples/06_cross_attention.py    or    torchrun --nproc-per-node=4 examples/06_cross_attention.py
"""

import torch
import torch.nn.functional as F
from launch import device, launch, mesh_of, say

import attnspan as span

SOURCE, TARGET = [100, 300, 112], [40, 90, 30]  # three texts and their summaries, packed
PAIRS = span.Documents(TARGET, kv_lengths=SOURCE)  # a summary sees the text it is of


def main():
    torch.manual_seed(0)
    mesh = mesh_of(-1)
    q, k, v = (torch.randn(1, 4, sum(n), 32, device=device()) for n in (TARGET, SOURCE, SOURCE))

    source = span.ContextParallel(mesh, seq_len=sum(SOURCE), mask=span.Documents(SOURCE))
    target = span.ContextParallel(mesh, seq_len=sum(TARGET), mask=span.Causal() & span.Documents(TARGET))
    cross = target.cross(source, PAIRS)

    out = cross(target.shard(q, dim=2), source.shard(k, dim=2), source.shard(v, dim=2))
    found = target.unshard(out, dim=2)

    dense = PAIRS.dense(sum(TARGET), sum(SOURCE)).to(device())
    error = (found - F.scaled_dot_product_attention(q, k, v, attn_mask=dense)).abs().max().item()
    say(cross.plan)
    say(f"largest difference from one device {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    launch(main)
