"""A picture shows the mask in the colours of its owners."""

import pytest
import torch

from attnspan.inspector.picture import MAX_PIXELS, _allowed, _owners, picture
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, SlidingWindow

MASKS = [Causal(), SlidingWindow(5, 3), Causal() & Documents([13, 40, 11]), ~Causal()]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_what_is_drawn_is_the_mask(mask):
    assert torch.equal(_allowed(mask.bands(64), torch.arange(64)), mask.dense(64))


@pytest.mark.parametrize(
    "layout", [Contiguous(3), HeadTail(3), Striped(ranks=3), Balanced(Causal(), ranks=3)], ids=repr
)
def test_every_row_has_the_colour_of_its_owner(layout):
    assert _owners(layout, 50, 0).tolist() == [layout.owner(50, position) for position in range(50)]


def test_a_picture_is_written_whatever_the_length(tmp_path):
    mask = Causal() & Documents([MAX_PIXELS, 3 * MAX_PIXELS + 1])
    written = picture(mask, HeadTail(ranks=12), 4 * MAX_PIXELS + 1, tmp_path / "mask.png")
    assert written.read_bytes().startswith(b"\x89PNG")
