"""`auto` takes a strategy for each pack: alike on all ranks, in any order, and as good as comparing all would find."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan.errors import PlanError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout, PerDocument, Striped
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Causal, Documents, Full, KeyPadding, Mask, SlidingWindow
from attnspan.masks.typical import typical_lengths
from attnspan.plan import Choice, Hardware, Plan, Shape, choose, kind
from attnspan.plan.kind import is_forecast, kind_of, strategy_for
from attnspan.plan.strategy import Gather, Needed, Ring, Strategy
from benchmarks.packs import PACKS, pack

SHAPE = Shape(heads=32, kv_heads=8)
SHAPES = [SHAPE, Shape(32, 32, 64), Shape(8, 1)]
H100 = Hardware.of("h100-nvlink")
NODES = replace(H100, ranks_per_node=2)
MACHINES = [H100, Hardware.of("cpu-gloo"), NODES]


def planned(mask: Mask, seq_len: int, ranks: int) -> Plan:
    return Plan(mask, Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks)), seq_len)


def compared(plan: Plan, shape: Shape, machine: Hardware) -> Choice:
    """What comparing every strategy on every rank finds."""
    how = {"seq_len": plan.seq_len, "ranks": plan.ranks, "layouts": [plan.layout], "sampled": plan.ranks}
    return choose(plan.mask, shape=shape, hardware=machine, **how)


def over(choice: Choice, taken: Strategy) -> float:
    """The predicted time of a strategy, over that of the one that a comparison takes."""
    return next(c.seconds for c in choice.candidates if c.plan.strategy == taken) / choice.candidates[0].seconds


def regret(name: str, seed: int, seq_len: int, ranks: int) -> float:
    """`over` for a pack, shape and machine by seed."""
    draw = random.Random(f"{name} {seed} {ranks}")
    shape, machine, documents = draw.choice(SHAPES), draw.choice(MACHINES), round(2 ** draw.uniform(2, 10))
    plan = planned(Causal() & Documents(pack(name, seq_len, documents, seed)), seq_len, ranks)
    return over(compared(plan, shape, machine), strategy_for(plan, shape, machine))


@pytest.mark.parametrize("name", PACKS)
def test_what_is_taken_is_within_5_percent_of_choosing_anew(name: str):
    assert max(regret(name, seed, 1 << 15, 8) for seed in range(3)) <= 1.05


@pytest.mark.parametrize("name", ["uniform", "two lengths"])
def test_what_is_taken_is_within_5_percent_of_choosing_anew_on_64_ranks(name: str):
    assert regret(name, 1, 1 << 16, 64) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "packs"), [(8, 30), (64, 6)])
@pytest.mark.parametrize("name", PACKS)
def test_what_is_taken_is_within_5_percent_of_choosing_anew_on_many_packs(name: str, ranks: int, packs: int):
    assert max(regret(name, seed, 1 << 17, ranks) for seed in range(100, 100 + packs)) <= 1.05


def test_a_strategy_that_suits_a_typical_pack_may_be_slow_for_another():
    """The twin: what the packs have in common does not decide, and the law can fail."""
    plan = planned(Causal() & Documents(pack("equal", 1 << 15, 33, 0)), 1 << 15, 8)
    typical = compared(kind_of(plan), SHAPE, NODES).plan.strategy
    anew = compared(plan, SHAPE, NODES)
    assert over(anew, Strategy.of(typical)) > 1.05
    assert over(anew, strategy_for(plan, SHAPE, NODES)) <= 1.05


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [[[1]], [[3, 1]], [[7, 13]], [[97], [90, 7], [1] * 97]], ids=repr)
def test_a_strategy_is_found_for_any_pack(rows: list[list[int]], ranks: int):
    mask, seq_len, shape = Causal() & Documents(rows), sum(rows[0]), Shape(12, 4, batch=len(rows))
    for layout in (Balanced(mask, ranks=ranks, chunk=1), HeadTail(ranks), Balanced(mask, ranks=ranks, per_row=True)):
        plan = Plan(mask, layout, seq_len)
        taken = strategy_for(plan, shape, NODES)
        assert over(compared(plan, shape, NODES), taken) <= 1.05


@pytest.mark.parametrize("keep_keys", [True, "auto"])
def test_keys_that_are_kept_count(keep_keys: bool):
    plan = planned(Causal() & Documents(pack("wide", 1 << 14, 30, 2)), 1 << 14, 8)
    slow = replace(NODES, between=replace(NODES.between, bandwidth=2e9))
    how = {"seq_len": 1 << 14, "ranks": 8, "layouts": [plan.layout], "keep_keys": keep_keys, "sampled": 8}
    anew = choose(plan.mask, shape=SHAPE, hardware=slow, **how)
    assert over(anew, strategy_for(plan, SHAPE, slow, keep_keys)) <= 1.05


def test_what_does_not_fit_into_memory_is_not_taken():
    plan = planned(Causal() & Documents([1 << 14]), 1 << 14, 8)
    anew = compared(plan, SHAPE, H100)
    ring = next(c for c in anew.candidates if c.plan.strategy == Ring())
    assert all(c.needs > ring.needs for c in anew.candidates if c.plan.strategy in (Needed(1), Needed(2), Gather()))
    tight = replace(H100, memory=2.0 * ring.needs)
    taken = strategy_for(plan, SHAPE, tight)
    assert next(c.needs for c in anew.candidates if c.plan.strategy == taken) <= ring.needs


def test_where_nothing_fits_the_error_says_what_is_needed():
    plan = planned(Causal() & Documents([4096]), 4096, 4)
    with pytest.raises(PlanError, match="no plan fits into"):
        strategy_for(plan, SHAPE, replace(H100, memory=1e6))


@pytest.mark.parametrize(
    ("mask", "layout", "expected"),
    [
        (Causal() & Documents([3000, 1096]), Contiguous(4), True),
        (Causal() & Documents([3000, 1096]), Striped(4), False),  # strides
        (Causal() & ~Documents([512] * 8), Contiguous(4), False),  # a key is in many bands
        (Causal(), Contiguous(4), False),  # comes again and again: compared once
        (KeyPadding([3000, 4096]) & Causal(), Contiguous(4), False),
        (Documents([3000, 1096]) & Causal() & ~Causal(), Contiguous(4), False),  # nothing to compute
    ],
    ids=repr,
)
def test_masks_of_one_batch_are_forecast(mask: Mask, layout: Layout, expected: bool):
    assert is_forecast(Plan(mask, layout, 4096)) == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 3))
def test_typical_documents_fill_the_same_length(lengths: list[int], rows: int):
    found = typical_lengths([lengths] * rows)
    assert len(found) == rows
    for row in found:
        assert sum(row) == sum(lengths)
        assert min(row) >= 1


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.randoms())
def test_the_order_of_documents_makes_no_kind(lengths: list[int], draw: random.Random):
    other = draw.sample(lengths, len(lengths))
    assert Documents(lengths).typical(sum(lengths)) == Documents(other).typical(sum(lengths))


def test_what_is_chosen_does_not_depend_on_what_was_seen_before():
    masks = [Causal() & Documents(pack("lognormal", 1 << 14, 40, seed)) for seed in range(6)]
    there = [strategy_for(planned(mask, 1 << 14, 4), SHAPE, H100) for mask in masks]
    kind._chosen.cache_clear()
    kind._forecast.cache_clear()
    back = [strategy_for(planned(mask, 1 << 14, 4), SHAPE, H100) for mask in reversed(masks)]
    assert there == back[::-1]


@pytest.mark.parametrize("surroundings", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode])
@pytest.mark.parametrize("layout", [HeadTail(4), Striped(4)], ids=repr)  # forecast, and compared
def test_what_is_chosen_is_the_same_under_any_mode(layout: Layout, surroundings):
    plan = Plan(Causal() & Documents([[700, 324], [24, 1000]]), layout, 1024)
    shape = Shape(8, 2, batch=2)
    kind._chosen.cache_clear()
    kind._forecast.cache_clear()
    with surroundings():
        found = strategy_for(plan, shape, NODES)
        anew = compared(plan, shape, NODES)
        traffic = plan.group_traffic()
    kind._chosen.cache_clear()
    kind._forecast.cache_clear()
    assert found == strategy_for(plan, shape, NODES)
    assert anew.explain() == compared(plan, shape, NODES).explain()
    assert traffic == plan.group_traffic()


def test_packs_of_one_distribution_are_of_few_kinds():
    masks = [Causal() & Documents(pack("lognormal", 1 << 17, 500, seed)) for seed in range(64)]
    assert len({kind_of(planned(mask, 1 << 17, 8)) for mask in masks}) <= 12


@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(64), Full()], ids=repr)
def test_a_mask_that_is_no_pack_is_chosen_for_itself(mask: Mask):
    plan = planned(mask, 4096, 4)
    assert kind_of(plan) == Plan(mask, plan.layout, 4096)
    anew = choose(mask, seq_len=4096, ranks=4, shape=SHAPE, hardware=H100, layouts=[plan.layout])
    assert strategy_for(plan, SHAPE, H100) == anew.plan.strategy


def test_rows_and_masks_of_a_layout_become_typical_together():
    rows = [pack("lognormal", 4096, 20, seed) for seed in range(2)]
    mask = Causal() & Documents(rows)
    layout = Balanced([mask, mask & SlidingWindow(64)], weights=[1, 5], ranks=4)
    found = kind_of(Plan(mask, layout, 4096))
    assert found.batch_rows == 2
    assert isinstance(found.layout, Balanced)
    assert found.layout.weights == (1, 5)
    assert found.layout.masks == (found.mask, found.mask & SlidingWindow(64))


def test_layouts_that_know_no_work_stay_as_they_are():
    lengths = [1000, 24, 512, 512]
    mask = Causal() & Documents(lengths)
    assert kind_of(Plan(mask, Contiguous(4), 2048)).layout == Contiguous(4)
    per_document = Plan(mask, PerDocument(lengths, ranks=4), 2048)
    assert kind_of(per_document) == per_document


def test_padded_batches_are_of_few_kinds():
    rows = [KeyPadding([4096 - 7 * n, 1000 + n]) & Causal() for n in range(20)]
    assert len({mask.typical(4096) for mask in rows}) <= 2
    assert {mask.typical(4096).rows for mask in rows} == {2}
