"""A hybrid of attention, gated delta and short convolutions, trained on packed documents: ranks as one device.

Run: python examples/17_hybrid.py    or    torchrun --nproc-per-node=4 examples/17_hybrid.py
"""

import torch
import torch.nn.functional as F
from launch import device, launch, mesh_of, say
from torch import nn

import attnspan as span

SEQ_LEN, VOCAB, HEADS, DIM, STEPS = 256, 64, 2, 32, 5


class GatedDeltaLayer(nn.Module):
    """As in Qwen3-Next: a short convolution, gates, and the gated delta rule."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gates, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 2 * HEADS), nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(3 * DIM, 3 * DIM, kernel_size=4, groups=3 * DIM, bias=False)

    def forward(self, x, cp):
        mixed = cp.conv1d(self.qkv(x), self.conv.weight, activation="silu")
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in mixed.chunk(3, dim=-1))
        decay, beta = self.gates(x).chunk(2, dim=-1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out = cp.recurrence(span.GatedDelta(q, k, v, -F.softplus(decay), beta.sigmoid()))
        return self.out(out.flatten(2))


class AttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, cp):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(cp.attention(q, k, v).transpose(1, 2).flatten(2))


class Hybrid(nn.Module):
    """Two recurrent layers, one of attention, one more that is recurrent: no layer needs positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        layers = [GatedDeltaLayer(), GatedDeltaLayer(), AttentionLayer(), GatedDeltaLayer()]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens, cp):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (DIM,)), cp)
        return self.head(F.rms_norm(x, (DIM,)))


def trained(cp):
    """The losses of a few steps, each on another pack of documents."""
    torch.manual_seed(0)
    model = Hybrid().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        cuts = torch.randperm(SEQ_LEN - 1, generator=random)[:3].sort().values + 1
        lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([SEQ_LEN])).tolist()
        tokens = (torch.arange(SEQ_LEN) * 3 + torch.randint(VOCAB, (), generator=random)) % VOCAB  # counting by threes

        pack = cp.with_mask(span.Causal() & span.Documents(lengths))
        own = pack.shard(tokens.unsqueeze(0).to(device()))
        labels = pack.shift(own, by=-1, fill=-100, documents=True)
        logits = model(own, pack)
        per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        loss = pack.mean_loss(per_token, labels.flatten() != -100)
        optimizer.zero_grad()
        loss.backward()
        pack.average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    say(pack.report())
    return losses


def main():
    losses = trained(span.ContextParallel(mesh_of(-1), seq_len=SEQ_LEN, mask=span.Causal()))
    alone = span.testing.loopback(ranks=1, device=device())
    expected = alone.run(lambda world: trained(span.ContextParallel(world, seq_len=SEQ_LEN, mask=span.Causal())))[0]
    for step, (loss, one) in enumerate(zip(losses, expected, strict=True)):
        say(f"step {step}: loss {loss:.6f} on ranks, {one:.6f} on one device")
        assert abs(loss - one) < 1e-4
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    launch(main, ranks=4)
