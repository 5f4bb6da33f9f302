"""Multi-head latent attention over ranks, and what is true of it: the same in dense float64.

    problem = Problem(Causal(), HeadTail(ranks=2), 16, "ring", heads=4, kv_heads=2, dim=6, value_dim=5)
    found = run(problem)  # Found(out, dq, dlatent, dweight): whole tensors; the weight's gradient is summed over ranks
    compare(problem, found)

Keys and values of a problem are not used: they are made of a latent by `Up`, as in DeepSeek-V3. Some numbers of the
latent are the keys' own last ones, the others go through a matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnspan.attention import attention
from attnspan.testing import loopback
from tests import oracle
from tests.attention.harness import BOUNDS, COARSE, _rank

RANK, ROPE = 7, 2


class Found(NamedTuple):
    out: Tensor
    dq: Tensor
    dlatent: Tensor
    dweight: Tensor


class Up(nn.Module):
    """The latent (B, S, RANK + ROPE) of a problem to its keys and values."""

    def __init__(self, problem, dtype=None):
        super().__init__()
        self.heads, self.dims = problem.kv_heads, (problem.dim - ROPE, problem.value_dim or problem.dim)
        random = torch.Generator().manual_seed(1)
        weight = torch.randn(self.heads * sum(self.dims), RANK, generator=random, dtype=torch.float64) / 2
        self.weight = nn.Parameter(weight.to(problem.dtype).to(dtype or problem.dtype))

    def forward(self, latent):
        low, rope = latent.split([RANK, ROPE], dim=-1)
        key, value = (low @ self.weight.T).unflatten(-1, (self.heads, -1)).transpose(1, 2).split(self.dims, dim=-1)
        return torch.cat([key, rope.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1), value


def latent_of(problem):
    """The whole latent, (B, Sk, RANK + ROPE)."""
    random = torch.Generator().manual_seed(2)
    shape = problem.rows, problem.plan.key_len, RANK + ROPE
    return torch.randn(shape, generator=random, dtype=torch.float64).to(problem.dtype)


def shard(problem, latent, rank):
    return problem.shard(latent.unsqueeze(1), rank, "key").squeeze(1)


def on_rank(problem, group, attend=None, **options):
    """Forward and backward on one rank; shards out, and this rank's part of the weight's gradient."""
    rank, up = _rank(group), Up(problem)
    query, latent = problem.shard(problem.whole.query, rank), shard(problem, latent_of(problem), rank)
    query.requires_grad_()
    latent.requires_grad_()
    if attend is None:
        attend = lambda *inputs, **more: attention(*inputs, plan=problem.plan, group=group, **more, **options)  # noqa: E731
    out = attend(query, latent, expand=up)
    out.backward(problem.shard(problem.whole.grad, rank))
    return Found(out.detach(), query.grad, latent.grad, up.weight.grad)


def together(problem, shards):
    out, dq, dlatent, dweight = zip(*shards, strict=True)
    dlatent = problem.unshard([x.unsqueeze(1) for x in dlatent], "key").squeeze(1)
    return Found(problem.unshard(list(out)), problem.unshard(list(dq)), dlatent, sum(dweight))


def run(problem, **options):
    worlds = loopback(problem.layout.ranks)
    return together(problem, worlds.run(lambda world: on_rank(problem, world, **options)))


def expected(problem):
    """One device, in float64."""
    up = Up(problem, torch.float64)
    query, latent = (x.double().clone().requires_grad_() for x in (problem.whole.query, latent_of(problem)))
    key, value = (oracle.per_query_head(x, query) for x in up(latent))
    out, _ = oracle.dense(query @ key.mT * problem.used_scale, problem.dense, [(problem.dense, value)])
    return Found(out.detach(), *torch.autograd.grad(out, [query, latent, up.weight], problem.whole.grad.double()))


def compare(problem, found, looser=1):
    """Against the oracle. `looser`: in half precision keys and values are rounded too, and so are their gradients."""
    bound = (BOUNDS.get(problem.dtype) or COARSE[problem.dtype]) * looser
    for name, x, y in zip(Found._fields, found, expected(problem), strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == problem.dtype, name
        error = float((x.double() - y).abs().max() / (y.abs().max() or 1.0)) if y.numel() else 0.0
        assert error <= bound, f"{name} is off by {error}, more than {bound}"
