"""Samples the next token of every row of logits: greedily, or drawn at random (draws.py).

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

from attnspan.engine.draws import GREEDY, RowSampling, SamplingTensors, draw_tokens, signed, streams, uniforms
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


class SampledToken(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs; or why there is no token."""

    token: int | None
    logprob: float | None = None
    top: dict[int, float] | None = None
    failure: str | None = None


class RequestSampling(NamedTuple):
    """How the tokens of a request are sampled, made once. `logprobs` are the likeliest that are told; None: none."""

    options: RowSampling
    rules: LogitsRules | None
    logprobs: int | None
    seed: int


class SamplingMetadata:
    """The rows of logits of a batch, and the options of each row's request, as tensors.

    A row is (sample, sample number, draft offset). A sample has one row, another for each fork that will be split off
    from it, and with a draft one more for each draft token, as if the tokens before it had been sampled.
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
        self.logprob_counts = [each.logprobs for each in sampling]
        self.logprob_rows = RowSelection.where([count is not None for count in self.logprob_counts], len(rows), device)
        self.drawn = RowSelection.where([each.options is not GREEDY for each in sampling], len(rows), device)
        if self.drawn is not None:
            some = [rows[row] for row in self.drawn.places]
            self.options = SamplingTensors([sampling[row].options for row in self.drawn.places], device)
            seeds = torch.tensor([requests[sample.request_number].seed for sample, _, _ in some], device="cpu")
            self._streams = streams(seeds, torch.tensor([number for _, number, _ in some], device="cpu"))
            self._draft_offsets = torch.tensor([offset for _, _, offset in some], device="cpu")
            self._tokens = [sample.tokens for sample, _, _ in some]
        ruled = [(row, each.rules) for row, each in zip(rows, sampling, strict=True) if each.rules is not None]
        self.ruled = RowSelection.where([each.rules is not None for each in sampling], len(rows), device)
        if self.ruled is not None:
            keyed = [
                LogitsRow((sample.request_number, number), sample.tokens, sample.prompt_length)
                for (sample, number, _), _ in ruled
            ]
            self.rules = RuledRows(keyed, [rules for _, rules in ruled], vocabulary, device)

    def numbers(self, device: torch.device, unread: int = 0) -> Tensor:
        """The random numbers of drawn rows in this step, float64. `unread`: as in `Sampler.sample`."""
        lengths = torch.tensor(list(map(len, self._tokens)), device="cpu")
        numbers = uniforms(self._streams, lengths + self._draft_offsets + unread)
        return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class Sampler:
    """Samples the tokens of an engine, and knows what their requests ask for."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestSampling] = {}
        self.processor = LogitsProcessor()
        self._metadata: SamplingMetadata | None = None  # of the last batch, see [Note: the same batch]

    def sample(self, logits: Tensor, chunks: Sequence[Chunk], unread: int = 0) -> PendingTokens:
        """A token for each row of logits (R, V), which are the rows of `SamplingMetadata`.

        `unread` is how many tokens of each sample the device has and the host has not read.
        """
        metadata = self._metadata_of(chunks, logits)
        logits = scores = logits.float()
        if metadata.ruled is not None:
            scores = metadata.ruled.write(logits, self.processor(metadata.ruled.read(logits), metadata.rules))
        max_score, tokens = scores.max(-1)
        if metadata.drawn is not None:
            numbers = metadata.numbers(logits.device, unread)
            drawn = draw_tokens(metadata.drawn.read(scores), metadata.options, numbers)
            tokens = metadata.drawn.write(tokens, drawn)
        max_logit = max_score if metadata.ruled is None else logits.amax(-1)
        if metadata.logprob_rows is None:
            return PendingTokens(tokens, metadata, max_score, max_logit)
        logprobs = metadata.logprob_rows.read(logits).log_softmax(-1)
        own = logprobs.gather(1, metadata.logprob_rows.read(tokens).unsqueeze(1)).flatten()
        most = max(metadata.logprob_counts[row] or 0 for row in metadata.logprob_rows.places)
        top_values, top_tokens = logprobs.topk(min(most, logits.shape[1]), dim=-1)
        return PendingTokens(tokens, metadata, max_score, max_logit, own, top_values, top_tokens)

    def _metadata_of(self, chunks: Sequence[Chunk], logits: Tensor) -> SamplingMetadata:
        """The metadata of a batch, that of the last one if its rows are the same."""
        metadata, made_for = self._metadata, (logits.shape[1], logits.device)
        samples, _, drafts = zip(*chunks, strict=True)
        if metadata is None or metadata.samples != samples or metadata.made_for != made_for or any(drafts):
            metadata = SamplingMetadata(chunks, self.requests, *made_for)
            self._metadata = metadata if metadata.samples is not None else None
        return metadata

    def may_draft(self, request: Request) -> bool:
        """Whether tokens may be sampled after drafts: no option looks at the tokens before."""
        return self.requests[request.number].rules is None

    def may_run_ahead(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step may be launched before the host has read the tokens of these: no option looks at them."""
        return all([self.requests[chunk.sample.request_number].rules is None for chunk in chunks])  # noqa: C419

    def add(self, request: Request, end_tokens: frozenset[int], grammar: LLMatcher | None = None) -> None:
        """A request begins."""
        params = request.params
        logprobs = params.top_logprobs if params.logprobs or params.top_logprobs else None
        self.requests[request.number] = RequestSampling(
            RowSampling.of(params), LogitsRules.of(params, end_tokens, grammar), logprobs, signed(request.seed)
        )

    def discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        self._metadata = None
        sampling = self.requests.pop(request.number, None)
        if sampling is not None and sampling.rules is not None:
            for number in range(len(request.continuations)):
                self.processor.discard((request.number, number))


class PendingTokens:
    """The tokens of R rows, `tokens` (R,) on their device, with their log-probabilities; `read` waits for them.

    On CUDA the copies to the host have begun, and a next step may use `tokens` before they arrive.
    """

    def __init__(
        self, tokens: Tensor, metadata: SamplingMetadata, max_score: Tensor, max_logit: Tensor, *logprobs: Tensor
    ) -> None:
        self.tokens, self._metadata = tokens, metadata
        columns = tokens, max_score, max_logit, *logprobs
        self._columns = [each.to("cpu", non_blocking=tokens.is_cuda) for each in columns]  # to pinned memory
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[SampledToken]:
        """A token for each row, in order."""
        if self._copied is not None:
            self._copied.synchronize()
        metadata, (tokens, max_scores, max_logits, *logprobs) = (
            self._metadata,
            [each.tolist() for each in self._columns],
        )
        sampled = list(map(SampledToken, tokens))
        if not (all(map(isfinite, max_logits)) and all(map(isfinite, max_scores))):  # NaN is above any number
            for row, (max_logit, max_score) in enumerate(zip(max_logits, max_scores, strict=True)):
                if not (isfinite(max_logit) and isfinite(max_score)):
                    sampled[row] = SampledToken(None, failure=NONE_LEFT if isfinite(max_logit) else NOT_NUMBERS)
        if metadata.logprob_rows is not None:
            for row, own, top_values, top_tokens in zip(metadata.logprob_rows.places, *logprobs, strict=True):
                count = metadata.logprob_counts[row] or 0
                top = dict(zip(top_tokens[:count], top_values[:count], strict=True))
                sampled[row] = sampled[row]._replace(logprob=own, top=top)
        return sampled
