"""What holds for every mask: bands, work, mask_mod, block masks and drawings all agree with `dense`."""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnspan.masks import BlockSparse, Causal, Documents, Full, KeyPadding, Mask, SinkTokens
from attnspan.masks.band import tight
from attnspan.masks.profile import RowWork
from tests.masks.strategies import Case, cases, masks, painted

slow = pytest.mark.slow
LISTS = [
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
]


def check_bands(case: Case) -> None:
    for row in range(case.mask.rows):
        bands = case.mask.bands(*case.lengths, row=row)
        dense = case.mask.dense(*case.lengths, row=row)
        assert torch.equal(painted(bands, *case.lengths), dense.int())  # each pair once, so they are disjoint
        assert case.mask.work(*case.lengths, row=row) == dense.sum()
        assert all(tight(*band[:4], lo=band.lo, hi=band.hi) == band for band in bands)
        assert list(bands) == sorted(bands)


def check_block_mask(case: Case, block_size: int | tuple[int, int]) -> None:
    mask, (q_len, kv_len) = case.mask, case.lengths
    ours = mask.block_mask(q_len, kv_len, block_size=block_size)
    theirs = create_block_mask(
        mask.mask_mod(q_len, kv_len), mask.rows, 1, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size
    )
    for name in LISTS:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
        assert mine.is_contiguous(), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape


@given(cases())
def test_bands_cover_what_dense_allows_once(case):
    check_bands(case)


@given(cases())
def test_columns_are_the_bands_of_the_cover(case):
    for row in range(case.mask.rows):
        columns, asked = case.mask.band_columns(*case.lengths, row=row)
        cover = case.mask.cover(*case.lengths, row=row)
        assert (columns.bands(), asked) == (cover.bands, cover.partial)


@given(cases())
def test_mask_mod_under_vmap_is_dense(case):
    asked = create_mask(case.mask.mask_mod(*case.lengths), case.mask.rows, 1, *case.lengths, device="cpu")
    for row in range(case.mask.rows):
        assert torch.equal(asked[row, 0], case.mask.dense(*case.lengths, row=row))


@given(cases(), st.integers(1, 12) | st.tuples(st.integers(1, 12), st.integers(1, 50)))
def test_block_mask_is_what_torch_makes_of_the_mask_mod(case, block_size):
    check_block_mask(case, block_size)


@given(cases(depth=2), st.data())
def test_row_work_is_the_sum_of_dense_rows(case, data):
    row = data.draw(st.integers(0, case.mask.rows - 1))
    sums = case.mask.dense(*case.lengths, row=row).sum(1)
    work = RowWork(case.mask.bands(*case.lengths, row=row))
    assert [work.at(q) for q in range(case.q_len)] == sums.tolist()
    assert [work.before(q) for q in range(case.q_len + 1)] == [0, *sums.cumsum(0).tolist()]


@given(cases(max_len=32))
def test_a_drawing_of_a_small_mask_shows_each_pair(case):
    for row in range(case.mask.rows):
        dense = case.mask.dense(*case.lengths, row=row)
        drawn = case.mask.draw(*case.lengths, row=row)
        assert [line.split(" ") for line in drawn.splitlines()] == [
            ["█" if allowed else "·" for allowed in line] for line in dense.tolist()
        ]


@given(cases(max_len=150, depth=1))
def test_a_drawing_of_a_large_mask_shows_blocks(case):
    height, width = (-(-n // 32) for n in case.lengths)
    dense = case.mask.dense(*case.lengths)
    expected = []
    for strip in dense.split(height):
        cells = [cell.float().mean().item() for cell in strip.split(width, dim=1)]
        expected.append(" ".join("·" if mean == 0 else "█" if mean == 1 else "▒" for mean in cells))
    if height * width > 1:
        expected[min(1, len(expected) - 1)] += f"  each cell is {height} x {width}"
    assert case.mask.draw(*case.lengths).splitlines() == expected


@given(cases())
def test_masks_compare_by_value_and_travel(case):
    mask = case.mask
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask
    assert hash(copy) == hash(mask)
    assert repr(copy) == repr(mask)
    assert copy.bands(*case.lengths) == mask.bands(*case.lengths)
    assert ~~mask == mask
    assert (mask & mask) != mask
    assert str(mask).startswith(repr(mask)[:60])


@given(
    st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), masks(n, depth=1, rows=1), masks(n, depth=1, rows=1)))
)
def test_operators_are_those_of_sets(drawn):
    length, left, right = drawn
    a, b = left.dense(length), right.dense(length)
    assert torch.equal((left & right).dense(length), a & b)
    assert torch.equal((left | right).dense(length), a | b)
    assert torch.equal((~left).dense(length), ~a)
    assert (left & right).work(length) + (left | right).work(length) == left.work(length) + right.work(length)
    assert left.work(length) + (~left).work(length) == length * length
    assert (left & ~left).bands(length) == (~left & left).bands(length) == ()
    assert (left | ~left).work(length) == length * length
    assert (left & ~right).work(length) == (~right & left).work(length) == (a & ~b).sum()


@given(cases(depth=1))
def test_a_dense_mask_comes_back(case):
    rows = torch.stack([case.mask.dense(*case.lengths, row=row) for row in range(case.mask.rows)])
    again = Mask.from_dense(rows)
    assert again == Mask.from_dense(rows.clone())
    for row, dense in enumerate(rows):
        assert torch.equal(again.dense(*case.lengths, row=row), dense)
        assert torch.equal(painted(again.bands(*case.lengths, row=row), *case.lengths), dense.int())


