"""A layout that cannot be says which argument, what arrived and what to do; messages are compared whole."""

import pytest

from attnspan.errors import LayoutError, MaskError
from attnspan.layouts import Balanced, Contiguous, HeadTail, PerDocument, RoundRobinByWork, Striped, moved
from attnspan.masks import Causal, Documents, KeyPadding

TWO, THREE = KeyPadding([3, 4]), KeyPadding([3, 4, 5])
BUILDS = {
    "Contiguous": Contiguous,
    "HeadTail": HeadTail,
    "Striped": Striped,
    "PerDocument": lambda ranks: PerDocument([8], ranks=ranks),
    "RoundRobinByWork": lambda ranks: RoundRobinByWork(Causal(), ranks=ranks),
    "Balanced": lambda ranks: Balanced(Causal(), ranks=ranks),
}


def refusal(error, build):
    with pytest.raises(error) as caught:
        build()
    return str(caught.value)


@pytest.mark.parametrize(("ranks", "shown"), [(0, "0"), (-2, "-2"), (2.0, "2.0 (float)"), ("2", "'2'")])
@pytest.mark.parametrize("name", BUILDS)
def test_ranks(name, ranks, shown):
    said = refusal(LayoutError, lambda: BUILDS[name](ranks))
    assert said == f"ranks must be a whole number >= 1, got {shown}; one process is ranks=1"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Striped(2, chunk=0), "chunk must be a whole number >= 1, got 0"),
        (lambda: Balanced(Causal(), ranks=2, chunk=0), "chunk must be a whole number >= 1, got 0"),
        (
            lambda: Balanced(Causal(), ranks=2, chunk=12.5),
            "chunk must be a whole number >= 1, got 12.5 (float)",
        ),
        (
            lambda: RoundRobinByWork(Causal(), ranks=2, block=-1),
            "block must be a whole number >= 1, got -1",
        ),
        (
            lambda: Balanced("causal", ranks=2),
            "masks must be a mask or a list of masks, got 'causal'",
        ),
        (lambda: Balanced([], ranks=2), "masks must be a mask or a list of masks, got []"),
        (
            lambda: Balanced([Causal(), 3], ranks=2),
            "masks must be a mask or a list of masks, got [Causal(), 3]",
        ),
        (
            lambda: Balanced([TWO, THREE], ranks=2),
            "masks must describe the same batch rows, or one for all, got [2, 3]",
        ),
        (
            lambda: Balanced([Causal(), Causal()], ranks=2, weights=[1]),
            "weights must be a list with one number per mask (2), got [1]",
        ),
        (
            lambda: Balanced(Causal(), ranks=2, weights=5),
            "weights must be a list with one number per mask (1), got 5",
        ),
        (
            lambda: RoundRobinByWork([Causal(), TWO], ranks=2, weights=[1, 0]),
            "weights[1] must be a number above 0, got 0; leave such a mask out",
        ),
        (
            lambda: RoundRobinByWork(Causal(), ranks=2, weights=[float("nan")]),
            "weights[0] must be a number above 0, got nan; leave such a mask out",
        ),
        (
            lambda: Balanced(Causal(), ranks=2, weights=["1"]),
            "weights[0] must be a number above 0, got '1'; leave such a mask out",
        ),
        (
            lambda: Balanced(Causal(), ranks=2, per_row=1),
            "per_row must be True or False, got 1",
        ),
        (
            lambda: PerDocument([4, 4], ranks=2).shards(9),
            "lengths must sum to seq_len (9), got 2 documents with sum 8; "
            "a layout for another length needs its own lengths",
        ),
        (lambda: HeadTail(2).shards(0), "seq_len must be a whole number >= 1, got 0"),
        (lambda: HeadTail(2).runs(8, rank=2), "rank must be below the layout's 2 ranks, got 2"),
        (lambda: HeadTail(2).owner(8, 8), "position must be below seq_len (8), got 8"),
        (
            lambda: PerDocument([[4, 4], [8]], ranks=2).shards(8, row=2),
            "row must be below the layout's 2 batch rows, got 2",
        ),
        (
            lambda: moved(THREE, PerDocument([[4, 4], [8]], ranks=2), 8),
            "the layout deals 2 batch rows, each its own way, got 3",
        ),
        (
            lambda: Balanced(TWO, ranks=2, per_row=True).work_per_rank(THREE, 8),
            "the layout deals 2 batch rows, each its own way, got 3",
        ),
    ],
)
def test_a_layout_that_cannot_be(build, message):
    assert refusal(LayoutError, build) == message


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: PerDocument([4, 0], ranks=2),
            "lengths[1] must be a whole number >= 1, got 0; each document needs at least one token",
        ),
        (
            lambda: PerDocument([[4, 4], [4]], ranks=2),
            "lengths must sum to the same length in every batch row, got sums [8, 4]; "
            "give the padding at the end a document of its own",
        ),
        (
            lambda: Balanced(Documents([4, 4]), ranks=2).shards(9),
            "lengths must sum to q_len (9), got 2 documents with sum 8; "
            "give the padding at the end a document of its own",
        ),
    ],
)
def test_what_a_mask_refuses_is_said_in_the_masks_words(build, message):
    assert refusal(MaskError, build) == message
