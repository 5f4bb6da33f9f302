"""Training programs as torchtitan and accelerate write them, with one import changed, and their model.

The model is a small Llama: rotary embeddings from a table that is a buffer, SDPA in a module of its own. Each program
trains one step on real ranks and returns its loss and gradients, averaged over ranks as DDP and FSDP2 do; `alone` is
the same step on one device.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention as by_name  # torch's own patch misses such a name

from attnspan.torch_compat import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from tests.devices import here

WORDS, WIDTH, HEADS, KV_HEADS, LONGEST = 31, 32, 4, 2, 64


class Inner(nn.Module):
    """SDPA and nothing else, as torchtitan wraps it."""

    def __init__(self, causal, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.causal, self.attend = causal, attend

    def forward(self, query, key, value):
        return self.attend(query, key, value, is_causal=self.causal, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, causal, attend):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        size = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * size)
        self.wk, self.wv = nn.Linear(WIDTH, KV_HEADS * size), nn.Linear(WIDTH, KV_HEADS * size)
        self.wo = nn.Linear(HEADS * size, WIDTH)
        self.inner = Inner(causal, attend)

    def forward(self, x, turns):
        y = self.norm(x)
        query, key, value = (w(y).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        query, key = rotated(query, turns), rotated(key, turns)
        out = self.inner(*(each.transpose(1, 2) for each in (query, key, value)))
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Tokens to logits. Without positions, the first rows of `freqs_cis` are those of the tokens."""

    def __init__(self, causal=True, layers=2, attend=F.scaled_dot_product_attention):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(causal, attend) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("freqs_cis", table(), persistent=False)

    def forward(self, tokens, positions=None):
        turns = self.freqs_cis[: tokens.shape[1]] if positions is None else self.freqs_cis[positions]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(x)


def table():
    size = WIDTH // HEADS // 2
    angles = torch.outer(torch.arange(LONGEST).float(), 0.5 ** torch.arange(size))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x, turns):
    """x (B, S, H, D), turns (S, D / 2) or (B, S, D / 2) complex."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns.unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2)


def batch(length, seed=0):
    """Inputs and labels, two slices of one tensor, as a data loader gives them."""
    random = torch.Generator().manual_seed(seed)
    tokens = here(torch.randint(WORDS, (2, length + 1), generator=random, device="cpu"))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, labels, total):
    """This rank's tokens' part of the mean over all: its sum over ranks is the loss."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alone(length, causal=True, seed=0):
    """(loss, gradients, logits) of one device."""
    model, (inputs, labels) = Model(causal), batch(length, seed)
    logits = model(inputs)
    loss = loss_of(logits, labels, labels.numel())
    loss.backward()
    return loss.detach(), gradients(model), logits.detach()


def summed(loss, model, group=None):
    """The loss and the gradients over all ranks, in place of what FSDP2 does."""
    loss = loss.detach()
    for each in (loss, *gradients(model).values()):
        dist.all_reduce(each, group=group)
    return loss, gradients(model)


# ---- torchtitan, with a context --------------------------------------------------------------------------------------


def create_context_parallel_ctx(cp_mesh, cp_buffers, cp_seq_dims, cp_no_restore_buffers, cp_rotate_method):
    set_rotate_method(cp_rotate_method)
    return context_parallel(
        cp_mesh, buffers=cp_buffers, buffer_seq_dims=cp_seq_dims, no_restore_buffers=cp_no_restore_buffers
    )


def titan_context(mesh, length, causal=True, rotate_method="allgather", model=None):
    """Inputs, labels and the rotary table are cut in place; forward and backward run inside."""
    model = model or Model(causal)
    inputs, labels = batch(length)
    total, before = labels.numel(), model.freqs_cis.clone()
    context = create_context_parallel_ctx(
        cp_mesh=mesh,
        cp_buffers=[inputs, labels, model.freqs_cis],
        cp_seq_dims=[1, 1, 0],
        cp_no_restore_buffers={inputs, labels},
        cp_rotate_method=rotate_method,
    )
    with context:
        pred = model(inputs)
        loss = loss_of(pred, labels, total)
        loss.backward()
        (logits,) = context_parallel_unshard(mesh, [pred.detach()], [1])
    assert torch.equal(model.freqs_cis, before), "the table is whole again"
    assert inputs.shape == labels.shape == pred.shape[:2], "what is not restored stays a shard"
    return *summed(loss, model), logits


# ---- torchtitan, with a style ----------------------------------------------------------------------------------------


def apply_cp_to_attention_module(attention_modules, cp_mesh):
    _enable_context_parallel_dispatcher()
    cp_plan = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
    for attention_module in attention_modules:
        parallelize_module(module=attention_module, device_mesh=cp_mesh, parallelize_plan=cp_plan)


def titan_style(mesh, length, causal=True, balance=True):
    """Inputs, labels and positions are cut out of place; SDPA's module is parallelized."""
    model = Model(causal)
    apply_cp_to_attention_module([layer.inner for layer in model.layers], mesh)
    inputs, labels = batch(length)
    total = labels.numel()
    positions = torch.arange(length).expand(2, -1)
    load_balancer = _HeadTailLoadBalancer(length, mesh.size(0), mesh.device_type) if balance else None
    _cp_options.enable_load_balance = balance  # contexts on this mesh have cut in the other order
    inputs, labels, positions = _context_parallel_shard(
        mesh=mesh, buffers=(inputs, labels, positions), seq_dims=(1, 1, 1), load_balancer=load_balancer
    )
    pred = model(inputs, positions)
    loss = loss_of(pred, labels, total)
    loss.backward()
    (logits,) = context_parallel_unshard(mesh, [pred.detach()], [1], load_balancer)
    _disable_context_parallel_dispatcher()
    _cp_options.enable_load_balance = True
    return *summed(loss, model), logits


def dtensors(mesh, length):
    """A styled module that is given DTensors, and gives plain tensors back."""
    inner = Inner(causal=True)
    apply_cp_to_attention_module([inner], mesh)
    generator = torch.Generator().manual_seed(3)
    whole = [
        here(torch.randn(1, heads, length, 8, generator=generator, device="cpu"))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    balancer = _HeadTailLoadBalancer(length, mesh.size(), mesh.device_type)
    parts = _context_parallel_shard(mesh, whole, [2, 2, 2], balancer)
    out = inner(*(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts))
    assert not isinstance(out, DTensor)
    (found,) = context_parallel_unshard(mesh, [out], [2])
    return found, F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)


# ---- accelerate ------------------------------------------------------------------------------------------------------


def accelerate(mesh, length):
    """On the "cp" axis of a mesh of two: each pair of ranks has a batch of its own. SDPA was imported by name."""
    maybe_context_parallel = functools.partial(context_parallel, mesh=mesh["cp"])
    model = Model(attend=by_name)
    inputs, labels = batch(length, seed=mesh["dp"].get_local_rank())
    positions = torch.arange(length).unsqueeze(0)
    total = labels.numel()
    buffers = [inputs, labels, positions]
    with maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        loss = loss_of(model(inputs, positions), labels, total)
        loss.backward()
    return *summed(loss, model, mesh["cp"].get_group()), None
