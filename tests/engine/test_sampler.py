"""Tokens are drawn from the distribution that transformers' own processors leave, by a number of the request's own."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from attnspan.engine.sampler import ChosenToken, Draw, choose_tokens, draw_tokens, probabilities, uniform

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


DRAWS = [Draw(0.7), Draw(1.0, top_k=5), Draw(1.3, top_p=0.8), Draw(2.0, top_k=20, top_p=0.5)]


def test_rows_with_different_wishes_get_the_probabilities_of_transformers():
    found = probabilities(LOGITS, DRAWS)
    for row, draw in enumerate(DRAWS):
        torch.testing.assert_close(found[row], warped(LOGITS[row], draw), rtol=1e-9, atol=1e-12)  # float64, both


@pytest.mark.parametrize("draw", [Draw(1.0, top_k=1), Draw(1.0, top_p=1e-9), Draw(1e-4), Draw(5e-324)], ids=str)
def test_one_token_is_left_where_only_one_may_be(draw):
    assert choose_tokens(LOGITS, [draw] * 4, [None] * 4) == [ChosenToken(token) for token in LOGITS.argmax(-1).tolist()]


def test_a_number_finds_the_token_whose_share_it_falls_into():
    weights = probabilities(LOGITS[:1], DRAWS[:1])[0]
    edges = [0.0, *weights.cumsum(0).tolist()]
    for token in range(50):
        middle = (edges[token] + edges[token + 1]) / 2
        assert draw_tokens(LOGITS[:1], [DRAWS[0]._replace(number=middle)]).tolist() == [token]


def test_the_largest_number_there_is_does_not_fall_off_the_end():
    logits = torch.full((1, 7), -torch.inf)
    logits[0, 2:4] = 0.0
    assert draw_tokens(logits, [Draw(1.0, number=1 - 2.0**-53)]).tolist() == [3]
    assert draw_tokens(logits, [Draw(1.0, number=0.0)]).tolist() == [2]


def test_counts_follow_the_probabilities():
    draw, times = DRAWS[3], 20_000
    numbers = [draw._replace(number=uniform(5, 1, position)) for position in range(times)]
    counts = torch.bincount(draw_tokens(LOGITS[3:].expand(times, -1), numbers), minlength=50).double()
    expected = warped(LOGITS[3], draw) * times
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    surprise = ((counts - expected)[some] ** 2 / expected[some]).sum().item()
    freedom = int(some.sum()) - 1
    assert surprise < freedom + 6 * (2 * freedom) ** 0.5  # chi squared; the seed is fixed, so it cannot fail by chance


def test_neighbouring_seeds_samples_and_positions_have_nothing_in_common():
    for change in range(3):
        numbers = torch.tensor([uniform(*(n if place == change else 3 for place in range(3))) for n in range(4000)])
        assert abs(numbers.mean().item() - 0.5) < 0.03  # 6 sigma of a mean of 4000
        lagged = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1].item()
        assert abs(lagged) < 0.1  # 6 sigma


def test_logprobs_are_the_models_own_whatever_is_drawn():
    told = choose_tokens(LOGITS, [Draw(), Draw(2.0, number=0.3), Draw(), Draw()], [0, 3, None, 2])
    true = LOGITS.log_softmax(-1)
    assert told[2].logprob is None
    for row in (0, 1, 3):
        assert told[row].logprob == pytest.approx(true[row, told[row].token].item(), abs=1e-6)
    assert [len(each.top or ()) for each in told] == [0, 3, 0, 2]
    assert list(told[3].top) == true[3].topk(2).indices.tolist()
