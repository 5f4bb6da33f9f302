"""Small models that call F.scaled_dot_product_attention, one of each kind, and what a training step leaves."""

import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint

from tests.devices import here

WIDTH, HEADS = 16, 2
TURN = threading.Lock()


class Attend(nn.Module):
    """Linear, SDPA, linear: (B, S, width) in and out. `options` go to SDPA."""

    def __init__(self, sdpa=None, **options):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sdpa, self.options = sdpa, {"is_causal": True, **options}

    def forward(self, x):
        query, key, value = self.enter(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attend = self.sdpa or F.scaled_dot_product_attention
        return self.leave(attend(query, key, value, **self.options).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Attends one after another. `again` checkpoints each: "reentrant", "non-reentrant", or a closure over it."""

    def __init__(self, *layers, again=None):
        super().__init__()
        self.layers, self.again = nn.ModuleList(layers or [Attend(), Attend()]), again

    def forward(self, x):
        for layer in self.layers:
            x = x + self._run(layer, x)
        return x

    def _run(self, layer, x):
        if self.again is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.again == "reentrant")


def model(seed=0, again=None, layers=2, **options):
    """The same weights for the same seed, in float64. Virtual ranks share torch's generator, and take turns."""
    with TURN:
        torch.manual_seed(seed)
        return Stack(*(Attend(**options) for _ in range(layers)), again=again).double()


def whole(seq_len, batch=2):
    random = torch.Generator().manual_seed(7)
    return here(torch.randn(batch, seq_len, WIDTH, generator=random, dtype=torch.float64, device="cpu"))


def dense(module, x, mask):
    """(out, gradients by name) on one device, with torch's SDPA and a dense mask."""
    allowed = here(torch.stack([mask.dense(x.shape[1], row=row) for row in range(mask.rows)])[:, None])

    class Dense(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is F.scaled_dot_product_attention:
                kwargs = {key: value for key, value in kwargs.items() if key in ("scale", "enable_gqa")}
                return func(*args, attn_mask=allowed, **kwargs)
            return func(*args, **kwargs)

    with Dense():
        out = module(x)
    return result(module, out)


def result(module, out):
    """(out, gradients of the mean square by name)."""
    module.zero_grad()
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def parallel(cp, module, run, x):
    """(whole out, averaged gradients by name) of run(shard of x)."""
    shard = cp.shard(x).detach().requires_grad_()
    out = run(shard)
    module.zero_grad()
    cp.mean_loss(out.square()).backward()
    cp.average_gradients(module)
    return cp.unshard(out.detach()), {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }


def same(found, true, bound=1e-12):
    """float64 sums of some hundred terms: two ways to take them differ by rounding alone."""
    (out, gradients), (true_out, true_gradients) = found, true
    assert gradients.keys() == true_gradients.keys()
    torch.testing.assert_close(out, true_out, rtol=bound, atol=bound)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, true_gradients[name], rtol=bound, atol=bound)


__all__ = ["Attend", "Stack", "by_name", "dense", "model", "parallel", "result", "same", "whole"]
