"""Applies a request's options to its logits before a token is chosen: penalties, biases, bans and forced tokens.

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

[Note: counts] How often each token occurs in a sample is a row of a table on the device, updated by one token per step.
The row is a cache: it has a count of the tokens that it includes, and is recounted from the sample's tokens if it is
more than one behind.

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
from attnspan.engine.row_selection import RowSelection

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bias = tuple[int, float]
"""A token, and what is added to its logit."""

BAN = float("-inf")
NO_PENALTIES = (1.0, 0.0, 0.0)
"""Repetition, frequency and presence, as nothing is penalised."""
PROMPT = 1 << 30
"""In a count: the token is in the prompt. Beside it is how often it was generated."""

UNKNOWN = -2
"""In place of how many tokens a row has seen."""

MAX_FACTOR = 1e30
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
    masks: dict[int, Tensor] = field(default_factory=dict)  # of tokens that are allowed (V,), by V

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
        options = (
            biases, endings, params.allowed_tokens, penalties != NO_PENALTIES, params.no_repeat_ngram_size,
            params.begin_suppress_tokens, grammar, params.forced_bos_token_id is not None, params.forced_eos_token_id,
            ends and (params.min_new_tokens or params.min_length or params.exponential_decay_length_penalty),
        )  # fmt: skip
        if not any(options):
            return None
        lengths = tuple({len(tokens) for tokens in endings})
        used = penalties if penalties != NO_PENALTIES else None
        return cls(params, tuple(ends), tuple(biases.items()), endings, lengths, used, grammar)

    def banned(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """(V,) -inf for tokens that are not among the allowed ones; None if all are."""
        if self.params.allowed_tokens is None:
            return None
        if vocabulary not in self.masks:
            mask = torch.full((vocabulary,), BAN, device="cpu")
            mask[[token for token in self.params.allowed_tokens if token < vocabulary]] = 0.0
            self.masks[vocabulary] = mask.to(device)
        return self.masks[vocabulary]

    @property
    def looks_at_tokens(self) -> bool:
        """Whether biases depend on the step."""
        params = self.params
        return bool(
            self.lengths or params.no_repeat_ngram_size or params.begin_suppress_tokens
            or (self.ends and (params.min_new_tokens or params.min_length))
        )  # fmt: skip

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
            return min(factor**beyond - 1, MAX_FACTOR) if beyond > 0 else 0.0
        except OverflowError:
            return MAX_FACTOR


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


class RuledRows:
    """Rows of logits with the rules of each, and all of these that is the same in every step, as tensors."""

    def __init__(
        self, rows: Sequence[LogitsRow], rules: Sequence[LogitsRules], vocabulary: int, device: torch.device
    ) -> None:
        def where(asks: Iterable[object]) -> RowSelection | None:
            return RowSelection.where(asks, len(rows), device)

        self.rows, self.rules = rows, rules
        fixed = [(row, token, bias) for row, rule in enumerate(rules) for token, bias in rule.biases]
        self.biases = Biases.of(fixed, vocabulary, device)
        self.bans = [rule.banned(vocabulary, device) for rule in rules]
        self.banned = where([ban is not None for ban in self.bans])
        self.looking = [row for row, rule in enumerate(rules) if rule.looks_at_tokens]
        self.penalised = where([rule.penalties for rule in rules])
        if self.penalised is not None:
            self.counted = [rows[row] for row in self.penalised.places]
            self.penalties = Penalties([rules[row].penalties or NO_PENALTIES for row in self.penalised.places], device)
        self.decaying = [row for row, rule in enumerate(rules) if rule.params.exponential_decay_length_penalty]
        self.forced = [
            row for row, rule in enumerate(rules)
            if rule.params.forced_bos_token_id is not None or rule.params.forced_eos_token_id is not None
        ]  # fmt: skip
        self.constrained = where([rule.grammar is not None for rule in rules])


class Biases(NamedTuple):
    """What is added to some of the logits (R, V)."""

    places: tuple[Tensor, Tensor]  # rows and tokens
    values: Tensor

    @classmethod
    def of(cls, found: Iterable[tuple[int, int, float]], vocabulary: int, device: torch.device) -> Biases | None:
        """Those of tokens that have logits; None if there are none."""
        found = [each for each in found if each[1] < vocabulary]
        if not found:
            return None
        rows, tokens, values = zip(*found, strict=True)
        places = torch.tensor(rows, device=device), torch.tensor(tokens, device=device)
        return cls(places, torch.tensor(values, dtype=torch.float32, device=device))


class Penalties:
    """The penalties of rows, as columns; None where no row has any."""

    def __init__(self, penalties: Sequence[tuple[float, float, float]], device: torch.device) -> None:
        self.repetition, self.frequency, self.presence = (
            torch.tensor(values, device=device).unsqueeze(-1) if set(values) != {neutral} else None
            for values, neutral in zip(zip(*penalties, strict=True), NO_PENALTIES, strict=True)
        )

    def apply(self, scores: Tensor, counts: Tensor) -> Tensor:
        """(R, V) less likely, where their tokens were before."""
        if self.repetition is not None:
            scaled = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
            scores = torch.where(counts > 0, scaled, scores)
        if self.frequency is not None or self.presence is not None:
            generated = counts & (PROMPT - 1)
            each = 0.0 if self.frequency is None else self.frequency * generated
            once = 0.0 if self.presence is None else self.presence * (generated > 0)
            scores = scores - (each + once)
        return scores


class TokenCounts:
    """(rows, V) int32: the tokens of samples. See [Note: counts]."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside of it
            self.table = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
            self.seen = torch.zeros(0, dtype=torch.int64, device="cpu")  # how many tokens are in each row, or UNKNOWN
        self.table_rows: dict[tuple[int, int], int] = {}  # of a sample
        self.unused: list[int] = []
        self._last: tuple[Sequence[LogitsRow], Tensor, Tensor] | None = None  # rows, and where they are in the table

    def of(self, rows: Sequence[LogitsRow]) -> Tensor:
        """(R, V) of samples as they are now. Rows that are given again, in the same sequence, are found fastest."""
        places, on_device = self._places(rows)
        lengths = torch.tensor([len(row.tokens) for row in rows], device="cpu")
        behind = lengths - self.seen[places]
        one = behind == 1
        if not one.all():
            for index in ((behind != 0) & ~one).nonzero().flatten().tolist():
                self._fill(rows[index], int(places[index]))
        if one.any():
            tokens = torch.tensor([row.tokens[-1] for row in rows], device="cpu")
            if not one.all():
                places, lengths, tokens = places[one], lengths[one], tokens[one]
            self.seen[places] = UNKNOWN  # whatever interrupts this, none is counted twice
            self.table[places.to(self.table.device), tokens.to(self.table.device)] += 1
            self.seen[places] = lengths
        return self.table[on_device]

    def _places(self, rows: Sequence[LogitsRow]) -> tuple[Tensor, Tensor]:
        """Where rows are in the table, on the host and on the device. Of new ones nothing is known yet."""
        if self._last is None or self._last[0] is not rows:
            for row in rows:
                if row.sample not in self.table_rows:
                    self._add(row.sample)
            places = torch.tensor([self.table_rows[row.sample] for row in rows], device="cpu")
            self._last = rows, places, places.to(self.table.device)
        return self._last[1:]

    def _add(self, sample: tuple[int, int]) -> None:
        """Another sample, of which nothing is known."""
        if not self.unused:
            size, vocabulary = self.table.shape
            more = max(size, 4)
            with torch.inference_mode(False):
                self.table = torch.cat([self.table, self.table.new_zeros(more, vocabulary)])
                self.seen = torch.cat([self.seen, self.seen.new_zeros(more)])
            self.unused += range(size, size + more)
        index = self.unused.pop()
        self.seen[index] = UNKNOWN
        self.table_rows[sample] = index

    def _fill(self, row: LogitsRow, index: int) -> None:
        """Count all tokens of a sample."""
        self.seen[index] = UNKNOWN
        counts = torch.zeros(self.table.shape[1], dtype=torch.int32, device="cpu")
        prompt, generated = (
            torch.tensor([token for token in tokens if token < len(counts)], dtype=torch.int64, device="cpu")
            for tokens in (row.tokens[: row.prompt_length], row.tokens[row.prompt_length :])
        )
        counts[prompt] = PROMPT
        counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        self.table[index] = counts.to(self.table.device)
        self.seen[index] = len(row.tokens)

    def discard(self, sample: tuple[int, int]) -> None:
        """A sample has ended."""
        self._last = None
        if sample in self.table_rows:
            self.unused.append(self.table_rows.pop(sample))


