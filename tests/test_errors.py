"""Messages are part of the interface: they are compared whole."""

import re

import numpy as np
import pytest
import torch

from attnspan import errors
from attnspan.errors import AttnspanError, LayoutError, MaskError, integer, integers, one_of


def exactly(message):
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=repr)
def test_whole_numbers_of_every_kind_become_ints(value):
    assert integer("ranks", value) == 3
    assert type(integer("ranks", value)) is int


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (True, "True"),
        (np.True_, "np.True_ (bool)"),
        (torch.tensor(True), "tensor(True) (Tensor)"),
        (4.0, "4.0 (float)"),
        (np.float32(4), "np.float32(4.0) (float32)"),
        (torch.tensor(4.0), "tensor(4.) (Tensor)"),
        (torch.tensor([4, 4]), "tensor([4, 4]) (Tensor)"),
        ("4", "'4'"),
        (None, "None"),
        ([4], "[4]"),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, ...]"),
        (torch.ones(2, 2), "tensor([[1., ... [1., 1.]]) (Tensor)"),
    ],
    ids=repr,
)
def test_what_is_not_a_whole_number_is_refused_by_name(value, shown):
    with pytest.raises(AttnspanError, match=exactly(f"seq_len must be a whole number >= 0, got {shown}")):
        integer("seq_len", value)


def test_the_bound_the_hint_and_the_error_are_the_callers():
    message = "ranks must be a whole number >= 1, got 0; one process is ranks=1"
    with pytest.raises(LayoutError, match=exactly(message)):
        integer("ranks", 0, at_least=1, hint="one process is ranks=1", error=LayoutError)


@pytest.mark.parametrize(
    "values", [[3, 5], (3, 5), {3: "a", 5: "b"}.keys(), np.array([3, 5]), torch.tensor([3, 5])], ids=repr
)
def test_lists_of_every_kind_become_tuples_of_ints(values):
    found = integers("lengths", values)
    assert found == (3, 5)
    assert {type(item) for item in found} == {int}


def test_an_empty_list_is_a_list():
    assert integers("lengths", []) == ()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (8, "8"),
        ("35", "'35'"),
        (b"35", "b'35' (bytes)"),
        (None, "None"),
        (torch.tensor(8), "tensor(8) (Tensor)"),
    ],
    ids=repr,
)
def test_what_is_not_a_list_is_refused_whole(values, shown):
    message = f"lengths must be a list of whole numbers >= 0, got {shown}; as in [3, 5]"
    with pytest.raises(MaskError, match=exactly(message)):
        integers("lengths", values, hint="as in [3, 5]", error=MaskError)


@pytest.mark.parametrize(
    ("values", "item", "shown"),
    [
        ([3, 0], 1, "0"),
        ([2.5, 0], 0, "2.5 (float)"),
        ([3, [5]], 1, "[5]"),
        (np.array([1.0]), 0, "np.float64(1.0) (float64)"),
    ],
    ids=repr,
)
def test_the_first_wrong_item_of_a_list_is_refused_by_its_place(values, item, shown):
    message = f"lengths[{item}] must be a whole number >= 1, got {shown}; as in [3, 5]"
    with pytest.raises(MaskError, match=exactly(message)):
        integers("lengths", values, at_least=1, hint="as in [3, 5]", error=MaskError)


def test_a_known_name_is_returned():
    assert one_of("align", "top", ["top", "bottom"]) == "top"


@pytest.mark.parametrize(
    ("value", "ending"),
    [
        ("bottm", "got 'bottm'; did you mean 'bottom'?"),
        ("Top", "got 'Top'; did you mean 'top'?"),
        ("left", "got 'left'; see Causal"),
        (1, "got 1; see Causal"),
        (["top"], "got ['top']; see Causal"),
    ],
    ids=repr,
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one_or_else_the_hint(value, ending):
    with pytest.raises(MaskError, match=exactly(f"align must be one of top, bottom, {ending}")):
        one_of("align", value, ["top", "bottom"], hint="see Causal", error=MaskError)


def tree(root, prefix=""):
    """The errors below ``root``, one line each, as the module's docstring draws them."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    for child in children:
        last = child is children[-1]
        yield f"{prefix}{'└── ' if last else '├── '}{child.__name__}"
        yield from tree(child, prefix + ("    " if last else "│   "))


def drawn(docstring):
    """The branches that a docstring draws, without what is said about them."""
    return re.findall(r"^    ((?:[│ ] {3})*[├└]── \w+)", docstring, re.MULTILINE)


def test_every_error_is_a_value_error():
    assert issubclass(AttnspanError, ValueError)


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    assert drawn(errors.__doc__) == list(tree(AttnspanError))


def test_twin_a_drawing_that_lacks_a_branch_is_noticed():
    stale = re.sub(r".*PlanError.*\n", "", errors.__doc__)
    assert drawn(stale) != list(tree(AttnspanError))
