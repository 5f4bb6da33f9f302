"""The suite can fail: every planted defect turns a probe red that is green without it.

The probe is a handful of the problems that the suite is made of, one for each thing that can be got wrong; they are
small, in float64, the quickest first, and judged as everywhere, by the oracle. Red is a wrong result or an error of
ours. Anything else that is raised is a defect that was planted badly. A problem that is `KNOWN` to see a defect is
tried before the others, to save their time; any other may see it too.
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
    "dropout, of rows of other documents": Problem(
        Causal() & Documents(BOTH), PerDocument(BOTH, ranks=2), 21, "ring", dropout_p=0.3
    ),
    "dropout and heads for sequence": Problem(Causal(), HeadTail(3), 19, "ulysses", heads=6, kv_heads=2, dropout_p=0.3),
    "a soft cap": program("tanh soft-cap", Contiguous(2), "gather"),
    "a table, and lse": program("relative bias, per-head window", HeadTail(3), "ring", through_lse=True),
    "a window by head": program("per-head window", Striped(4), "ulysses(2) x ring"),
    "a learned bias by row": program("score by row and head", HeadTail(3), "needed(2)"),
}


KNOWN = {
    "a window, as needed": [
        "shards are packed as if they were contiguous",
        "a general tile is computed as a full one",
        "a window is one key too narrow",
    ],
    "rows that see nothing": [
        "a row that sees nothing becomes nan",
        "a row that sees nothing has lse zero",
        "a row without gradients keeps what was in memory",
    ],
    "heads for sequence": [
        "heads come back in the wrong order",
        "tokens of a group lie in the order of ranks instead of positions",
        "gradients of key heads that several ranks took are not summed",
    ],
    "stripes beside chunks": ["every nth key is read as if they were neighbours"],
    "many runs": [
        "a message of many runs is laid out from the back",
        "gradients of many runs in one message are taken apart from the back",
    ],
    "heads and a ring": ["groups send to the ranks that have the numbers of groups"],
    "a BlockMask that knows better": [
        "programs see the positions of the shard",
        "partial blocks are taken for full",
        "the mask of the first head is used for all",
    ],
    "a soft cap": ["scores are changed forward but not backward", "the slope of a score mod is taken to be one"],
    "a table, and lse": [
        "the gradient of a captured tensor is not reduced over ranks",
        "the gradient of a captured tensor is counted once per rank",
        "only the last block counts for a captured tensor",
        "the gradient of lse does not reach programs",
    ],
    "a window by head": ["programs see heads counted from the first of a share"],
    "a learned bias by row": ["programs see batch rows counted from the first of a lane"],
}
"""Which problem sees a defect, where it is not one of the first."""


def red(said=""):
    """The problems of the probe that are red, and what they say; first the one that is known to see this defect."""
    for name in sorted(PROBE, key=lambda name: said not in KNOWN.get(name, [])):
        try:
            check(PROBE[name])
        except (AssertionError, AttnspanError) as wrong:
            yield name, str(wrong)


@pytest.mark.parametrize("defect", DEFECTS, ids=sentence)
def test_the_probe_turns_red_when(defect):
    with planted(defect):
        assert any(red(sentence(defect))), f"nothing saw that {sentence(defect)}"


def test_what_is_known_to_be_seen_is_planted():
    assert {said for each in KNOWN.values() for said in each} <= set(map(sentence, DEFECTS))
    assert KNOWN.keys() <= PROBE.keys()


def test_the_list_is_as_long_as_promised():
    assert len(set(map(sentence, DEFECTS))) == len(DEFECTS) >= 24


def test_planting_as_such_changes_nothing_and_leaves_nothing_behind():
    """Twin: the probe is green with what does no harm, and after each defect was planted and taken out."""

    def nothing(plant):
        bend_kernels(plant, lambda kernel, *args: kernel.forward(*args), lambda kernel, *args: kernel.backward(*args))

    with planted(nothing):
        assert list(red()) == []
    for defect in DEFECTS:
        with planted(defect):
            pass
    assert list(red()) == []
