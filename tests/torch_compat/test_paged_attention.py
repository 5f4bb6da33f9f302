"""Our PagedAttention keeps laws that torch's breaks: each is run on both, and must fail on torch's."""

import contextlib

import pytest
import torch
from torch.nn.attention.experimental import _paged_attention as theirs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from attnspan.errors import PageError, PoolExhausted
from attnspan.torch_compat.paged_attention import PagedAttention

SIZE, HEADS, DIM, PAGES = 4, 2, 8, 12


def index(*rows):
    return torch.tensor(rows)


class Cached:
    """A cache and the dense keys of every row."""

    def __init__(self, kind, pages=PAGES):
        self.paged = kind(pages, SIZE, 4, device="cpu")
        self.k, self.v = torch.zeros(2, 1, HEADS, pages * SIZE, DIM, dtype=torch.float64).unbind()
        self.dense = {}

    def fill(self, row, length, seed=0):
        k, v = torch.randn(
            2, 1, HEADS, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + row)
        )
        self.paged.reserve(index(row), index(length))
        self.paged.assign(index(row), torch.arange(length).unsqueeze(0), k, v, self.k, self.v)
        self.dense[row] = k, v

    def attend(self, rows, score_mod=None):
        """As eager FlexAttention: the mask's function is asked of every slot of the cache."""
        lengths = [self.dense[row][0].shape[2] for row in rows]
        most = -(-max(lengths) // SIZE) * SIZE
        limit = torch.tensor(lengths)
        logical = create_block_mask(lambda b, h, q, k: k < limit[b], len(rows), 1, 1, most, "cpu", BLOCK_SIZE=(1, SIZE))
        mask = self.paged.convert_logical_block_mask(logical, index(*rows))
        allowed = create_mask(mask.mask_mod, len(rows), 1, 1, self.k.shape[2], "cpu")
        q = torch.randn(len(rows), HEADS, 1, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        scores = q @ self.k.mT * DIM**-0.5
        wanted = []
        for row, own in zip(rows, q, strict=True):
            k, v = self.dense[row]
            own = own @ k[0].mT * DIM**-0.5
            wanted.append((self.changed(score_mod, own, None) if score_mod else own).softmax(-1) @ v[0])
        if score_mod:
            scores = self.changed(self.paged.get_score_mod(score_mod), scores, len(rows))
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ self.v, torch.stack(wanted)

    @staticmethod
    def changed(score_mod, scores, rows):
        at = torch.arange(scores.shape[-1])
        b = torch.arange(rows).view(-1, 1, 1, 1) if rows else torch.tensor(0)
        return score_mod(scores, b, torch.tensor(0), torch.tensor(0), at)


def any_rows_in_any_order(kind):
    cached = Cached(kind)
    for row, length in enumerate((5, 11, 3)):
        cached.fill(row, length)
    for rows in ([0, 1, 2], [2, 0], [1]):
        torch.testing.assert_close(*cached.attend(rows))


def score_mods_of_any_rows(kind):
    cached = Cached(kind)
    for row, length in enumerate((5, 11, 3)):
        cached.fill(row, length)
    torch.testing.assert_close(*cached.attend([2, 0], lambda s, b, h, q, k: s + 0.3 * k))


def an_erased_row_is_forgotten(kind):
    cached = Cached(kind)
    cached.fill(0, 8)
    cached.paged.erase(index(0))
    cached.fill(1, 8)  # on the pages that row 0 had
    cached.fill(0, 4, seed=5)
    torch.testing.assert_close(*cached.attend([0, 1]))


def an_unreserved_position_is_refused(kind):
    cached = Cached(kind)
    cached.fill(0, PAGES * SIZE - SIZE)
    cached.fill(1, SIZE)
    before = cached.k.clone()
    values = torch.ones(1, HEADS, 1, DIM, dtype=torch.float64)
    for position in (SIZE, 10 * SIZE):
        with pytest.raises((PageError, RuntimeError, IndexError)):
            cached.paged.assign(index(1), torch.tensor([[position]]), values, values, cached.k, cached.v)
    assert torch.equal(cached.k, before)


def an_index_of_any_shape_erases_once(kind):
    cached = Cached(kind)
    cached.fill(0, 8)
    for attempt in (torch.tensor(0), index(0)):
        with contextlib.suppress(Exception):  # what counts is that nothing is half done
            cached.paged.erase(attempt)
    assert sorted(cached.paged.empty_pages) == list(range(PAGES))


def a_page_of_two_rows_is_freed_once(kind):
    cached = Cached(kind)
    cached.fill(0, 8)
    paged = cached.paged
    for table in (paged.page_table, paged.physical_to_logical, paged.capacity):
        table[1] = table[0]
    paged.erase(index(0))
    assert len(paged.empty_pages) == PAGES - 2
    paged.erase(index(1))
    assert sorted(paged.empty_pages) == list(range(PAGES))


def a_converted_mask_has_nothing_for_backward(kind):
    cached = Cached(kind)
    cached.fill(0, 8)
    logical = create_block_mask(lambda b, h, q, k: k <= 7, 1, 1, 1, 8, "cpu", BLOCK_SIZE=(1, SIZE))
    assert cached.paged.convert_logical_block_mask(logical).q_indices is None


def a_converted_mask_lists_full_blocks(kind):
    cached = Cached(kind)
    cached.fill(0, 8)
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    logical = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(1, SIZE), mask_mod=lambda b, h, q, k: k >= 0, seq_lengths=(1, 8)
    )
    assert cached.paged.convert_logical_block_mask(logical).full_kv_num_blocks is not None


def a_converted_mask_has_a_column_to_spare(kind):
    cached = Cached(kind, pages=3)
    cached.fill(0, 3 * SIZE)
    logical = create_block_mask(lambda b, h, q, k: k != 1, 1, 1, 1, 12, "cpu", BLOCK_SIZE=(1, SIZE))
    mask = cached.paged.convert_logical_block_mask(logical)
    assert mask.full_kv_indices.shape[-1] > 3


def a_score_mod_sees_pages_that_come_later(kind):
    cached = Cached(kind)
    score_mod = cached.paged.get_score_mod(lambda s, b, h, q, k: s + k)
    cached.fill(0, 6)
    page = int(cached.paged.page_table[0, 1])
    at = torch.tensor(page * SIZE)
    assert score_mod(torch.tensor(0.0), torch.tensor(0), at, at, at) == SIZE


LAWS = [
    any_rows_in_any_order,
    score_mods_of_any_rows,
    an_erased_row_is_forgotten,
    an_unreserved_position_is_refused,
    an_index_of_any_shape_erases_once,
    a_page_of_two_rows_is_freed_once,
    a_converted_mask_has_nothing_for_backward,
    a_converted_mask_lists_full_blocks,
    a_converted_mask_has_a_column_to_spare,
]
named = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)


