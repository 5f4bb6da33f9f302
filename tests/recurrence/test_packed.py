"""Packed sequences, each continued from a state of its own, against the recurrence token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnspan as span
from attnspan.layouts import Contiguous
from attnspan.recurrence import PackedSequences
from tests.recurrence import oracle
from tests.recurrence.cases import RULES, Case, normal

CPU = torch.device("cpu")
LENGTHS = st.one_of(
    st.lists(st.just(1), min_size=1, max_size=4),  # all decode
    st.lists(st.sampled_from([1, 2, 7, 16, 70]), min_size=1, max_size=4),
)


def case_of(rule, lengths, **shape):
    return Case(rule, Contiguous(1), sum(lengths), [lengths], 1, **shape)


def near(found, expected, bound=1e-12):  # float64, and sums of up to 70 terms
    return float((found - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@given(st.sampled_from(RULES), LENGTHS, st.sampled_from([(1, 1), (4, 2)]), st.integers(0, 99))
def test_every_sequence_goes_on_from_its_own_state(rule, lengths, heads, seed):
    case = case_of(rule, lengths, heads=heads[0], groups=heads[1], seed=seed)
    out, after = PackedSequences(lengths, CPU).run(case.call(case.tensors), case.states)
    expected, ends = case.expected(case.tensors, case.states)
    assert near(out, expected)
    assert near(after, ends)


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 99))
def test_every_convolution_goes_on_from_the_tokens_before(lengths, width, biased, seed):
    left = width - 1
    tokens, before = normal(sum(lengths), 3, seed=seed), normal(len(lengths), left, 3, seed=seed + 1)
    weight, bias = normal(3, width, seed=seed + 2), normal(3, seed=seed + 3) if biased else None
    out, after = PackedSequences(lengths, CPU).conv1d(tokens, before, weight, bias)
    for part, given_before, found, kept in zip(tokens.split(lengths), before, out.split(lengths), after, strict=True):
        line = torch.cat([given_before, part])
        assert near(found, oracle.conv1d(line.unsqueeze(0), weight, bias, [[len(line)]])[0, left:])
        assert torch.equal(kept, line[len(line) - left :])


@pytest.mark.parametrize("cuts", [[3, 1, 1, 8], [13]])
def test_a_function_of_ones_own_runs_on_each_sequence(cuts):
    def decayed(x, state):
        outs = []
        for token in x.unbind(1):
            state = 0.5 * state + token
            outs.append(state)
        return torch.stack(outs, 1), state

    tokens, before = normal(1, sum(cuts), 4), normal(len(cuts), 4, seed=1)
    rule = span.Affine(decayed, [tokens], (4,), diagonal=True)
    out, after = PackedSequences(cuts, CPU).run(rule, before)
    for part, state, found, end in zip(tokens.split(cuts, 1), before, out.split(cuts, 1), after, strict=True):
        expected, last = decayed(part, state.unsqueeze(0))
        assert near(found, expected)
        assert near(end, last[0])
