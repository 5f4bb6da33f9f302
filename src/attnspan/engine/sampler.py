"""Chooses the next token of every row of logits: greedily, or drawn at random (draws.py).

The request's options are applied to the logits first (logits_processor.py). Log-probabilities are those of the model,
before any options.

A row without a distribution, because it holds NaN or its largest number is infinite, has no next token (None), nor has
a row whose options ban every token.

[Note: the same batch] The options of all rows are tensors, which are kept while consecutive batches have the same
samples (`SamplingMetadata`). So a step has no loop over rows, except for options that depend on tokens.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnspan.engine.draws import GREEDY, Draw, Draws, draw_tokens, signed, streams, uniforms
from attnspan.engine.logits_processor import LogitsProcessor, LogitsRow, LogitsRules, RuledRows
from attnspan.engine.request import Request
from attnspan.engine.row_selection import RowSelection
from attnspan.engine.scheduler import Chunk

if TYPE_CHECKING:
    from llguidance import LLMatcher

NOT_NUMBERS = (
    "the model's logits are NaN or infinite there; look for such numbers in its weights, or for a dtype that is too "
    "narrow"
)
NONE_LEFT = "its options leave no token there; allow one more, or ban fewer"


class ChosenToken(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs; or why there is no token."""

    token: int | None
    logprob: float | None = None
    top: dict[int, float] | None = None
    failure: str | None = None


class RequestSampling(NamedTuple):
    """How the tokens of a request are chosen, made once. `logprobs` are the likeliest that are told; None: none."""

    draw: Draw
    rules: LogitsRules | None
    logprobs: int | None
    seed: int


class SamplingMetadata:
    """The rows of logits of a batch, and the options of each row's request, as tensors.

    A row is (sample, sample number, draft offset). A sample has one row, another for each fork that will be split off
    from it, and with a draft one more for each draft token, as if the tokens before it had been chosen.
    """

    def __init__(
        self, chunks: Sequence[Chunk], requests: Mapping[int, RequestSampling], vocabulary: int, device: torch.device
    ) -> None:
        lasting = not any([sample.forks or draft for sample, _, draft in chunks])  # noqa: C419  # twice as fast
        if lasting:
            rows = [(sample, sample.number, 0) for sample, _, _ in chunks]
        else:
            rows = [
                (sample, number, offset)
                for sample, _, draft in chunks
                for number in range(sample.number, sample.number + 1 + sample.forks)
                for offset in range(1 + len(draft))
            ]
        self.samples = tuple([sample for sample, _, _ in rows]) if lasting else None  # of the batches that they are for
        self.made_for = vocabulary, device
        sampling = [requests[sample.request_number] for sample, _, _ in rows]
        count = len(rows)
        self.wants = [each.logprobs for each in sampling]
        self.wanted = RowSelection.where([want is not None for want in self.wants], count, device)
        self.drawn = RowSelection.where([each.draw is not GREEDY for each in sampling], count, device)
        if self.drawn is not None:
            some = [rows[row] for row in self.drawn.places]
            self.draws = Draws([sampling[row].draw for row in self.drawn.places], device)
            seeds = torch.tensor([requests[sample.request_number].seed for sample, _, _ in some], device="cpu")
            self._streams = streams(seeds, torch.tensor([number for _, number, _ in some], device="cpu"))
            self._draft_offsets = torch.tensor([offset for _, _, offset in some], device="cpu")
            self._tokens = [sample.tokens for sample, _, _ in some]
        ruled = [(row, each.rules) for row, each in zip(rows, sampling, strict=True) if each.rules is not None]
        self.ruled = RowSelection.where([each.rules is not None for each in sampling], count, device)
        if self.ruled is not None:
            keyed = [
                LogitsRow((sample.request_number, number), sample.tokens, sample.prompt_length)
                for (sample, number, _), _ in ruled
            ]
            self.rules = RuledRows(keyed, [rules for _, rules in ruled], vocabulary, device)

    def numbers(self, device: torch.device, unread: int = 0) -> Tensor:
        """The random numbers of drawn rows in this step, float64. `unread`: as in `Sampler.choose`."""
        lengths = torch.tensor(list(map(len, self._tokens)), device="cpu")
        numbers = uniforms(self._streams, lengths + self._draft_offsets + unread)
        return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class Sampler:
    """Chooses the tokens of an engine's samples, and knows what their requests ask for."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestSampling] = {}
        self.processor = LogitsProcessor()
        self._rows: SamplingMetadata | None = None  # of the last batch, see [Note: the same batch]

    def choose(self, logits: Tensor, chunks: Sequence[Chunk], unread: int = 0) -> PendingTokens:
        """A token for each row of logits (R, V), which are the rows of `SamplingMetadata`.

        `unread` is how many tokens of each sample the device has and the host has not read.
        """
        rows = self._metadata_of(chunks, logits)
        logits, scores = logits.float(), None
        if rows.ruled is not None:
            scores = rows.ruled.write(logits, self.processor(rows.ruled.read(logits), rows.rules))
        return choose_tokens(logits, rows, scores, unread)

    def _metadata_of(self, chunks: Sequence[Chunk], logits: Tensor) -> SamplingMetadata:
        """The rows of a batch, those of the last one if they are the same."""
        rows, made_for = self._rows, (logits.shape[1], logits.device)
        samples, _, drafts = zip(*chunks, strict=True)
        if rows is None or rows.samples != samples or rows.made_for != made_for or any(drafts):
            rows = SamplingMetadata(chunks, self.requests, *made_for)
            self._rows = rows if rows.samples is not None else None
        return rows

    def may_draft(self, request: Request) -> bool:
        """Whether tokens may be chosen after drafts: no option looks at the tokens before."""
        return self.requests[request.number].rules is None

    def may_run_ahead(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step may be launched before the host has read the tokens of these: no option looks at them."""
        return all([self.requests[chunk.sample.request_number].rules is None for chunk in chunks])  # noqa: C419

    def add(self, request: Request, end_tokens: frozenset[int], grammar: LLMatcher | None = None) -> None:
        """A request begins."""
        params = request.params
        logprobs = params.top_logprobs if params.logprobs or params.top_logprobs else None
        self.requests[request.number] = RequestSampling(
            Draw.of(params), LogitsRules.of(params, end_tokens, grammar), logprobs, signed(request.seed)
        )

    def discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        self._rows = None
        sampling = self.requests.pop(request.number, None)
        if sampling is not None and sampling.rules is not None:
            for number in range(len(request.samples)):
                self.processor.discard((request.number, number))


