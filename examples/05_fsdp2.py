"""FSDP2 x context parallelism: parameters sharded over all ranks, sequences over some, the loss of one device.

Run: python examples/05_fsdp2.py    or    torchrun --nproc-per-node=4 examples/05_fsdp2.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import device, launch, mesh_of, say
from torch import nn
from torch.distributed.fsdp import fully_shard

import attnspan as span

SEQ_LEN, VOCAB, HEADS, DIM, STEPS = 256, 64, 4, 64, 5
MASK = span.Causal()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, attend):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x).clone()  # FSDP2 warns of results that are views


def main():
    world = dist.get_world_size()
    mesh = mesh_of(2 if world % 4 == 0 else 1, -1, names=("dp", "cp"))
    cp = span.ContextParallel(mesh["cp"], seq_len=SEQ_LEN, mask=MASK)
    torch.manual_seed(0)
    alone = Model().to(device())
    model = copy.deepcopy(alone)
    everyone = mesh._flatten("all")  # FSDP averages gradients over all ranks, so the loss is a mean over all, too
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone))

    for step in range(STEPS):
        batch = torch.randint(VOCAB, (2 * mesh["dp"].size(), SEQ_LEN), generator=torch.Generator().manual_seed(step))
        rows = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device())

        tokens = cp.shard(rows, dim=1)
        labels = cp.shift(tokens, by=-1, fill=-100)
        logits = model(tokens, cp.positions, cp.attention)
        loss = cp.mean_loss(per_token(logits, labels), labels != -100, over=everyone)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step(), ours.zero_grad()

        expected = one_device(alone, batch.to(device()))
        theirs.step(), theirs.zero_grad()
        say(f"step {step}: loss {loss.item():.6f} on {mesh.shape} ranks (dp, cp), {expected:.6f} alone")
        assert abs(loss.item() - expected) < 1e-4


def per_token(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)


def one_device(model, tokens):
    """A step of the same training, whole."""
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    logits = model(tokens, torch.arange(SEQ_LEN, device=tokens.device), attend)
    loss = per_token(logits[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


if __name__ == "__main__":
    launch(main)
