"""A mask_mod becomes exactly the mask that it is, and is asked for few of its pairs where its program shows the rest.

Random programs, of what masks are made of: documents, windows, prefixes, dilations, tables by row and head, of any
dtype, with repeats and negative ids. The oracle is FlexAttention's own evaluation, pair by pair.
"""

import operator
import pickle
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnspan.errors import MaskError
from attnspan.masks import Causal, Documents, Mask, MaskMod, PrefixLM, SlidingWindow, mask, question
from attnspan.masks.program import Program
from tests.masks.strategies import painted

ROWS, HEADS = 2, 3
NAMES = ["documents", "rows", "heads", "window", "prefix", "dilated", "blocks", "floats", "table", "where", "vmap"]
DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64]


@st.composite
def tables(draw, *shape):
    """Runs of ids in any order, repeated and negative ones among them; longer than any sequence here."""
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20))
    random = torch.Generator().manual_seed(seed)
    changes = torch.rand(*shape, 96, generator=random) < draw(st.sampled_from([0.05, 0.2, 1.0]))
    ids = torch.randint(-3, 9, (*shape, 96), generator=random)
    if draw(st.booleans()):
        ids = ids.sort(-1).values
    last = torch.where(changes, torch.arange(96), 0).cummax(-1).values
    ids = ids.gather(-1, last)
    return (ids.abs() if dtype == torch.uint8 else ids).to(dtype)


@st.composite
def patterns(draw):
    """A mask_mod, and how many rows and heads it tells apart."""
    n = draw(st.integers(0, 40))
    match draw(st.sampled_from(NAMES)):
        case "documents":
            ids = draw(tables())
            return lambda b, h, q, k: ids[q] == ids[k], 1, 1
        case "rows":
            ids = draw(tables(ROWS))
            return lambda b, h, q, k: ids[b, q] == ids[b][k], ROWS, 1
        case "heads":
            windows = torch.tensor(draw(st.lists(st.integers(0, 60), min_size=HEADS, max_size=HEADS)))
            return lambda b, h, q, k: (q - k).abs() <= windows[h], 1, HEADS
        case "window":
            return lambda b, h, q, k: (q >= k) & (q - k < n), 1, 1
        case "prefix":
            return lambda b, h, q, k: (q >= k) | (k < n), 1, 1
        case "dilated":
            return lambda b, h, q, k: (q - k) % (n % 5 + 1) == 0, 1, 1
        case "blocks":
            blocks = draw(tables(12)).bool()
            return lambda b, h, q, k: blocks[q // 8, k // 8], 1, 1
        case "floats":
            return lambda b, h, q, k: (q * 0.5).floor() >= k / (n + 1), 1, 1
        case "table":
            order = torch.randperm(96, generator=torch.Generator().manual_seed(n))
            return lambda b, h, q, k: order[q] >= order[k] - n, 1, 1
        case "where":
            ids = draw(tables())
            return lambda b, h, q, k: torch.where(q < n, k < n, ids[q] != ids[-1 - k]), 1, 1
        case "vmap":
            starts = torch.arange(3) * n
            return lambda b, h, q, k: ((k >= starts) & (k <= starts + q)).any(), 1, 1
    raise AssertionError("every name has a case")


@st.composite
def mask_mods(draw):
    """One pattern, or two together."""
    (left, *counts), (right, *more) = draw(patterns()), draw(patterns())
    rows, heads = map(max, counts, more)
    together = draw(st.sampled_from([operator.and_, operator.or_, operator.xor, lambda x, y: ~x, lambda x, y: x]))
    return lambda b, h, q, k: together(left(b, h, q, k), right(b, h, q, k)), rows, heads


def check_cover(mask, allowed_RHQK):
    """Certain pairs all count, others that count are asked; heads that are alike have bands."""
    lengths = tuple(allowed_RHQK.shape[2:])
    for row, allowed in enumerate(allowed_RHQK):
        cover = mask.cover(*lengths, row=row)
        certain, asked = (painted(bands, *lengths) for bands in cover)
        assert int((certain + asked).max()) <= 1
        assert (certain.bool() <= allowed.all(0)).all()
        assert (allowed.any(0) <= (certain + asked).bool()).all()
        if mask.heads == 1:
            assert torch.equal(painted(mask.bands(*lengths, row=row), *lengths), allowed[0].int())


def forget():
    mask._cached_bands.cache_clear()
    mask._cached_cover.cache_clear()


@given(
    mask_mods(),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([1, 3, 8, 12, 32, 64, 128]),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
)
def test_a_function_becomes_the_mask_that_it_is(drawn, q_len, kv_len, block, least, by_blocks):
    fn, rows, heads = drawn
    allowed = create_mask(fn, rows, heads, q_len, kv_len, device="cpu")
    few = {"FEW": 0, "MAX_SPANS": -1} if by_blocks else {}
    forget()
    with patch.multiple(question, MIN_BOX=least, **few):
        check_cover(MaskMod(fn, rows=rows, heads=heads, block=block), allowed)
        if by_blocks:
            check_cover(Mask.from_block_mask(create_block_mask(fn, rows, heads, q_len, kv_len, "cpu", 16)), allowed)


def test_a_wrong_answer_of_intervals_is_found(monkeypatch):
    """As if boxes beside the diagonal were empty."""
    from attnspan.masks.intervals import Intervals

    fn = lambda b, h, q, k: q >= k  # noqa: E731
    allowed = create_mask(fn, 1, 1, 64, 64, device="cpu")
    forget()
    check_cover(MaskMod(fn, block=16), allowed)
    decide = Intervals.decide
    monkeypatch.setattr(Intervals, "decide", lambda self, boxes: (decide(self, boxes)[0] & False, boxes.i != boxes.j))
    forget()
    with pytest.raises(AssertionError):
        check_cover(MaskMod(fn, block=16), allowed)
    forget()


# ---- how much is asked -----------------------------------------------------------------------------------------------

DOCUMENT = 1000


def documents(length):
    ids = torch.arange(length) // DOCUMENT
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])


