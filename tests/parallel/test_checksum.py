"""Equal bits have equal checksums, and other bits, or the same in another order, have others."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attnspan.parallel.checksum import BLOCK, SMALL, Weights, checksum, weights

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]
# Up to a word, beside one, in one row with others, of several blocks, and of blocks and a rest that is no whole word.
SIZES = [1, 7, 64, 3 * BLOCK + 5, SMALL + 3, 4 * SMALL]


def filled(size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator)
    return (octets * (1 - 2 * (octets % 2)) if dtype.is_floating_point else octets).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_number_that_changes_is_noticed_and_a_copy_is_not(dtype, size):
    one = filled(size, dtype)
    before = checksum([one])
    assert checksum([one.clone()]) == before
    assert checksum([one.view(1, -1)]) == before  # shapes are compared elsewhere
    for place in {0, size // 2, size - 1}:
        other = one.clone()
        other[place] = ~other[place] if dtype == torch.bool else 3 if other[place] != 3 else 5
        assert checksum([other]) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 64, 2 * BLOCK, 16 * BLOCK, 4 * SMALL])
def test_signs_that_turn_are_noticed_all_of_them_or_half(dtype, size):
    one = filled(size, dtype) + 1
    half = one.clone()
    half[: size // 2].neg_()
    assert len({checksum([one]), checksum([-one]), checksum([half])}) == 3


@given(st.data())
def test_two_numbers_that_trade_places_are_noticed(data):
    """Rows of a matrix do, and experts, and heads."""
    size = data.draw(st.sampled_from([64, 2 * BLOCK, 20 * BLOCK]))
    one = torch.arange(size, dtype=torch.int64).double()
    a, b = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    other = one.clone()
    other[a], other[b] = one[b], one[a]
    near = abs(a - b) % 1021 == 0 and size > BLOCK  # what is told in the file's docstring
    assert near or (checksum([other]) == checksum([one])) == (a == b)


@pytest.mark.parametrize("shape", [(97, 64), (5000, 64), (8, 256, 128)])
def test_rows_in_another_order_are_noticed(shape):
    one = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    seen = {checksum([one])}
    for place in range(1, min(shape[0], 40)):
        other = one.clone()
        other[0], other[-place] = one[-place], one[0]
        seen.add(checksum([other]))
    assert len(seen) == min(shape[0], 40)


def test_tensors_in_another_order_are_noticed():
    one, other = torch.randn(64), torch.randn(64)
    large = torch.randn(SMALL)
    assert checksum([one, other]) != checksum([other, one])
    assert checksum([large, large + 1]) != checksum([large + 1, large])


def test_tensors_that_do_not_lie_in_a_row_count_as_they_read():
    base = torch.randn(300, 1200)
    for odd in (base.t(), base[:, 1:], base[1:].view(-1)[1:], base.view(-1)[3::2], base.conj(), base.new_empty(0, 3)):
        assert checksum([odd]) == checksum([odd.clone(memory_format=torch.contiguous_format)])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_counts_by_what_and_where():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for sparse in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        assert checksum([sparse(dense)]) != checksum([sparse(dense.t().contiguous())])
        assert checksum([sparse(dense)]) == checksum([sparse(dense.clone())])


def test_the_content_of_a_model_is_that_of_its_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = Weights(model).content()
    assert Weights(copy.deepcopy(model)).content() == before
    model[1].running_mean.data.add_(1)
    assert Weights(model).content() != before


def test_weights_of_sums_are_odd_and_all_different_however_many_are_asked_for():
    found = weights(5000, torch.device("cpu"))
    assert bool((found % 2 != 0).all())
    assert len(set(found.tolist())) == 5000
    assert torch.equal(found[:100], weights(100, torch.device("cpu")))
