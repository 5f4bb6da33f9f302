"""What FlexAttention is given of a program: tables that are prepared once, and what is asked pair by pair."""

import functools
import gc

import torch

from attnspan.kernels import split
from attnspan.masks.tracing import traced

SLOPES = torch.tensor([0.5, 1.0, 2.0])


def score_mod(score, b, h, q_idx, kv_idx):
    return score - torch.sigmoid(SLOPES)[h] * (q_idx - kv_idx)


def program_of(fn):
    return traced(fn, "score_mod", score=torch.float32)


def test_tables_and_what_is_asked_compute_what_the_program_does():
    program = program_of(score_mod)
    prepare, ask, _ = split.split(program)
    score, b, h, q_idx, kv_idx = torch.tensor(3.0), *(torch.tensor(i) for i in (0, 2, 5, 1))
    assert ask(None, score, b, h, q_idx, kv_idx, *prepare(SLOPES)) == score_mod(score, b, h, q_idx, kv_idx)


def test_a_program_that_is_made_again_has_the_same_parts_so_that_nothing_recompiles():
    before = split.split(program_of(score_mod))
    gc.collect()
    assert split.split(program_of(lambda *arguments: score_mod(*arguments))) is before


def test_the_parts_of_many_programs_are_let_go_of(monkeypatch):
    assert split.split_graph.cache_parameters()["maxsize"] is not None
    most = 8  # in the place of hundreds, which take long to trace
    monkeypatch.setattr(split, "split_graph", functools.lru_cache(maxsize=most)(split.split_graph.__wrapped__))
    first = split.split(program_of(score_mod))
    for window in range(most):
        split.split(traced(lambda b, h, q, k, window=window: q - k < window))
    assert split.split_graph.cache_info().currsize == most
    assert split.split(program_of(score_mod)) is not first