@given(cases(depth=2), st.integers(1, 12) | st.tuples(st.integers(1, 12), st.integers(1, 12)))
@settings(max_examples=settings.default.max_examples // 2)
def test_a_block_mask_comes_back(case, block_size):
    again = Mask.from_block_mask(case.mask.block_mask(*case.lengths, block_size=block_size))
    assert again.rows == case.mask.rows
    for row in range(case.mask.rows):
        assert torch.equal(again.dense(*case.lengths, row=row), case.mask.dense(*case.lengths, row=row))
    check_bands(Case(again, *case.lengths))


@given(cases(depth=3))
def test_a_rule_closes_over_numbers_and_tensors_only(case):
    """Compilers lift what a mask_mod captures into inputs; a mask object could not be one."""

    def leaves(fn):
        for cell in fn.__closure__ or ():
            found = cell.cell_contents
            if hasattr(found, "__closure__"):
                yield from leaves(found)
            elif isinstance(found, tuple):
                yield from found
            else:
                yield found

    plain = (int, torch.Tensor, torch.device)
    assert all(isinstance(leaf, plain) for leaf in leaves(case.mask.mask_mod(*case.lengths)))


# ---- the longest lengths -------------------------------------------------------------------------------


@slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(cases(max_len=4096, depth=2))
def test_bands_cover_what_dense_allows_up_to_4096(case):
    check_bands(case)


@slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(cases(max_len=2048, depth=2), st.sampled_from([16, 64, 128, (64, 128), (128, 32), (100, 7)]))
def test_block_mask_is_what_torch_makes_up_to_2048(case, block_size):
    check_block_mask(case, block_size)


# ---- by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (Causal(), (1024, 1024)),
        (Causal(align="bottom"), (100, 1000)),
        (Causal(align="top"), (1000, 100)),
        (Causal() & Documents([300, 1, 723]), (1024, 1024)),
        (~Full(), (300, 300)),
        (KeyPadding([0, 300, 128]), (256, 300)),
        (Full(), (129, 127)),
    ],
)
@pytest.mark.parametrize("block_size", [128, (64, 128), (128, 96), (1000, 1), (2048, 2048)])
def test_known_block_masks(mask, lengths, block_size):
    check_block_mask(Case(mask, *lengths), block_size)


def test_blocks_that_are_full_only_together_are_full():
    halves = SinkTokens(3) | ~SinkTokens(3)
    assert halves.block_mask(8, block_size=4).full_kv_num_blocks.tolist() == [[[2, 2]]]
    documents = Documents([2, 6]) | ~Documents([2, 6]) & Causal() | ~Causal()
    check_block_mask(Case(documents, 8, 8), 4)
    assert documents.block_mask(8, block_size=4).full_kv_num_blocks.tolist() == [[[2, 2]]]


def test_blocks_larger_than_int32_counts():
    block_mask = Full().block_mask(1 << 17, block_size=1 << 16)  # 2^32 pairs in a block
    assert block_mask.full_kv_num_blocks.tolist() == [[[2, 2]]]
    assert block_mask.kv_num_blocks.tolist() == [[[0, 0]]]


def test_a_block_mask_that_lists_less_than_its_mask_mod_means_less():
    block_mask = Causal().block_mask(6, block_size=2)
    block_mask.full_kv_num_blocks.zero_()
    diagonal = BlockSparse(torch.eye(3, dtype=torch.bool), 2)
    assert torch.equal(Mask.from_block_mask(block_mask).dense(6), (Causal() & diagonal).dense(6))


def test_a_block_mask_without_a_mask_mod_is_its_blocks():
    from torch.nn.attention.flex_attention import BlockMask

    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=2, seq_lengths=(4, 4))
    assert torch.equal(Mask.from_block_mask(block_mask).dense(4), BlockSparse([[1, 0], [1, 1]], 2).dense(4))


def test_equal_however_it_was_written():
    assert KeyPadding(3) == KeyPadding([3]) == KeyPadding(torch.tensor([3]))
    assert Documents([3, 5]) == Documents([[3, 5]]) == Documents(torch.tensor([3, 5])) == Documents((3, 5))
    assert Documents([3, 5]) == Documents.from_cu_seqlens([0, 3, 8]) == Documents.from_ids([4] * 3 + [1] * 5)
    assert Documents([torch.tensor([3, 5]), torch.tensor([8])]) == Documents([[3, 5], [8]])
    assert Documents(range(1, 4)) == Documents([1, 2, 3])
    assert Causal() != Causal(align="top")
    assert len({Causal(), Causal(), Full(), Causal() & Full(), Causal() & Full()}) == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(-5, 5))
def test_documents_from_other_formats(lengths, first_id):
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids = torch.arange(first_id, first_id + len(lengths)).flip(0).repeat_interleave(torch.tensor(lengths))
    expected = Documents(lengths)
    assert Documents.from_cu_seqlens(torch.tensor(edges, dtype=torch.int32)) == expected
    assert Documents.from_ids(ids) == Documents.from_ids(ids.tolist()) == expected
    assert Documents.from_ids(torch.stack([ids, ids])) == Documents([lengths, lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert Documents.from_position_ids(positions) == Documents.from_position_ids(positions.tolist()) == expected
    assert Documents.from_position_ids(torch.stack([positions, positions]).int()) == Documents([lengths, lengths])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_padding_from_an_attention_mask(lengths):
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert KeyPadding.from_attention_mask(mask.to(dtype)) == KeyPadding(lengths)
    assert KeyPadding.from_attention_mask(mask[0]) == KeyPadding(lengths[0])