KINDS = {
    "documents": (documents, lambda n: Causal() & Documents([DOCUMENT] * (n // DOCUMENT) + [n % DOCUMENT])),
    "window": (lambda n: lambda b, h, q, k: (q >= k) & (q - k < 4096), lambda n: SlidingWindow(4095)),
    "prefix": (lambda n: lambda b, h, q, k: (q >= k) | (k < 3000), lambda n: PrefixLM(3000)),
}


@pytest.fixture
def pairs(monkeypatch):
    """How many pairs a flat program is asked."""
    counted = []
    over = Program.over_boxes

    def counting(self, b, h, queries, keys):
        counted.append(queries.numel() * keys.shape[1])
        return over(self, b, h, queries, keys)

    monkeypatch.setattr(Program, "over_boxes", counting)
    forget()
    yield counted
    forget()


@pytest.mark.parametrize("source", ["MaskMod", "BlockMask"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_grows_as_the_edges_of_a_mask(pairs, kind, source):
    """Twice the tokens are twice the pairs to ask, some 50 for each token; S x S would be four times."""
    asked = []
    for length in (1 << 14, 1 << 15):
        fn, pattern = (each(length) for each in KINDS[kind])
        found = MaskMod(fn)
        if source == "BlockMask":
            block_mask = pattern.block_mask(length)
            block_mask.mask_mod = fn
            found = Mask.from_block_mask(block_mask)
        assert found.cover(length).is_exact
        assert found.work(length) == pattern.work(length)
        asked.append(sum(pairs))
        pairs.clear()
    assert asked[1] < 2.2 * asked[0]
    assert asked[1] < 80 * (1 << 15)


def test_partial_blocks_beyond_a_limit_are_left_to_kernels(pairs, monkeypatch):
    """A limit that half of the blocks reach; the others are asked later, and the mask is the same."""
    from attnspan.masks import listed

    monkeypatch.setattr(question, "BLOCKS_AT_ONCE", 4)
    monkeypatch.setattr(listed, "MAX_EVALUATED", 2000)
    fn = packed
    mask = Mask.from_block_mask(create_block_mask(fn, None, None, 768, 768, "cpu"))
    cover = mask.cover(768)
    assert 0 < sum(pairs) < 40_000
    certain, asked = (painted(bands, 768, 768).bool() for bands in cover)
    allowed = create_mask(fn, 1, 1, 768, 768, device="cpu")[0, 0]
    assert asked.any()
    assert (certain <= allowed).all()
    assert (allowed <= certain | asked).all()
    assert torch.equal(painted(mask.bands(768), 768, 768).bool(), allowed)


# ---- bad input -------------------------------------------------------------------------------------------------------

SHORT, ZERO = torch.arange(100), torch.tensor([1, 0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: (q >= k) & (SHORT[q] == SHORT[k]),
        lambda b, h, q, k: (q < 0) & (SHORT[k] > 2),
        lambda b, h, q, k: (q < 0) & (q // ZERO[k % 2] > 2),
    ],
    ids=["a short table", "a short table that does not matter", "zero"],
)
@pytest.mark.parametrize("block", [16, 128])
def test_a_function_that_raises_for_some_pair_is_refused(fn, block):
    with pytest.raises(MaskError, match="could not be evaluated as a mask_mod: "):
        MaskMod(fn, block=block).cover(300)


IDS = torch.arange(768) // 70


def packed(b, h, q, k):
    return (q >= k) & (IDS[q] == IDS[k])


def test_a_mask_travels_after_it_was_planned_for_and_is_decided_there_too(pairs):
    mask = MaskMod(packed)
    cover = mask.cover(300)
    asked = sum(pairs)
    there = pickle.loads(pickle.dumps(mask))
    forget()
    assert there.cover(300) == cover
    assert sum(pairs) == 2 * asked < 300 * 300
