"""The next token of every row of logits: the likeliest, or one drawn at random.

A draw needs one number between 0 and 1, from a counter-based generator keyed on (seed, sample, position) (`uniform`).
No state is shared, so a request gets the same tokens in any batch, on any device, and after preemption. The number is
looked up in the cumulative sum of the probabilities, in float64.

Logits are divided by the temperature, then cut to the `top_k` likeliest, then to the likeliest that together have
`top_p` of what is left, as in transformers. Log-probabilities are the model's own, before any of that.

A row that is no distribution, because it holds NaN or its largest number is infinite, has no next token: None.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.engine.params import SamplingParams

_BITS = (1 << 64) - 1


class Draw(NamedTuple):
    """How the token of one row is chosen: by `number` in [0, 1), or the likeliest at temperature 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    number: float = 0.0


class ChosenToken(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs; no token where logits are not numbers."""

    token: int | None
    logprob: float | None = None
    top: dict[int, float] | None = None


GREEDY = Draw()


def draw_for(params: SamplingParams, seed: int, sample: int, position: int) -> Draw:
    """How the token of a sample at a position is chosen."""
    if not params.temperature:
        return GREEDY
    return Draw(params.temperature, params.top_k, params.top_p, uniform(seed, sample, position))


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) that is as good as random.

    >>> uniform(0, 0, 0) == uniform(0, 0, 0) != uniform(0, 0, 1)
    True
    """
    state = 0
    for word in (seed, sample, position):
        state = _mixed((state ^ (word & _BITS)) + 0x9E3779B97F4A7C15 & _BITS)
    return (state >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    """A permutation of 64 bits in which each bit of x changes about half of them (the finaliser of SplitMix64)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31


def choose_tokens(logits: Tensor, draws: Sequence[Draw], wants: Sequence[int | None]) -> list[ChosenToken]:
    """A token for each row of logits (R, V); `wants` is the number of top log-probabilities, None for none at all."""
    logits = logits.float()
    largest, tokens = logits.max(-1)
    places = [place for place, draw in enumerate(draws) if draw.temperature > 0]
    if places:
        some = torch.tensor(places, device=logits.device)
        tokens[some] = draw_tokens(logits[some], [draws[place] for place in places])
    found = [  # NaN is larger than any number
        token if isfinite(most) else None for token, most in zip(tokens.tolist(), largest.tolist(), strict=True)
    ]
    wanted = [place for place, want in enumerate(wants) if want is not None]
    answers = [ChosenToken(token) for token in found]
    if wanted:
        some = torch.tensor(wanted, device=logits.device)
        logprobs = logits[some].log_softmax(-1)
        own = logprobs.gather(1, tokens[some].unsqueeze(1)).flatten().tolist()
        most = max(wants[place] or 0 for place in wanted)
        values, indices = (side.tolist() for side in logprobs.topk(min(most, logits.shape[1]), dim=-1))
        for row, place in enumerate(wanted):
            top = dict(zip(indices[row][: wants[place]], values[row][: wants[place]], strict=True))
            answers[place] = ChosenToken(found[place], own[row], top)
    return answers


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A token (R,) for each row, by its number."""
    weights = probabilities(logits, draws).nan_to_num()  # rows without a token are drawn from like others
    sums = weights.cumsum(-1)
    numbers = torch.tensor([draw.number for draw in draws], dtype=torch.float64, device=logits.device)
    marks = (numbers * sums[:, -1]).unsqueeze(-1)
    found = torch.searchsorted(sums, marks, right=True)
    # Rounding may carry a mark to the very end of the sum, behind which nothing is.
    last = (weights > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(found, last).flatten()


def probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """(R, V) float64: how likely each token is to be drawn, 0 for those that are left out.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> probabilities(logits, [Draw(temperature=1.0, top_k=2)]).mul(100).round().tolist()
    [[73.0, 27.0, 0.0]]
    """
    device = logits.device
    scores = logits.double()
    scores = scores - scores.amax(-1, keepdim=True)  # the likeliest is 0, however small a number it is divided by
    scores = scores / torch.tensor([[draw.temperature] for draw in draws], dtype=torch.float64, device=device)
    if any(draw.top_k for draw in draws):
        vocabulary = scores.shape[1]
        counts = torch.tensor([[min(draw.top_k, vocabulary) or vocabulary] for draw in draws], device=device)
        ranked = scores.sort(-1, descending=True).values
        scores = scores.masked_fill(scores < ranked.gather(1, counts - 1), -torch.inf)
    weights = scores.softmax(-1)
    if any(draw.top_p < 1 for draw in draws):
        ranked, order = weights.sort(-1)
        beyond = torch.tensor([[1 - draw.top_p] for draw in draws], dtype=torch.float64, device=device)
        out = ranked.cumsum(-1) <= beyond
        out[:, -1] = False  # the likeliest stays, however little is asked for
        weights = weights.masked_fill(out.scatter(1, order, out), 0.0)
    return weights / weights.sum(-1, keepdim=True)
