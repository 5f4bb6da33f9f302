"""Multi-head latent attention (MLA), trained over ranks: 20 numbers a token travel in the place of 160.

Run: python examples/18_latent_attention.py    or    torchrun --nproc-per-node=4 examples/18_latent_attention.py
"""

import torch
import torch.nn.functional as F
from launch import device, launch, mesh_of, say
from torch import nn

import attnspan as span

SEQ_LEN, VOCAB, DIM, STEPS = 256, 64, 32, 5
HEADS, NOPE, ROPE, VALUE, RANK = 4, 16, 4, 16, 16


def rotated(x, positions):
    """Rotary embedding of (..., tokens, ROPE), of the tokens' global positions."""
    angles = positions[:, None] / 100 ** (torch.arange(0, ROPE, 2, device=x.device) / ROPE)
    real, imaginary = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


class LatentAttention(nn.Module):
    """As in DeepSeek-V3, without a low rank for queries."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(DIM, HEADS * (NOPE + ROPE)), nn.Linear(HEADS * VALUE, DIM)
        self.down, self.up = nn.Linear(DIM, RANK + ROPE), nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)

    def expand(self, latent):
        """Keys and values of all heads, token by token: run wherever the latent arrives."""
        low, rope = latent.split([RANK, ROPE], dim=-1)
        nope, value = self.up(low).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), value

    def forward(self, x, cp):
        nope, rope = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, ROPE], dim=-1)
        query = torch.cat([nope, rotated(rope, cp.positions)], dim=-1)
        low, rope = self.down(x).split([RANK, ROPE], dim=-1)
        latent = torch.cat([F.rms_norm(low, (RANK,)), rotated(rope, cp.positions)], dim=-1)
        return self.out(cp.attention(query, latent, expand=self.expand).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(LatentAttention() for _ in range(2))

    def forward(self, tokens, cp):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (DIM,)), cp)
        return self.head(F.rms_norm(x, (DIM,)))


def trained(cp):
    """The losses of a few steps, and what travelled."""
    torch.manual_seed(0)
    model = Model().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = ((torch.arange(SEQ_LEN) * 3 + step) % VOCAB).unsqueeze(0).to(device())  # counting by threes
        own, labels = cp.shard(tokens), cp.shift(cp.shard(tokens), by=-1, fill=-100)
        per_token = F.cross_entropy(model(own, cp).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        loss = cp.mean_loss(per_token, labels.flatten() != -100)
        optimizer.zero_grad()
        loss.backward()
        cp.average_gradients(model)  # of `up` too: each rank's is of the tokens that it attended over
        optimizer.step()
        losses.append(loss.item())
    return losses, cp.report()


def main():
    losses, report = trained(span.ContextParallel(mesh_of(-1), seq_len=SEQ_LEN, mask=span.Causal()))
    say(report)
    alone = span.testing.loopback(ranks=1, device=device())
    ((expected, _),) = alone.run(
        lambda world: trained(span.ContextParallel(world, seq_len=SEQ_LEN, mask=span.Causal()))
    )
    for step, (loss, one) in enumerate(zip(losses, expected, strict=True)):
        say(f"step {step}: loss {loss:.6f} on ranks, {one:.6f} on one device")
        assert abs(loss - one) < 1e-4
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    launch(main, ranks=4)
