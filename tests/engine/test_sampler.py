"""Tokens are drawn from the distribution that transformers' own processors leave, by a number of the request's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from attnspan import SamplingParams
from attnspan.engine.draws import RowSampling, SamplingTensors, draw_tokens, probabilities, signed, streams, uniforms
from attnspan.engine.request import Request
from attnspan.engine.sample import Sample
from attnspan.engine.sampler import SampledToken, Sampler
from attnspan.engine.scheduler import Chunk

CPU = torch.device("cpu")
BITS = (1 << 64) - 1
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(4, 50, generator=GENERATOR) * 3


def warped(logits, draw):
    """The oracle: one row by the classes of transformers."""
    scores = TemperatureLogitsWarper(draw.temperature)(None, logits.double().unsqueeze(0))
    if draw.top_k:
        scores = TopKLogitsWarper(draw.top_k)(None, scores)
    if draw.top_p < 1:
        scores = TopPLogitsWarper(draw.top_p)(None, scores)
    return scores.softmax(-1)[0]


def chosen(logits, params):
    """The tokens of a sampler, each row for a request of its own."""
    sampler = Sampler()
    for number, each in enumerate(params):
        sampler.add(Request(number, [1, 2], each.over(SamplingParams()), each.seed or 0), frozenset())
    return sampler.sample(logits, [Chunk(Sample(number, [1, 2], 9), 2) for number in range(len(params))]).read()


def number_of(seed, sample, position):
    """The oracle of `uniforms`: the same arithmetic on integers that have no end."""
    state = 0
    for word in (seed, sample, position):
        x = (state ^ (word & BITS)) + 0x9E3779B97F4A7C15 & BITS
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
        x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
        state = x ^ x >> 31
    return (state >> 11) * 2.0**-53


def numbers(seeds, samples, positions):
    rows = (torch.tensor(list(map(signed, each))) for each in (seeds, samples))
    return uniforms(streams(*rows), torch.tensor(positions))


DRAWS = [
    RowSampling(0.7),
    RowSampling(1.0, top_k=5),
    RowSampling(1.3, top_p=0.8),
    RowSampling(2.0, top_k=20, top_p=0.5),
]


def test_rows_with_different_wishes_get_the_probabilities_of_transformers():
    found = probabilities(LOGITS, SamplingTensors(DRAWS, CPU))
    for row, draw in enumerate(DRAWS):
        torch.testing.assert_close(found[row], warped(LOGITS[row], draw), rtol=1e-9, atol=1e-12)  # float64, both


ONE_LEFT = [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1e-4},
            {"temperature": 5e-324}]  # fmt: skip


@pytest.mark.parametrize("options", ONE_LEFT, ids=str)
def test_one_token_is_left_where_only_one_may_be(options):
    likeliest = [SampledToken(token) for token in LOGITS.argmax(-1).tolist()]
    assert chosen(LOGITS, [SamplingParams(**options)] * 4) == likeliest


def test_a_number_finds_the_token_whose_share_it_falls_into():
    draws = SamplingTensors(DRAWS[:1], CPU)
    weights = probabilities(LOGITS[:1], draws)[0]
    edges = torch.cat([torch.zeros(1), weights.cumsum(0)])
    for token, middle in enumerate((edges[:-1] + edges[1:]) / 2):
        assert draw_tokens(LOGITS[:1], draws, middle.reshape(1)).tolist() == [token]


def test_the_largest_number_there_is_does_not_fall_off_the_end():
    logits = torch.full((2, 7), -torch.inf)
    logits[:, 2:4] = 0.0
    numbers = torch.tensor([1 - 2.0**-53, 0.0], dtype=torch.float64)
    assert draw_tokens(logits, SamplingTensors([RowSampling(1.0)] * 2, CPU), numbers).tolist() == [3, 2]


words = st.integers(0, BITS)


@given(st.lists(st.tuples(words, st.integers(0, 300), st.integers(0, 1 << 40)), min_size=1, max_size=5))
def test_numbers_are_those_of_integers_without_end(rows):
    assert numbers(*zip(*rows, strict=True)).tolist() == [number_of(*row) for row in rows]


def test_counts_follow_the_probabilities():
    draw, times = DRAWS[3], 20_000
    found = draw_tokens(
        LOGITS[3:].expand(times, -1),
        SamplingTensors([draw] * times, CPU),
        numbers([5] * times, [1] * times, range(times)),
    )
    counts = torch.bincount(found, minlength=50).double()
    expected = warped(LOGITS[3], draw) * times
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    surprise = ((counts - expected)[some] ** 2 / expected[some]).sum().item()
    freedom = int(some.sum()) - 1
    assert surprise < freedom + 6 * (2 * freedom) ** 0.5  # chi squared; the seed is fixed, so it cannot fail by chance


def test_neighbouring_seeds_samples_and_positions_have_nothing_in_common():
    for change in range(3):
        found = numbers(*(range(4000) if place == change else [3] * 4000 for place in range(3)))
        assert abs(found.mean().item() - 0.5) < 0.03  # 6 sigma of a mean of 4000
        lagged = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1].item()
        assert abs(lagged) < 0.1  # 6 sigma


def test_logprobs_are_the_models_own_whatever_is_drawn():
    wants = [{"logprobs": True}, {"temperature": 2.0, "seed": 7, "top_logprobs": 3}, {}, {"top_logprobs": 2}]
    told = chosen(LOGITS, [SamplingParams(**each) for each in wants])
    true = LOGITS.log_softmax(-1)
    assert told[2].logprob is None
    for row in (0, 1, 3):
        assert told[row].logprob == pytest.approx(true[row, told[row].token].item(), abs=1e-6)
    assert [len(each.top or ()) for each in told] == [0, 3, 0, 2]
    assert list(told[3].top) == true[3].topk(2).indices.tolist()
