"""What Balanced promises, on the corpus and on small and odd sequences."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan.layouts import Balanced, Contiguous, HeadTail, RoundRobinByWork, moved
from attnspan.layouts.balanced import EQUAL, FEW, TOLERANCE, WORTH, fitting_chunk
from attnspan.layouts.fair_window import HEAVY
from attnspan.layouts.layout import _cached_shards
from attnspan.masks import Causal, Documents, Full, SlidingWindow
from attnspan.masks.profile import RowWork
from attnspan.plan import Plan
from attnspan.plan.plan import _steps
from benchmarks.corpus import CASES, case, lognormal
from benchmarks.packs import PACKS, pack
from tests.layouts.strategies import lengths_of, masks

CHUNK = 128


def weighted_work(layout, case, seq_len):
    works = [layout.work_per_rank(mask, seq_len) for mask in case.masks]
    return [sum(w * n for w, n in zip(case.weights, ranks, strict=True)) for ranks in zip(*works, strict=True)]


def check(name, ranks, chunks=64):
    seq_len = chunks * CHUNK * ranks
    it = case(name, seq_len)
    layout = Balanced(it.masks, weights=it.weights, ranks=ranks)
    work = weighted_work(layout, it, seq_len)
    rivals = [HeadTail(ranks), RoundRobinByWork(it.masks, weights=it.weights, ranks=ranks)]
    assert max(work) <= 1.02 * sum(work) / ranks
    for rival in rivals:
        assert max(work) <= max(*weighted_work(rival, it, seq_len), (1 + TOLERANCE) * sum(work) / ranks), rival
    tokens = layout.tokens(seq_len)
    assert max(tokens) - min(tokens) <= CHUNK
    runs = [len(runs) for runs in layout.shards(seq_len)]
    assert max(runs) <= 4
    assert sum(runs) / ranks <= 3.5
    assert min(run.stop - run.start for runs in layout.shards(seq_len) for run in runs) >= CHUNK
    if it.lengths and max(it.lengths) < seq_len / (8 * ranks):
        assert sum(moved(it.masks[0], layout, seq_len)) <= 0.05 * seq_len * (ranks - 1)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_promise_holds_on_the_corpus(name, ranks):
    check(name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 5, 7, 16, 32, 64])
@pytest.mark.parametrize("name", CASES)
def test_the_promise_holds_on_the_whole_corpus(name, ranks):
    check(name, ranks)


def test_a_short_run_between_longer_ones_goes_to_a_neighbour():
    check("documents-short", 32)


def test_some_case_has_only_short_documents():
    lengths = case("documents-short", 64 * CHUNK * 8).lengths
    assert max(lengths) < 64 * CHUNK / 8


def random_pack(seed):
    """A mask of documents, its length, a number of ranks, and the part of a fair share that its heaviest row is."""
    draw = random.Random(seed)
    ranks = draw.choice([256, 512])
    seq_len = ranks * 2 ** draw.randint(7, 12)
    documents = min(round(2 ** draw.uniform(4, 14)), seq_len // 16)
    mask = Causal() & Documents(pack(draw.choice([*PACKS]), seq_len, documents, seed))
    return mask, seq_len, ranks, max(mask.right.lengths[0]) * ranks / mask.work(seq_len)


def check_random_pack(seed):
    mask, seq_len, ranks, heaviest = random_pack(seed)
    layout = Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks))
    tokens = layout.tokens(seq_len)
    assert max(tokens) - min(tokens) <= max(2, fitting_chunk(seq_len, ranks))
    assert max(map(len, layout.shards(seq_len))) <= 8
    if heaviest <= 0.02:  # else a single token is more than the unevenness that is allowed
        assert layout.imbalance(mask, seq_len) <= 1.02


@pytest.mark.parametrize("seed", range(16))
def test_random_packs_are_fair_on_hundreds_of_ranks_with_few_runs(seed):
    check_random_pack(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000))
def test_a_thousand_random_packs_are_fair_on_hundreds_of_ranks_with_few_runs(seed):
    check_random_pack(seed)


def test_most_random_packs_have_no_row_that_is_too_heavy():
    assert sum(random_pack(seed)[3] <= 0.02 for seed in range(64)) >= 32


@given(st.integers(1, 4096), st.integers(1, 16), st.sampled_from([1, 16, 128]))
def test_causal_is_head_tail(seq_len, ranks, chunk):
    expected = HeadTail(ranks).shards(seq_len) if seq_len > 1 else Contiguous(ranks).shards(seq_len)
    assert Balanced(Causal(), ranks=ranks, chunk=chunk).shards(seq_len) == expected


@given(st.integers(1, 4096), st.integers(1, 16))
def test_full_is_contiguous(seq_len, ranks):
    assert Balanced(Full(), ranks=ranks).shards(seq_len) == Contiguous(ranks).shards(seq_len)


@pytest.mark.parametrize("mask", [Documents([512] * 32), Causal() & Documents([512] * 32)])
def test_equal_documents_stay_whole_and_in_order(mask):
    assert Balanced(mask, ranks=4).shards(16384) == Contiguous(4).shards(16384)


def test_a_pack_of_short_documents_is_hardly_cut():
    lengths = lognormal(1 << 19, mean=256)
    edges = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    shards = Balanced(Causal() & Documents(lengths), ranks=16).shards(1 << 19)
    cut = [run.start for runs in shards for run in runs if run.start not in edges]
    assert len(cut) <= 2 * 16
    assert len(cut) < len(lengths) / 50


@given(st.data(), st.integers(1, 700), st.integers(1, 8), st.sampled_from([1, 4, 32]))
def test_it_is_as_fair_as_head_tail_and_round_robin(data, seq_len, ranks, chunk):
    mask = data.draw(masks(seq_len))
    work = Balanced(mask, ranks=ranks, chunk=chunk).work_per_rank(mask, seq_len)
    rivals = [HeadTail(ranks), RoundRobinByWork(mask, ranks=ranks, block=chunk)]
    # One line of work is Contiguous or HeadTail, fair up to the rounding of counts: a token at either end. And a
    # gain of less than EQUAL is not worth dealing a few blocks, nor one of less than WORTH dealing many.
    part = EQUAL if seq_len <= FEW * chunk * ranks else WORTH
    allowed = max(2 * seq_len, part * sum(work) / ranks)
    assert max(work) <= min(max(rival.work_per_rank(mask, seq_len)) for rival in rivals) + allowed


@given(st.data(), st.integers(256, 4096), st.integers(1, 8), st.sampled_from([4, 16]))
def test_no_light_run_is_shorter_than_a_chunk_where_there_are_enough(data, seq_len, ranks, chunk):
    mask = data.draw(masks(seq_len))
    shards = Balanced(mask, ranks=ranks, chunk=chunk).shards(seq_len)
    if seq_len >= 2 * chunk * ranks:
        work, fair = RowWork(mask.bands(seq_len)), mask.work(seq_len) / ranks
        short = [run for runs in shards for run in runs if run.stop - run.start < chunk]
        light = [run for run in short if work.between(run.start, run.stop) < fair / HEAVY]
        assert len(light) <= (seq_len % chunk > 0)  # dealt blocks end with a short one


@given(st.data(), st.integers(1, 2000), st.integers(1, 6))
def test_batch_rows_give_each_rank_the_same_number_of_tokens(data, seq_len, ranks):
    mask = Causal() & Documents([data.draw(lengths_of(seq_len)) for _ in range(3)])
    layout = Balanced(mask, ranks=ranks, chunk=8, per_row=True)
    assert layout.rows == 3
    assert layout.tokens(seq_len, 0) == layout.tokens(seq_len, 1) == layout.tokens(seq_len, 2)


def test_each_batch_row_is_balanced_by_itself():
    rows = [lognormal(65536, mean=2048, seed=seed) for seed in range(3)]
    mask = Causal() & Documents(rows)
    layout = Balanced(mask, ranks=4, per_row=True)
    for row, lengths in enumerate(rows):
        tally = RowWork((Causal() & Documents(lengths)).bands(65536))
        work = [sum(tally.over(run.positions) for run in runs) for runs in layout.shards(65536, row)]
        assert max(work) <= 1.02 * sum(work) / 4
    assert layout.imbalance(mask, 65536) <= 1.02


def test_the_batch_as_a_whole_is_balanced_by_one_layout():
    mask = Causal() & Documents([lognormal(65536, mean=2048, seed=seed) for seed in range(3)])
    layout = Balanced(mask, ranks=4)
    assert layout.rows == 1
    assert layout.imbalance(mask, 65536) <= 1.02


def test_weights_say_what_is_balanced():
    full, window = Causal(), Causal() & SlidingWindow(256)
    layout = Balanced([full, window], weights=[1, 100], ranks=4)
    seq_len = 65536
    work = [a + 100 * b for a, b in zip(*(layout.work_per_rank(m, seq_len) for m in (full, window)), strict=True)]
    assert max(work) <= 1.02 * sum(work) / 4


@pytest.mark.parametrize("surroundings", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode])
def test_a_plan_is_the_same_under_any_mode(surroundings):
    lengths = lognormal(8192, mean=300, seed=17)
    mask = Causal() & Documents(lengths)
    with surroundings():
        shards = Balanced(mask, ranks=4, chunk=32).shards(8192)
        steps = Plan(mask, Balanced(mask, ranks=4, chunk=32), 8192, "needed(2)").steps(1)
    _cached_shards.cache_clear()
    _steps.cache_clear()
    assert shards == Balanced(mask, ranks=4, chunk=32).shards(8192)
    assert steps == Plan(mask, Balanced(mask, ranks=4, chunk=32), 8192, "needed(2)").steps(1)


def test_numbers_beyond_what_floats_hold_are_divided_too():
    mask = Causal() & Documents([1 << 39, 1 << 38, 1 << 38])
    layout = Balanced([mask, Causal()], weights=[0.3333333, 1000.77], ranks=5)
    work = [
        1 * a + 3002 * b for a, b in zip(*(layout.work_per_rank(m, 1 << 40) for m in (mask, Causal())), strict=True)
    ]
    assert max(work) <= 1.02 * sum(work) / 5
