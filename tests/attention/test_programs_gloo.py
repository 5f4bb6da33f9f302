"""Every program on real processes: what virtual ranks compute, 2 to 4 ranks (daily 2) compute too, on gloo to the bit.

A spawn takes seconds, so each tries every program, under one strategy after another. On CUDA a program takes every rank
ten seconds or more to compile: there each number of ranks tries a fifth of them, others than the next.
"""

from functools import partial

from attnspan.layouts import HeadTail, Striped
from attnspan.testing import loopback
from tests.attention.harness import compare, on_rank, together
from tests.attention.programs import WRITTEN, problem
from tests.attention.test_gloo import there, to_the_bit
from tests.processes import on_backends, spawn

APART = 5  # on CUDA, every fifth program
STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses"]


def problems(ranks, backend):
    """By name, every program under some strategy and layout; see above for those on CUDA."""
    strategies = [*STRATEGIES, *(["ulysses(2) x needed"] if ranks % 2 == 0 else [])]
    return {
        name: problem(
            name, (HeadTail, Striped)[n % 2](ranks), strategies[(n + ranks) % len(strategies)], through_lse=True
        )
        for n, name in enumerate(WRITTEN)
        if backend == "gloo" or n % APART == ranks % APART
    }


def live(world, backend):
    """One process."""
    return {name: on_rank(there(each, world), None) for name, each in problems(world.ranks, backend).items()}


@on_backends(2, slow=(3, 4))
def test_processes_run_every_program(ranks, backend):
    told = spawn(ranks, live, backend, backend=backend, timeout=240)
    wrong = {}
    for name, each in problems(ranks, backend).items():
        real = [rank[name] for rank in told]
        try:
            compare(each, together(each, real))
            if backend == "gloo":
                to_the_bit(real, loopback(ranks).run(partial(on_rank, each)))
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong
