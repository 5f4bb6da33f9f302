"""A recurrence of one's own, as a black box, is split over ranks exactly; one that is not affine is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnspan as span
from attnspan.testing import loopback
from tests.recurrence.cases import Case, cases, distance, normal, of_rank, summed, truth


def gated_delta(query, key, value, decay, beta, state):
    """The gated delta rule as somebody would write it: token by token, batch rows and heads at once."""
    outs = []
    for t in range(query.shape[1]):
        state = decay[:, t].exp()[..., None, None] * state
        new = beta[:, t, :, None] * (value[:, t] - (key[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + key[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        outs.append((query[:, t].unsqueeze(-2) @ state).squeeze(-2) * query.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


def selective(query, key, value, decay, state):
    """A decay of its own for every number of the state, as in Mamba."""
    outs = []
    for t in range(query.shape[1]):
        state = decay[:, t].exp().unsqueeze(-1) * state + key[:, t].unsqueeze(-1) * value[:, t].unsqueeze(-2)
        outs.append((query[:, t].unsqueeze(-2) @ state).squeeze(-2) * query.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


class AsFunction(Case):
    """A case whose rule is the function above."""

    def call(self, tensors):
        shape = (self.heads, self.key_dim, self.value_dim)
        fn, diagonal = (gated_delta, False) if self.rule == "GatedDelta" else (selective, True)
        return span.Affine(fn, list(tensors.values()), shape, diagonal=diagonal)


@settings(max_examples=12)
@given(cases(rules=["GatedDelta", "GLA"], most=13), st.integers(1, 4))
def test_a_function_over_ranks_is_that_of_one_device(case, width):
    names = ("rule", "layout", "seq_len", "lengths", "batch", "initial", "seed")
    case = AsFunction(**{name: getattr(case, name) for name in names}, heads=2, groups=2, value_dim=width)
    found = loopback(case.layout.ranks).run(lambda world: of_rank(case, world))
    apart = distance(summed(case, found), truth(case))
    assert max(apart.values()) < 1e-9, apart


def through(fn, state_shape=(3, 3), **options):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=span.Contiguous(2))
        x = cp.shard(normal(1, 8, 3, dtype=torch.float32))
        return cp.recurrence(span.Affine(fn, [x], state_shape, **options))

    return loopback(2).run(rank)


def squashed(x, state):
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t].unsqueeze(-1))
    return x, state


def clamped(x, state):
    for t in range(x.shape[1]):
        state = (state + x[:, t].unsqueeze(-1)).clamp(max=1000.0)
    return x, state


def first_token_halved(x, state):
    """Affine, but otherwise at the beginning of a call."""
    for t in range(x.shape[1]):
        state = state * (1.0 if t else 0.5) + x[:, t].unsqueeze(-1)
    return x, state


def from_the_right(x, state):
    """Affine, but by a matrix from the other side."""
    for t in range(x.shape[1]):
        state = state @ (torch.eye(3) + torch.outer(x[0, t], x[0, t])) + x[:, t].unsqueeze(-1)
    return x, state


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (squashed, {}, r"fn \(squashed\) is not affine in its state: .* a matrix from the left .*; off by "),
        (squashed, {"diagonal": True}, r"fn \(squashed\) is not affine .* a factor for each number of it"),
        (from_the_right, {}, r"fn \(from_the_right\) is not affine"),
        (lambda x, state: x, {}, r"must return \(out, final_state\), got Tensor"),
        (
            lambda x, state: (x, state[..., :1]),
            {},
            r"a state of shape \(1, 3, 3\), got shapes \(1, 4, 3\) and \(1, 3, 1",
        ),
        (first_token_halved, {}, r"for a run of tokens as for its parts .*: it depends on where a run begins"),
        (clamped, {}, r"fn \(clamped\) is not affine"),
        (
            lambda x, state: (x, state.double()),
            {},
            r"must return a final state of the dtype of the initial one, float32, got float64; compute",
        ),
        (squashed, {"state_shape": (3,)}, r"state_shape must have two dims, or one if diagonal, got \(3,\)"),
    ],
)
def test_what_is_not_affine_is_refused_by_name(fn, options, words):
    with pytest.raises(span.RecurrenceError, match=words):
        through(fn, **options)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
def test_what_tokens_add_does_not_hide_the_matrix(size, diagonal):
    x = normal(1, 64, 3, dtype=torch.float32) + 1

    def rank(world):
        cp = span.ContextParallel(world, seq_len=64, mask=span.Causal(), layout=span.Contiguous(4))
        leaf = (x * size).requires_grad_()
        out = cp.recurrence(span.Affine(leaky, [cp.shard(leaf)], (3, 1), diagonal=diagonal))
        (out / size).square().sum().backward()
        return cp.unshard(out.detach()), leaf.grad

    found, leaf = loopback(4).run(rank), (x * size).double().requires_grad_()
    out, _ = leaky(leaf, torch.zeros(1, 3, 1, dtype=torch.float64))
    (out / size).square().sum().backward()
    assert (found[0][0] - out).abs().max() < 2e-6 * out.abs().max()
    assert (sum(grad for _, grad in found) - leaf.grad).abs().max() < 2e-6 * leaf.grad.abs().max()


def test_a_strong_decay_of_a_large_state_is_exact():
    x = normal(1, 24, 3, dtype=torch.float32) * torch.tensor([1e8] * 8 + [1.0] * 16)[:, None]

    def fn(x, state):
        return leaky(x, state, 0.1)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=24, mask=span.Causal(), layout=span.Contiguous(3))
        return cp.unshard(cp.recurrence(span.Affine(fn, [cp.shard(x)], (3, 1))))

    out, _ = fn(x.double(), torch.zeros(1, 3, 1, dtype=torch.float64))
    torch.testing.assert_close(loopback(3).run(rank)[0].double(), out, rtol=1e-5, atol=0)


def leaky(x, state, kept=0.99):
    outs = []
    for t in range(x.shape[1]):
        state = kept * state + x[:, t].unsqueeze(-1)
        outs.append(state.sum(-1))
    return torch.stack(outs, 1), state


def mixed(x, state):
    """A matrix product, which autocast would round."""
    for t in range(x.shape[1]):
        state = (torch.eye(3) * 0.5 + 0.1) @ state + x[:, t].unsqueeze(-1)
    return x, state


def test_autocast_does_not_reach_the_function():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=span.Contiguous(2))
        rule = span.Affine(mixed, [cp.shard(torch.ones(1, 8, 3))], (3, 3))
        with torch.autocast("cpu", torch.bfloat16):
            _, state = cp.recurrence(rule, return_final_state=True)
        return state

    expected = mixed(torch.ones(1, 8, 3), torch.zeros(1, 3, 3))[1]
    torch.testing.assert_close(loopback(2).run(rank)[0], expected)


def closure(curved, calls):
    def fn(x, state):
        calls.append(len(x))
        out, state = leaky(x, state)
        return out, state + curved * state**2

    return fn


class Owner:
    def __init__(self):
        self.calls = []

    def fn(self, x, state):
        self.calls.append(len(x))
        return leaky(x, state)


class Slotted:
    """Cannot be held weakly."""

    __slots__ = ()

    def __call__(self, x, state):
        return leaky(x, state)


def test_every_function_is_tested_once_and_another_of_the_same_name_too():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=2, mask=span.Causal(), layout=span.Contiguous(3))
        x = cp.shard(torch.ones(1, 2, 3))

        def called(fn, calls):
            calls.clear()
            cp.recurrence(span.Affine(fn, [x], (3, 1)))
            return len(calls)

        owner, calls = Owner(), []
        first = closure(0.0, calls)
        for fn, log in ((first, calls), (closure(0.0, calls), calls), (owner.fn, owner.calls)):
            once, plain = called(fn, log), called(owner.fn if fn == owner.fn else fn, log)
            assert once - plain == (7 if x.shape[1] else 0)
        assert called(first, calls) == plain
        for _ in range(2):
            cp.recurrence(span.Affine(Slotted(), [x], (3, 1)))
        with pytest.raises(span.RecurrenceError, match=r"fn \(closure.<locals>.fn\) is not affine"):
            called(closure(0.3, calls), calls)
        assert called(first, calls) == plain  # the session goes on

    loopback(3).run(rank)
