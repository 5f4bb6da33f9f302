"""A small Llama: RMSNorm, rotary positions, grouped key heads, SwiGLU; and its training, in one place or on ranks.

Attention is an argument: a session, or `Dense` for one device. `batch(step)` is what a step is trained on, and
`one_device()` trains and tells every step's loss and gradients, which `off` compares.

Shapes: B batch, S tokens, H heads, D head dim.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnspan.masks import Causal, Documents
from tests.devices import here

WIDTH, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB, LAYERS = 16, 4, 2, 4, 24, 32, 2


class Dense:
    """Attention of one device, with the interface of a session."""

    def __init__(self, mask, seq_len):
        rows = [mask.dense(seq_len, row=row) for row in range(mask.rows)]
        self.allowed, self.positions = here(torch.stack(rows).unsqueeze(1)), torch.arange(seq_len)

    def attention(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.allowed, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.wq, self.wo = linear(WIDTH, HEADS * DIM), linear(HEADS * DIM, WIDTH)
        self.wk, self.wv = linear(WIDTH, KV_HEADS * DIM), linear(WIDTH, KV_HEADS * DIM)

    def forward(self, x, positions, attend):
        # As many heads as are here: under tensor parallelism, a part of them.
        query, key, value = (heads_of(each(x)) for each in (self.wq, self.wk, self.wv))
        out = attend.attention(rotated(query, positions), rotated(key, positions), value)
        return self.wo(out.transpose(1, 2).flatten(2))


def heads_of(x):
    """(B, S, H * D) as (B, H, S, D). A view: under a default device, dynamo does not follow `unflatten`."""
    return x.view(*x.shape[:-1], -1, DIM).transpose(1, 2)


def rotated(x, positions):
    """Rotary embedding of (B, H, S, D) by global positions (S,)."""
    angles = positions[:, None] * 100.0 ** -(torch.arange(DIM // 2, device=x.device) / (DIM // 2))
    cos, sin, (even, odd) = angles.cos(), angles.sin(), x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x, positions, attend):
        x = x + self.attention(self.norm(x), positions, attend)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """(B, S) tokens to (B, S, VOCAB) logits. `reentrant` is None, or how blocks are checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)
        random = torch.Generator().manual_seed(7)  # the same in every process, on every device
        with torch.no_grad():
            for weight in self.parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=random, device="cpu") * 0.5 * WIDTH**-0.5)

    def forward(self, tokens, positions, attend):
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, positions, attend)
            else:
                x = checkpoint(layer, x, positions, attend, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


# ---- training --------------------------------------------------------------------------------------------------------

STEPS, BATCH, SEQ_LEN = 10, 2, 27
PACKS = [[27], [5, 22], [13, 1, 13], [9, 9, 9], [20, 7]]


@dataclass(frozen=True)
class Batch:
    """One step: whole tokens and labels, and the mask of its documents."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: object


def batch(step, micro=0):
    """Another pack of documents each time; labels are next tokens within them, some of which do not count."""
    lengths = PACKS[(step + 2 * micro) % len(PACKS)]
    tokens = (torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN) * (3 + step + 5 * micro) + step) % VOCAB
    labels = tokens.roll(-1, dims=1)
    labels[:, torch.tensor(lengths).cumsum(0) - 1] = -100
    labels[:, : 4 + micro] = -100
    return Batch(tokens, labels, Causal() & Documents(lengths))


def losses(model, tokens, labels, positions, attend):
    """The loss of every token, and which of them count."""
    logits = model(tokens, positions, attend)
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != -100


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)  # DTensors and tensors may mix


NORM = 0.5
"""What gradients are clipped to; at every step they have more."""


def clipped(model):
    """The plain way: averaged gradients need no other."""
    nn.utils.clip_grad_norm_(model.parameters(), NORM)


def one_device(micro=1, clip=True, steps=range(STEPS)):
    """Every step's loss and gradients, over the tokens of all micro-batches."""
    model, found = Llama(), []
    optim = optimizer(model)
    for step in steps:
        parts = []
        for each in (batch(step, number) for number in range(micro)):
            dense = Dense(each.mask, SEQ_LEN)
            parts.append(losses(model, each.tokens, each.labels, dense.positions, dense))
        per_token, valid = (torch.cat(side) for side in zip(*parts, strict=True))
        loss = per_token[valid].mean()
        optim.zero_grad()
        loss.backward()
        if clip:
            clipped(model)
        found.append((loss.item(), gradients(model)))
        optim.step()
    return found


def gradients(model):
    """By name, whole, as they are now; names without what wrappers put before them."""
    whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in named(model)}
    return {name: grad.clone() for name, grad in whole.items()}


def named(model):
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module.").replace("_orig_mod.", ""), parameter


def off(found, true):
    """The largest error of any loss or gradient, over the largest magnitude of its like."""
    assert len(found) == len(true)
    worst = 0.0
    for (loss, grads), (true_loss, true_grads) in zip(found, true, strict=True):
        assert grads.keys() == true_grads.keys()
        worst = max(worst, abs(loss - true_loss) / abs(true_loss))
        for name, grad in grads.items():
            worst = max(worst, float((grad - true_grads[name]).abs().max() / true_grads[name].abs().max()))
    return worst
