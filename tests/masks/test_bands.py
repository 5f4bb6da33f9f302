"""A band is a set of pairs, and so are lists of bands: every operation against plain Python sets."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.masks import algebra
from attnspan.masks.band import Band, ceil_div, tight
from attnspan.masks.columns import Columns
from attnspan.masks.profile import RowWork
from tests.masks.strategies import bands, disjoint_bands, pairs

near = st.integers(-4, 14)


@given(near, near, near, near, near, near)
def test_tight_keeps_the_set_and_touches_every_row_column_and_bound(q0, q1, k0, k1, lo, hi):
    expected = pairs([(q0, q1, k0, k1, lo, hi)])
    band = tight(q0, q1, k0, k1, lo=lo, hi=hi)
    assert pairs([band] if band else []) == expected
    if band is None:
        return
    rows, columns, diagonals = (
        {q for q, _ in expected},
        {k for _, k in expected},
        {k - q for q, k in expected},
    )
    assert rows == set(range(band.q0, band.q1))
    assert columns == set(range(band.k0, band.k1))
    assert (band.lo, band.hi) == (min(diagonals), max(diagonals))


@given(near, near, near, near)
def test_without_diagonals_tight_is_the_rectangle(q0, q1, k0, k1):
    band = tight(q0, q1, k0, k1)
    assert pairs([band] if band else []) == {(q, k) for q in range(q0, q1) for k in range(k0, k1)}
    assert band is None or band.is_rectangle


@given(bands())
def test_equal_sets_are_equal_bands(band):
    assert tight(*band[:4], lo=band.lo, hi=band.hi) == band
    assert band.is_rectangle == (band.area == (band.q1 - band.q0) * (band.k1 - band.k0))


@given(bands())
def test_area_counts_the_pairs(band):
    assert band.area == len(pairs([band]))


@given(disjoint_bands(), bands())
def test_columns_meet_a_band_as_bands_do(many, band):
    both = [each & band for each in many]
    assert (Columns.of(many) & band).bands() == tuple(each for each in both if each is not None)
    assert Columns.of(many).some([*range(len(many))][::2]) == many[::2]


@given(bands(), bands())
def test_and_is_intersection(left, right):
    both = left & right
    assert pairs([both] if both else []) == pairs([left]) & pairs([right])
    assert both == (right & left)


@given(bands(), bands())
def test_hull_is_the_smallest_band_that_holds_both(left, right):
    hull = left.hull(right)
    together = pairs([left, right])
    assert together <= pairs([hull])
    assert hull == tight(*hull[:4], lo=hull.lo, hi=hull.hi)
    for name, step in {"q0": 1, "q1": -1, "k0": 1, "k1": -1, "lo": 1, "hi": -1}.items():
        smaller = hull._replace(**{name: getattr(hull, name) + step})
        assert not together <= pairs([smaller]), name


@given(bands(), near, near)
def test_shift_moves_every_pair(band, q, k):
    assert pairs([band.shift(q, k)]) == {(i + q, j + k) for i, j in pairs([band])}
    assert band.shift(q, k).shift(-q, -k) == band


@given(bands(), near, near, near, near)
def test_cut_keeps_what_lies_inside(band, q0, q1, k0, k1):
    piece = band.cut(q0, q1, k0, k1)
    assert pairs([piece] if piece else []) == {(q, k) for q, k in pairs([band]) if q0 <= q < q1 and k0 <= k < k1}


@given(bands(), near, near, st.integers(1, 5))
def test_thin_is_a_strided_slice(band, q_start, k_start, step):
    thin = band.thin(q_start, k_start, step)
    expected = {
        ((q - q_start) // step, (k - k_start) // step)
        for q, k in pairs([band])
        if q >= q_start and k >= k_start and (q - q_start) % step == 0 and (k - k_start) % step == 0
    }
    assert pairs([thin] if thin else []) == expected


def test_thin_of_a_dense_grid_is_its_slice():
    grid = torch.ones(16, 16, dtype=torch.bool).tril(-1)
    band = tight(0, 16, 0, 16, hi=-1)
    for step in (2, 3, 5):
        for q in range(step):
            for k in range(step):
                expected = {tuple(pair) for pair in grid[q::step, k::step].nonzero().tolist()}
                assert pairs([band.thin(q, k, step)]) == expected


@given(st.integers(-50, 50), st.integers(1, 9))
def test_ceil_div_rounds_up(a, b):
    assert ceil_div(a, b) * b >= a > (ceil_div(a, b) - 1) * b


# ---- sets of bands -------------------------------------------------------------------------------------


def check_disjoint(result):
    assert sum(band.area for band in result) == len(pairs(result))
    assert all(tight(*band[:4], lo=band.lo, hi=band.hi) == band for band in result)
    assert list(result) == sorted(result)


@given(disjoint_bands(), disjoint_bands())
def test_algebra_is_set_algebra(left, right):
    ours, theirs = pairs(left), pairs(right)
    for operation, expected in (
        (algebra.intersect, ours & theirs),
        (algebra.union, ours | theirs),
        (algebra.subtract, ours - theirs),
    ):
        result = operation(left, right)
        assert pairs(result) == expected, operation.__name__
        check_disjoint(result)


@given(disjoint_bands(max_size=8))
def test_joined_keeps_the_set_in_no_more_bands(some):
    result = algebra.joined(some)
    assert pairs(result) == pairs(some)
    assert len(result) <= len(some)
    check_disjoint(result)
    assert algebra.area(some) == algebra.area(result) == len(pairs(some))


@given(bands(), st.lists(near, max_size=4), st.lists(near, max_size=4))
def test_joined_undoes_cutting_into_a_grid(band, rows, columns):
    rows, columns = sorted({-99, *rows, 99}), sorted({-99, *columns, 99})
    pieces = [band.cut(q0, q1, k0, k1) for q0, q1 in pairwise(rows) for k0, k1 in pairwise(columns)]
    assert algebra.joined(piece for piece in pieces if piece) == (band,)


@given(disjoint_bands(max_size=12), disjoint_bands(max_size=12))
def test_meeting_names_each_pair_that_shares_a_row_once(left, right):
    expected = [(i, j) for i, a in enumerate(left) for j, b in enumerate(right) if max(a.q0, b.q0) < min(a.q1, b.q1)]
    assert sorted(algebra.meeting(left, right)) == expected


@given(st.lists(bands(reach=40), max_size=40), st.lists(bands(reach=40), max_size=40))
def test_meeting_parts_large_sets_too(left, right):
    expected = [(i, j) for i, a in enumerate(left) for j, b in enumerate(right) if max(a.q0, b.q0) < min(a.q1, b.q1)]
    assert sorted(algebra.meeting(left, right)) == expected


@pytest.mark.parametrize("operation", [algebra.intersect, algebra.union, algebra.subtract])
def test_nothing_is_a_set_too(operation):
    some = (tight(0, 2, 0, 2),)
    assert operation((), ()) == ()
    assert operation((), some) == (some if operation is algebra.union else ())
    assert operation(some, ()) == (() if operation is algebra.intersect else some)


# ---- work of rows --------------------------------------------------------------------------------------


@given(disjoint_bands(), near, st.integers(0, 20), st.integers(1, 5))
def test_row_work_counts_the_pairs_of_rows(some, start, count, step):
    work = RowWork(some)
    cells = pairs(some)
    rows = range(start, start + count * step, step)
    assert work.at(start) == sum(q == start for q, _ in cells)
    assert work.before(start) == sum(q < start for q, _ in cells)
    assert work.between(start, start + count) == sum(start <= q < start + count for q, _ in cells)
    assert work.over(rows) == sum(q in rows for q, _ in cells)
    assert work.edges == sorted(set(work.edges))


def test_an_empty_range_holds_no_work():
    work = RowWork([tight(0, 8, 0, 8)])
    assert work.over(range(5, 3)) == work.over(range(5, 3, 2)) == work.over(range(0)) == 0
    assert RowWork([]).before(5) == RowWork([]).at(5) == RowWork([]).over(range(0, 5, 2)) == 0


def test_bands_reach_beyond_machine_integers():
    band = tight(0, 1 << 40, 0, 1 << 40, hi=0)
    assert band == Band(0, 1 << 40, 0, 1 << 40, 1 - (1 << 40), 0)
    assert band.area == RowWork([band]).before(1 << 40) == (1 << 39) * ((1 << 40) + 1)
