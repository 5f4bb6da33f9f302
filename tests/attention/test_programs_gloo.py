"""Every program on real processes: what virtual ranks compute, 2 to 4 gloo ranks (daily 2) compute too, to the bit.

A spawn takes seconds, so each tries every program, under one strategy after another.
"""

from functools import partial
from io import BytesIO

import pytest
import torch

from attnspan.layouts import HeadTail, Striped
from attnspan.testing import loopback
from tests.attention.harness import compare, on_rank, together
from tests.attention.programs import WRITTEN, problem
from tests.processes import spawn

STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses"]


def problems(ranks):
    """By name, every program under some strategy and layout."""
    strategies = [*STRATEGIES, *(["ulysses(2) x needed"] if ranks % 2 == 0 else [])]
    return {
        name: problem(
            name, (HeadTail, Striped)[n % 2](ranks), strategies[(n + ranks) % len(strategies)], through_lse=True
        )
        for n, name in enumerate(WRITTEN)
    }


def live(rank, ranks):
    """One process; results as bytes: tensors would travel as shared memory, which ends with its process."""
    found = {name: on_rank(each, None) for name, each in problems(ranks).items()}
    with BytesIO() as file:
        torch.save(found, file)
        return file.getvalue()


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))])
def test_processes_run_every_program(ranks):
    told = [torch.load(BytesIO(each), weights_only=False) for each in spawn(ranks, live, ranks, timeout=120)]
    wrong = {}
    for name, each in problems(ranks).items():
        real, virtual = [rank[name] for rank in told], loopback(ranks).run(partial(on_rank, each))
        try:
            compare(each, together(each, real))
            for one, other in zip(real, virtual, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True) if x is not None), "virtual ranks"
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong
