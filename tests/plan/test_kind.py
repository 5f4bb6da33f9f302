"""`auto` chooses by kind of pack: alike on all ranks, in any order, and about as well as pack by pack."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnspan.layouts import Balanced, Contiguous, PerDocument
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Causal, Documents, Full, KeyPadding, Mask, SlidingWindow
from attnspan.masks.typical import typical_lengths
from attnspan.plan import Hardware, Plan, Shape, choose, kind
from attnspan.plan.kind import kind_of, strategy_for
from benchmarks.packs import PACKS, pack

SHAPE = Shape(heads=32, kv_heads=8)
H100 = Hardware.of("h100-nvlink")


def planned(mask: Mask, seq_len: int, ranks: int) -> Plan:
    return Plan(mask, Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks)), seq_len)


def regret(mask: Mask, seq_len: int, ranks: int) -> float:
    """The predicted time of what the kind takes, over that of what is best for the pack itself."""
    plan = planned(mask, seq_len, ranks)
    anew = choose(mask, seq_len=seq_len, ranks=ranks, shape=SHAPE, hardware=H100, layouts=[plan.layout])
    taken = strategy_for(plan, SHAPE, H100)
    return next(c.seconds for c in anew.candidates if c.plan.strategy == taken) / anew.candidates[0].seconds


@pytest.mark.parametrize("name", PACKS)
def test_a_kind_is_about_as_fast_as_choosing_anew(name: str):
    packs = [Causal() & Documents(pack(name, 1 << 14, 40, seed)) for seed in range(4)]
    assert fmean(regret(mask, 1 << 14, 4) for mask in packs) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", PACKS)
def test_a_kind_is_about_as_fast_as_choosing_anew_on_many_packs(name: str, ranks: int):
    masks = [Causal() & Documents(pack(name, 1 << 17, count, seed)) for count in (20, 500) for seed in range(6)]
    assert fmean(regret(mask, 1 << 17, ranks) for mask in masks) <= 1.05


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
    back = [strategy_for(planned(mask, 1 << 14, 4), SHAPE, H100) for mask in reversed(masks)]
    assert there == back[::-1]


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
    assert found.rows == 2
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