class PendingTokens:
    """The tokens of R rows, `tokens` (R,) on their device, with their log-probabilities; `read` waits for them.

    On CUDA the copies to the host have begun, and a next step may use `tokens` before they arrive.
    """

    def __init__(self, tokens: Tensor, rows: SamplingMetadata, *numbers: Tensor) -> None:
        self.tokens, self._rows = tokens, rows
        self._numbers = [each.to("cpu", non_blocking=tokens.is_cuda) for each in (tokens, *numbers)]  # to pinned memory
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[ChosenToken]:
        """A token for each row, in order."""
        if self._copied is not None:
            self._copied.synchronize()
        rows, (tokens, left, given, *logprobs) = self._rows, [each.tolist() for each in self._numbers]
        answers = list(map(ChosenToken, tokens))
        if not (all(map(isfinite, given)) and all(map(isfinite, left))):  # NaN is above any number
            for row, numbers in enumerate(zip(given, left, strict=True)):
                if not all(map(isfinite, numbers)):
                    answers[row] = ChosenToken(None, failure=NONE_LEFT if isfinite(numbers[0]) else NOT_NUMBERS)
        if rows.wanted is not None:
            for row, own, values, tokens_of in zip(rows.wanted.places, *logprobs, strict=True):
                want = rows.wants[row] or 0
                top = dict(zip(tokens_of[:want], values[:want], strict=True))
                answers[row] = answers[row]._replace(logprob=own, top=top)
        return answers


def choose_tokens(
    logits: Tensor, rows: SamplingMetadata, scores: Tensor | None = None, unread: int = 0
) -> PendingTokens:
    """A token for each row of logits (R, V), float32; of `scores`, where options have changed any."""
    largest, tokens = (logits if scores is None else scores).max(-1)
    if rows.drawn is not None:
        some = rows.drawn.read(logits if scores is None else scores)
        tokens = rows.drawn.write(tokens, draw_tokens(some, rows.draws, rows.numbers(logits.device, unread)))
    given = largest if scores is None else logits.amax(-1)
    if rows.wanted is None:
        return PendingTokens(tokens, rows, largest, given)
    logprobs = rows.wanted.read(logits).log_softmax(-1)
    own = logprobs.gather(1, rows.wanted.read(tokens).unsqueeze(1)).flatten()
    most = max(rows.wants[row] or 0 for row in rows.wanted.places)
    values, tokens_of = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    return PendingTokens(tokens, rows, largest, given, own, values, tokens_of)