def test_a_score_mod_is_kept_while_pages_come_and_go():
    a_score_mod_sees_pages_that_come_later(PagedAttention)
    a_score_mod_sees_pages_that_come_later(theirs.PagedAttention)  # right there too


@named
def test_ours_keeps_the_law(law):
    law(PagedAttention)


@named
def test_twin_torchs_breaks_the_law(law):
    with pytest.raises(BaseException):  # noqa: B017, PT011  # pytest.raises fails by an exception of its own kind
        law(theirs.PagedAttention)


def test_the_names_and_arguments_are_torchs():
    import inspect

    for name, method in inspect.getmembers(theirs.PagedAttention, inspect.isfunction):
        given = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(PagedAttention, name)).parameters)[: len(given)] == given
    ours, torchs = (vars(kind(3, 2, 1, device="cpu")).keys() for kind in (PagedAttention, theirs.PagedAttention))
    assert torchs <= ours


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [True, False, True, False], []])
def test_several_rows_are_erased_at_once_as_in_torch(rows):
    told = []
    for kind in (PagedAttention, theirs.PagedAttention):
        cached = Cached(kind)
        for row, length in enumerate((5, 11, 3)):
            cached.fill(row, length)
        cached.paged.erase(torch.tensor(rows, dtype=None if rows else torch.int64))
        told.append((cached.paged.empty_pages, cached.paged.page_table.tolist(), cached.paged.capacity.tolist()))
    assert told[0] == told[1]


def test_assign_compiles_whole():
    """It was an `if` on numbers of the device."""
    torch._dynamo.reset()
    eager, compiled = Cached(PagedAttention), Cached(PagedAttention)
    compiled.paged.assign = torch.compile(compiled.paged.assign, fullgraph=True, backend="aot_eager")
    for cached in (eager, compiled):
        for row, length in enumerate((5, 11, 3)):
            cached.fill(row, length)
    assert torch.equal(compiled.k, eager.k)
    assert torch.equal(compiled.v, eager.v)
    before, values = compiled.k.clone(), torch.ones(1, HEADS, 3, DIM, dtype=torch.float64)
    with pytest.raises(PageError, match="position 8 of row 0 is not reserved; the row has room for 8 tokens"):
        compiled.paged.assign(index(0), torch.tensor([[6, 7, 8]]), values, values, compiled.k, compiled.v)
    assert torch.equal(compiled.k, before)
    torch._dynamo.reset()


def test_assign_is_an_op_that_torch_finds_no_fault_with():
    cached = Cached(PagedAttention)
    cached.fill(1, 6)
    values = torch.ones(1, HEADS, 2, DIM, dtype=torch.float64)
    given = cached.paged.page_table, SIZE, index(1), torch.tensor([[3, 5]]), values, values, cached.k, cached.v
    torch.library.opcheck(torch.ops.attnspan.paged_assign.default, given)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: what any other device does, as far as shapes go
