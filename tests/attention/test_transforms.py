"""Derivatives of every kind that torch can ask for: served exactly, or refused in our words; never zero in silence."""

import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._dynamo import compiled_autograd

import attnspan as span
from attnspan.errors import AttentionError, PageError, ShardError
from attnspan.paged import PageAllocator, PageLayer, PagePool, StepPlan
from attnspan.testing import loopback

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of jvp

LENGTH = 8
ALONE = threading.Lock()  # forward mode has one level for all threads of a process


def tensors(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, 2, LENGTH, 4, dtype=torch.float64, generator=generator).unbind()


def by_attention(cp):
    return cp.attention


def by_sdpa(cp):
    def attend(*tensors):
        with cp.sdpa():
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    return attend


def by_flex(cp):
    return lambda *tensors: cp.flex_attention(*tensors, block_mask=cp.mask)


def by_prepared(cp):
    prepared = cp.attention_for(cp.mask)
    return lambda *tensors: prepared(*tensors)


def by_cross(cp):
    return cp.cross(cp, cp.mask)


def by_function(cp):
    plan = cp.plan
    return lambda *tensors: span.attention(*tensors, plan=plan, group=cp.transport)


def by_module(cp):
    class Attends(torch.nn.Module):
        def forward(self, *tensors):
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    module = Attends()
    cp.attach(module)
    return module


WAYS = [by_attention, by_sdpa, by_flex, by_prepared, by_cross, by_function, by_module]


def dual(function, x, tangent):
    with ALONE, forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def batched(function, x, tangent):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, torch.stack([tangent, tangent]), is_grads_batched=True)


def twice(function, x, tangent):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)


def around(function, x, tangent):
    x = x.clone().requires_grad_()
    return torch.vmap(lambda each: each + function(x))(torch.stack([tangent, tangent]))


def alone(asked):
    def asking(function, x, tangent):
        with ALONE:
            return asked(function, x, tangent)

    return asking


ASKED = {
    "torch.func.jvp": alone(lambda f, x, t: torch.func.jvp(f, (x,), (t,))),
    "torch.func.jacfwd": alone(lambda f, x, t: torch.func.jacfwd(f)(x)),
    "dual tensors": dual,
    "torch.func.grad": lambda f, x, t: torch.func.grad(lambda a: f(a).sum())(x),
    "torch.func.vjp": lambda f, x, t: torch.func.vjp(f, x)[1](t),
    "torch.func.jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "torch.func.hessian": alone(lambda f, x, t: torch.func.hessian(lambda a: f(a).sum())(x)),
    "vmap": lambda f, x, t: torch.vmap(f)(torch.stack([x, t])),
    "batched gradients": batched,
    "a gradient around a transform": around,
    "second derivatives": twice,
}
SAID = {
    "dual tensors": "attention has no forward-mode derivative, and a tensor with a tangent came in; use backward()",
    "batched gradients": "attention's backward cannot run inside torch.func's",
    "second derivatives": "attention has no second derivatives; take gradients without create_graph=True",
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_that_attention_does_not_have_is_refused_and_never_zero(way, asked):
    query, key, value, tangent = tensors(4)

    def rank(world):
        attend = way(span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal()))
        with pytest.raises(AttentionError, match=SAID.get(asked, "attention cannot run inside torch.func's grad")):
            ASKED[asked](lambda x: attend(x, key, value), query, tangent)
        return attend(query, key, value)  # and nothing is left behind

    (out,) = loopback(1).run(rank)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_tangent_of_any_argument_is_refused(place):
    given = [*tensors(3), torch.zeros(2, dtype=torch.float64)]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())

        def attend(x):
            query, key, value, sinks = (*given[:place], x, *given[place + 1 :])
            return cp.attention(query, key, value, sinks=sinks)

        for asked in ("torch.func.jvp", "dual tensors", "torch.func.grad"):
            with pytest.raises(AttentionError, match=r"attention (cannot run inside|has no forward-mode)"):
                ASKED[asked](attend, given[place], torch.ones_like(given[place]))

    loopback(1).run(rank)


MOVES = {
    "unshard": lambda cp: lambda x: cp.unshard(x, dim=2),
    "shift": lambda cp: lambda x: cp.shift(x, 1, dim=2),
    "a mean or a sum over ranks": lambda cp: lambda x: cp.mean_loss(x.flatten()),
}


