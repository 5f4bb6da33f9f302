"""Dropout: one mask of probabilities for any number of ranks, forward and backward, against the oracle.

The oracle (`oracle.dropped`) draws the mask pair by pair from the definition of the generator, in numpy.
"""

from dataclasses import replace

import pytest
import torch

from attnspan.attention import Attention, attention
from attnspan.errors import AttentionError, KernelError, TransportError
from attnspan.kernels import blocks
from attnspan.layouts import Balanced, Contiguous, HeadTail, PerDocument, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Plan
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.attention.harness import Problem, check, on_rank, run
from tests.attention.programs import problem as program

PACK = Causal() & Documents([13, 9, 15])
ROWS = Causal() & KeyPadding([37, 20])
BOTH = [[20, 10, 7], [5, 5, 27]]
STRATEGIES = ["ring", "gather", "needed", "needed(3)", "ulysses"]
SHARDED = {
    1: Problem(Causal(), Contiguous(1), 37, heads=4, kv_heads=2),
    2: Problem(PACK, HeadTail(2), 37, heads=4, kv_heads=2),
    3: Problem(SlidingWindow(6, 2), Striped(3), 37, heads=6, kv_heads=2),
    4: Problem(ROWS, Balanced(ROWS, ranks=4, chunk=2, per_row=True), 37, heads=4, kv_heads=4),
}
OTHERS = {
    "hybrid": Problem(Causal(), HeadTail(4), 37, "ulysses(2) x ring", heads=4, kv_heads=2),
    "rows of other documents": Problem(Causal() & Documents(BOTH), PerDocument(BOTH, ranks=2), 37, "ring"),
    "cross": Problem(Full(), Contiguous(3), 10, "gather", kv_len=18, kv_layout=HeadTail(3), value_dim=4),
    "sinks and lse": Problem(PACK, Striped(3), 37, "ring", heads=6, sinks=True, through_lse=True),
    "lse, by reference": Problem(Causal(), HeadTail(2), 19, "ring", through_lse=True, kernel="reference"),
    "reference": Problem(PACK, HeadTail(3), 37, "needed(2)", heads=4, kv_heads=2, kernel="reference"),
    "rows that see nothing": Problem(Causal() & KeyPadding([20, 0, 11]), HeadTail(3), 20),
    "fewer tokens than ranks": Problem(Causal(), Contiguous(3), 2),
    "one token": Problem(Causal(), Contiguous(1), 1),
    "a negative scale": Problem(Causal(), HeadTail(2), 17, "ring", scale=-0.3),
    "keys and values alone": Problem(Causal(), HeadTail(2), 17, "ring", wanted="kv"),
    "other strides": Problem(Causal(), HeadTail(2), 17, "ring", memory="rows of more"),
    "float32": Problem(PACK, HeadTail(2), 37, "ring", dtype=torch.float32),
    "bfloat16": Problem(PACK, HeadTail(2), 37, "ring", dtype=torch.bfloat16),
    "a soft cap": program("tanh soft-cap", Contiguous(2), "gather"),
    "a learned bias": program("score by row and head", HeadTail(3), "needed(2)"),
    "a window by head": program("per-head window", Striped(4), "ulysses(2) x ring"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", SHARDED)
def test_every_strategy_drops_what_the_definition_says(ranks, strategy):
    check(replace(SHARDED[ranks], strategy=strategy, dropout_p=0.3))


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_is_attended_to(name):
    check(replace(OTHERS[name], dropout_p=0.25))


@pytest.mark.parametrize("p", [1e-12, 0.5, 0.999999])
def test_any_share_below_one(p):
    check(replace(SHARDED[2], strategy="ring", dropout_p=p))


@pytest.mark.parametrize("name", ["a learned bias", "rows of other documents", "cross"])
def test_tiles_of_many_blocks(name, monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 5)
    monkeypatch.setattr(blocks, "AT_ONCE", 1)
    check(replace(OTHERS[name], dropout_p=0.25))


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_backward_from_kept_keys(strategy):
    problem = replace(SHARDED[2], strategy=strategy, dropout_p=0.25)
    drops = {"dropout_p": problem.dropout_p, "dropout_seed": problem.dropout_seed}

    def on(problem, world):
        kept = Attention(problem.plan, world, keep_keys=True)
        return on_rank(problem, world, lambda q, k, v, sinks: kept(q, k, v, **drops, return_lse=True))

    check(problem, on)


def test_without_dropout_no_bit_changes():
    problem = replace(SHARDED[2], strategy="ring", dtype=torch.float32)
    plain, none = (run(replace(problem, dropout_seed=seed)) for seed in (0, 1))
    assert all(x is y or torch.equal(x, y) for x, y in zip(plain, none, strict=True))


# ---- seeds -----------------------------------------------------------------------------------------------------------

PLAN = Plan(Causal(), HeadTail(2), 16, "ring")


def attend(world, p=0.5, seed=None, plan=PLAN):
    """This rank's out for the same tensors each time."""
    x = torch.ones(1, 2, len(plan.layout.positions(plan.seq_len)[world.rank]), 8)
    return attention(x, x, x, plan=plan, group=world, dropout_p=p, dropout_seed=seed)


def told(call, ranks=2):
    """What every rank is refused with, and what it posted before."""

    def rank(world):
        transport = Counting(world)
        with pytest.raises(AttentionError) as refused:
            call(transport)
        return str(refused.value), *sorted(set(transport.calls))

    (found,) = set(loopback(ranks).run(rank))
    return found


def test_two_calls_differ_and_one_seed_repeats():
    plan = replace(PLAN, layout=HeadTail(1))

    def rank(world):
        torch.manual_seed(3)
        drawn = [attend(world, plan=plan) for _ in range(2)]
        torch.manual_seed(3)
        again = [attend(world, plan=plan) for _ in range(2)]
        given = [attend(world, seed=seed, plan=plan) for seed in (5, 5, 6)]
        before = torch.get_rng_state()
        attend(world, seed=5, plan=plan)
        attend(world, p=0.0, plan=plan)
        assert torch.equal(before, torch.get_rng_state()), "only a seed that is not given is drawn"
        return drawn, again, given

    ((drawn, again, given),) = loopback(1).run(rank)
    assert not torch.equal(*drawn)
    assert all(map(torch.equal, drawn, again))
    assert torch.equal(given[0], given[1])
    assert not torch.equal(given[0], given[2])


def test_other_seeds_on_a_rank_are_refused_before_anything_travels():
    text, *posted = told(lambda world: attend(world, seed=7 + world.rank))
    assert "rank 1 differs from rank 0 in dropout_seed (8, not 7); dropout needs the same seed on every rank" in text
    assert posted == ["agree"]


def test_another_share_on_a_rank_is_refused_before_anything_travels():
    text, *posted = told(lambda world: attend(world, p=0.1 * (1 + world.rank), seed=7))
    assert "rank 1 differs from rank 0 in dropout_p (0.2, not 0.1)" in text
    assert "needs the same seed" not in text
    assert posted == ["agree"]


@pytest.mark.parametrize("wrong", [{"p": 1.5}, {"p": [0.1]}, {"seed": -1}, {"seed": 2**63}], ids=str)
def test_what_is_no_share_or_seed_on_a_rank_is_refused_on_all(wrong):
    text, *posted = told(lambda world: attend(world, **{"seed": 7, **(wrong if world.rank else {})}))
    assert text.startswith("on rank 1: dropout_")
    assert posted == ["agree"]


def test_seeds_that_virtual_ranks_draw_one_after_another_are_refused():
    text, *posted = told(attend)
    assert text.endswith("virtual ranks draw from one generator, and need dropout_seed")
    assert posted == ["agree"]


def test_a_later_call_with_another_seed_on_a_rank_is_refused():
    def rank(world):
        for seed in (7, 8, 9 + world.rank):
            attend(world, seed=seed)

    with pytest.raises(TransportError, match=r"with dropout_seed=(9|10), the same on every rank \(operation 4\)"):
        loopback(2).run(rank)


def test_a_later_call_costs_no_exchange_for_its_seed():
    def rank(world):
        def posted(**dropout):
            transport = Counting(world)
            attend(transport, **dropout)
            return [event.what for event in transport.log if event.kind != "wait"]

        posted(p=0.0), posted(seed=1)
        return posted(p=0.0) == posted(seed=2)

    assert loopback(2).run(rank) == [True, True]


def test_a_kernel_without_dropout_is_refused_and_not_replaced():
    def call(world):
        x = torch.ones(1, 2, 8, 8)
        attention(x, x, x, plan=PLAN, group=world, kernel="cpu_flash", dropout_p=0.5, dropout_seed=1)

    def rank(world):
        with pytest.raises(KernelError, match=r"cpu_flash has no dropout; for this tile use blocks, or auto$"):
            call(world)

    loopback(2).run(rank)
