"""The recurrences of a session: recurrent layers and short convolutions over its documents and ranks.

There is one state per document, numbered through the batch rows: (documents, ...), as in packed kernels. If each row is
one document, that is one state per row. Initial states are given whole on every rank; their gradient is on the rank
where the document begins, and zero on the others. Final states are whole on every rank: see [Note: gradients] in
sharding.py.

[Note: short runs] A map has the size of a state, however few tokens it stands for. With many short stretches, maps take
more traffic than gathering the tokens would, or more work than the tokens themselves; the first such call warns.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from attnspan.attention.transforms import check_untransformed
from attnspan.dtypes import dtype_name, dtype_or_type
from attnspan.errors import MaskError, RecurrenceError, ShardError, integer, one_of
from attnspan.layouts import Run
from attnspan.masks.borders import borders
from attnspan.parallel.moves import GatheredTokens, Moves, before
from attnspan.parallel.report import RecurrenceUse
from attnspan.parallel.session_spec import SessionSpec
from attnspan.plan import RecurrentLayers
from attnspan.plan.recurrent import RecurrentForecast
from attnspan.recurrence import Affine, Recurrence, Rule, Stretches, TestedFunctions
from attnspan.recurrence.kernels import chosen
from attnspan.recurrence.rules import LinearRule
from attnspan.transports.consensus import digest

ACTIVATIONS = ("silu", "swish")

ENOUGH = 2**20
"""Bytes of maps that no layout is worth changing for."""

MUCH, LONG = 1.0, 4096
"""Work of maps, over that of tokens, that is worth a warning, and the tokens of a sequence from which on it is."""


class Recurrences:
    """Recurrent layers and convolutions along the sequence of a session."""

    def __init__(self, spec: SessionSpec):
        self.spec = spec
        self.uses: dict[str, RecurrenceUse] = {}
        self._layers: dict[str, RecurrentLayers] = {}
        self._halos: dict[int, Moves] = {}
        self._lines: dict[int, tuple[Tensor, Tensor]] = {}
        self._tested = TestedFunctions()
        self._checked: set[str] = set()

    @cached_property
    def recurrence(self) -> Recurrence:
        """The stretches of all ranks, and what this one does."""
        spec = self.spec
        with torch.inference_mode(False):  # made anywhere, used anywhere
            found = Stretches.of(spec.layout, spec.seq_len, borders(spec.masks.values(), spec.seq_len))
        return Recurrence(found, spec.transport)

    @property
    def stretches(self) -> list[list[Run]]:
        """This rank's stretches, by batch row."""
        return self.recurrence.stretches.on(self.spec.rank)

    # ---- recurrences -----------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # agreements, exchanges and plans are not for compiled code
    def run(
        self, rule: Rule, initial: Tensor | None, final: bool, kernel: str = "auto"
    ) -> tuple[Tensor, Tensor | None]:
        """The output of a rule, and all documents' final states if asked for."""
        said: str | RecurrenceError | ShardError
        try:
            self._check(rule, initial)
            by = chosen(kernel, rule)
            given = "" if initial is None else f", from {initial.dtype} states"
            said = f"recurrence {rule}{given}{', to final states' if final else ''}, documents {self._digest}"
            said += "" if by is None else f", by {by.name}"
        except (RecurrenceError, ShardError) as refusal:
            said = refusal
        except MaskError as refusal:
            said = RecurrenceError(str(refusal))
        untested = isinstance(said, str) and isinstance(rule, Affine) and rule not in self._tested
        name = self.spec.sharding.agree("recurrence", said, again=untested)
        if isinstance(rule, Affine):
            self._tested.add(rule)
        self._warn(rule)
        recurrence = self.recurrence
        if initial is not None:
            initial = recurrence.states(initial.to(rule.dtype), rule)
        self._count(rule)
        out, ends = recurrence.run(rule, initial, name, by)
        return out, self._gathered(ends, name) if final else None

    def _gathered(self, ends: Tensor, name: str) -> Tensor:
        """All documents' final states, from those of the documents that end on each rank."""
        recurrence, transport = self.recurrence, self.spec.transport
        sizes = [len(each) for each in recurrence.last]
        every: Tensor = GatheredTokens.apply(ends.contiguous(), transport, sizes, f"final states of {name}")
        order = torch.cat(recurrence.last).argsort().to(every.device)
        return every.index_select(0, order).transpose(0, 1).flatten(0, 1)

    def _check(self, rule: Rule, initial: Tensor | None) -> None:
        if not isinstance(rule, Rule):
            raise RecurrenceError(f"rule must be one such as GatedDelta(query, key, ...), got {type(rule).__name__}")
        spec, sizes = self.spec, rule.sizes
        if not (initial is None or isinstance(initial, Tensor)):
            raise RecurrenceError(f"initial_state must be a tensor, or None for zeros, got {type(initial).__name__}")
        check_untransformed("recurrence", *rule.tensors.values(), initial, error=RecurrenceError)
        stretches = self.recurrence.stretches
        tensors = rule.tensors if initial is None else {**rule.tensors, "initial_state": initial}
        for name, tensor in tensors.items():
            if hasattr(tensor, "to_local"):
                raise RecurrenceError(f"{name} must be a plain tensor, got a DTensor; pass its to_local()")
            if tensor.device != spec.transport.device:
                raise RecurrenceError(
                    f"{name} must be on {spec.transport.device}, where the group is, got {tensor.device}"
                )
            if not torch.compiler.is_compiling():
                spec.sharding.check_mark(tensor)
        first, tokens = next(iter(rule.tensors)), spec.sharding.tokens
        if sizes["S"] != tokens:
            hint = "; these are whole, and were never sharded" if sizes["S"] == spec.seq_len else ""
            raise RecurrenceError(
                f"{first} must have this rank's {tokens} of {spec.seq_len} tokens, got {sizes['S']}{hint}"
            )
        if stretches.rows not in (1, sizes["B"]):
            raise RecurrenceError(f"{first} must have the {stretches.rows} batch rows of the session, got {sizes['B']}")
        if initial is not None:
            self._check_state(rule, initial)
        if isinstance(rule, Affine) and sizes["S"] and rule not in self._tested:
            rule.check()

    def _check_state(self, rule: Rule, initial: Tensor) -> None:
        documents = self._documents(rule)
        expected = (documents, *rule.state_shape)
        if initial.shape != expected or not initial.is_floating_point():
            raise RecurrenceError(
                f"initial_state must be {expected}, a state for each of {documents} documents through all batch rows, "
                f"got {initial.dtype} of shape {tuple(initial.shape)}"
            )

    def _documents(self, rule: Rule) -> int:
        """Documents of all batch rows."""
        stretches = self.recurrence.stretches
        return stretches.documents * (rule.sizes["B"] if stretches.rows == 1 else 1)

    @cached_property
    def _digest(self) -> str:
        stretches = self.recurrence.stretches
        return digest(stretches.start[stretches.step == 0].tolist())

    def _count(self, rule: Rule) -> None:
        name = type(rule).__name__
        used = self.uses.get(name, RecurrenceUse())
        there, back = self.recurrence.arriving(rule)
        self.uses[name] = RecurrenceUse(used.calls + 1, used.forward + there, used.backward + back)
        if isinstance(rule, LinearRule):
            self._layers[name] = _planned(rule)

    def layers(self, attended: int) -> list[RecurrentLayers]:
        """What was used, as planning knows it, for so many calls of attention."""
        return [replace(each, count=self.uses[name].calls / attended) for name, each in self._layers.items()]

    def reset(self) -> None:
        """Start counting again."""
        self.uses.clear()
        self._layers.clear()

    def _warn(self, rule: Rule) -> None:
        """See [Note: short runs]."""
        if str(rule) in self._checked:
            return
        self._checked.add(str(rule))
        spec, own, stretches = self.spec, len(self.recurrence.plan.own), self.recurrence.stretches
        maps = sum(there for there, _ in self.recurrence.traffic(rule))
        gathered = (spec.ranks - 1) * sum(x.nbytes for x in rule.tensors.values())
        said = []
        if maps > max(gathered, ENOUGH):
            said.append(
                f"sends {maps / 2**20:.1f} MiB of their maps in a forward pass; sending all tokens to all ranks would "
                f"take {gathered / 2**20:.1f} MiB"
            )
        extra = RecurrentForecast(_planned(rule), stretches, spec.ranks).extra if isinstance(rule, LinearRule) else 0.0
        if extra > MUCH and spec.seq_len * stretches.rows >= LONG:
            said.append(f"computes {extra:.1f} times as much for maps as one device does for all tokens")
        if said:
            warnings.warn(
                f"{type(rule).__name__}: this rank holds {spec.sharding.tokens} tokens in {own} runs, and "
                f"{', and '.join(said)}. Use a layout of few long runs: Contiguous(ranks={spec.ranks}), "
                f"HeadTail(ranks={spec.ranks}), or Balanced with most_runs=2",
                stacklevel=4,
            )

    # ---- convolutions ----------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # agreements, exchanges and plans are not for compiled code
    def halo(self, tensor: Tensor, left: int, dim: int, batch_dim: int) -> Tensor:
        """The tokens before each stretch, `left` of them."""
        left = integer("left", left, at_least=1, error=ShardError)
        return self.spec.sharding.moved(tensor, dim, batch_dim, self._halo(left), 0)

    @torch._disable_dynamo  # agreements, exchanges and plans are not for compiled code
    def conv1d(self, tensor: Tensor, conv: Convolution) -> Tensor:
        """A depthwise causal convolution that begins anew with every document."""
        rows = self.recurrence.stretches.rows
        said: str | ShardError | RecurrenceError
        try:
            said = f"conv1d {conv.checked(tensor)}, of {self.spec.sharding.described_shard(tensor, conv.dim, 0, rows)}"
        except ShardError as refusal:
            said = refusal
        self.spec.sharding.agree("conv1d", said)
        weight = conv.weight.flatten(1)
        left = weight.shape[1] - 1
        parts = [tensor, self.halo(tensor, left, conv.dim, 0)] if left else [tensor]
        alike = rows == 1
        tokens = [_lines(part, conv.dim, alike) for part in parts]
        line, back = (each.to(tensor.device) for each in self._line(left))
        padded = torch.cat(tokens).index_select(0, line).permute(1, 2, 0)  # (rows, channels, line)
        # Without tokens it runs on zeros and nothing is taken: the dtype is that of other ranks, and parameters get a
        # gradient, which averaging waits for.
        padded = padded if len(line) else F.pad(padded, (0, left + 1))
        out = F.conv1d(padded, weight.unsqueeze(1), conv.bias, groups=len(weight))
        out = out.permute(2, 0, 1).index_select(0, back)
        out = out.transpose(0, 1) if alike else out.unflatten(0, (len(tensor), -1)).squeeze(2)
        out = out if conv.dim == 1 else out.transpose(1, 2)
        return (out if conv.activation is None else F.silu(out)).contiguous()

    def _halo(self, left: int) -> Moves:
        if left not in self._halos:
            spec = self.spec
            self._halos[left] = before(self.recurrence.stretches, spec.layout, spec.seq_len, spec.rank, left)
        return self._halos[left]

    def _line(self, left: int) -> tuple[Tensor, Tensor]:
        """Stretches one after another, each behind its halo: which tokens, and where outputs of tokens are found."""
        if left not in self._lines:
            with torch.inference_mode(False):
                self._lines[left] = self._lined_up(left)
        return self._lines[left]

    def _lined_up(self, left: int) -> tuple[Tensor, Tensor]:
        rows = self.stretches
        tokens, most = len(rows) * self.spec.sharding.tokens, max(map(len, rows))
        line, at = [], 0
        for row, stretches in enumerate(rows):
            for number, run in enumerate(stretches):
                first, last = tokens + (row * most + number) * left, at + len(run.positions)
                line += [torch.arange(first, first + left, device="cpu"), torch.arange(at, last, device="cpu")]
                at = last
        found = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *line])
        return found, (found < tokens).nonzero().flatten() - left


