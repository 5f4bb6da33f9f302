"""How a rank's tokens are computed: kernels by name, as a choice that is made in data.

A kernel says whether it takes a rule, cuts stretches into chunks of a size that suits it, and gives the output of all
tokens and the state after every stretch. In between it calls the scan, which alone meets the group: maps of chunks go
in, states before chunks come out (scan.py). A kernel that is named and does not take a rule raises its reason.

``chunked`` is plain torch, in float32 or float64, on every device. ``fla`` calls the Triton kernels of
flash-linear-attention (fla.py), which multiply in the dtype of the tokens. ``auto`` takes `fla` for tokens in half
precision where it can (on an H200 it is two to seven times as fast), else `chunked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from attnspan.errors import RecurrenceError, one_of
from attnspan.recurrence import fla
from attnspan.recurrence.chunked import Reads, RuleInputs, chunk_size, chunked
from attnspan.recurrence.maps import Passed, joined, split
from attnspan.recurrence.plan import Chunks, RankPlan
from attnspan.recurrence.rules import LinearRule, Rule
from attnspan.recurrence.scan import Scan, StateScan


class RecurrenceKernel(Protocol):
    """How the tokens of a rule are computed."""

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Whether products of states are to be as exact as float32's; otherwise they may be as TF32's."""

    def refuses(self, rule: LinearRule) -> str | None:
        """Why it does not take a rule, or None."""

    def size(self, rule: LinearRule, plan: RankPlan) -> int:
        """Tokens of a chunk, for the stretches of a rank."""

    def inputs(self, rule: LinearRule) -> RuleInputs:
        """The tensors of a rule that it takes, (B, S, ...)."""

    def run(self, rule: LinearRule, inputs: RuleInputs, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        """The output (T, H, V) of inputs (T, H, ...), and the states after stretches, given those at the beginnings."""


class PlainChunked:
    """Chunk by chunk, in plain torch: chunked.py."""

    name, exact = "chunked", True

    def refuses(self, rule: LinearRule) -> str | None:
        return None

    def size(self, rule: LinearRule, plan: RankPlan) -> int:
        return chunk_size(plan.lengths, rule.sizes["K"], in_factors(rule, plan.mapped))

    def inputs(self, rule: LinearRule) -> RuleInputs:
        return rule.expanded_inputs()

    def run(self, rule: LinearRule, inputs: RuleInputs, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        tokens = inputs.each(lambda x: tokens_in_chunks(x, scan.chunks))
        reads, maps = chunked(tokens, rule.factor, in_factors(rule, scan.mapped))
        before, after, inner = StateScan.apply(initial, scan, *maps)
        return outputs_of(reads, Passed(before, inner), scan.chunks), after


KERNELS = MappingProxyType[str, RecurrenceKernel]({"chunked": PlainChunked(), "fla": fla.Fla()})


def chosen(kernel: str, rule: Rule) -> RecurrenceKernel | None:
    """The kernel of a name, or the one that `auto` takes; none for a function of one's own."""
    one_of("kernel", kernel, ("auto", *KERNELS), error=RecurrenceError)
    if not isinstance(rule, LinearRule):
        if kernel != "auto":
            raise RecurrenceError(
                f"kernel must be 'auto' for {type(rule).__name__}, which runs by itself, got {kernel!r}"
            )
        return None
    if kernel == "auto":
        half = rule.inputs().key.dtype in (torch.bfloat16, torch.float16)
        return KERNELS["fla" if half and KERNELS["fla"].refuses(rule) is None else "chunked"]
    reason = KERNELS[kernel].refuses(rule)
    if reason is not None:
        raise RecurrenceError(f"kernel={kernel!r} does not take this {type(rule).__name__}: {reason}")
    return KERNELS[kernel]


def in_factors(rule: LinearRule, mapped: int) -> bool:
    """Whether the maps of chunks are kept as factors, if so many stretches are needed as maps.

    See [Note: factors] in maps.py.
    """
    on_cpu = next(iter(rule.tensors.values())).device.type == "cpu"
    return rule.MATRIX and on_cpu and not mapped


# ---- tokens and chunks -------------------------------------------------------------------------------------------


def outputs_of(reads: Sequence[Reads], passed: Passed, chunks: Chunks) -> Tensor:
    """The output (T, H, V) of all tokens, given the states before chunks and what goes through their factors."""
    by_part = split(passed, [len(each.own) for each in reads])
    found = (Passed(each.read(*part)) for each, part in zip(reads, by_part, strict=True))
    out = joined(found, len(passed.states)).states.flatten(0, 1)
    return out if chunks.in_order else out.index_select(0, chunks.back)


def tokens_in_chunks(tokens: Tensor, chunks: Chunks) -> Tensor:
    """(T, H, D) as (n, C, H, D), with zeros where a chunk has no token."""
    found = tokens if chunks.in_order else tokens.index_select(0, chunks.tokens.flatten())
    if not chunks.full:
        found = torch.where(chunks.filled.view(-1, 1, 1), found, 0)
    by_chunk: Tensor = found.unflatten(0, chunks.tokens.shape)
    return by_chunk
