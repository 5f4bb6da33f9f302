"""The suite can fail: every planted defect turns a probe red that is green without it.

The probe is a handful of the problems that the suite is made of, one for each thing that can be got wrong; they are
small, in float64, and judged as everywhere, by the oracle. Red is a wrong result or an error of ours. Anything else
that is raised is a defect that was planted badly.
"""

import pytest

from attnspan.errors import AttnspanError
from attnspan.layouts import Contiguous, HeadTail, PerDocument, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from tests.attention.defects import DEFECTS, bend_kernels, planted, sentence
from tests.attention.harness import Problem, check

BOTH = [[5, 9, 7], [12, 1, 8]]

PROBE = {
    "a ring": Problem(Causal(), HeadTail(4), 32, "ring", heads=4, kv_heads=2),
    "documents, gathered": Problem(
        Causal() & Documents([7, 13, 4, 9]), Contiguous(3), 33, "gather", heads=6, kv_heads=2
    ),
    "a window, as needed": Problem(SlidingWindow(5, 2), Contiguous(4), 30, "needed(3)", memory="rows of more"),
    "rows that see nothing": Problem(Causal() & KeyPadding([20, 0, 11]), HeadTail(3), 20, kernel="reference"),
    "rows of other documents": Problem(Causal() & Documents(BOTH), PerDocument(BOTH, ranks=2), 21, "ring"),
    "stripes beside chunks": Problem(SlidingWindow(9, 0), Striped(3), 25, "needed(2)", kv_layout=HeadTail(3)),
    "many runs": Problem(Causal(), PerDocument([4] * 10, ranks=2), 40, "needed"),
    "cross-attention": Problem(Full(), Contiguous(3), 10, "gather", kv_len=18, kv_layout=HeadTail(3), value_dim=4),
    "heads for sequence": Problem(Causal(), HeadTail(3), 19, "ulysses", heads=6, kv_heads=2),
    "heads and a ring": Problem(Causal(), Striped(4), 24, "ulysses(2) x ring", heads=4, kv_heads=4),
    "sinks, scale and lse": Problem(Causal(), HeadTail(2), 12, "ring", scale=0.3, sinks=True, through_lse=True),
}


def red():
    """The problems of the probe that are red, and what they say."""
    for name, problem in PROBE.items():
        try:
            check(problem)
        except (AssertionError, AttnspanError) as wrong:
            yield name, str(wrong)


def test_the_probe_is_green():
    assert list(red()) == []


@pytest.mark.parametrize("defect", DEFECTS, ids=sentence)
def test_the_probe_turns_red_when(defect):
    with planted(defect):
        assert any(red()), f"nothing saw that {sentence(defect)}"


def test_the_list_is_as_long_as_promised():
    assert len(set(map(sentence, DEFECTS))) == len(DEFECTS) >= 24


def test_planting_as_such_changes_nothing_and_leaves_nothing_behind():
    """Twin: what does no harm is green, and so is everything after each defect was planted and taken out."""

    def nothing(plant):
        bend_kernels(plant, lambda kernel, *args: kernel.forward(*args), lambda kernel, *args: kernel.backward(*args))

    with planted(nothing):
        assert list(red()) == []
    for defect in DEFECTS:
        with planted(defect):
            pass
    assert list(red()) == []