def test_block_lists_are_as_wide_as_torchs_on_every_device(device):
    """They were as wide as the mask's own off the CPU, and so of another shape whenever a sequence grew."""
    lists = torch.ones(2, 1, 1, dtype=torch.int32), torch.zeros(2, 1, 1, 3, dtype=torch.int32)
    logical = BlockMask.from_kv_blocks(
        *lists, *lists, BLOCK_SIZE=(1, SIZE), seq_lengths=(1, 3 * SIZE), compute_q_blocks=False
    ).to(device)
    masks = [
        kind(PAGES, SIZE, 4, device=device).convert_logical_block_mask(logical)
        for kind in ((PagedAttention,) if device == "meta" else (PagedAttention, theirs.PagedAttention))
    ]
    for mask in masks:
        assert mask.kv_indices.shape == mask.full_kv_indices.shape == (2, 1, 1, PAGES)


CAUGHT = {
    AssertionError: lambda c: c.paged.reserve(index(0), index(13 * SIZE)),
    RuntimeError: lambda c: c.paged.convert_logical_block_mask(
        create_block_mask(lambda b, h, q, k: k > q, 1, 1, 8, 8, "cpu", BLOCK_SIZE=(8, 8))
    ),
    IndexError: lambda c: c.paged.reserve(index(4), index(1)),
}
VALUES = torch.ones(1, HEADS, 2, DIM, dtype=torch.float64)
ASSIGNED = {
    "gradients": (index(0), torch.tensor([[0, 1]]), VALUES.clone().requires_grad_(), VALUES),
    "rows": (index(0, 1), torch.tensor([[0, 1]]), VALUES, VALUES),
    "positions": (index(0), torch.tensor([[0, 1, 2]]), VALUES, VALUES),
    "heads": (index(0), torch.tensor([[0, 1]]), VALUES[:, :1], VALUES[:, :1]),
    "head dims": (index(0), torch.tensor([[0, 1]]), VALUES[..., :3], VALUES[..., :3]),
}


@pytest.mark.parametrize("kind", [PagedAttention, theirs.PagedAttention], ids=["ours", "torch's"])
@pytest.mark.parametrize("error", CAUGHT)
def test_what_programs_catch_of_torchs_is_raised(kind, error):
    with pytest.raises(error):
        CAUGHT[error](Cached(kind))


@pytest.mark.parametrize("kind", [PagedAttention, theirs.PagedAttention], ids=["ours", "torch's"])
@pytest.mark.parametrize("name", ASSIGNED)
def test_values_that_do_not_fit_are_a_runtime_error(kind, name):
    cached = Cached(kind)
    cached.paged.reserve(index(0), index(8))
    with pytest.raises(RuntimeError):
        cached.paged.assign(*ASSIGNED[name], cached.k, cached.v)


def test_pages_are_dealt_in_torchs_order():
    tables = []
    for kind in (PagedAttention, theirs.PagedAttention):
        paged = kind(PAGES, SIZE, 3, device="cpu")
        paged.reserve(index(1), index(9))
        paged.reserve(index(0), index(1))
        paged.reserve(index(1), index(17))
        tables.append((paged.page_table, paged.capacity, paged.physical_to_logical))
    for ours, torchs in zip(*tables, strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize(
    ("error", "message", "operation"),
    [
        (PoolExhausted, "requested 13 pages but there are only 12 empty", lambda c: c.paged.reserve(0, 13 * SIZE)),
        (PageError, "batch_idx must be below max_batch_size=4, got 4", lambda c: c.paged.reserve(4, 1)),
        (PageError, "batch_idx must be a whole number", lambda c: c.paged.reserve(torch.tensor([0, 1]), 1)),
        (PageError, "batch_idx must be below max_batch_size=4, got 5", lambda c: c.paged.erase(torch.tensor([0, 5]))),
        (PageError, r"batch_idx\[1\] must be a whole number", lambda c: c.paged.erase(torch.tensor([0, -1]))),
        (PageError, "must have max_batch_size=4 flags, got 2", lambda c: c.paged.erase(torch.tensor([True, False]))),
        (PageError, "must have columns of page_size=4, got 8", lambda c: c.paged.convert_logical_block_mask(
            create_block_mask(lambda b, h, q, k: k > q, 1, 1, 8, 8, "cpu", BLOCK_SIZE=(8, 8)))),
        (PageError, "input_pos", lambda c: c.paged.assign(index(0), index(0), c.k[:, :, :1], c.v[:, :, :1], c.k, c.v)),
        (PageError, "k_cache must be", lambda c: c.paged.assign(
            index(0), index(0)[None], c.k[:, :1, :1], c.v[:, :1, :1], c.k, c.v)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(error, message, operation):
    cached = Cached(PagedAttention)
    with pytest.raises(error, match=message):
        operation(cached)
    assert sorted(cached.paged.empty_pages) == list(range(PAGES))
    assert (cached.paged.page_table == -1).all()
