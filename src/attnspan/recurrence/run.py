"""The join: a rule's tokens into chunks, chunks into maps, maps into states, states into outputs.

Knows what a rank's plan says and nothing of the layout behind it. Batch rows that lie alike are heads to everything
below: tokens are (T, B * H, ...) there, and (B * T, H, ...) where rows lie differently.

[Note: ties] Every rank takes part in the exchange of a backward pass, so every rank's outputs and final states depend
on `StateScan`, and `StateScan` on whatever requires gradients: sums over empty slices, which are zero, add the
dependency. A function of one's own needs three: outputs of runs that begin documents are computed before `StateScan`;
an initial state is read by the ranks whose runs begin with it; and a rank without tokens calls the function on one
token that it made up and drops the result, because the function may hold parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attnspan.layouts.document_runs import Stretches
from attnspan.recurrence.affine import Affine
from attnspan.recurrence.kernels import RecurrenceKernel
from attnspan.recurrence.maps import AffineMaps, Maps
from attnspan.recurrence.plan import Chunks, RankPlan, Route, on_device
from attnspan.recurrence.rules import LinearRule, Rule
from attnspan.recurrence.scan import Scan, StateScan
from attnspan.transports import Transport


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The recurrences of one sequence, on one rank."""

    stretches: Stretches
    transport: Transport
    plan: RankPlan = field(init=False)
    _chunks: dict[int, Chunks] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", RankPlan(self.stretches, self.transport.rank, self.transport.ranks))

    def run(
        self, rule: Rule, initial: Tensor | None, name: str, kernel: RecurrenceKernel | None
    ) -> tuple[Tensor, Tensor]:
        """The output of this rank's tokens, and the states after its last stretches of documents (see `last`).

        `initial` has a state for each document, (documents, ...); `name` is the operation's. A function of one's own
        has no kernel.
        """
        with torch.autocast(self.transport.device.type, enabled=False):
            if isinstance(rule, Affine):
                return self._affine(rule, initial, name)
            assert isinstance(rule, LinearRule), "there is no other kind"
            assert kernel is not None, "it was chosen"
            return self._linear(rule, initial, name, kernel)

    @cached_property
    def last(self) -> list[Tensor]:
        """By rank: the documents that end there, in the order of its states."""
        plans = [RankPlan(self.stretches, rank, self.transport.ranks) for rank in range(self.transport.ranks)]
        return [self.stretches.document[plan.own[self.stretches.back[plan.own] == 0]] for plan in plans]

    def states(self, given: Tensor, rule: Rule) -> Tensor:
        """States by document, rows among the heads where they lie alike: (documents, B, ...) or (documents, 1, ...)."""
        by_row: Tensor = given.unflatten(0, (self._alike(rule), self.stretches.documents))
        return by_row.transpose(0, 1)

    def traffic(self, rule: Rule) -> list[tuple[int, int]]:
        """Bytes that go to each rank, forward and backward."""
        size = rule.dtype.itemsize
        return [(size * there, size * back) for there, back in self.plan.traffic(*self._sizes(rule))]

    def arriving(self, rule: Rule) -> tuple[int, int]:
        """Bytes that come to this rank, forward and backward."""
        there, back = self.plan.arriving(*self._sizes(rule))
        return rule.dtype.itemsize * there, rule.dtype.itemsize * back

    def _alike(self, rule: Rule) -> int:
        """How many batch rows go together."""
        return rule.sizes["B"] if self.stretches.rows == 1 else 1

    def _sizes(self, rule: Rule) -> tuple[int, int]:
        """How many numbers the matrix, or decay, and the state of a map have, rows that lie alike together."""
        alike = self._alike(rule)
        return alike * rule.map_size, alike * torch.Size(rule.state_shape).numel()

    def _linear(
        self, rule: LinearRule, initial: Tensor | None, name: str, kernel: RecurrenceKernel
    ) -> tuple[Tensor, Tensor]:
        chunks, alike = self._chunked(kernel.size(rule, self.plan)), self.stretches.rows == 1
        inputs = kernel.inputs(rule).each(lambda x: _outermost(x, alike))
        heads, begin = (inputs.value.shape[1], rule.sizes["K"], rule.sizes["V"]), self._begin
        if initial is None:
            begins = inputs.value.new_zeros(len(begin), *heads, dtype=rule.dtype)
        else:
            begins = rule.state_in(initial).flatten(1, 2).index_select(0, begin)
        maps = AffineMaps(rule.MATRIX, kernel.exact)
        scan = Scan(self.plan.mapped, self.plan.waiting, chunks, self._routes, self.transport, name, maps)
        out, after = kernel.run(rule, inputs, begins, scan)
        return rule.finish_output(_innermost(out, rule.sizes["B"], alike)), rule.state_out(self._ends(after, rule))

    def _affine(self, rule: Affine, initial: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
        plan, rows, parts = self.plan, self._alike(rule), list(rule.parts(self.plan))
        waiting, begins = parts[: plan.waiting], parts[plan.waiting :]
        maps = [rule.map(inputs) for inputs, _ in waiting]
        first = (rule.zeros(rows) if initial is None else initial[document] for _, document in begins)
        begun = [rule.call(inputs, state) for (inputs, _), state in zip(begins, first, strict=True)]
        made_up = None if parts else rule.empty()
        nothing = rule.flat(self._tie(rule, initial, made_up))
        unit = nothing if rule.diagonal else nothing.new_zeros(len(nothing), nothing.shape[1], nothing.shape[1])
        a = torch.stack([unit, *(rule.flat(a) for a, _ in maps), *[unit] * len(begun)])[1:]
        b = torch.stack([nothing, *(rule.flat(b) for _, b in maps), *(rule.flat(end) for _, end in begun)])[1:]
        chunks = self._chunked(max([1, *self.plan.lengths.tolist()]))
        scan = Scan(
            plan.mapped, plan.waiting, chunks, self._routes, self.transport, name, AffineMaps(not rule.diagonal)
        )
        before, after, _ = StateScan.apply(b.new_zeros(len(self._begin), *b.shape[1:]), scan, *Maps(a, b))
        states = before.reshape(len(before), rows, *rule.state_shape)
        outs = [rule.call(inputs, state)[0] for (inputs, _), state in zip(waiting, states, strict=False)]
        out = self._joined(outs + [out for out, _ in begun]) if made_up is None else made_up[0]
        return out + before[:0].sum().to(out.dtype), self._ends(after, rule)

    def _tie(self, rule: Affine, initial: Tensor | None, made_up: tuple[Tensor, Tensor] | None) -> Tensor:
        """A state of zeros that depends on whatever requires gradients. See [Note: ties]."""
        tie = sum((x[:, :0].sum().to(rule.dtype) for x in rule.inputs), rule.zeros(self._alike(rule)))
        tie = tie if made_up is None else tie + made_up[1].sum()
        return tie if initial is None else tie + initial[:0].sum()

    def _joined(self, outs: list[Tensor]) -> Tensor:
        """The outputs of stretches, in the order of the shard."""
        s, own = self.stretches, self.plan.own
        order = s.place[own].argsort().tolist()
        line = torch.cat([outs[i] for i in order], 1)
        by_row: Tensor = line if s.rows == 1 else line.unflatten(1, (s.rows, -1)).squeeze(0)
        return by_row

    @cached_property
    def _routes(self) -> tuple[Route, Route]:
        with torch.inference_mode(False):
            device = self.transport.device
            return on_device(self.plan.forward, device), on_device(self.plan.backward, device)

    def _chunked(self, size: int) -> Chunks:
        if size not in self._chunks:
            with torch.inference_mode(False):
                self._chunks[size] = on_device(Chunks.of(self.plan, size), self.transport.device)
        return self._chunks[size]

    @cached_property
    def _begin(self) -> Tensor:
        """The documents that begin on this rank, in the order of its stretches."""
        with torch.inference_mode(False):
            return self.stretches.document[self.plan.own[self.plan.waiting :]].to(self.transport.device)

    def _ends(self, after: Tensor, rule: Rule) -> Tensor:
        """Of the states after stretches, those that end a document: (documents, B or 1, heads, ...)."""
        last = (self.stretches.back[self.plan.own] == 0).nonzero().flatten()
        chosen = after.index_select(0, last.to(after.device))
        rows = self._alike(rule)
        shape = rule.state_shape if isinstance(rule, Affine) else (after.shape[1] // rows, *after.shape[2:])
        return chosen.reshape(len(last), rows, *shape)


def _outermost(tensor: Tensor, alike: bool) -> Tensor:
    """(B, S, H, ...) with tokens first."""
    return tensor.transpose(0, 1).flatten(1, 2) if alike else tensor.flatten(0, 1)


def _innermost(tokens: Tensor, rows: int, alike: bool) -> Tensor:
    """The way back."""
    by_row: Tensor = tokens.unflatten(1, (rows, -1)) if alike else tokens.unflatten(0, (rows, len(tokens) // rows))
    return by_row.transpose(0, 1).contiguous() if alike else by_row
