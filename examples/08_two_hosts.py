"""Two hosts: the same program, started once on each. Nothing in it knows.

On both hosts, with the first one's address:

    torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=HOST --master-port=29500 examples/08_two_hosts.py
    torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=HOST --master-port=29500 examples/08_two_hosts.py

Run alone it starts four processes here. Heads are exchanged inside a host, keys between hosts: a mesh of two axes.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import device, launch, mesh_of, say

import attnspan as span

SEQ_LEN = 768
MASK = span.Causal() & span.Documents([200, 500, 68])


def main():
    torch.manual_seed(0)
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    inside = inside if dist.get_world_size() > inside else inside // 2 or 1  # all on one host: pretend there are two
    mesh = mesh_of(-1, inside, names=("hosts", "heads"))
    cp = span.ContextParallel(mesh, seq_len=SEQ_LEN, mask=MASK)

    whole = [torch.randn(1, heads, SEQ_LEN, 32, device=device()) for heads in (4, 2, 2)]
    found = cp.unshard(cp.attention(*(cp.shard(x, dim=2) for x in whole)), dim=2)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=MASK.dense(SEQ_LEN).to(device()), enable_gqa=True)
    error = (found - expected).abs().max().item()
    say(cp.plan)
    say(f"{mesh.shape[0]} hosts x {inside} ranks: largest difference from one device {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    launch(main, ranks=4)
