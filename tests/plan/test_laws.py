"""Laws of every plan, against the dense mask."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnspan.layouts import HeadTail
from attnspan.layouts.run import tokens_in
from attnspan.masks import Causal
from attnspan.plan import Plan, Step, geometry
from tests.masks.strategies import masks
from tests.plan.strategies import computed, layouts, plans, positions, used_keys


@given(plans())
def test_every_allowed_pair_is_computed_by_exactly_one_tile_and_no_other_pair_is(plan: Plan):
    for row in range(plan.batch_rows):
        dense = plan.mask.dense(plan.seq_len, plan.kv_len, row if plan.mask.rows > 1 else 0)
        assert torch.equal(computed(plan, row), dense.int())


@given(plans())
def test_what_one_rank_sends_at_a_step_the_other_receives_at_that_step(plan: Plan):
    for row in range(plan.batch_rows):
        steps = [plan.steps(group * plan.degree, row) for group in range(plan.groups)]
        assert len({len(mine) for mine in steps}) == 1, "all ranks take part in the same exchanges"
        for at_once in zip(*steps, strict=True):
            sent = sorted(transfer for step in at_once for transfer in step.sends)
            received = sorted(transfer for step in at_once for transfer in step.receives)
            assert sent == received
            assert all(transfer.runs for transfer in sent), "nothing empty is sent"
            assert all(transfer.source != transfer.target for transfer in sent)


@given(plans(), st.sampled_from([1, 2, geometry.AT_ONCE]))
def test_the_hops_of_a_ring_are_the_distances_at_which_keys_are_needed(plan: Plan, at_once: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "AT_ONCE", at_once)
        for row in range(plan.batch_rows):
            drawn = plan.geometry(row)
            fresh = geometry.Geometry(drawn.columns, drawn.q_shards, drawn.k_shards)
            needed = {(rank - source) % plan.groups for rank in range(plan.groups) for source in fresh.needs(rank)}
            assert fresh.shifts == needed - {0}


def test_the_steps_of_one_rank_do_not_list_the_pairs_of_all_ranks():
    plan = Plan(Causal(), HeadTail(256), 1 << 16, "needed(2)")
    assert len(plan.steps(100)) == 2
    assert plan.geometry(0).shifts == {*range(1, 256)}
    assert "_demands" not in vars(plan.geometry(0))
    assert len(plan.group_traffic()) == 256
    assert "_demands" in vars(plan.geometry(0)), "traffic does"


@given(plans())
def test_an_arena_holds_what_was_received_and_own_keys_each_once(plan: Plan):
    layout = plan.layout if plan.kv_layout is None else plan.kv_layout
    for row in range(plan.batch_rows):
        shards = layout.positions(plan.kv_len, row)
        for group in range(plan.groups):
            own = {p for rank in range(group * plan.degree, (group + 1) * plan.degree) for p in shards[rank]}
            for step in plan.steps(group * plan.degree, row):
                arena = positions(step.arena)
                assert len(arena) == len(set(arena))
                arrived = {p for transfer in step.receives for p in positions(transfer.runs)}
                assert set(positions(step.own)) <= own
                assert set(arena) == arrived | set(positions(step.own))
                assert not arrived & set(positions(step.own))


@given(plans())
def test_keys_come_from_the_rank_that_owns_them(plan: Plan):
    layout = plan.layout if plan.kv_layout is None else plan.kv_layout
    for row in range(plan.batch_rows):
        shards = layout.positions(plan.kv_len, row)
        owner = {p: rank // plan.degree for rank, shard in enumerate(shards) for p in shard}
        for group in range(plan.groups):
            for step in plan.steps(group * plan.degree, row):
                for transfer in step.receives:
                    assert {owner[p] for p in positions(transfer.runs)} == {transfer.origin}
                    assert transfer.target == group
                    held = [run.positions for run in plan.keys(transfer.origin * plan.degree, row)]
                    for run in transfer.runs:
                        assert any(_inside(run.positions, whole) for whole in held), "a run travels as one piece"


def _inside(part: range, whole: range) -> bool:
    first = whole.index(part[0]) if part[0] in whole else len(whole)
    return whole[first : first + len(part)] == part


@given(plans())
def test_gradients_of_every_key_used_go_home_once_after_the_step_that_used_it(plan: Plan):
    layout = plan.layout if plan.kv_layout is None else plan.kv_layout
    for row in range(plan.batch_rows):
        shards = layout.positions(plan.kv_len, row)
        owner = {p: rank // plan.degree for rank, shard in enumerate(shards) for p in shard}
        steps = [plan.steps(group * plan.degree, row) for group in range(plan.groups)]
        for at_once in zip(*steps, strict=True):
            assert sorted(way for step in at_once for way in step.grad_sends) == sorted(
                way for step in at_once for way in step.grad_receives
            )
        for group, mine in enumerate(steps):
            gone = [p for step in mine for way in step.grad_sends for p in positions(way.runs)]
            assert len(gone) == len(set(gone))
            assert set(gone) == {p for p in used_keys(plan, group, row) if owner[p] != group}
            for step in mine:
                for way in step.grad_sends:
                    assert way.source == group
                    assert {owner[p] for p in positions(way.runs)} == {way.target}
                    assert set(positions(way.runs)) <= set(positions(step.arena))


@given(plans().filter(lambda plan: "Needed" in repr(plan.strategy)))
def test_needed_moves_exactly_the_keys_the_mask_uses_and_none_twice(plan: Plan):
    layout = plan.layout if plan.kv_layout is None else plan.kv_layout
    for row in range(plan.batch_rows):
        shards = layout.positions(plan.kv_len, row)
        for group in range(plan.groups):
            own = {p for rank in range(group * plan.degree, (group + 1) * plan.degree) for p in shards[rank]}
            steps = plan.steps(group * plan.degree, row)
            moved = [p for step in steps for transfer in step.receives for p in positions(transfer.runs)]
            assert len(moved) == len(set(moved))
            assert set(moved) == used_keys(plan, group, row) - own


@given(plans())
def test_work_and_bytes_are_sums_over_steps(plan: Plan):
    total = 0.0
    for rank in range(plan.ranks):
        steps = [step for row in range(plan.batch_rows) for step in plan.steps(rank, row)]
        assert plan.work(rank) * plan.degree == sum(step.area for step in steps)
        moved = sum(transfer.tokens for step in steps for transfer in step.receives)
        assert sum(plan.received(rank).values()) == moved
        total += plan.work(rank)
    rows = range(plan.batch_rows)
    expected = sum(plan.mask.work(plan.seq_len, plan.kv_len, row if plan.mask.rows > 1 else 0) for row in rows)
    assert abs(total - expected) < 1e-6 * max(expected, 1)
    assert plan.imbalance() >= 1.0 - 1e-9


@given(plans())
def test_a_ring_holds_at_most_three_shards(plan: Plan):
    shards = plan.layout if plan.kv_layout is None else plan.kv_layout
    if plan.degree == 1 and repr(plan.strategy) == "Ring()":
        largest = sum(max(shards.tokens(plan.kv_len, row)) for row in range(plan.batch_rows))
        assert max(plan.peak_keys(rank) for rank in range(plan.ranks)) <= 3 * largest


@given(plans())
def test_tiles_say_their_kind_truly(plan: Plan):
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            for tile in step.tiles:
                allowed = torch.zeros(len(tile.rows), len(tile.cols), dtype=torch.bool)
                distance = torch.arange(len(tile.cols))[None, :] - torch.arange(len(tile.rows))[:, None]
                allowed |= (distance >= tile.lo) & (distance <= tile.hi)
                assert tile.area == int(allowed.sum()) > 0
                assert (tile.kind == "full") == bool(allowed.all())
                if tile.kind == "causal":
                    assert torch.equal(allowed, torch.ones_like(allowed).tril())


@given(plans(max_ranks=3))
def test_a_plan_is_a_value(plan: Plan):
    twin = pickle.loads(pickle.dumps(plan)) if "MaskMod" not in repr(plan.mask) else plan
    assert twin == plan
    assert hash(twin) == hash(plan)
    assert twin.steps(0) == plan.steps(0)


@st.composite
def wide_plans(draw):
    """Lengths up to 4096 and 16 ranks: too large for counting every pair one by one in pictures, not for areas."""
    seq_len, ranks = draw(st.integers(1, 4096)), draw(st.integers(1, 16))
    mask = draw(masks(seq_len, depth=2, rows=1))
    assume(seq_len <= 256 or "MaskMod" not in repr(mask))  # one that alternates is a band for each run of keys: minutes
    assume(mask.cover(seq_len).is_exact)  # of others the plan counts pairs that are asked, too
    strategy = draw(st.sampled_from(["ring", "gather", "needed", "needed(3)"]))
    return Plan(mask, draw(layouts(mask, ranks, True)), seq_len, strategy)


@settings(max_examples=4)
@given(wide_plans())
def test_the_laws_hold_for_long_sequences_and_many_ranks(plan: Plan):
    check_areas(plan)


@pytest.mark.slow
@settings(max_examples=15)
@given(wide_plans())
def test_the_laws_hold_for_many_long_sequences(plan: Plan):
    check_areas(plan)
    tiles = sum(len(step.tiles) for rank in range(plan.ranks) for step in plan.steps(rank))
    if tiles > 2_000:  # dense random masks: a tile per pair or so, which the areas have counted
        return
    dense = plan.mask.dense(plan.seq_len)
    assert torch.equal(computed(plan, 0), dense.int())
    for rank, own in enumerate(plan.layout.positions(plan.seq_len)):
        steps = plan.steps(rank)
        moved = [p for step in steps for transfer in step.receives for p in positions(transfer.runs)]
        used = set(dense[positions(plan.queries(rank))].any(0).nonzero().flatten().tolist())
        assert len(moved) == len(set(moved)) == sum(plan.received(rank).values())
        assert used - set(own) <= set(moved)
        if "Needed" in repr(plan.strategy):
            assert set(moved) == used - set(own)


def check_areas(plan: Plan) -> None:
    areas = sum(step.area for rank in range(plan.ranks) for step in plan.steps(rank))
    assert areas == plan.mask.work(plan.seq_len)
    steps: list[Step] = list(plan.steps(plan.ranks - 1))
    assert sum(map(len, (step.tiles for step in steps))) <= max(areas, 1)
    assert all(tokens_in(step.arena) <= plan.seq_len for step in steps)
