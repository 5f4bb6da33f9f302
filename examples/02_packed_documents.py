"""Packed documents: every batch has other lengths; labels, positions and the loss come out right.

Run: python examples/02_packed_documents.py    or    torchrun --nproc-per-node=4 examples/02_packed_documents.py
"""

import torch
import torch.nn.functional as F
from launch import device, launch, mesh_of, say
from torch import nn

import attnspan as span

SEQ_LEN, VOCAB, HEADS, DIM = 512, 64, 4, 64


class Model(nn.Module):
    """One attention layer with rotary-free positions: enough to need labels, positions and a loss."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens) + self.places(positions)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(x + attend(q, k, v).transpose(1, 2).flatten(2))


def lengths_of(batch):
    """Some documents that fill the sequence, others for every batch."""
    generator = torch.Generator().manual_seed(batch)
    cuts = torch.randperm(SEQ_LEN - 1, generator=generator)[:5].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([SEQ_LEN])).tolist()


def main():
    torch.manual_seed(0)
    model = Model().to(device())
    cp = span.ContextParallel(mesh_of(-1), seq_len=SEQ_LEN, mask=span.Causal())
    for batch in range(3):
        lengths = lengths_of(batch)
        mask = span.Causal() & span.Documents(lengths)
        tokens = torch.randint(VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(batch)).to(device())

        pack = cp.with_mask(mask)  # another pack: another session of the same family
        own = pack.shard(tokens, dim=1)
        labels = pack.shift(own, by=-1, fill=-100, documents=True)  # the next token, but not of the next document
        logits = model(own, pack.positions, pack.attention)
        per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        loss = pack.mean_loss(per_token, labels.flatten() != -100)

        whole = one_device(model, tokens, mask, lengths)
        say(f"documents {lengths}: loss {loss.item():.6f} on {cp.ranks} ranks, {whole.item():.6f} on one device")
        assert abs(loss.item() - whole.item()) < 1e-5


def one_device(model, tokens, mask, lengths):
    """The same, whole."""
    dense = mask.dense(SEQ_LEN).to(tokens.device)
    logits = model(tokens, torch.arange(SEQ_LEN, device=tokens.device), lambda q, k, v: sdpa(q, k, v, dense))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sdpa(q, k, v, dense):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)


if __name__ == "__main__":
    launch(main)
