"""SamplingTensors tokens at random, by temperature and cuts, with numbers that depend on the request alone.

A number in [0, 1) comes from a counter-based generator keyed on (seed, sample, position) (`uniforms`). There is no
shared state, so a request gets the same tokens in any batch, on any device, and after preemption. The number is looked
up in the cumulative sum of the probabilities, in float64.

Logits are divided by the temperature, and cut by `top_h`, `top_k`, `top_p`, `min_p`, `typical_p`, `epsilon_cutoff` and
`eta_cutoff`, in this order, each on the probabilities that the previous one left, as in transformers. Each is applied
only to the rows that use it.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.engine.params import SamplingParams
from attnspan.engine.row_selection import RowSelection
from attnspan.splitmix import INCREMENT, mix, shift_right


class RowSampling(NamedTuple):
    """How the token of one row is sampled: at random, or the likeliest at temperature 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> RowSampling:
        """As a request asks for it."""
        if not params.temperature:
            return GREEDY
        return cls(
            params.temperature, params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0, params.typical_p or 1.0,
            params.epsilon_cutoff or 0.0, params.eta_cutoff or 0.0, params.top_h or 0.0,
        )  # fmt: skip


GREEDY = RowSampling()


class SamplingTensors:
    """The options of R rows, none of them greedy, as tensors."""

    def __init__(self, options: Sequence[RowSampling], device: torch.device) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)

        columns = tuple(zip(*options, strict=True))
        self.temperatures = column(columns[0])
        self.cuts: list[tuple[Cut, RowSelection, Tensor]] = []
        for field, (cut, neutral) in CUTS.items():
            values = columns[field]
            if values.count(neutral) < len(values):
                rows = RowSelection([row for row, each in enumerate(values) if each != neutral], len(values), device)
                self.cuts.append((cut, rows, column([values[row] for row in rows.places])))


def draw_tokens(logits: Tensor, options: SamplingTensors, numbers: Tensor) -> Tensor:
    """A token (R,) for each row, by its number (R,), float64."""
    weights = probabilities(logits, options).nan_to_num()  # rows without a token are drawn from like others
    sums = weights.cumsum(-1)
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, numbers.unsqueeze(-1) * total, right=True)
    # Rounding may carry a mark to the very end of the sum, behind which nothing is.
    return torch.minimum(found, torch.searchsorted(sums, total)).flatten()


def probabilities(logits: Tensor, options: SamplingTensors) -> Tensor:
    """(R, V) float64: how likely each token is to be drawn, 0 for those that are left out.

    >>> options = SamplingTensors([RowSampling(temperature=1.0, top_k=2)], torch.device("cpu"))
    >>> probabilities(torch.tensor([[2.0, 1.0, 0.0]]), options).mul(100).round().tolist()
    [[73.0, 27.0, 0.0]]
    """
    scores = logits.double()
    scores = scores - scores.amax(-1, keepdim=True)  # the likeliest is 0, however small a number it is divided by
    scores = scores / options.temperatures
    for cut, rows, limits in options.cuts:
        some = rows.read(scores)
        scores = rows.write(scores, some.masked_fill(cut(some, limits), -torch.inf))
    return scores.softmax(-1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def signed(bits: int) -> int:
    """A number of 64 bits as int64 has it.

    >>> signed(2**64 - 1)
    -1
    """
    return bits - ((bits >> 63) << 64)


def streams(seeds: Tensor, samples: Tensor) -> Tensor:
    """Where the generators (R,) of samples begin; all are int64, whose arithmetic is modulo 2**64."""
    return _absorbed(_absorbed(torch.zeros_like(seeds), seeds), samples)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Numbers (R,) in [0, 1) that are as good as random, float64: one of each generator, for a position.

    >>> stream = streams(torch.tensor([0]), torch.tensor([0]))
    >>> uniforms(stream, torch.tensor([0])) != uniforms(stream, torch.tensor([1]))
    tensor([True])
    """
    return shift_right(_absorbed(streams, positions), 11).double() * 2.0**-53


def _absorbed(states: Tensor, words: Tensor) -> Tensor:
    """States (R,) with a word each mixed in."""
    return mix((states ^ words) + INCREMENT)


# ---- cuts: tokens (R, V) to leave out, by scores and what each row asks for (R, 1); never all ------------------------


def _beyond_top_h(scores: Tensor, share: Tensor) -> Tensor:
    """All but the likeliest, of 100, whose terms of the entropy together are at most a share of it."""
    top, order = scores.topk(min(100, scores.shape[1]), dim=-1)
    weights = top.softmax(-1)
    terms = -(weights * weights.log()).nan_to_num()  # 0 where a token is left out already
    kept = terms.cumsum(-1) <= terms.sum(-1, keepdim=True) * share
    kept[:, 0] = True
    return torch.ones_like(scores, dtype=torch.bool).scatter(1, order, ~kept)


def _beyond_top_k(scores: Tensor, count: Tensor) -> Tensor:
    """All below the k-th."""
    ranked = scores.sort(-1, descending=True).values
    return scores < ranked.gather(1, count.long().clamp(max=scores.shape[1]) - 1)


def _beyond_top_p(scores: Tensor, share: Tensor) -> Tensor:
    """All but the likeliest that together have this share."""
    ranked, order = scores.sort(-1)
    out = ranked.softmax(-1).cumsum(-1) <= 1 - share
    out[:, -1] = False  # the likeliest stays, however little is asked for
    return out.scatter(1, order, out)


def _below_min_p(scores: Tensor, share: Tensor) -> Tensor:
    """All less likely than this share of the likeliest."""
    weights = scores.softmax(-1)
    return weights < share * weights.amax(-1, keepdim=True)


def _untypical(scores: Tensor, share: Tensor) -> Tensor:
    """All but those of this share whose surprise is nearest to the entropy."""
    logs = scores.log_softmax(-1)
    weights = logs.exp()
    away, order = (-logs + (logs * weights).nansum(-1, keepdim=True)).abs().sort(-1)
    last = (weights.gather(1, order).cumsum(-1) < share).sum(-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    out = away > away.gather(1, last)
    out[:, 0] = False
    return out.scatter(1, order, out)


def _below_epsilon(scores: Tensor, least: Tensor) -> Tensor:
    """All less likely than this, but the likeliest."""
    return (scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True))


def _below_eta(scores: Tensor, least: Tensor) -> Tensor:
    """As epsilon, which is less where there is more to choose from."""
    logs = scores.log_softmax(-1)
    entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
    return _below_epsilon(scores, torch.minimum(least, least.sqrt() * (-entropy).exp()))


Cut = Callable[[Tensor, Tensor], Tensor]

CUTS: dict[int, tuple[Cut, float]] = {
    RowSampling._fields.index(name): (cut, RowSampling._field_defaults[name])
    for name, cut in {
        "top_h": _beyond_top_h, "top_k": _beyond_top_k, "top_p": _beyond_top_p, "min_p": _below_min_p,
        "typical_p": _untypical, "epsilon_cutoff": _below_epsilon, "eta_cutoff": _below_eta,
    }.items()
}  # fmt: skip
"""By their field in a `RowSampling`: what is cut, and the value with which nothing is. In the order of transformers."""
