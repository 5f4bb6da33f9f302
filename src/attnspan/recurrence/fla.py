"""The Triton kernels of flash-linear-attention, where the package fla-core is installed.

It computes one device's recurrence in three passes over pieces of 64 tokens: what a piece can know alone, side by side;
states, piece after piece; outputs, side by side. The second is short of parallel work, since pieces wait for each
other. So stretches are cut into chunks of a thousand tokens or more, and its kernels run on all chunks at once::

    1. alone     each piece by itself (`Law.maps`)
    2. maps      A and B of each chunk (programs.py for delta rules); for decays, A is their product
    3. scan      states before chunks, over all ranks (scan.py)
    4. outputs   states piece after piece, from those before chunks, and outputs (`Law.outputs`; in one program for
                 delta rules)

[Note: gradients of chunks] The gradient after a chunk, D, and the state before it, S, are what its tokens have to know:
maps give ``A S + B``, so gradients of A and B are those of the final state of a chunk that began with S. Backward
therefore runs once from zero, for what states owe to outputs alone (`Law.state_gradients`), then the scan, then once
more from D for everything (`Law.backward`). Nothing is differentiated through maps.

[Note: shut gates] Sums of decays are subtracted from each other, which is NaN after -inf. A decay below e^-80 is none
that half precision could tell from it: decays are cut off there, and their gradient is zero, as it is for -inf.

[Note: Hopper] Triton 3.4 to 3.7.0 compiles one kernel of backward wrongly on Hopper GPUs, and the package refuses it
there. It is used where there is one decay for all channels of a head. Such decays are then written out for every
channel, which the kernels of KDA and GLA take.

What is called are parts of the package, of one version (fla_package.py); which ones, fla_laws.py says. The products are
of the tensors' dtype, sums and states are float32.   Shapes: T tokens of this rank, n chunks, G and H heads (batch rows
among them), K and V head dims; tensors are (1, T, H, D), states (n, H, K, V), A (n, H, K, K), or (n, H, 1 or K, 1) for
decays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name
from attnspan.errors import AttnspanError
from attnspan.recurrence.backward import backward_once
from attnspan.recurrence.chunked import RuleInputs
from attnspan.recurrence.fla_laws import EmptyLaw, Law, law_of
from attnspan.recurrence.fla_package import ONE_AT_A_TIME, TAKES, VERSION, PartCall, installed
from attnspan.recurrence.maps import Maps, Passed
from attnspan.recurrence.plan import RankPlan
from attnspan.recurrence.rules import LinearRule
from attnspan.recurrence.scan import SavedScan, Scan, gradients, states_of

SHORTEST = 1024
"""Tokens of a chunk, at least: fewer cost more in maps than they gain in parallel work."""

BUSY = 256
"""Chunks times heads that keep a GPU busy."""

SHUT = 80.0
"""See [Note: shut gates]."""


@dataclass(frozen=True)
class Fla:
    """The kernel: see above."""

    name: str = "fla"
    exact: bool = False

    def refuses(self, rule: LinearRule) -> str | None:
        if (found := installed()) is None:
            return "the package fla-core is not installed; pip install 'attnspan[fla]'"
        if found != VERSION:
            return f"it calls fla-core {VERSION}, got {found}; pip install 'attnspan[fla]'"
        if reason := _misfit(rule):
            return reason
        try:
            TAKES.verify()
        except AttnspanError as moved:
            return f"it cannot call fla-core {found}: {moved}"
        return None

    def size(self, rule: LinearRule, plan: RankPlan) -> int:
        """A power of two: chunks that are as long as they can be while there are enough for all of a GPU."""
        tokens, heads = int(plan.lengths.sum()), rule.sizes["H"] * rule.sizes["B"]
        most = max(SHORTEST, tokens * heads // BUSY)
        return 1 << (most - 1).bit_length()

    def inputs(self, rule: LinearRule) -> RuleInputs:
        given, dtype = rule.inputs(), rule.inputs().key.dtype
        heads = given.value.shape[2]
        decay = None if given.decay is None else given.decay.to(torch.float32).clamp(min=-SHUT)
        query, key = given.query, given.key
        if not rule.MATRIX and key.shape[2] != heads:
            query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        return given._replace(query=query, key=key, value=given.value.to(dtype), decay=decay)

    def run(self, rule: LinearRule, inputs: RuleInputs, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        inputs = inputs.each(lambda x: x.unsqueeze(0))
        if inputs.decay is not None and inputs.decay.shape[-1] == 1:
            trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial))
            wide = trained and _miscompiled(initial.device)  # See [Note: Hopper].
            decay = (
                inputs.decay.expand(*inputs.decay.shape[:3], inputs.key.shape[-1]) if wide else inputs.decay.squeeze(3)
            )
            inputs = inputs._replace(decay=decay)
        if inputs.beta is not None:
            inputs = inputs._replace(beta=inputs.beta.squeeze(3))
        out, after = FlaFunction.apply(*inputs, initial, FlaScan(scan, float(rule.factor)))
        return out.squeeze(0), after


def _misfit(rule: LinearRule) -> str | None:
    """What the package's kernels do not take."""
    given = rule.inputs()
    halves, dtypes = (torch.bfloat16, torch.float16), {given.query.dtype, given.key.dtype, rule_dtype(rule)}
    if not given.key.is_cuda:
        return f"it needs tensors on CUDA, got {given.key.device.type}"
    if len(dtypes) > 1:
        return f"it needs queries, keys and values of one dtype, got {', '.join(sorted(map(dtype_name, dtypes)))}"
    if given.key.dtype not in halves and (
        given.key.dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
    ):
        return (
            f"it multiplies in half precision, or float32 as TF32, got {dtype_name(given.key.dtype)}; use bfloat16, or "
            "allow TF32 by torch.set_float32_matmul_precision('high')"
        )
    if rule.dtype == torch.float64:
        return "it computes in float32, got a float64 tensor"
    for name in ("K", "V"):
        if not 16 <= rule.sizes[name] <= 256 or rule.sizes[name] % 16:
            return f"it needs head dims that are a multiple of 16 up to 256, got {name} = {rule.sizes[name]}"
    if isinstance(rule.factor, Tensor) or not isinstance(rule.factor, Real):
        return "it needs a scale that is a number, got a tensor"
    if torch.cuda.get_device_capability(given.key.device)[0] < 8:
        return "it needs a GPU of compute capability 8.0 or above"
    return None


