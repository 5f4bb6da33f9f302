"""Cut into parts, a tile has the same pairs, each once; and FA2's windows are the tiles they stand for."""

from hypothesis import given
from hypothesis import strategies as st

from attnspan.kernels import cuda_flash
from attnspan.kernels.parts import cut_rows
from attnspan.masks.tile import Tile


@st.composite
def tiles(draw):
    """Any tile that holds a pair, tight or not."""
    n, m = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    lo = draw(st.integers(1 - n - 3, m - 1))
    hi = draw(st.integers(max(lo, 1 - n), m + 3))
    return Tile(range(n), range(m), lo, hi)


def pairs(tile):
    return {(i, j) for i in tile.rows for j in tile.cols if tile.lo <= j - tile.cols[0] - (i - tile.rows[0]) <= tile.hi}


@given(tiles(), st.lists(st.integers(-2, 26)))
def test_parts_hold_each_pair_once_and_are_tight(tile, at):
    parts = [part.tile for part in cut_rows(tile, at)]
    assert sum(part.area for part in parts) == tile.area
    assert set().union(*map(pairs, parts)) == pairs(tile)
    assert all({i for i, _ in pairs(part)} == set(part.rows) for part in parts)
    assert all({j for _, j in pairs(part)} == set(part.cols) for part in parts)


def fa2(n, m, window_size_left=-1, window_size_right=-1):
    """The pairs that FA2 computes: its rules for windows, as flash_api.cpp and mask.h have them."""
    left = -1 if window_size_left >= m else window_size_left
    right = -1 if window_size_right >= m else window_size_right
    if left < 0 and right >= 0:
        left = m
    if left >= 0 and right < 0:
        right = m
    if left < 0 and right < 0:
        return {(i, j) for i in range(n) for j in range(m)}
    return {(i, j) for i in range(n) for j in range(m) if i + m - n - left <= j <= i + m - n + right}


@given(tiles())
def test_every_tile_is_a_set_of_windows_that_fa2_takes_as_meant(tile):
    found = []
    for rows, cols, part in cuda_flash._parts(tile):
        n, m = len(part.rows), len(part.cols)
        found += [(rows.start + i, cols.start + j) for i, j in fa2(n, m, **cuda_flash._window(part))]
    assert sorted(found) == sorted(pairs(tile))


def test_twin_a_window_wider_than_the_keys_is_taken_for_none():
    causal = Tile(range(9), range(2), -8, 0)
    assert fa2(9, 2, **cuda_flash._window(causal)) != pairs(causal)
