"""Long chunks, and many in groups: random cases have neither, since their heads are small."""

import pytest
import torch

from attnspan.layouts import Contiguous, HeadTail
from attnspan.recurrence import chunked, kernels
from tests.recurrence.cases import Case, distance, on_ranks, truth


@pytest.mark.parametrize("rule", ["GatedDelta", "KDA", "GLA", "SSD"])
def test_long_chunks_in_groups_are_exact(rule, monkeypatch):
    assert chunked.chunk_size(torch.tensor([90, 60]), 40) >= 32
    case = Case(rule, HeadTail(2), 300, [[180, 120]], 1, key_dim=40, value_dim=7)
    expected = truth(case)
    for numbers in (1, 3 * 32 * 2 * 40, chunked.CACHED):
        monkeypatch.setattr(chunked, "CACHED", numbers)
        apart = distance(on_ranks(case), expected)
        assert max(apart.values()) < 1e-9, (numbers, apart)


@pytest.mark.parametrize("rule", ["GatedDelta", "KDA"])
def test_a_triangle_is_solved_within_rounding_in_float32(rule):
    case = Case(rule, Contiguous(1), 256, [[256]], 1, key_dim=64, value_dim=16).rounded(torch.float32)
    apart = distance(on_ranks(case, torch.float32), truth(case))
    assert max(apart.values()) < 2e-6, apart  # as in test_laws.py


def test_keys_that_repeat_are_solved_within_rounding_in_float32():
    case = Case("DeltaNet", Contiguous(1), 128, [[128]], 1, key_dim=64, value_dim=16)
    case.tensors["key"][:] = case.tensors["key"][:, :1]  # the triangle is full: the worst case for its inverse
    rounded = case.rounded(torch.float32)
    apart = distance(on_ranks(rounded, torch.float32), truth(rounded))
    assert apart["out"] < 2e-6, apart


@pytest.mark.parametrize("rule", ["GatedDelta", "KDA"])
def test_maps_multiplied_out_are_the_same_as_factors(rule, monkeypatch):
    case = Case(rule, Contiguous(1), 300, [[180, 120]], 1, key_dim=40, value_dim=7)
    expected = truth(case)
    for factors in (True, False):
        monkeypatch.setattr(kernels, "in_factors", lambda rule, mapped, kept=factors: kept)
        apart = distance(on_ranks(case), expected)
        assert max(apart.values()) < 1e-9, (factors, apart)
