"""Activation checkpointing and torch.compile, as torch's programs use them: forward and backward in one context."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnspan.errors import AttentionError
from attnspan.torch_compat import _context_parallel_shard, _ContextParallel, _HeadTailLoadBalancer, context_parallel
from tests.torch_compat.harness import on_ranks

LENGTH, WIDTH = 9, 8
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Inner(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.inner = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64), Inner()
        generator = torch.Generator().manual_seed(1)  # its own: virtual ranks draw from the default one in any order
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / WIDTH)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.inner(*heads).transpose(1, 2).flatten(2)


def tokens():
    return torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def alone(layers=1):
    block, x = Block(), tokens()
    for _ in range(layers):
        x = block(x)
    (x**2).sum().backward()
    return block.project.weight.grad


def equal(told, expected):
    """Gradients sum over ranks to that of one device; float64."""
    return torch.allclose(sum(told), expected, rtol=1e-10, atol=1e-10)


@KINDS
def test_a_region_runs_again_inside_the_context(reentrant):
    def run(mesh):
        block, x = Block(), tokens()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            x.requires_grad_()
            y = checkpoint(block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant)
            (y**2).sum().backward()
        return block.project.weight.grad

    assert equal(on_ranks(2, run), alone(layers=2))


@KINDS
def test_a_context_inside_a_region_runs_again_with_it(reentrant):
    def step(block, mesh, x):
        with context_parallel(mesh):
            return block(x)

    def run(mesh):
        block, balancer = Block(), _HeadTailLoadBalancer(LENGTH, mesh.ranks, "cpu")
        (x,) = _context_parallel_shard(mesh, [tokens()], [1], balancer)
        y = checkpoint(step, block, mesh, x.requires_grad_(), use_reentrant=reentrant)
        (y**2).sum().backward()
        return block.project.weight.grad

    assert equal(on_ranks(2, run), alone())


@KINDS
def test_a_region_that_would_run_again_after_the_context_raises(reentrant):
    def run(mesh):
        block, x = Block(), tokens()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = checkpoint(block, x.clone().requires_grad_(), use_reentrant=reentrant)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):  # not even inside another one
            (y**2).sum().backward()

    with pytest.raises(AttentionError, match="runs again after context_parallel was left; run backward inside"):
        on_ranks(2, run)


def test_without_checkpointing_backward_may_come_later():
    def run(mesh):
        block, x = Block(), tokens()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = block(x.clone())
        (y**2).sum().backward()
        return block.project.weight.grad

    assert equal(on_ranks(2, run), alone())


def styled(mesh):
    block = Block()
    _ContextParallel(2, _ContextParallel.AttentionType.SDPA)._apply(block.inner, mesh)
    (x,) = _context_parallel_shard(mesh, [tokens()], [1])
    return block, x.requires_grad_()


@KINDS
def test_a_styled_module_runs_again_as_it_ran(reentrant):
    def run(mesh):
        block, x = styled(mesh)
        (checkpoint(block, x, use_reentrant=reentrant) ** 2).sum().backward()
        return block.project.weight.grad

    assert equal(on_ranks(2, run), alone())


@KINDS
def test_a_styled_module_that_would_run_again_in_another_order_raises(reentrant):
    def run(mesh):
        block, x = styled(mesh)
        y = checkpoint(block, x, use_reentrant=reentrant)
        _context_parallel_shard(mesh, [tokens()], [1], _HeadTailLoadBalancer(LENGTH, mesh.ranks, "cpu"))
        (y**2).sum().backward()

    with pytest.raises(AttentionError, match="runs again with another session"):
        on_ranks(2, run)


def test_a_copy_of_a_styled_model_is_styled():
    def run(mesh):
        block, x = styled(mesh)
        copy = deepcopy(block)
        (copy(x) ** 2).sum().backward()
        return copy.project.weight.grad, block.project.weight.grad is None

    told = on_ranks(2, run)
    assert equal([grad for grad, _ in told], alone())
    assert all(untouched for _, untouched in told)


@pytest.mark.parametrize("how", ["context", "style"])
def test_a_block_compiles_whole(how):
    """On one rank: dynamo is not made for threads."""

    def run(mesh):
        torch._dynamo.reset()
        if how == "style":
            block, x = styled(mesh)
            out = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
            (out**2).sum().backward()
            return block.project.weight.grad
        block, x = Block(), tokens()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            (compiled(x) ** 2).sum().backward()
        return block.project.weight.grad

    assert equal(on_ranks(1, run), alone())