class LogitsProcessor:
    """The rules of requests, applied to rows of logits, and what is remembered of their samples."""

    def __init__(self) -> None:
        self.counts: TokenCounts | None = None
        self.ngrams: dict[tuple[int, int], NGrams] = {}
        self.grammars: dict[tuple[int, int], GrammarState] = {}

    def __call__(self, logits: Tensor, ruled: RuledRows) -> Tensor:
        """Logits (R, V), float32, as the rules have them."""
        vocabulary, device = logits.shape[1], logits.device
        scores = self._biased(logits, ruled)
        if ruled.penalised is not None:
            if self.counts is None or self.counts.table.shape[1] != vocabulary:
                self.counts = TokenCounts(vocabulary, device)
            counts = self.counts.of(ruled.counted)
            scores = ruled.penalised.write(scores, ruled.penalties.apply(ruled.penalised.read(scores), counts))
        decays = Biases.of(
            (
                (row, end, decay)
                for row in ruled.decaying
                if (decay := ruled.rules[row].decay_after(ruled.rows[row]))
                for end in ruled.rules[row].ends
            ),
            vocabulary, device,
        )  # fmt: skip
        if decays is not None:
            before = scores[decays.places]
            scores = scores.index_put(
                decays.places, before + (before.abs() * decays.values).masked_fill(~before.isfinite(), 0.0)
            )
        for row in ruled.forced:
            forced = ruled.rules[row].forced_after(ruled.rows[row])
            if forced is not None:
                only = torch.full((vocabulary,), BAN, device="cpu")
                only[[token for token in forced if token < vocabulary]] = 0.0
                scores = scores.index_put((torch.tensor(row, device=device),), only.to(device))
        if ruled.constrained is not None:
            masks = [self._mask(ruled.rows[row], ruled.rules[row]) for row in ruled.constrained.places]
            allowed = allowed_by(masks, vocabulary, device)
            scores = ruled.constrained.write(scores, ruled.constrained.read(scores).masked_fill(~allowed, BAN))
        return scores

    def _mask(self, row: LogitsRow, rules: LogitsRules) -> bytes:
        """What a row's grammar leaves."""
        assert rules.grammar is not None, "it has one"
        state = self.grammars.get(row.sample)
        if state is None:
            state = self.grammars[row.sample] = GrammarState(rules.grammar)
        return state.mask(row.tokens[row.prompt_length :])

    def _biased(self, logits: Tensor, ruled: RuledRows) -> Tensor:
        """Logits with all biases added."""
        vocabulary, device = logits.shape[1], logits.device
        found = list[tuple[int, int, float]]()
        for index in ruled.looking:
            row, rule = ruled.rows[index], ruled.rules[index]
            found += [(index, token, bias) for token, bias in rule.biases_after(row)]
            n = rule.params.no_repeat_ngram_size
            if n:
                ngrams = self.ngrams.setdefault(row.sample, NGrams())
                found += [(index, token, bias) for token, bias in ngrams.bans(row.tokens, n)]
        added = [each for each in (ruled.biases, Biases.of(found, vocabulary, device)) if each is not None]
        if not added and ruled.banned is None:
            return logits
        biases = torch.zeros_like(logits)
        if ruled.banned is not None:
            biases = ruled.banned.write(biases, torch.stack([ban for ban in ruled.bans if ban is not None]))
        for each in added:
            biases.index_put_(each.places, each.values, accumulate=True)
        return logits + biases

    def discard(self, sample: tuple[int, int]) -> None:
        """A sample has ended."""
        if self.counts is not None:
            self.counts.discard(sample)
        self.ngrams.pop(sample, None)
        self.grammars.pop(sample, None)

    def reset(self) -> None:
        """Forget all samples: what was remembered may be half of a step that was broken off."""
        self.counts, self.ngrams, self.grammars = None, {}, {}
