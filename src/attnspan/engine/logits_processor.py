"""What a request's options make of its logits, before a token is chosen: penalties, biases, bans and forced tokens.

In the order and meaning of transformers' processors:

    1. biases      sequence_bias, logit_bias; -inf is a ban: bad_words, tokens that are not allowed, suppressed ones,
                   the last tokens of repeated n-grams, end tokens of a sample that is too short
    2. penalties   repetition (of all tokens), then frequency and presence (of generated ones)
    3. decay       of the length: end tokens become likelier
    4. forced      tokens, which undo all bans but suppressed ones and those of a grammar
    5. grammar     what a text of a JSON schema cannot go on with is banned (grammar.py)

A ban is final from wherever it is added on, so all of them are added at once. Here too the end tokens are all that end
a sample: `stop_token_ids`, and the model's own unless `ignore_eos`.

Only rows of requests that ask for any of it come here, and all of them together: a few operations on the device,
however many rows there are. What is found by looking at tokens (n-grams, ends of sequences) is found on the host.
A model may know more tokens than it has logits for; those that have none can be named, and do nothing.

[Note: counts] Which tokens a sample has, and how often, is a row of a table on the device, to which one token is added
in a step. The row is a cache: it knows how many tokens it has seen, and a sample that has no row gets one from its
tokens.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from attnspan.engine.grammar import GrammarState, allowed_by
from attnspan.engine.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bias = tuple[int, float]
"""A token, and what is added to its logit."""

BAN = float("-inf")
PROMPT = 1 << 30
"""In a count: the token is in the prompt. Beside it is how often it was generated."""

LARGEST = 1e30
"""The largest factor of a length penalty: the end token is the likeliest by far, and logits stay finite."""


class LogitsRow(NamedTuple):
    """A row of logits: the sample whose it is, the tokens before it, and how many of them are the prompt."""

    sample: tuple[int, int]  # of which request, and its number there
    tokens: Sequence[int]
    prompt_length: int


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRules:
    """The options of one request, as they are looked up in every step."""

    params: SamplingParams
    ends: tuple[int, ...]  # the tokens that end a sample
    biases: tuple[Bias, ...]  # of single tokens
    endings: Mapping[tuple[int, ...], list[Bias]]  # after these tokens
    lengths: tuple[int, ...]  # of the sequences in `endings`
    penalties: tuple[float, float, float] | None  # repetition, frequency, presence
    grammar: LLMatcher | None = None  # at its beginning
    tensors: dict[int, Tensor] = field(default_factory=dict)  # biases (V,), by V

    @classmethod
    def of(
        cls, params: SamplingParams, end_tokens: frozenset[int], grammar: LLMatcher | None = None
    ) -> LogitsRules | None:
        """The rules of a request; None if its logits are the model's own."""
        ends = ends_of(params, end_tokens)
        biases: dict[int, float] = dict(cast("Iterable[Bias]", params.logit_bias or ()))
        endings: dict[tuple[int, ...], list[Bias]] = {}
        words = [(word, BAN) for word in params.bad_words or () if len(word) > 1 or word[0] not in ends]
        for tokens, bias in (*(params.sequence_bias or ()), *words):
            if len(tokens) == 1:
                biases[tokens[0]] = biases.get(tokens[0], 0.0) + bias
            else:
                endings.setdefault(tuple(tokens[:-1]), []).append((tokens[-1], bias))
        biases |= dict.fromkeys(params.suppress_tokens or (), BAN)
        penalties = (
            params.repetition_penalty or 1.0,
            params.frequency_penalty or 0.0,
            params.presence_penalty or 0.0,
        )
        asked = (
            biases, endings, params.allowed_tokens, penalties != (1.0, 0.0, 0.0), params.no_repeat_ngram_size,
            params.begin_suppress_tokens, grammar, params.forced_bos_token_id is not None, params.forced_eos_token_id,
            ends and (params.min_new_tokens or params.min_length or params.exponential_decay_length_penalty),
        )  # fmt: skip
        if not any(asked):
            return None
        lengths = tuple({len(tokens) for tokens in endings})
        used = penalties if penalties != (1.0, 0.0, 0.0) else None
        return cls(params, tuple(ends), tuple(biases.items()), endings, lengths, used, grammar)

    def bias(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """(V,) what is added in every step; None for nothing."""
        allowed = self.params.allowed_tokens
        if not self.biases and allowed is None:
            return None
        if vocabulary not in self.tensors:
            bias = torch.zeros(vocabulary, device="cpu")
            if allowed is not None:
                bias.fill_(BAN)[[token for token in allowed if token < vocabulary]] = 0.0
            for token, added in self.biases:
                if token < vocabulary:
                    bias[token] += added
            self.tensors[vocabulary] = bias.to(device)
        return self.tensors[vocabulary]

    def biases_after(self, row: LogitsRow) -> list[Bias]:
        """What else is added in this step; n-grams apart."""
        params, tokens = self.params, row.tokens
        generated = len(tokens) - row.prompt_length
        lengths = [length for length in self.lengths if length <= len(tokens)]
        found = [bias for length in lengths for bias in self.endings.get(tuple(tokens[-length:]), ())]
        if generated < (params.min_new_tokens or 0) or len(tokens) < (params.min_length or 0):
            found += [(end, BAN) for end in self.ends]
        if params.begin_suppress_tokens and self._begins(row):
            found += [(token, BAN) for token in params.begin_suppress_tokens]
        return found

    def _begins(self, row: LogitsRow) -> bool:
        """Whether this is the first token that is free."""
        forced = row.prompt_length == 1 and self.params.forced_bos_token_id is not None
        return len(row.tokens) - row.prompt_length == int(forced)

    def forced_after(self, row: LogitsRow) -> list[int] | None:
        """The only tokens that are possible in this step, if any are forced."""
        params = self.params
        forced: Sequence[int] | None = None
        if params.forced_bos_token_id is not None and len(row.tokens) == 1:
            forced = (params.forced_bos_token_id,)
        ends = params.forced_eos_token_id
        if ends is not None and len(row.tokens) - row.prompt_length + 1 == params.max_new_tokens:
            assert not isinstance(ends, int), "params are in one form"
            forced = ends
        if forced is None:
            return None
        out = {*(params.suppress_tokens or ()), *((params.begin_suppress_tokens or ()) if self._begins(row) else ())}
        return [token for token in forced if token not in out]

    def decay_after(self, row: LogitsRow) -> float:
        """What the size of an end token's logit is multiplied by, and added to it."""
        if self.params.exponential_decay_length_penalty is None:
            return 0.0
        start, factor = self.params.exponential_decay_length_penalty
        beyond = len(row.tokens) - row.prompt_length - start
        try:
            return min(factor**beyond - 1, LARGEST) if beyond > 0 else 0.0
        except OverflowError:
            return LARGEST


def ends_of(params: SamplingParams, end_tokens: frozenset[int]) -> set[int]:
    """The tokens that end a sample, of a model with these end tokens."""
    return {*params.stop_token_ids} | (set() if params.ignore_eos else end_tokens)


class NGrams:
    """What followed each run of n - 1 tokens of a sample so far."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], set[int]] = {}
        self.seen = 0

    def bans(self, tokens: Sequence[int], n: int) -> list[Bias]:
        """The tokens that would end an n-gram that there was before."""
        for end in range(max(self.seen, n - 1), len(tokens)):
            self.after.setdefault(tuple(tokens[end - n + 1 : end]), set()).add(tokens[end])
        self.seen = len(tokens)
        return [(token, BAN) for token in self.after.get(tuple(tokens[len(tokens) - n + 1 :]), ())]


class TokenCounts:
    """(rows, V) int32: the tokens of samples. See [Note: counts]."""

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.table_rows: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # of a sample: its row, and how many tokens are in it
        self.unused: list[int] = []

    def of(self, rows: Sequence[LogitsRow], vocabulary: int, device: torch.device) -> Tensor:
        """(R, V) of samples as they are now."""
        if self.table is None or self.table.shape[1] != vocabulary:
            self.table_rows, self.unused = {}, []
            with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside of it
                self.table = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        known: list[tuple[int, LogitsRow]] = []
        for row in rows:
            if self.table_rows.get(row.sample, (0, -1))[1] + 1 != len(row.tokens):
                self._fill(row)
            else:
                known.append(
                    (self.table_rows.pop(row.sample)[0], row)
                )  # whatever interrupts this, none is counted twice
        if known:
            indices = torch.tensor([index for index, _ in known], device=device)
            self.table[indices, torch.tensor([row.tokens[-1] for _, row in known], device=device)] += 1
            self.table_rows.update({row.sample: (index, len(row.tokens)) for index, row in known})
        return self.table[torch.tensor([self.table_rows[row.sample][0] for row in rows], device=device)]

    def _fill(self, row: LogitsRow) -> None:
        """Count all tokens of a sample."""
        self.discard(row.sample)
        assert self.table is not None, "made"
        if not self.unused:
            size, vocabulary = self.table.shape
            more = max(size, 4)
            with torch.inference_mode(False):
                self.table = torch.cat([self.table, self.table.new_zeros(more, vocabulary)])
            self.unused += range(size, size + more)
        index = self.unused.pop()
        counts = torch.zeros(self.table.shape[1], dtype=torch.int32, device="cpu")
        prompt, generated = (
            torch.tensor([token for token in tokens if token < len(counts)], dtype=torch.int64, device="cpu")
            for tokens in (row.tokens[: row.prompt_length], row.tokens[row.prompt_length :])
        )
        counts[prompt] = PROMPT
        counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        self.table[index] = counts.to(self.table.device)
        self.table_rows[row.sample] = index, len(row.tokens)

    def discard(self, sample: tuple[int, int]) -> None:
        """A sample has ended."""
        if sample in self.table_rows:
            self.unused.append(self.table_rows.pop(sample)[0])


class LogitsProcessor:
    """The rules of requests, applied to rows of logits, and what is remembered of their samples."""

    def __init__(self) -> None:
        self.counts = TokenCounts()
        self.ngrams: dict[tuple[int, int], NGrams] = {}
        self.grammars: dict[tuple[int, int], GrammarState] = {}

    def __call__(self, logits: Tensor, rows: Sequence[LogitsRow], rules: Sequence[LogitsRules]) -> Tensor:
        """Logits (R, V), float32, as the rules have them."""
        scores = self._biased(logits, rows, rules)
        penalised = [index for index, rule in enumerate(rules) if rule.penalties]
        if penalised:
            some = torch.tensor(penalised, device=logits.device)
            counts = self.counts.of([rows[index] for index in penalised], logits.shape[1], logits.device)
            scores[some] = _penalised(scores[some], counts, [rules[index].penalties for index in penalised])
        decays = [
            (index, end, decay)
            for index, (row, rule) in enumerate(zip(rows, rules, strict=True))
            if (decay := rule.decay_after(row))
            for end in rule.ends
            if end < logits.shape[1]
        ]
        if decays:
            indices, ends, factors = (torch.tensor(each, device=logits.device) for each in zip(*decays, strict=True))
            before = scores[indices, ends]
            scores[indices, ends] += (before.abs() * factors).masked_fill(~before.isfinite(), 0.0)
        for index, (row, rule) in enumerate(zip(rows, rules, strict=True)):
            forced = rule.forced_after(row)
            if forced is not None:
                scores[index] = BAN
                scores[index, [token for token in forced if token < logits.shape[1]]] = 0.0
        ruled = [index for index, rule in enumerate(rules) if rule.grammar is not None]
        if ruled:
            some = torch.tensor(ruled, device=logits.device)
            masks = [self._mask(rows[index], rules[index]) for index in ruled]
            allowed = allowed_by(masks, logits.shape[1], logits.device)
            scores[some] = scores[some].masked_fill(~allowed, BAN)
        return scores

    def _mask(self, row: LogitsRow, rules: LogitsRules) -> bytes:
        """What a row's grammar leaves."""
        assert rules.grammar is not None, "it has one"
        state = self.grammars.get(row.sample)
        if state is None:
            state = self.grammars[row.sample] = GrammarState(rules.grammar)
        return state.mask(row.tokens[row.prompt_length :])

    def _biased(self, logits: Tensor, rows: Sequence[LogitsRow], rules: Sequence[LogitsRules]) -> Tensor:
        """A copy of logits with all biases added."""
        device, found = logits.device, list[tuple[int, int, float]]()
        fixed = [rule.bias(logits.shape[1], device) for rule in rules]
        for index, (row, rule) in enumerate(zip(rows, rules, strict=True)):
            found += [(index, token, bias) for token, bias in rule.biases_after(row)]
            n = rule.params.no_repeat_ngram_size
            if n:
                ngrams = self.ngrams.setdefault(row.sample, NGrams())
                found += [(index, token, bias) for token, bias in ngrams.bans(row.tokens, n)]
        indices = [index for index, bias in enumerate(fixed) if bias is not None]
        found = [each for each in found if each[1] < logits.shape[1]]
        if not indices and not found:
            return logits.clone()
        biases = torch.zeros_like(logits)
        if indices:
            biases[torch.tensor(indices, device=device)] = torch.stack([bias for bias in fixed if bias is not None])
        if found:
            at, tokens, added = (torch.tensor(each, device=device) for each in zip(*found, strict=True))
            biases.index_put_((at, tokens), added.to(biases.dtype), accumulate=True)
        return logits + biases

    def discard(self, sample: tuple[int, int]) -> None:
        """A sample has ended."""
        self.counts.discard(sample)
        self.ngrams.pop(sample, None)
        self.grammars.pop(sample, None)

    def reset(self) -> None:
        """Forget all samples: what was remembered may be half of a step that was broken off."""
        self.counts, self.ngrams, self.grammars = TokenCounts(), {}, {}


def _penalised(scores: Tensor, counts: Tensor, penalties: Sequence[tuple[float, float, float] | None]) -> Tensor:
    """(R, V) less likely, where their tokens were before."""
    repetition, frequency, presence = torch.tensor(penalties, device=scores.device).T.unsqueeze(-1)
    generated = counts % PROMPT
    scores = torch.where(counts > 0, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
    return torch.sub(scores, frequency * generated + presence * (generated > 0))
