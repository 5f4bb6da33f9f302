"""Recurrences over ranks are those of one device, token by token: every rule, on any layout, packed as it comes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrence.cases import RULES, cases, distance, on_ranks, truth

WIDE = 1e-9  # of float64; what differs is the order of a few hundred sums
NARROW = 2e-6  # of float32, as for attention


@given(cases())
def test_a_recurrence_over_ranks_is_that_of_one_device(case):
    apart = distance(on_ranks(case), truth(case))
    assert max(apart.values()) < WIDE, apart


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=5)
@given(data=st.data())
def test_in_float32_it_is_within_rounding(rule, data):
    case = data.draw(cases(rules=[rule])).rounded(torch.float32)
    apart = distance(on_ranks(case, torch.float32), truth(case))
    for name, found in apart.items():
        shared = name in case.tensors and case.tensors[name].dim() == 1  # a sum over all tokens, most of which cancels
        assert found < (10 * NARROW if shared else NARROW), apart
