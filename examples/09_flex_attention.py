"""FlexAttention over ranks: packed documents, a learned bias, balanced work; all of it beside one device's.

The mask_mod and the score_mod are FlexAttention's, written for the whole sequence; nobody rewrites them for shards.

Run: python examples/09_flex_attention.py    or    torchrun --nproc-per-node=4 examples/09_flex_attention.py
"""

import torch
import torch.distributed as dist
from launch import device, launch, mesh_of, say
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnspan as span

# from torch.distributed.tensor.experimental._attention import _ContextParallel, ...
from attnspan.torch_compat import _context_parallel_shard, _ContextParallel, _PTRRLoadBalancer, context_parallel_unshard

LENGTHS = [900, 70, 210, 313, 507]
SEQ_LEN, HEADS, DIM = sum(LENGTHS), 4, 32  # torch wants a multiple of ranks x 128; here any length will do


def main():
    mesh = mesh_of(-1)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device())
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, SEQ_LEN, DIM, generator=random).to(device()) for _ in range(3)]
    slopes = nn.Parameter(torch.rand(HEADS, generator=random).to(device()))

    def document_causal(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    def learned_alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    expected = alone(tensors, slopes, ids)
    block_mask = create_block_mask(document_causal, None, None, SEQ_LEN, SEQ_LEN, device=device())

    # A session whose layout balances the blocks of the mask.
    cp = span.ContextParallel(mesh, seq_len=SEQ_LEN, mask=span.Mask.from_block_mask(block_mask))
    say(f"{cp.ranks} ranks, work of the largest over the mean: {cp.layout.imbalance(cp.mask, SEQ_LEN):.3f}")
    shards = [cp.shard(x, dim=2).requires_grad_() for x in tensors]
    out = cp.flex_attention(*shards, score_mod=learned_alibi, block_mask=block_mask)
    with cp.flex():  # the same for a model that calls torch's function, however it imported it
        again = flex_attention(*shards, score_mod=learned_alibi, block_mask=block_mask)
    assert torch.equal(out, again)
    cp.mean_loss(out**2).backward()
    cp.average_gradients([slopes])  # DDP and FSDP2 do that themselves
    grads = [cp.unshard(x.grad, dim=2) / cp.ranks for x in shards]
    compare("session", [cp.unshard(out.detach(), dim=2), *grads, slopes.grad], expected)
    cp.assert_used(layers=2)

    # The same program by torch's names.
    balancer = _PTRRLoadBalancer(block_mask, mesh.size())
    attention = parallelize_module(
        Attention(learned_alibi), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
    )
    *shards, own_mask = _context_parallel_shard(mesh, [*tensors, block_mask], [2, 2, 2, 2], balancer)
    shards = [x.requires_grad_() for x in shards]
    slopes.grad = None
    out = attention(*shards, block_mask=own_mask)
    (out**2).sum().div(tensors[0].numel()).backward()  # this rank's part of the mean
    dist.all_reduce(slopes.grad)
    whole = context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in shards)], [2] * 4, balancer)
    compare("torch's names", [*whole, slopes.grad], expected)


class Attention(nn.Module):
    def __init__(self, score_mod):
        super().__init__()
        self.score_mod = score_mod

    def forward(self, query, key, value, block_mask):
        return flex_attention(query, key, value, score_mod=self.score_mod, block_mask=block_mask)


def alone(tensors, slopes, ids):
    """Output and gradients of one device, written out in float64."""
    query, key, value, slopes = (x.detach().double().requires_grad_() for x in (*tensors, slopes))
    far = torch.arange(SEQ_LEN, device=ids.device)[:, None] - torch.arange(SEQ_LEN, device=ids.device)
    scores = query @ key.mT * DIM**-0.5 - slopes[:, None, None] * far
    out = scores.masked_fill((ids[:, None] != ids) | (far < 0), -torch.inf).softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad((out**2).mean(), (query, key, value, slopes))]


def compare(name, found, expected):
    """float32 beside float64: a part in a hundred thousand of the largest."""
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    parts = ("output", "dq", "dk", "dv", "d slopes")
    told = ", ".join(f"{part} {error:.0e}" for part, error in zip(parts, errors, strict=True))
    say(f"{name}, beside one device: {told}")
    assert max(errors) < 1e-4, errors


if __name__ == "__main__":
    launch(main)
