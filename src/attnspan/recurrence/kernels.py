"""How a rank's tokens are computed: kernels by name, as a choice that is made in data.

A kernel says whether it takes a rule, cuts stretches into chunks of a size that suits it, and gives the output of all
tokens and the state after every stretch. In between it calls the scan, which alone meets the group: maps of chunks go
in, states before chunks come out (scan.py). A kernel that is named and does not take a rule raises its reason.

``chunked`` is plain torch, in float32 or float64, on every device. ``fla`` calls the Triton kernels of
flash-linear-attention (fla.py). ``auto`` is `chunked`: `fla` has not been measured on a GPU yet, and is used by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from attnspan.errors import RecurrenceError, one_of
from attnspan.recurrence import fla
from attnspan.recurrence.chunked import ChunkMaps, RuleInputs, chunk_size, chunked
from attnspan.recurrence.plan import Chunks
from attnspan.recurrence.rules import LinearRule, Rule
from attnspan.recurrence.scan import Scan, StateScan


class RecurrenceKernel(Protocol):
    """How the tokens of a rule are computed."""

    @property
    def name(self) -> str: ...

    def refuses(self, rule: LinearRule) -> str | None:
        """Why it does not take a rule, or None."""

    def size(self, rule: LinearRule, lengths: Tensor) -> int:
        """Tokens of a chunk, for stretches of these lengths."""

    def inputs(self, rule: LinearRule) -> RuleInputs:
        """The tensors of a rule that it takes, (B, S, ...)."""

    def run(self, rule: LinearRule, inputs: RuleInputs, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        """The output (T, H, V) of inputs (T, H, ...), and the states after stretches, given those at the beginnings."""


class PlainChunked:
    """Chunk by chunk, in plain torch: chunked.py."""

    name = "chunked"

    def refuses(self, rule: LinearRule) -> str | None:
        return None

    def size(self, rule: LinearRule, lengths: Tensor) -> int:
        return chunk_size(lengths, rule.sizes["K"])

    def inputs(self, rule: LinearRule) -> RuleInputs:
        return rule.expanded_inputs()

    def run(self, rule: LinearRule, inputs: RuleInputs, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        parts = chunked(inputs.each(lambda x: tokens_in_chunks(x, scan.chunks)), rule.factor)
        before, after = StateScan.apply(*maps_of(parts), initial, scan)
        return outputs_of(parts, before, scan.chunks), after


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
    kernel = "chunked" if kernel == "auto" else kernel
    reason = KERNELS[kernel].refuses(rule)
    if reason is not None:
        raise RecurrenceError(f"kernel={kernel!r} does not take this {type(rule).__name__}: {reason}")
    return KERNELS[kernel]


# ---- tokens and chunks -------------------------------------------------------------------------------------------


def maps_of(parts: Sequence[ChunkMaps]) -> tuple[Tensor, Tensor]:
    """A and B of all chunks."""
    return torch.cat([part.a for part in parts]), torch.cat([part.b for part in parts])


def outputs_of(parts: Sequence[ChunkMaps], before: Tensor, chunks: Chunks) -> Tensor:
    """The output (T, H, V) of all tokens, given the states before chunks."""
    states = before.split([len(part.out) for part in parts])
    out = torch.cat([part.read(state).transpose(1, 2) for part, state in zip(parts, states, strict=True)])
    out = out.flatten(0, 1)
    return out if chunks.in_order else out.index_select(0, chunks.back)


def tokens_in_chunks(tokens: Tensor, chunks: Chunks) -> Tensor:
    """(T, H, D) as (n, C, H, D), with zeros where a chunk has no token."""
    found = tokens if chunks.in_order else tokens.index_select(0, chunks.tokens.flatten())
    if not chunks.full:
        found = torch.where(chunks.filled.view(-1, 1, 1), found, 0)
    by_chunk: Tensor = found.unflatten(0, chunks.tokens.shape)
    return by_chunk
