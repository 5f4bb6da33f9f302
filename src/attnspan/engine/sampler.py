"""The next token of every row of logits: the likeliest, or one drawn at random.

A draw needs one number between 0 and 1, from a counter-based generator keyed on (seed, sample, position) (`uniform`).
No state is shared, so a request gets the same tokens in any batch, on any device, and after preemption. The number is
looked up in the cumulative sum of the probabilities, in float64.

Logits are first what the request's options make of them (logits_processor.py). Then they are divided by the
temperature, and cut by `top_h`, `top_k`, `top_p`, `min_p`, `typical_p`, `epsilon_cutoff` and `eta_cutoff`, in this
order, each by the probabilities that the one before has left, as in transformers. Each looks only at the rows that ask
for it. Log-probabilities are the model's own, before any of that.

A row that is no distribution, because it holds NaN or its largest number is infinite, has no next token: None. Neither
has one whose options leave no token.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan.engine.logits_processor import LogitsProcessor, LogitsRow, LogitsRules
from attnspan.engine.params import SamplingParams
from attnspan.engine.request import Request
from attnspan.engine.scheduler import Chunk

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BITS = (1 << 64) - 1

NOT_NUMBERS = (
    "the model's logits are NaN or infinite there; look for such numbers in its weights, or for a dtype that is too "
    "narrow"
)
NONE_LEFT = "its options leave no token there; allow one more, or ban fewer"


class Draw(NamedTuple):
    """How the token of one row is chosen: by `number` in [0, 1), or the likeliest at temperature 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float = 0.0
    number: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> Draw:
        """As a request asks for it; the number is another for each token."""
        if not params.temperature:
            return GREEDY
        return cls(
            params.temperature, params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0, params.typical_p or 1.0,
            params.epsilon_cutoff or 0.0, params.eta_cutoff or 0.0, params.top_h or 0.0,
        )  # fmt: skip


