"""A recurrence of one's own, as a black box, is split over ranks exactly; one that is not affine is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnspan as span
from attnspan.testing import loopback
from tests.recurrence.cases import Case, cases, distance, of_rank, summed, truth


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
        x = cp.shard(torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0)))
        return cp.recurrence(span.Affine(fn, [x], state_shape, **options))

    return loopback(2).run(rank)


def squashed(x, state):
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t].unsqueeze(-1))
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
        (squashed, {"state_shape": (3,)}, r"state_shape must have two dims, or one if diagonal, got \(3,\)"),
    ],
)
def test_what_is_not_affine_is_refused_by_name(fn, options, words):
    with pytest.raises(span.RecurrenceError, match=words):
        through(fn, **options)
