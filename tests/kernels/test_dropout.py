"""The generator of dropout: its published values, the oracle's, and its statistics.

Statistics are those of fixed seeds, so that a test passes always or never. Each compares a sum of independent terms
with its mean, and allows SIGMAS standard deviations: by the normal distribution a perfect generator fails one of them
with probability 6e-7, and any of the 49 with 3e-5.
"""

import itertools

import pytest
import torch

from attnspan.kernels import Dropout
from attnspan.kernels.dropout import WORD, philox
from tests import oracle

SIGMAS = 5.0
SHAPE = (4, 8, 128, 250)  # a last four of keys that is cut
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0x299F31D0A4093822)
PUBLISHED = {  # with the paper, Random123's kat_vectors
    (0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (WORD, WORD, WORD, WORD, (1 << 64) - 1): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    PI: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}


def weights(p=0.3, seed=1, shape=SHAPE, begin=(0, 0, 0, 0), dtype=torch.float32):
    place = [torch.arange(first, first + size) for first, size in zip(begin, shape, strict=True)]
    return Dropout(p, seed).at(place).weights(dtype)


@pytest.mark.parametrize("given", PUBLISHED, ids=lambda given: hex(given[0]))
def test_philox_has_its_published_values(given):
    *counter, seed = given
    found = philox(tuple(torch.tensor(word) for word in counter), seed)
    assert tuple(word.item() for word in found) == PUBLISHED[given]


@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1])
def test_weights_are_those_of_the_oracle(seed):
    assert torch.equal(weights(0.37, seed, dtype=torch.float64), oracle.dropped(0.37, seed, SHAPE))


@pytest.mark.parametrize("cols", [[3], [5, 6, 7, 8], [9, 1, 2, 30, 4], [0, 4, 8, 12], [7, 7, 6]], ids=str)
def test_a_part_is_that_of_the_whole(cols):
    whole = weights(shape=(2, 3, 5, 32))
    rows, heads = torch.tensor([4, 1]), torch.tensor([2, 0])
    found = Dropout(0.3, 1).at([torch.tensor([1]), heads, rows, torch.tensor(cols)]).weights(torch.float32)
    assert torch.equal(found, whole[1:][:, heads][:, :, rows][..., cols])


@pytest.mark.parametrize("begin", [2**20, 2**31, 2**32 - 130], ids=hex)
def test_positions_of_long_sequences_are_told_apart(begin):
    far = weights(shape=(1, 1, 64, 64), begin=(0, 0, begin, begin))
    assert not torch.equal(far, weights(shape=(1, 1, 64, 64)))
    assert not torch.equal(far, weights(shape=(1, 1, 64, 64), begin=(0, 0, begin, begin + 4)))


def test_shares_at_the_ends():
    assert torch.equal(weights(1e-12), torch.ones(SHAPE))
    assert int((weights(1 - 1e-9) > 0).sum()) == 0


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**62 + 1])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_share_and_its_scale(p, seed):
    found = weights(p, seed)
    kept = found > 0
    assert found[kept].unique().tolist() == [torch.tensor(1 / (1 - p)).item()]
    share, error = kept.double().mean().item(), (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(share - (1 - p)) < SIGMAS * error


def correlation(one, other):
    """Of the kept pairs of two masks, in standard deviations."""
    product = (one - one.mean()) * (other - other.mean())
    return (product.sum() / (one.var() * other.var()).sqrt() / product.numel() ** 0.5).item()


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("dim", range(4), ids=["rows", "heads", "queries", "keys"])
def test_neighbours_are_not_correlated(dim, distance):
    found = (weights(shape=(20, 20, 32, 64)) > 0).double()
    size = found.shape[dim] - distance
    assert abs(correlation(found.narrow(dim, 0, size), found.narrow(dim, distance, size))) < SIGMAS


def test_places_that_swap_indices_are_not_correlated():
    """A hash of a sum, or of an exclusive or, of indices would have the same word there."""
    found = (weights(shape=(24, 24, 24, 24)) > 0).double()
    index = torch.meshgrid(*[torch.arange(24)] * 4, indexing="ij")
    for one, other in itertools.combinations(range(4), 2):
        once = index[one] < index[other]  # each pair of places, and none with itself
        assert abs(correlation(found[once], found.transpose(one, other)[once])) < SIGMAS


@pytest.mark.parametrize("other", [2, 1 + 2**32, 1 + 2**62])
def test_seeds_are_not_correlated(other):
    assert abs(correlation(*((weights(seed=seed) > 0).double() for seed in (1, other)))) < SIGMAS
