"""A small transformer that reads text, for the demo: rotary positions, grouped key heads, attention from outside."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, KV_HEADS, LAYERS = 256, 64, 4, 2, 2
HEAD_DIM = DIM // HEADS


def rotated(x, positions):
    """Rotary embedding by global positions."""
    frequency = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angle = positions[..., None] * frequency
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.middle = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.query, self.keys = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x, positions, attend):
        y = self.norm(x)
        q = self.query(y).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        k, v = self.keys(y).unflatten(-1, (2 * KV_HEADS, HEAD_DIM)).transpose(1, 2).chunk(2, dim=1)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.middle(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions, attend):
        """Logits; `attend(q, k, v)` is all that knows of ranks."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.head(self.norm(x))
