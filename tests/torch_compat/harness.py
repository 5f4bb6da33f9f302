"""What the tests of torch_compat share: one attention, on one device and cut over virtual ranks."""

import torch
import torch.nn.functional as F

from attnspan.testing import loopback
from tests.devices import here


def whole(length, heads=2, kv_heads=None, batch=2, seed=0, dtype=torch.float64):
    """Query, key and value of one device; the same numbers whenever asked."""
    generator = torch.Generator().manual_seed(seed)
    return [
        here(torch.randn(batch, count, length, 8, dtype=dtype, generator=generator, device="cpu"))
        for count in (heads, kv_heads or heads, kv_heads or heads)
    ]


def alone(length, is_causal=True, **options):
    """Output and gradients of one device, for the loss `(out ** 2).sum()`."""
    leaves = [x.requires_grad_() for x in whole(length, **options)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad((out**2).sum(), leaves)]


def close(found, expected):
    """float64: what is left is the order of sums."""
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(found, expected, strict=True))


def on_ranks(ranks, fn):
    """What fn(mesh) returned on every virtual rank. Options that it sets are its rank's own."""
    return loopback(ranks).run(fn)