@pytest.mark.parametrize("what", MOVES)
@pytest.mark.parametrize("asked", ["torch.func.jvp", "dual tensors", "torch.func.grad", "vmap"])
def test_moves_and_losses_refuse_transforms_too(what, asked):
    x, tangent = tensors(2)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        with pytest.raises(ShardError, match=f"{what} (cannot run inside torch.func|has no forward-mode derivative)"):
            ASKED[asked](MOVES[what](cp), cp.shard(x, dim=2), cp.shard(tangent, dim=2))

    loopback(1).run(rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shard_has_all_derivatives(ranks):
    x, tangent = tensors(2)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        found, expected = (lambda a: cp.shard(a.sin(), dim=2)), lambda a: a.sin()[:, :, cp.positions]
        for asked in ("torch.func.jvp", "dual tensors", "torch.func.jacrev", "vmap", "second derivatives"):
            torch.testing.assert_close(ASKED[asked](found, x, tangent), ASKED[asked](expected, x, tangent))

    loopback(ranks).run(rank)


@pytest.mark.parametrize("move", ["unshard", "shift"])
def test_moves_have_second_derivatives(move):
    (x,) = tensors(1)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        own = cp.shard(x, dim=2)
        (found,) = twice(MOVES[move](cp), own, None)
        # sums over ranks of squares: each token's own is 2, counted once by each rank that has it
        kept = torch.ones(LENGTH, dtype=torch.float64)
        if move == "shift":
            kept[-1] = 0.0
        copies = 2 if move == "unshard" else 1
        return torch.equal(found, (2.0 * copies * kept)[cp.positions].view(1, 1, -1, 1).expand_as(own))

    assert loopback(2).run(rank) == [True, True]


def test_pages_refuse_transforms():
    allocator = PageAllocator(num_pages=8, page_size=4)
    pool = PagePool(allocator, [PageLayer(kv_heads=1, head_dim=2)])
    plan = StepPlan(pool, max_sequences=1, max_tokens=8, max_length=16)
    key = torch.ones(3, 1, 2)
    plan.step([(allocator.add(), 3)])
    query, sinks = torch.ones(3, 2, 2), torch.ones(2)
    for asked in ("torch.func.jvp", "dual tensors", "torch.func.grad"):
        with pytest.raises(PageError, match=r"key (cannot|has no|requires grad).*a cache has no"):
            ASKED[asked](lambda x: pool.write(0, x, key, plan), key, key)
        pool.write(0, key, key, plan)
        with pytest.raises(PageError, match=r"query (cannot|has no|requires grad).*a cache has no"):
            ASKED[asked](lambda x: pool.attend(0, x, plan), query, query)
        with pytest.raises(PageError, match=r"sinks (cannot|has no|requires grad).*a cache has no"):
            ASKED[asked](lambda x: pool.attend(0, query, plan, sinks=x), sinks, sinks)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("asked", ["torch.func.jvp", "dual tensors", "torch.func.grad", "vmap"])
@pytest.mark.parametrize("outer", [True, False])
def test_compiled_code_is_refused_alike(compiled, asked, fullgraph, outer):
    query, key, value, tangent = tensors(4)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())

        def attend(x):
            return cp.attention(x, key, value)

        if outer and asked == "dual tensors":
            return  # a lock is no code to compile
        compiling = torch.compile(undecorated(asked) if outer else attend, backend="aot_eager", fullgraph=fullgraph)
        run = (lambda: compiling(attend, query, tangent)) if outer else lambda: ASKED[asked](compiling, query, tangent)
        with pytest.raises(Exception, match=r"attention|functorch"):  # torch wraps what is raised while it compiles
            run()

    loopback(1).run(rank)


def undecorated(asked):
    return {
        "torch.func.jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
        "torch.func.grad": lambda f, x, t: torch.func.grad(lambda a: f(a).sum())(x),
        "vmap": lambda f, x, t: torch.vmap(f)(torch.stack([x, t])),
    }[asked]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch looks at its own tensors
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # and makes its own functions
def test_compiled_autograd_is_exact(compiled):
    query, key, value = tensors(3)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())

        def gradient(backward):
            x = query.clone().requires_grad_()
            out = cp.shift(cp.attention(cp.shard(x, dim=2), *(cp.shard(y, dim=2) for y in (key, value))), 1, dim=2)
            backward(cp.mean_loss(cp.unshard(out, dim=2).square().flatten()))
            return x.grad

        def compiling(loss):
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                loss.backward()

        torch.testing.assert_close(gradient(compiling), gradient(torch.Tensor.backward), rtol=0, atol=0)

    loopback(1).run(rank)