class ChosenToken(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs; or why there is no token."""

    token: int | None
    logprob: float | None = None
    top: dict[int, float] | None = None
    failure: str | None = None


GREEDY = Draw()


class Recipe(NamedTuple):
    """How the tokens of a request are chosen, made once. `logprobs` are the likeliest that are told; None: none."""

    draw: Draw
    rules: LogitsRules | None
    logprobs: int | None
    seed: int


class Processed(NamedTuple):
    """Rows of logits that are not as the model has them: which, and how they are."""

    rows: Sequence[int]
    scores: Tensor


class Sampler:
    """Chooses the tokens of an engine's samples, and knows their requests' recipes."""

    def __init__(self) -> None:
        self.recipes: dict[int, Recipe] = {}
        self.processor = LogitsProcessor()

    def choose(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[ChosenToken]:
        """A token for each row of logits (R, V): of samples, of those that will be split off from them, and after
        drafts as if they had been chosen."""
        draws, wants = list[Draw](), list[int | None]()
        ruled: list[tuple[int, LogitsRow, LogitsRules]] = []
        for sample, _, draft in chunks:
            draw, rules, want, seed = self.recipes[sample.arrival]
            if draw is GREEDY and rules is None:
                count = 1 + sample.forks + len(draft)  # one of both is 0
                draws += [GREEDY] * count
                wants += [want] * count
                continue
            for number in range(sample.number, sample.number + 1 + sample.forks):
                if rules is not None:
                    row = LogitsRow((sample.arrival, number), sample.tokens, sample.prompt_length)
                    ruled.append((len(draws), row, rules))
                for position in range(len(sample.tokens), len(sample.tokens) + 1 + len(draft)):
                    if draw is not GREEDY:
                        draw = Draw._make((*draw[:-1], uniform(seed, number, position)))
                    draws.append(draw)
                    wants.append(want)
        logits, processed = logits.float(), None
        if ruled:
            indices, rows, all_rules = zip(*ruled, strict=True)
            some = logits if len(indices) == len(draws) else logits[torch.tensor(indices, device=logits.device)]
            processed = Processed(indices, self.processor(some, rows, all_rules))
        return choose_tokens(logits, draws, wants, processed)

    def may_draft(self, request: Request) -> bool:
        """Whether tokens may be chosen after drafts: no option looks at the tokens before."""
        return self.recipes[request.number].rules is None

    def add(self, request: Request, end_tokens: frozenset[int], grammar: LLMatcher | None = None) -> None:
        """A request begins."""
        params = request.params
        logprobs = params.top_logprobs if params.logprobs or params.top_logprobs else None
        self.recipes[request.number] = Recipe(
            Draw.of(params), LogitsRules.of(params, end_tokens, grammar), logprobs, request.seed
        )

    def discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        recipe = self.recipes.pop(request.number, None)
        if recipe is not None and recipe.rules is not None:
            for number in range(len(request.samples)):
                self.processor.discard((request.number, number))


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


def choose_tokens(
    logits: Tensor, draws: Sequence[Draw], wants: Sequence[int | None], processed: Processed | None = None
) -> list[ChosenToken]:
    """A token for each row of logits (R, V), float32; `wants` is the number of top log-probabilities, None for none."""
    largest, tokens = logits.max(-1)
    failures = [None if isfinite(most) else NOT_NUMBERS for most in largest.tolist()]  # NaN is above any number
    if processed is not None:
        left, chosen = processed.scores.max(-1)
        tokens[torch.tensor(processed.rows, device=logits.device)] = chosen
        for row, most in zip(processed.rows, left.tolist(), strict=True):
            failures[row] = failures[row] or (None if isfinite(most) else NONE_LEFT)
    drawn = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if drawn:
        some = torch.tensor(drawn, device=logits.device)
        scores = logits[some]
        if processed is not None:
            both = [(row, index) for index, row in enumerate(processed.rows) if draws[row].temperature > 0]
            if both:
                at = {row: index for index, row in enumerate(drawn)}
                into = torch.tensor([at[row] for row, _ in both], device=logits.device)
                scores[into] = processed.scores[torch.tensor([index for _, index in both], device=logits.device)]
        tokens[some] = draw_tokens(scores, [draws[row] for row in drawn])
    answers = [
        ChosenToken(None if failure else token, None, None, failure)
        for token, failure in zip(tokens.tolist(), failures, strict=True)
    ]
    wanted = [row for row, want in enumerate(wants) if want is not None]
    if wanted:
        some = torch.tensor(wanted, device=logits.device)
        logprobs = logits[some].log_softmax(-1)
        own = logprobs.gather(1, tokens[some].unsqueeze(1)).flatten().tolist()
        most = max(wants[row] or 0 for row in wanted)
        values, tokens_of = (side.tolist() for side in logprobs.topk(min(most, logits.shape[1]), dim=-1))
        for index, row in enumerate(wanted):
            top = dict(zip(tokens_of[index][: wants[row]], values[index][: wants[row]], strict=True))
            answers[row] = answers[row]._replace(logprob=own[index], top=top)
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
    scores = logits.double()
    scores = scores - scores.amax(-1, keepdim=True)  # the likeliest is 0, however small a number it is divided by
    scores = scores / torch.tensor([[draw.temperature] for draw in draws], dtype=torch.float64, device=scores.device)
    asked_of = tuple(zip(*draws, strict=True))
    for option, (cut, neutral) in CUTS.items():
        if asked_of[option].count(neutral) < len(draws):
            rows = [row for row, value in enumerate(asked_of[option]) if value != neutral]
            asked = torch.tensor([[draws[row][option]] for row in rows], dtype=torch.float64, device=scores.device)
            if len(rows) == len(draws):
                scores = scores.masked_fill(cut(scores, asked), -torch.inf)
            else:
                some = torch.tensor(rows, device=scores.device)
                scores[some] = scores[some].masked_fill(cut(scores[some], asked), -torch.inf)
    return scores.softmax(-1)


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


CUTS: dict[int, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    Draw._fields.index(name): (cut, Draw._field_defaults[name])
    for name, cut in {
        "top_h": _beyond_top_h, "top_k": _beyond_top_k, "top_p": _beyond_top_p, "min_p": _below_min_p,
        "typical_p": _untypical, "epsilon_cutoff": _below_epsilon, "eta_cutoff": _below_eta,
    }.items()
}  # fmt: skip
"""By their field in a draw: what is cut, and the value with which nothing is. In the order of transformers."""
