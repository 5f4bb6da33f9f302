"""Recurrences of many sequences in one packed row, each continued from a state of its own: what generation needs.

A step of generation has the next tokens of many sequences, one after another: a chunk of a prompt here, a single token
there. Each recurrence goes on from the state after the sequence's last token, and gives the one after its new tokens::

    packed = PackedSequences([300, 1, 1], device)
    out, after = packed.run(GatedDelta(query, key, value, decay, beta), before)  # (1, 302, H, V), (3, H, K, V)
    out, after = packed.conv1d(tokens, before, weight, bias)  # (302, C), (3, width - 1, C)

Where every sequence has one token, the law of the rule is applied to it. Otherwise sequences are cut into chunks, all
of which are computed at once, and their maps are applied one after another (chunked.py). No ranks and no gradients:
those are in run.py.   Shapes: N sequences, T tokens of all, C channels, H heads, K and V head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from attnspan.layouts.document_runs import Stretches
from attnspan.recurrence.affine import Affine
from attnspan.recurrence.chunked import chunk_size, chunked
from attnspan.recurrence.kernels import in_factors, outputs_of, tokens_in_chunks
from attnspan.recurrence.maps import AffineMaps, Passed
from attnspan.recurrence.plan import Chunks, RankPlan, on_device
from attnspan.recurrence.rules import LinearRule, Rule


class PackedSequences:
    """Sequences of so many new tokens each, at least one.

    >>> from attnspan.recurrence import Lightning
    >>> ones = torch.ones(1, 3, 1, 1)
    >>> packed = PackedSequences([2, 1], torch.device("cpu"))
    >>> out, after = packed.run(Lightning(ones, ones, ones), torch.tensor([10.0, 20.0]).view(2, 1, 1, 1))
    >>> out.flatten().tolist(), after.flatten().tolist()
    ([11.0, 12.0, 21.0], [12.0, 21.0])
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device
        length = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        start, none = length.cumsum(0) - length, torch.zeros_like(length)
        number = torch.arange(len(length), device="cpu")
        self._plan = RankPlan(Stretches(1, len(length), none, start, length, none, start, number), rank=0, ranks=1)
        self._chunks: dict[int, Chunks] = {}
        self._lines: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, rule: Rule, before: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a rule for all tokens, and the states (N, ...) after each sequence, from those before it."""
        kind = "cpu" if self.device.type == "meta" else self.device.type  # for which there is no autocast
        with torch.autocast(kind, enabled=False):
            if isinstance(rule, Affine):
                return self._affine(rule, before)
            assert isinstance(rule, LinearRule), "there is no other kind"
            out, after = (_one_each if max(self.lengths) == 1 else self._in_chunks)(rule, rule.state_in(before))
            return rule.finish_output(out).contiguous(), rule.state_out(after)

    def _in_chunks(self, rule: LinearRule, before: Tensor) -> tuple[Tensor, Tensor]:
        factors = in_factors(rule, mapped=0)
        size = chunk_size(self._plan.lengths, rule.sizes["K"], factors)
        if size not in self._chunks:
            self._chunks[size] = on_device(Chunks.of(self._plan, size), self.device)
        chunks, (own, back) = self._chunks[size], self._order
        tokens = rule.expanded_inputs().each(lambda x: tokens_in_chunks(x[0], chunks))
        reads, maps = chunked(tokens, rule.factor, factors)
        passed = Passed.empty(maps, before)
        after = AffineMaps(rule.MATRIX).scan(maps, before.index_select(0, own), chunks.sizes[2], passed)
        return outputs_of(reads, passed, chunks).unsqueeze(0), after.index_select(0, back)

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        """Which sequence is the n-th of the plan, and the way back."""
        own = self._plan.own
        return own.to(self.device), own.argsort().to(self.device)

    def _affine(self, rule: Affine, before: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(*(x.split(self.lengths, dim=1) for x in rule.inputs), strict=True)
        found = [rule.call(inputs, state.unsqueeze(0)) for inputs, state in zip(parts, before, strict=True)]
        return torch.cat([out for out, _ in found], 1), torch.cat([after for _, after in found])

    def conv1d(self, tokens: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """A depthwise causal convolution of (T, C) by (C, width), and the last width - 1 tokens of each sequence."""
        left, channels = weight.shape[1] - 1, len(weight)
        if left not in self._lines:
            self._lines[left] = self._lined_up(left)
        heads, places, tails = self._lines[left]
        line = tokens.new_empty(len(tokens) + before.shape[0] * left, channels)
        line.index_copy_(0, heads, before.flatten(0, 1))
        line.index_copy_(0, places, tokens)
        out = F.conv1d(line.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=channels)[0]  # (C, line - left)
        after = line.index_select(0, tails).view(before.shape)
        return out.index_select(1, places - left).T, after

    def _lined_up(self, left: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences behind the tokens before them, as a line: where those are, the new ones, and the last of each."""
        s, row = self._plan.stretches, torch.arange(len(self.lengths), device="cpu")
        behind = torch.arange(left, device="cpu")
        first = s.start + row * left
        heads = (first.unsqueeze(1) + behind).flatten()
        places = torch.arange(int(s.length.sum()), device="cpu") + (row.repeat_interleave(s.length) + 1) * left
        tails = ((first + s.length).unsqueeze(1) + behind).flatten()
        return heads.to(self.device), places.to(self.device), tails.to(self.device)


def _one_each(rule: LinearRule, before: Tensor) -> tuple[Tensor, Tensor]:
    """The law of a rule for one token of each sequence: see chunked.py."""
    query, key, value, decay, beta = rule.expanded_inputs().each(lambda x: x[0].unsqueeze(2))  # (N, H, 1, ...)
    state = before if decay is None else before * decay.exp().mT
    new = value if beta is None else beta * (value - key @ state)
    state = state + key.mT @ new
    return (rule.factor * query @ state).squeeze(2).unsqueeze(0), state
