"""A recurrence of one's own: a function from tokens and a state to outputs and a state, as a black box.

``out, final_state = fn(*inputs, initial_state)`` is run on one stretch of tokens at a time. If the final state is an
affine function of the initial one, ``A S + B``, that is all there is to know: B is the final state from zero, and A is
found from states of which each row is one of the identity's. Stretches that begin a document are run once; others from
zero, for A, and again from their true state.

That it is affine is tested, not believed: on this rank's first tokens, with random states.

[Note: large states] A is the difference of two final states, ``(fn(c) - fn(0)) / c``, and what both have in common, B,
is rounded at its own size. The state c is so large that B is below the rounding of what becomes of c: A then has the
precision that the function computes with, whatever the tokens add, and also where it has decayed to far below 1. c is a
power of two, so that it rounds nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.errors import RecurrenceError
from attnspan.recurrence.plan import RankPlan
from attnspan.recurrence.rules import FLOATS, Rule

PROBED = 64
"""Tokens that a function is tested on, at most."""

Function = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Affine(Rule):
    """A function ``fn(*inputs, initial_state) -> (out, final_state)`` whose final state is affine in the initial one.

    Each of `inputs` is (B, S, ...), and `fn` is called with any number of batch rows and tokens. A state is (B,
    *state_shape). It is acted on by a matrix from the left, the same for all of the last dim and another for each index
    before the last two; if `diagonal`, by a factor for each of its numbers.
    """

    fn: Function
    inputs: Sequence[Tensor]
    state_shape: tuple[int, ...]
    diagonal: bool = False

    SHAPES = ""

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {f"inputs[{i}]": tensor for i, tensor in enumerate(self.inputs)}

    @cached_property
    def sizes(self) -> dict[str, int]:
        if not callable(self.fn):
            raise RecurrenceError(f"fn must be a function, fn(*inputs, initial_state), got {type(self.fn).__name__}")
        given = self.inputs if isinstance(self.inputs, list | tuple) else []
        if not given or not all(isinstance(x, Tensor) for x in given):
            kinds = [type(x).__name__ for x in given] or type(self.inputs).__name__
            raise RecurrenceError(f"inputs must be a list of at least one tensor, as in [x], got {kinds}")
        if not all(isinstance(n, int) and n > 0 for n in self.state_shape):
            raise RecurrenceError(f"state_shape must be sizes of at least 1, got {self.state_shape!r}")
        if len(self.state_shape) < (1 if self.diagonal else 2):
            raise RecurrenceError(
                f"state_shape must have two dims, or one if diagonal, got {tuple(self.state_shape)}; batch rows are not"
                " among them"
            )
        first = self.inputs[0]
        for name, tensor in self.tensors.items():
            if tensor.dtype not in FLOATS or tensor.dim() < 2 or tensor.shape[:2] != first.shape[:2]:
                raise RecurrenceError(
                    f"{name} must be (B, S, ...) of floats, with the B and S of the first, {tuple(first.shape[:2])}, "
                    f"got {dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
                )
        return {"B": first.shape[0], "S": first.shape[1]}

    @property
    def map_size(self) -> int:
        size = torch.Size(self.state_shape).numel()
        return size if self.diagonal else size // self.state_shape[-1] * self.state_shape[-2]

    def __str__(self) -> str:
        shapes = [f"{dtype_name(x.dtype)} {tuple(x.shape[2:])}" for x in self.inputs]
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        kind = "diagonal, " if self.diagonal else ""
        return f"Affine {name} of {self.inputs[0].shape[0]} rows of {shapes}, {kind}state {tuple(self.state_shape)}"

    # ---- maps ------------------------------------------------------------------------------------------------------

    def parts(self, plan: RankPlan) -> Iterator[tuple[Sequence[Tensor], int]]:
        """The inputs of each stretch of a rank, in its order, and their document."""
        s, tokens = plan.stretches, self.inputs[0].shape[1]
        for i in plan.own.tolist():
            row, place, length = int(s.row[i]), int(s.place[i]), int(s.length[i])
            rows = slice(None) if s.rows == 1 else slice(row, row + 1)
            place -= 0 if s.rows == 1 else row * tokens
            yield [x[rows, place : place + length] for x in self.inputs], int(s.document[i])

    def zeros(self, rows: int) -> Tensor:
        """The state of nothing."""
        return self.inputs[0].new_zeros(rows, *self.state_shape, dtype=self.dtype)

    def call(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """The function, on a state of its own that it may write to."""
        return self.fn(*inputs, state.clone(memory_format=torch.contiguous_format))

    def empty(self) -> tuple[Tensor, Tensor]:
        """The output and final states of no tokens: cut from those of a token of halves.

        A gradient of zero goes back through the function. At 0 or 1 more functions have an infinite derivative (norms
        and logarithms, sqrt(1 - a^2)), and zero times that is NaN.
        """
        token = [torch.cat([x, x.new_full((len(x), 1, *x.shape[2:]), 0.5)], 1) for x in self.inputs]
        out, end = self.call(token, self.zeros(len(token[0])))
        return out[:, :0], end[:0]

    def map(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A and B of some tokens: (rows, ...) each. See [Note: large states]."""
        rows = len(inputs[0])
        end = self.call(inputs, self.zeros(rows))[1]
        size = self.size(end) / torch.finfo(end.dtype).eps
        if self.diagonal:
            return (self.call(inputs, size.expand_as(end))[1] - end) / size, end
        height, width = self.state_shape[-2:]
        calls = -(-height // width)
        units = torch.eye(height, calls * width, dtype=end.dtype, device=end.device).unflatten(1, (calls, width))
        lead = [1] * (len(self.state_shape) - 2)
        states = units.movedim(1, 0).reshape(1, calls, *lead, height, width) * size.unsqueeze(1)
        again = [x.repeat_interleave(calls, 0) for x in inputs]
        ends = self.call(again, states.flatten(0, 1))[1].unflatten(0, (rows, calls)) - end.unsqueeze(1)
        return (ends / size.unsqueeze(1)).movedim(1, -2).flatten(-2)[..., :height], end

    def size(self, end: Tensor) -> Tensor:
        """A power of two above all numbers of each matrix's part of a state, and at least 1."""
        found = end.detach().abs().nan_to_num(1.0, 1.0)
        found = found if self.diagonal else found.amax((-2, -1), keepdim=True)
        most = torch.finfo(end.dtype).max * torch.finfo(end.dtype).eps ** 2
        return torch.ldexp(torch.ones_like(found), found.clamp(1.0, most).frexp().exponent)

    def flat(self, state: Tensor) -> Tensor:
        """(rows, ...) as the scan has it: (heads, K, V), rows among the heads."""
        if self.diagonal:
            return state.reshape(len(state), -1, 1)
        return state.reshape(-1, *state.shape[-2:])

    # ---- the test --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self) -> None:
        """Raise if the function does not give what it should, or is not affine."""
        with torch.autocast(self.inputs[0].device.type, enabled=False):  # as the recurrence itself runs
            tokens = [x[:, :PROBED].detach() for x in self.inputs]
            generator = torch.Generator(device="cpu").manual_seed(0)
            shape = (len(tokens[0]), *self.state_shape)
            state = torch.randn(shape, generator=generator, dtype=self.dtype, device="cpu").to(tokens[0].device)
            self._check_returned(tokens, state)
            self._check_affine(tokens, state)
            self._check_parts(tokens, state)

    def _check_returned(self, tokens: Sequence[Tensor], state: Tensor) -> None:
        found: Any = self.call(tokens, state)
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
            raise RecurrenceError(f"{self._named} must return (out, final_state), got {type(found).__name__}")
        out, end = found
        rows, length = tokens[0].shape[:2]
        if end.shape != state.shape or out.shape[:2] != (rows, length):
            raise RecurrenceError(
                f"{self._named} must return an output for each of {rows} x {length} tokens and a state of shape "
                f"{tuple(state.shape)}, got shapes {tuple(out.shape)} and {tuple(end.shape)}"
            )
        if end.dtype != state.dtype:
            raise RecurrenceError(
                f"{self._named} must return a final state of the dtype of the initial one, {dtype_name(state.dtype)}, "
                f"got {dtype_name(end.dtype)}; compute in any dtype, and convert it back"
            )

    def _check_affine(self, tokens: Sequence[Tensor], state: Tensor) -> None:
        a, b = self.map(tokens)
        unit = self.size(b)
        state = state * unit  # as large as what tokens add: it is not lost beside that
        together = tuple(range(1, b.dim())) if self.diagonal else (-2, -1)
        for scale in (1.0, 8.0):
            expected = self.call(tokens, state * scale)[1].double() - b.double()
            linear = a.double() * state * scale if self.diagonal else a.double() @ (state.double() * scale)
            sizes = torch.maximum(expected.abs(), b.double().abs())
            error, size = ((x / unit).amax(together) for x in ((expected - linear).abs(), sizes))
            limits = torch.finfo(b.dtype)
            if not bool((error <= limits.eps**0.5 * size.clamp_min(limits.tiny)).all()):
                kind = "a factor for each number of it" if self.diagonal else "a matrix from the left"
                raise RecurrenceError(
                    f"{self._named} is not affine in its state: its final state is not {kind} times the initial one, "
                    f"plus what the tokens add; off by {error.max():.3g} where the largest is {size.max():.3g}. Such a "
                    "layer cannot be split over ranks by its maps"
                )

    def _check_parts(self, tokens: Sequence[Tensor], state: Tensor) -> None:
        """Raise if a run gives another state than its first token and the rest, one after the other."""
        whole, part = self.call(tokens, state)[1], state
        for tokens_of_part in ([x[:, :1] for x in tokens], [x[:, 1:] for x in tokens]):
            part = self.call(tokens_of_part, part)[1] if tokens_of_part[0].shape[1] else part
        error, size = (whole - part).abs().max(), torch.maximum(whole.abs().max(), state.abs().max())
        if not bool(error <= torch.finfo(state.dtype).eps ** 0.5 * size):
            raise RecurrenceError(
                f"{self._named} must give the same final state for a run of tokens as for its parts one after the "
                f"other, got states that differ by {error:.3g} where the largest is {size:.3g}: it depends on where a "
                "run begins"
            )

    @property
    def _named(self) -> str:
        return f"fn ({getattr(self.fn, '__qualname__', type(self.fn).__name__)})"


class TestedFunctions:
    """The functions that passed, as objects: another closure of the same code is another function.

    They are held weakly. A method is made anew whenever it is asked for, so it is known by its object and function. An
    object that cannot be held weakly is tested at every call.
    """

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Any, set[tuple[object, str]]] = WeakKeyDictionary()

    def __contains__(self, rule: Affine) -> bool:
        owner, name = _identity(rule)
        try:
            return name in self._found.get(owner, ())
        except TypeError:
            return False

    def add(self, rule: Affine) -> None:
        owner, name = _identity(rule)
        try:
            self._found.setdefault(owner, set()).add(name)
        except TypeError:
            return


def _identity(rule: Affine) -> tuple[object, tuple[object, str]]:
    """What lives as long as a function, and what else it is known by."""
    if isinstance(rule.fn, MethodType):
        return rule.fn.__self__, (rule.fn.__func__, str(rule))
    return rule.fn, (None, str(rule))