def _planned(rule: LinearRule) -> RecurrentLayers:
    """A call as planning knows it."""
    batch, heads, keys, values = (rule.sizes[letter] for letter in "BHKV")
    return RecurrentLayers(type(rule).__name__, heads, keys, values, 1, batch, dtype_name(rule.dtype))


@dataclass(frozen=True, eq=False)
class Convolution:
    """A depthwise causal convolution: weight (channels, width), or as nn.Conv1d has it, (channels, 1, width)."""

    weight: Tensor
    bias: Tensor | None
    dim: int
    activation: str | None

    def checked(self, tensor: Tensor) -> str:
        """What all ranks must have in common; raises if tensors do not fit."""
        weight, bias = self.weight, self.bias
        if self.activation is not None:
            one_of("activation", self.activation, ACTIVATIONS, error=ShardError)
        for name, each in (("tensor", tensor), ("weight", weight), ("bias", bias)):
            floats = isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
            if not floats and (each is not None or name != "bias"):
                raise ShardError(f"{name} must be a tensor of floats, got {dtype_or_type(each)}")
        check_untransformed("conv1d", tensor, error=ShardError)
        if tensor.dim() != 3 or self.dim not in (1, 2):
            raise ShardError(
                "conv1d needs (batch, tokens, channels) with dim=1, or (batch, channels, tokens) with dim=2, got shape "
                f"{tuple(tensor.shape)} and dim={self.dim!r}"
            )
        channels = tensor.shape[3 - self.dim]
        if weight.dim() not in (2, 3) or (weight.dim() == 3 and weight.shape[1] != 1) or len(weight) != channels:
            raise ShardError(
                f"weight must be ({channels}, width) or ({channels}, 1, width), one filter for each channel, got shape "
                f"{tuple(weight.shape)}"
            )
        if not weight.shape[-1]:
            raise ShardError(f"weight must have a width of at least 1, got shape {tuple(weight.shape)}")
        if bias is not None and bias.shape != (channels,):
            raise ShardError(f"bias must be ({channels},), got shape {tuple(bias.shape)}")
        for name, each in (("weight", weight), ("bias", bias)):
            if each is not None and each.device != tensor.device:
                raise ShardError(f"{name} must be on {tensor.device}, where the tensor is, got {each.device}")
        return f"of width {weight.shape[-1]}, {'no' if bias is None else 'a'} bias, activation {self.activation}"


def _lines(tensor: Tensor, dim: int, alike: bool) -> Tensor:
    """(tokens, rows, channels), the rows one after another where they lie differently."""
    tensor = tensor if dim == 1 else tensor.transpose(1, 2)
    return tensor.transpose(0, 1) if alike else tensor.flatten(0, 1).unsqueeze(1)