def rule_dtype(rule: LinearRule) -> torch.dtype:
    """The dtype of the values, as they came."""
    return rule.tensors["value" if "value" in rule.tensors else "x"].dtype


def _miscompiled(device: torch.device) -> bool:
    """See [Note: Hopper]."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    version = tuple(int(each) for each in re.findall(r"\d+", import_module("triton").__version__)[:3])
    return (3, 4) <= version < (3, 7, 1)


@dataclass(frozen=True)
class FlaScan:
    """What is computed beside tensors: the scan over ranks, and what outputs are multiplied by."""

    scan: Scan
    scale: float

    @property
    def call(self) -> PartCall:
        return PartCall(self.scan.chunks.packed, self.scale)


class _FlaApply(Protocol):
    def __call__(self, *given: Tensor | FlaScan | None) -> tuple[Tensor, Tensor]: ...


class FlaFunction(torch.autograd.Function):
    """Outputs, and states after stretches: the four steps, and [Note: gradients of chunks]."""

    apply: ClassVar[_FlaApply]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tokens, initial, job = given
        x = RuleInputs(*tokens).each(lambda each: each.contiguous())
        law = _law(x, job.call)
        with ONE_AT_A_TIME:
            made = law.maps()
        known, after, ctx.header = states_of(job.scan, Maps(made.a, made.b), initial)
        with ONE_AT_A_TIME:
            out = law.outputs(made, known.states)
        ctx.job, ctx.count = job, len(made.saved)
        ctx.save_for_backward(*x, made.a, *made.saved, *known)
        return out, after

    @staticmethod
    @backward_once
    def backward(ctx: Any, d_out: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        tensors, job, count, d_out = ctx.saved_tensors, ctx.job, ctx.count, d_out.contiguous()
        x, a, saved = RuleInputs(*tensors[:5]), tensors[5], tensors[6 : 6 + count]
        known = SavedScan(*tensors[6 + count :])
        law, chunks = _law(x, job.call), job.scan.chunks.packed
        states = known.states.index_select(0, chunks.order)
        with ONE_AT_A_TIME:
            reached = law.state_gradients(saved, states, d_out)
        d_states = reached.states.index_select(0, chunks.at)
        ends = d_after.contiguous()
        (after, _), d_initial = gradients(job.scan, Maps(a), known, ctx.header, Passed(d_states), ends)
        with ONE_AT_A_TIME:
            grads = law.backward(saved, reached, states, (d_out, after.index_select(0, chunks.order)))
        each = (None if g is None or y is None else g.to(y.dtype) for g, y in zip(grads, x, strict=True))
        return *each, d_initial, None


def _law(x: RuleInputs, call: PartCall) -> Law:
    return law_of(x, call) if x.key.shape[1] else EmptyLaw(x, call)
