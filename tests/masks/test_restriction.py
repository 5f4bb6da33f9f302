"""A mask seen by some rows and some columns, as lists of ranges with any steps, against slices of the dense mask."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.masks.ranges import Ranges
from attnspan.masks.restriction import restrict_rows, row_pieces
from tests.masks.strategies import cases


@st.composite
def ranges(draw, length: int) -> list[range]:
    """Disjoint ranges in any order: stripes of one step, or pieces of a cut, some left out."""
    if draw(st.booleans()):
        step = draw(st.integers(1, min(length, 5)))
        found = [range(start, length, step) for start in range(step)]
    else:
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        found = [range(a, b) for a, b in pairwise(cuts)]
    kept = draw(st.lists(st.sampled_from(found), unique=True, min_size=1))
    return draw(st.permutations(kept))


@given(st.data(), cases())
def test_pieces_are_the_dense_mask_of_their_rows_and_columns_each_pair_once(data, case):
    rows, cols = data.draw(ranges(case.q_len)), data.draw(ranges(case.kv_len))
    dense = case.mask.dense(*case.lengths)
    found = {
        (i, j): torch.zeros(len(r), len(c), dtype=torch.int32) for i, r in enumerate(rows) for j, c in enumerate(cols)
    }
    for piece in restrict_rows(row_pieces(case.mask.bands(*case.lengths), rows), rows, Ranges(cols)):
        q0, q1, k0, k1, lo, hi = piece.band
        for q in range(q0, q1):
            for k in range(max(k0, q + lo), min(k1, q + hi + 1)):
                found[piece.row_range, piece.col_range][piece.rows[q], piece.cols[k]] += 1
    for (i, j), grid in found.items():
        assert torch.equal(grid, dense[list(rows[i])][:, list(cols[j])].int())
