"""The suite can fail: every planted defect turns a probe red that is green without it.

The probe is a handful of the problems that the suite is made of, one for each thing that can be got wrong; they are
small, in float64, the quickest first, and judged as everywhere, by the oracle. Red is a wrong result or an error of
ours. Anything else that is raised is a defect that was planted badly.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import AttnspanError
from attnspan.layouts import Contiguous, HeadTail, PerDocument, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, Mask, SlidingWindow
from tests.attention.defects import DEFECTS, bend_kernels, planted, sentence
from tests.attention.harness import Problem, check
from tests.attention.programs import problem as program

BOTH = [[5, 9, 7], [12, 1, 8]]


def knowing_better():
    """Full blocks that its function would not allow, blocks to be asked, and blocks that it leaves out."""
    partial, full = (torch.tensor(each, dtype=torch.int32)[None, None] for each in ([1, 1, 0], [0, 1, 1]))
    at, whole = ([[0, 1, 2], [1, 0, 2], [0, 1, 2]], [[0, 1, 2], [2, 0, 1], [0, 1, 2]])
    at, whole = (torch.tensor(each, dtype=torch.int32)[None, None] for each in (at, whole))

    def mask_mod(b, h, q, k):
        return (q >= k) & ((q + k + h) % 3 != 0)

    by_head = [x.expand(1, 2, *x.shape[2:]).contiguous() for x in (partial, at, full, whole)]
    return BlockMask.from_kv_blocks(*by_head, BLOCK_SIZE=4, mask_mod=mask_mod, seq_lengths=(12, 12))


PROBE = {
    "sinks, scale and lse": Problem(Causal(), HeadTail(2), 12, "ring", scale=0.3, sinks=True, through_lse=True),
    "a ring": Problem(Causal(), HeadTail(4), 32, "ring", heads=4, kv_heads=2),
    "documents, gathered": Problem(
        Causal() & Documents([7, 13, 4, 9]), Contiguous(3), 33, "gather", heads=6, kv_heads=2
    ),
    "rows of other documents": Problem(Causal() & Documents(BOTH), PerDocument(BOTH, ranks=2), 21, "ring"),
    "cross-attention": Problem(Full(), Contiguous(3), 10, "gather", kv_len=18, kv_layout=HeadTail(3), value_dim=4),
    "a window, as needed": Problem(SlidingWindow(5, 2), Contiguous(4), 30, "needed(3)", memory="rows of more"),
    "rows that see nothing": Problem(Causal() & KeyPadding([20, 0, 11]), HeadTail(3), 20, kernel="reference"),
    "heads for sequence": Problem(Causal(), HeadTail(3), 19, "ulysses", heads=6, kv_heads=2),
    "stripes beside chunks": Problem(SlidingWindow(9, 0), Striped(3), 25, "needed(2)", kv_layout=HeadTail(3)),
    "many runs": Problem(Causal(), PerDocument([4] * 10, ranks=2), 40, "needed"),
    "heads and a ring": Problem(Causal(), Striped(4), 24, "ulysses(2) x ring", heads=4, kv_heads=4),
    "a BlockMask that knows better": Problem(
        Mask.from_block_mask(knowing_better()), HeadTail(2), 12, "gather", heads=2, kv_heads=2
    ),
    "a soft cap": program("tanh soft-cap", Contiguous(2), "gather"),
    "a table, and lse": program("relative bias, per-head window", HeadTail(3), "ring", through_lse=True),
    "a window by head": program("per-head window", Striped(4), "ulysses(2) x ring"),
    "a learned bias by row": program("score by row and head", HeadTail(3), "needed(2)"),
}


LIKELY = list(PROBE)
"""The problems of the probe, those first that turned red last: neighbours in the list of defects are alike."""


def red():
    """The problems of the probe that are red, and what they say."""
    for name in list(LIKELY):
        try:
            check(PROBE[name])
        except (AssertionError, AttnspanError) as wrong:
            LIKELY.remove(name)
            LIKELY.insert(0, name)
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
