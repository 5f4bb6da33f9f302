"""Losses on outputs alone: every rank takes part in the backward pass, whatever its runs begin with."""

import pytest
import torch

import attnspan as span
from attnspan.layouts import Contiguous, HeadTail
from attnspan.testing import loopback
from tests.devices import here
from tests.processes import on_backends, spawn
from tests.recurrence.cases import RULES, Case, normal
from tests.recurrence.test_affine import AsFunction

CASES = dict.fromkeys(RULES, Case) | {"GatedDelta as a function": AsFunction, "GLA as a function": AsFunction}
LAYOUTS = {
    "a document over ranks": (Contiguous(2), [8]),
    "whole documents": (Contiguous(2), [4, 4]),
    "both": (HeadTail(3), [5, 8]),
    "an empty rank": (Contiguous(3), [2]),
}


def drawn(name, where, initial=False):
    layout, lengths = LAYOUTS[where]
    case = CASES[name](name.split(" as")[0], layout, sum(lengths), [lengths], 1, groups=2, initial=initial)
    return case, here(normal(1, sum(lengths), 2, 2, seed=1))


def trained(world, name, where, initial):
    """One rank's gradients."""
    case, towards = drawn(name, where, initial)
    cp = span.ContextParallel(world, seq_len=case.seq_len, mask=case.mask, layout=case.layout)
    tensors, states = case.leaves(device=cp.transport.device)
    mine = {key: x if x.dim() == 1 else cp.shard(x) for key, x in tensors.items()}
    (cp.recurrence(case.call(mine), initial_state=states) * cp.shard(towards)).sum().backward()
    wants = [*tensors.values(), *([] if states is None else [states])]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in wants]


def expected(name, where, initial):
    case, towards = drawn(name, where, initial)
    tensors, states = case.leaves()
    (case.expected(tensors, states)[0] * towards).sum().backward()
    return [x.grad for x in [*tensors.values(), *([] if states is None else [states])]]


def same(parts, grads):
    for each, grad in zip(zip(*parts, strict=True), grads, strict=True):
        torch.testing.assert_close(sum(each), grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_on_outputs_alone_has_the_gradients_of_one_device(name, where):
    for initial in (False, True):
        ranks = loopback(LAYOUTS[where][0].ranks)
        same(
            ranks.run(lambda world, initial=initial: trained(world, name, where, initial)),
            expected(name, where, initial),
        )


def live(world):
    return {where: trained(world, "GatedDelta as a function", where, False) for where in ("both", "an empty rank")}


@on_backends(3)
def test_processes_train_on_outputs_alone(ranks, backend):
    found = spawn(ranks, live, backend=backend)
    for where in ("both", "an empty rank"):
        same([each[where] for each in found], expected("GatedDelta as a function", where, False))


@pytest.mark.parametrize("seq_len", [2, 7])
@pytest.mark.parametrize("final", [False, True])
def test_a_parameter_of_a_function_is_trained_on_every_rank(seq_len, final):
    x = normal(1, seq_len, 3).sigmoid()

    def loss(run):
        weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

        def fn(x, state):
            outs = []
            for t in range(x.shape[1]):
                state = weight * state + x[:, t].log().unsqueeze(-1) * (1 - x[:, t] ** 2).sqrt().unsqueeze(-1)
                outs.append(state.sum(-1) * weight)
            return torch.stack(outs, 1), state

        run(fn).backward()
        return weight.grad

    def rank(world):
        cp = span.ContextParallel(world, seq_len=seq_len, mask=span.Causal(), layout=Contiguous(3))

        def on_ranks(fn):
            out, states = cp.recurrence(span.Affine(fn, [cp.shard(x)], (3, 1)), return_final_state=True)
            return out.sum() + (states.sum() / cp.ranks if final else 0)

        return loss(on_ranks)

    def alone(fn):
        out, state = fn(x, torch.zeros(1, 3, 1, dtype=torch.float64))
        return out.sum() + (state.sum() if final else 0)

    found = loopback(3).run(rank)
    assert all(grad is not None for grad in found)  # averaging waits for it
    torch.testing.assert_close(sum(found), loss(alone), rtol=0, atol=1e-10)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("heads", [(), (2,)])
def test_a_function_may_write_to_its_state(heads, diagonal):
    x = normal(1, 12, 3)

    def fn(x, state):
        outs = []
        for t in range(x.shape[1]):
            state.mul_(0.9).add_(x[:, t].view(len(x), *[1] * len(heads), 3, 1))
            outs.append(state.sum(-1).flatten(1))
        return torch.stack(outs, 1), state

    def rank(world):
        cp = span.ContextParallel(world, seq_len=12, mask=span.Documents([5, 7]), layout=Contiguous(3))
        begin, leaf = torch.ones(2, *heads, 3, 2, dtype=torch.float64), x.clone().requires_grad_()
        rule = span.Affine(fn, [cp.shard(leaf)], (*heads, 3, 2), diagonal=diagonal)
        out = cp.recurrence(rule, initial_state=begin)
        out.sum().backward()
        assert torch.equal(begin, torch.ones_like(begin))
        return cp.unshard(out.detach()), leaf.grad

    found, leaf = loopback(3).run(rank), x.clone().requires_grad_()
    begin = [torch.ones(1, *heads, 3, 2, dtype=torch.float64) for _ in range(2)]
    out = torch.cat([fn(part, state)[0] for part, state in zip(leaf.split([5, 7], 1), begin, strict=True)], 1)
    out.sum().backward()
    torch.testing.assert_close(found[0][0], out.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(grad for _, grad in found), leaf.grad, rtol=0, atol=1e-12)
