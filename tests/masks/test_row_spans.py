"""Spans of rows become bands that hold the same pairs, each once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.masks.algebra import joined
from attnspan.masks.band import Band, tight
from attnspan.masks.row_spans import RowSpans
from tests.masks.strategies import disjoint_bands, painted


def written(spans, rows, keys):
    """How often each pair is in a span."""
    grid = torch.zeros(rows, keys, dtype=torch.int32)
    for row, start, stop in zip(*(each.tolist() for each in (spans.row, spans.start, spans.stop)), strict=True):
        grid[row, start:stop] += 1
    return grid


def grids(draw):
    """Bands, or noise; bands that begin before 0 are cut."""
    if draw(st.booleans()):
        return painted(draw(disjoint_bands()), 24, 24).bool()
    seed, density = draw(st.integers(0, 1 << 20)), draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    return torch.rand(7, 9, generator=torch.Generator().manual_seed(seed)) < density


@given(st.data())
def test_bands_of_spans_are_tight_and_hold_the_same_pairs(data):
    allowed = grids(data.draw)
    spans = RowSpans.of_pairs(allowed[None], torch.tensor([0]), torch.tensor([0]))
    assert torch.equal(written(spans, *allowed.shape), allowed.int())
    bands = [Band._make(each) for each in spans.merged().bands().tolist()]
    assert torch.equal(painted(bands, *allowed.shape), allowed.int())
    assert all(tight(*band[:4], lo=band.lo, hi=band.hi) == band for band in bands)


@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_spans_of_boxes_merge_to_those_of_the_whole(data, height, width):
    allowed = grids(data.draw)
    whole = RowSpans.of_pairs(allowed[None], torch.tensor([0]), torch.tensor([0]))
    parts = [
        RowSpans.of_pairs(allowed[None, q : q + height, k : k + width], torch.tensor([q]), torch.tensor([k]))
        for q in range(0, allowed.shape[0], height)
        for k in range(0, allowed.shape[1], width)
    ]
    merged = RowSpans.together(parts[::-1]).merged()
    for name in ("row", "start", "stop"):
        assert torch.equal(getattr(merged, name), getattr(whole, name))


@given(st.data())
def test_a_single_band_comes_back_as_one(data):
    bands = [band.shift(2, 2) for band in data.draw(disjoint_bands(max_size=1))]
    spans = RowSpans.of_pairs(painted(bands, 30, 30)[None].bool(), torch.tensor([0]), torch.tensor([0]))
    assert joined(map(Band._make, spans.merged().bands().tolist())) == tuple(bands)
    assert len(spans.merged().bands()) == len(bands)


def test_nothing_is_no_band():
    nothing = RowSpans.together([])
    assert nothing.merged().bands().tolist() == []
    assert len(nothing.repeated(3, rows=9)) == 0
