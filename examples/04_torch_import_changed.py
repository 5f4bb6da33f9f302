"""A program written for torch's experimental context parallelism, with one import changed.

Run: python examples/04_torch_import_changed.py    or    torchrun --nproc-per-node=4 examples/04_torch_import_changed.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import device, launch, mesh_of, say
from torch import nn
from torch.utils.checkpoint import checkpoint

# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from attnspan.torch_compat import context_parallel, context_parallel_unshard, set_rotate_method

SEQ_LEN, VOCAB, HEADS, DIM, STEPS = 250, 64, 4, 64, 5  # torch wants a multiple of 2 x ranks; here any length will do


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Knows nothing of ranks: `places` is a buffer along the sequence, which the context cuts with the tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB)
        self.register_buffer("places", torch.randn(SEQ_LEN, DIM))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    mesh = mesh_of(-1, names=("cp",))
    set_rotate_method("alltoall")
    torch.manual_seed(0)
    model = Model().to(device())
    alone = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone))
    for step in range(STEPS):
        batch = torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)).to(device())
        expected, whole = trained(alone, batch[:, :-1], batch[:, 1:])
        theirs.step(), theirs.zero_grad()

        inputs, labels = batch[:, :-1], batch[:, 1:]
        buffers = [inputs, labels, model.places]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers={inputs, labels}):
            loss, logits = trained(model, inputs, labels)  # on this rank's tokens
            (logits,) = context_parallel_unshard(mesh, [logits], [1])
        for tensor in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
        ours.step(), ours.zero_grad()

        error = (logits - whole).abs().max().item()
        say(f"step {step}: loss {loss:.6f} on {mesh.size()} ranks, {expected:.6f} alone; logits differ by {error:.0e}")
        assert abs(loss - expected) < 1e-5
        assert error < 1e-4


def trained(model, inputs, labels):
    """The loss, as these tokens' part of the mean over the batch, and the logits; gradients are in the model."""
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * SEQ_LEN)
    loss.backward()
    return loss.detach(), logits.detach()


if __name__ == "__main__":
    launch(main)
