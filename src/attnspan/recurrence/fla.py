"""The Triton kernels of flash-linear-attention, where the package fla-core is installed.

It computes one device's recurrence in three passes over pieces of 64 tokens: what a piece can know alone, side by side;
states, piece after piece; outputs, side by side. The second is short of parallel work, since pieces wait for each
other. So stretches are cut into chunks of a thousand tokens or more, and its kernels run on all chunks at once::

    1. alone     each piece by itself (`Law.maps`)
    2. maps      A and B of each chunk, with A in float32; for decays, A is their product
    3. scan      states before chunks, over all ranks (scan.py)
    4. outputs   states piece after piece, from those before chunks, and outputs (`Law.outputs`)

[Note: backward] The gradient after a chunk, D, and the state before it, S, are what its tokens have to know: maps give
``A S + B``, so gradients of A and B are those of the final state of a chunk that began with S. Backward therefore runs
once from zero, for what states owe to outputs alone (`Law.reach`), then the scan, then once more from D for everything
(`Law.backward`). Nothing is differentiated through maps.

[Note: shut gates] Sums of decays are subtracted from each other, which is NaN after -inf. A decay below e^-80 is none
that half precision could tell from it: decays are cut off there, and their gradient is zero, as it is for -inf.

[Note: Hopper] Triton 3.4 to 3.7.0 compiles one kernel of backward wrongly on Hopper GPUs, and the package refuses it
there. It is used where there is one decay for all channels of a head. Such decays are then written out for every
channel, which the kernels of KDA and GLA take.

What is called are parts of the package, of one version. The products are of the tensors' dtype, sums and states are
float32.   Shapes: T tokens of this rank, n chunks, G and H heads (batch rows among them), K and V head dims; tensors
are (1, T, H, D), states (n, H, K, V), A (n, H, K, K), or (n, H, 1 or K, 1) for decays.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from numbers import Real
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnspan.assumptions import Assumption
from attnspan.dtypes import dtype_name
from attnspan.errors import AttnspanError
from attnspan.recurrence.chunked import Terms
from attnspan.recurrence.plan import PIECE, Line
from attnspan.recurrence.rules import LinearRule
from attnspan.recurrence.scan import SavedScan, Scan, gradients, states_of

VERSION = "0.6.0"
"""The version of fla-core whose parts are called."""

SHORTEST = 1024
"""Tokens of a chunk, at least: fewer cost more in maps than they gain in parallel work."""

BUSY = 256
"""Chunks times heads that keep a GPU busy."""

SHUT = 80.0
"""See [Note: shut gates]."""

LN2 = 1.4426950216
"""The package's 1 / log(2): it computes with powers of two."""


# ---- the package ---------------------------------------------------------------------------------------------------

PARTS = {
    "ops.utils.cumsum chunk_local_cumsum": "g chunk_size reverse scale cu_seqlens chunk_indices",
    "ops.cp.chunk_fwd chunk_cp_fwd_h": "k w u hm g gk cu_seqlens chunk_size multi_seqs",
    "ops.common.chunk_delta_h chunk_gated_delta_rule_fwd_h": (
        "k w u g gk initial_state output_final_state chunk_size cu_seqlens chunk_indices chunk_offsets"
    ),
    "ops.common.chunk_delta_h chunk_gated_delta_rule_bwd_dhu": (
        "q k w do dv g gk h0 dht scale cu_seqlens chunk_size chunk_indices chunk_offsets"
    ),
    "ops.common.chunk_o chunk_fwd_o": "q k v h g scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_o chunk_bwd_dv_local": "q k do g scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_o chunk_bwd_dqkwg": "q k v do h dh w g dv scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_h chunk_fwd_h": "k v g gk h0 output_final_state cu_seqlens chunk_size",
    "ops.common.chunk_h chunk_bwd_dh": "q k v do h0 dht scale g gk cu_seqlens chunk_size states_in_fp32",
    "ops.gated_delta_rule.chunk_fwd chunk_gated_delta_rule_fwd_intra": (
        "k v g beta cu_seqlens chunk_size chunk_indices"
    ),
    "ops.gated_delta_rule.wy_fast recompute_w_u_fwd": "k v beta A g cu_seqlens chunk_indices",
    "ops.gated_delta_rule.wy_fast prepare_wy_repr_bwd": "k v beta A dw du g cu_seqlens chunk_indices",
    "ops.kda.chunk_intra chunk_kda_fwd_intra": "q k v gk beta scale cu_seqlens chunk_size chunk_indices",
    "ops.kda.wy_fast recompute_w_u_fwd": "k v beta A gk q cu_seqlens chunk_indices",
    "ops.kda.chunk_bwd chunk_kda_bwd_dAv": "q k v do A scale cu_seqlens chunk_size chunk_indices",
    "ops.kda.chunk_bwd chunk_kda_bwd": (
        "q k v beta Aqk Akk scale initial_state do dht g cu_seqlens chunk_indices chunk_size disable_recompute"
    ),
    "ops.gla.chunk chunk_gla_fwd_intra_gk": "q k g scale cu_seqlens chunk_size chunk_indices",
    "ops.gla.chunk chunk_gla_fwd_o_gk": "q v g A h scale cu_seqlens chunk_size chunk_indices",
    "ops.gla.chunk chunk_gla_bwd": (
        "q k v g g_cumsum scale initial_state h A do dht cu_seqlens chunk_size chunk_indices"
    ),
    "ops.simple_gla.chunk chunk_simple_gla_bwd": (
        "q k v g g_gamma initial_state do dht scale cu_seqlens chunk_size chunk_indices"
    ),
}
"""The functions that are called, by module and name, and the arguments that they are given."""


@cache
def installed() -> str | None:
    """The version of fla-core that is here, without importing it; None if there is none."""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return None


@cache
def part(name: str) -> Any:
    """A function of the package, by module and name."""
    module, function = name.split()
    return getattr(import_module(f"fla.{module}"), function)


def _takes() -> bool:
    """Whether every part has the arguments that it is given, and needs no other. Where it is not installed, none is."""
    return installed() is None or all(
        _has(inspect.signature(part(name)), names.split()) for name, names in PARTS.items()
    )


def _has(signature: inspect.Signature, names: list[str]) -> bool:
    needed = {each.name for each in signature.parameters.values() if each.default is inspect.Parameter.empty}
    needed -= {each.name for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD}
    return needed <= set(names) <= set(signature.parameters)


TAKES = Assumption(
    "fla-core has the functions and arguments that are known",
    "recurrence/fla.py",
    "functions below `fla.ops`, of one version",
    _takes,
    library="fla-core",
)

_ONE_AT_A_TIME = Lock()
"""Held while the package is called: it compiles and tunes what is new to it, and virtual ranks are threads."""


# ---- laws ----------------------------------------------------------------------------------------------------------


class PartCall(NamedTuple):
    """What every part is told beside tensors."""

    line: Line
    scale: float

    def __call__(self, name: str, offsets: bool = False, /, **given: object) -> Any:
        """A part of the package, called for this rank's chunks."""
        cut = {"cu_seqlens": self.line.starts, "chunk_size": PIECE, "chunk_indices": self.line.pieces}
        cut |= {"chunk_offsets": self.line.offsets} if offsets else {}
        known = {key: value for key, value in cut.items() if key in PARTS[name].split()}
        return part(name)(**given, **known)

    def summed(self, decay: Tensor) -> Tensor:
        """Sums of decays within pieces, to base two."""
        found: Tensor = self("ops.utils.cumsum chunk_local_cumsum", g=decay, scale=LN2)
        return found

    def summed_back(self, grad: Tensor) -> Tensor:
        """The gradient of decays, from that of their sums."""
        found: Tensor = self("ops.utils.cumsum chunk_local_cumsum", g=grad, reverse=True)
        return found

    def totals(self, decay: Tensor) -> Tensor:
        """The factor of each chunk, (n, H, 1 or K, 1)."""
        lengths = self.line.starts.diff()
        sums = torch.segment_reduce(decay[0].flatten(1), "sum", lengths=lengths, axis=0, unsafe=True)
        return sums.view(len(lengths), *decay.shape[2:], *[1] * (5 - decay.dim())).exp()


class Made(NamedTuple):
    """What a law made of tokens alone: what is kept for backward, and what is made again there."""

    kept: tuple[Tensor | None, ...]
    lost: tuple[Tensor, ...]
    a: Tensor
    b: Tensor


class Reached(NamedTuple):
    """Gradients of the states before chunks, from outputs alone, and what was made again for that."""

    states: Tensor
    again: tuple[Tensor, ...]


class Law(Protocol):
    """One of the package's recurrences; x are tokens, `kept` what `maps` kept, `states` those before chunks."""

    def maps(self, x: Terms, call: PartCall) -> Made: ...

    def outputs(self, x: Terms, made: Made, states: Tensor, call: PartCall) -> Tensor: ...

    def reach(self, x: Terms, kept: Any, states: Tensor, grad: Tensor, call: PartCall) -> Reached: ...

    def backward(
        self, x: Terms, kept: Any, reached: Reached, states: Tensor, grads: tuple[Tensor, Tensor], call: PartCall
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the tokens, from those of outputs and of states after chunks."""


FORWARD, BACKWARD = (f"ops.common.chunk_delta_h chunk_gated_delta_rule_{each}" for each in ("fwd_h", "bwd_dhu"))
"""The pass over states of the delta rules, and its way back."""


def _delta_maps(call: PartCall, k: Tensor, w: Tensor, u: Tensor, **gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """A and B of a delta rule, together in one tensor."""
    heads, value = u.shape[2:]
    both = k.new_empty(len(call.line.order), heads, k.shape[-1], value + k.shape[-1], dtype=torch.float32)
    call("ops.cp.chunk_fwd chunk_cp_fwd_h", k=k, w=w, u=u, hm=both, multi_seqs=True, **gates)
    b, a = both.split([value, k.shape[-1]], -1)
    return a, b


class GatedDeltaLaw:
    """The delta rule, with one decay for a head, or none."""

    def maps(self, x: Terms, call: PartCall) -> Made:
        g = None if x.decay is None else call.summed(x.decay)
        intra = "ops.gated_delta_rule.chunk_fwd chunk_gated_delta_rule_fwd_intra"
        w, u, inverse = call(intra, k=x.key, v=x.value, g=g, beta=x.beta)
        return Made((g, inverse), (w, u), *_delta_maps(call, x.key, w, u, g=g))

    def outputs(self, x: Terms, made: Made, states: Tensor, call: PartCall) -> Tensor:
        (g, _), (w, u) = made.kept, made.lost
        h, new, _ = call(FORWARD, True, k=x.key, w=w, u=u, g=g, initial_state=states, output_final_state=False)
        out: Tensor = call("ops.common.chunk_o chunk_fwd_o", q=x.query, k=x.key, v=new, h=h, g=g, scale=call.scale)
        return out

    def reach(self, x: Terms, kept: Any, states: Tensor, grad: Tensor, call: PartCall) -> Reached:
        g, inverse = kept
        again = "ops.gated_delta_rule.wy_fast recompute_w_u_fwd"
        w, u = call(again, k=x.key, v=x.value, beta=x.beta, A=inverse, g=g)
        h, new, _ = call(FORWARD, True, k=x.key, w=w, u=u, g=g, initial_state=states, output_final_state=False)
        qk = {"q": x.query, "k": x.key, "g": g, "do": grad, "scale": call.scale}
        d_new = call("ops.common.chunk_o chunk_bwd_dv_local", **qk)
        _, found, _ = call(BACKWARD, True, w=w, dv=d_new, h0=states, dht=None, **qk)
        return Reached(found, (w, h, new, d_new))

    def backward(
        self, x: Terms, kept: Any, reached: Reached, states: Tensor, grads: tuple[Tensor, Tensor], call: PartCall
    ) -> tuple[Tensor | None, ...]:
        (g, inverse), (w, h, new, d_new), (grad, after) = kept, reached.again, grads
        qk = {"q": x.query, "k": x.key, "g": g, "do": grad, "scale": call.scale}
        d_h, _, d_new = call(BACKWARD, True, w=w, dv=d_new, h0=states, dht=after, **qk)
        d_q, d_k, d_w, d_g = call("ops.common.chunk_o chunk_bwd_dqkwg", v=new, w=w, h=h, dv=d_new, dh=d_h, **qk)
        more = "ops.gated_delta_rule.wy_fast prepare_wy_repr_bwd"
        d_k2, d_v, d_beta, d_g2 = call(more, k=x.key, v=x.value, beta=x.beta, g=g, A=inverse, dw=d_w, du=d_new)
        return d_q, d_k + d_k2, d_v, None if g is None else call.summed_back(d_g + d_g2), d_beta


class KDALaw:
    """The delta rule, with a decay for each channel."""

    def maps(self, x: Terms, call: PartCall) -> Made:
        g = call.summed(x.decay) if x.decay is not None else None
        tokens = {"q": x.query, "k": x.key, "v": x.value, "gk": g, "beta": x.beta}
        w, u, _, keys, pairs, inverse = call("ops.kda.chunk_intra chunk_kda_fwd_intra", scale=call.scale, **tokens)
        return Made((g, pairs, inverse), (w, u, keys), *_delta_maps(call, keys, w, u, gk=g))

    def outputs(self, x: Terms, made: Made, states: Tensor, call: PartCall) -> Tensor:
        (g, pairs, _), (w, u, keys) = made.kept, made.lost
        h, new, _ = call(FORWARD, True, k=keys, w=w, u=u, gk=g, initial_state=states, output_final_state=False)
        out: Tensor = call("ops.gla.chunk chunk_gla_fwd_o_gk", q=x.query, v=new, g=g, A=pairs, h=h, scale=call.scale)
        return out

    def reach(self, x: Terms, kept: Any, states: Tensor, grad: Tensor, call: PartCall) -> Reached:
        g, pairs, inverse = kept
        again = "ops.kda.wy_fast recompute_w_u_fwd"
        w, u, queries, keys = call(again, q=x.query, k=x.key, v=x.value, beta=x.beta, A=inverse, gk=g)
        h, new, _ = call(FORWARD, True, k=keys, w=w, u=u, gk=g, initial_state=states, output_final_state=False)
        local = "ops.kda.chunk_bwd chunk_kda_bwd_dAv"
        _, d_new = call(local, q=x.query, k=x.key, v=new, do=grad, A=pairs, scale=call.scale)
        ends = {"h0": states, "dht": None, "scale": call.scale}
        _, found, _ = call(BACKWARD, True, q=queries, k=keys, w=w, gk=g, do=grad, dv=d_new, **ends)
        return Reached(found, (w, u, queries, keys, new, h))

    def backward(
        self, x: Terms, kept: Any, reached: Reached, states: Tensor, grads: tuple[Tensor, Tensor], call: PartCall
    ) -> tuple[Tensor | None, ...]:
        (g, pairs, inverse), (w, u, queries, keys, new, h) = kept, reached.again
        made = {"w": w, "u": u, "qg": queries, "kg": keys, "v_new": new, "h": h, "disable_recompute": True}
        tokens = {"q": x.query, "k": x.key, "v": x.value, "beta": x.beta, "g": g, "Aqk": pairs, "Akk": inverse}
        ends = {"initial_state": states, "do": grads[0], "dht": grads[1], "scale": call.scale}
        d_q, d_k, d_v, d_beta, d_g, *_ = call("ops.kda.chunk_bwd chunk_kda_bwd", **tokens, **ends, **made)
        return d_q, d_k, d_v, d_g, d_beta


class DecayLaw:
    """No delta rule, and one decay for a head, or none."""

    GATE: ClassVar[str] = "g"

    def maps(self, x: Terms, call: PartCall) -> Made:
        g = None if x.decay is None else call.summed(x.decay)
        forward = {"k": x.key, "v": x.value, self.GATE: g, "h0": None, "output_final_state": True}
        _, b = call("ops.common.chunk_h chunk_fwd_h", **forward)
        a = b.new_ones(*b.shape[:2], 1, 1) if x.decay is None else call.totals(x.decay)
        return Made((g,), (), a, b)

    def outputs(self, x: Terms, made: Made, states: Tensor, call: PartCall) -> Tensor:
        (g,) = made.kept
        h = self._states(x, g, states, call)
        out: Tensor = call("ops.common.chunk_o chunk_fwd_o", q=x.query, k=x.key, v=x.value, h=h, g=g, scale=call.scale)
        return out

    def _states(self, x: Terms, g: Tensor | None, states: Tensor, call: PartCall) -> Tensor:
        forward = {"k": x.key, "v": x.value, self.GATE: g, "h0": states, "output_final_state": False}
        found: Tensor = call("ops.common.chunk_h chunk_fwd_h", **forward)[0]
        return found

    def reach(self, x: Terms, kept: Any, states: Tensor, grad: Tensor, call: PartCall) -> Reached:
        tokens = {"q": x.query, "k": x.key, "v": x.value, self.GATE: kept[0], "do": grad}
        ends = {"h0": states, "dht": None, "scale": call.scale, "states_in_fp32": True}
        return Reached(call("ops.common.chunk_h chunk_bwd_dh", **tokens, **ends)[1], ())

    def backward(
        self, x: Terms, kept: Any, reached: Reached, states: Tensor, grads: tuple[Tensor, Tensor], call: PartCall
    ) -> tuple[Tensor | None, ...]:
        tokens = {"q": x.query, "k": x.key, "v": x.value, "g": kept[0], "g_gamma": None, "scale": call.scale}
        ends = {"initial_state": states, "do": grads[0], "dht": grads[1]}
        d_q, d_k, d_v, d_g, _ = call("ops.simple_gla.chunk chunk_simple_gla_bwd", **tokens, **ends)
        return d_q, d_k, d_v, None if kept[0] is None else call.summed_back(d_g), None


class GLALaw(DecayLaw):
    """No delta rule, and a decay for each channel."""

    GATE = "gk"

    def outputs(self, x: Terms, made: Made, states: Tensor, call: PartCall) -> Tensor:
        (g,) = made.kept
        h, pairs = self._states(x, g, states, call), self._pairs(x, g, call)
        out: Tensor = call(
            "ops.gla.chunk chunk_gla_fwd_o_gk", q=x.query, v=x.value, g=g, A=pairs, h=h, scale=call.scale
        )
        return out

    def _pairs(self, x: Terms, g: Tensor | None, call: PartCall) -> Tensor:
        found: Tensor = call("ops.gla.chunk chunk_gla_fwd_intra_gk", q=x.query, k=x.key, g=g, scale=call.scale)
        return found

    def backward(
        self, x: Terms, kept: Any, reached: Reached, states: Tensor, grads: tuple[Tensor, Tensor], call: PartCall
    ) -> tuple[Tensor | None, ...]:
        (g,) = kept
        tokens = {"q": x.query, "k": x.key, "v": x.value, "g": None, "g_cumsum": g, "A": self._pairs(x, g, call)}
        ends = {"initial_state": states, "h": None, "do": grads[0], "dht": grads[1], "scale": call.scale}
        d_q, d_k, d_v, d_g, _ = call("ops.gla.chunk chunk_gla_bwd", **tokens, **ends)
        return d_q, d_k, d_v, d_g, None


def law_of(terms: Terms) -> Law:
    """The recurrence of some tokens."""
    channels = terms.decay is not None and terms.decay.dim() == 4
    if terms.beta is None:
        return GLALaw() if channels else DecayLaw()
    return KDALaw() if channels else GatedDeltaLaw()


# ---- the kernel ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fla:
    """The kernel: see above."""

    name: str = "fla"

    def refuses(self, rule: LinearRule) -> str | None:
        if (found := installed()) is None:
            return "the package fla-core is not installed; pip install 'attnspan[fla]'"
        if found != VERSION:
            return f"it calls fla-core {VERSION}, got {found}; pip install 'attnspan[fla]'"
        if reason := _misfit(rule):
            return reason
        try:
            TAKES.hold()
        except AttnspanError as moved:
            return f"it cannot call fla-core {found}: {moved}"
        return None

    def size(self, rule: LinearRule, lengths: Tensor) -> int:
        """A power of two: chunks that are as long as they can be while there are enough for all of a GPU."""
        tokens, heads = int(lengths.sum()), rule.sizes["H"] * rule.sizes["B"]
        most = max(SHORTEST, tokens * heads // BUSY)
        return 1 << (most - 1).bit_length()

    def terms(self, rule: LinearRule) -> Terms:
        given, dtype = rule.given(), rule.given().key.dtype
        heads = given.value.shape[2]
        decay = None if given.decay is None else given.decay.to(torch.float32).clamp(min=-SHUT)
        query, key = given.query, given.key
        if not rule.MATRIX and key.shape[2] != heads:
            query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        return given._replace(query=query, key=key, value=given.value.to(dtype), decay=decay)

    def run(self, rule: LinearRule, terms: Terms, initial: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        terms = terms.each(lambda x: x.unsqueeze(0))
        if terms.decay is not None and terms.decay.shape[-1] == 1:
            trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*terms, initial))
            wide = trained and _miscompiled(initial.device)  # See [Note: Hopper].
            decay = terms.decay.expand(*terms.decay.shape[:3], terms.key.shape[-1]) if wide else terms.decay.squeeze(3)
            terms = terms._replace(decay=decay)
        if terms.beta is not None:
            terms = terms._replace(beta=terms.beta.squeeze(3))
        out, after = FlaFunction.apply(*terms, initial, Job(scan, float(rule.factor)))
        return out.squeeze(0), after


def _misfit(rule: LinearRule) -> str | None:
    """What the package's kernels do not take."""
    given = rule.given()
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
class Job:
    """What is computed beside tensors: the scan over ranks, and what outputs are multiplied by."""

    scan: Scan
    scale: float

    @property
    def call(self) -> PartCall:
        return PartCall(self.scan.chunks.line, self.scale)


class _FlaApply(Protocol):
    def __call__(self, *given: Tensor | Job | None) -> tuple[Tensor, Tensor]: ...


class FlaFunction(torch.autograd.Function):
    """Outputs, and states after stretches: the four steps, and [Note: backward]."""

    apply: ClassVar[_FlaApply]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tokens, initial, job = given
        x = Terms(*tokens).each(lambda each: each.contiguous())
        law, call, line = law_of(x), job.call, job.scan.chunks.line
        if not x.key.shape[1]:
            shape = (0, *initial.shape[1:])
            a = (
                initial.new_empty(0, shape[1], *[shape[2]] * 2)
                if job.scan.matrix
                else initial.new_empty(shape)[..., :1]
            )
            made = Made((), (), a, initial.new_empty(shape))
        else:
            with _ONE_AT_A_TIME:
                made = law.maps(x, call)
        a, b = (each.index_select(0, line.at) for each in (made.a, made.b))
        known, after, ctx.header = states_of(job.scan, a, b, initial)
        states = known.states.index_select(0, line.order)
        with _ONE_AT_A_TIME:
            out = law.outputs(x, made, states, call) if x.key.shape[1] else torch.empty_like(x.value)
        ctx.job, ctx.count = job, len(made.kept)
        ctx.save_for_backward(*x, *made.kept, *known)
        return out, after

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, d_out: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_out.device.type, enabled=False):
            return _runs_back(ctx, d_out.contiguous(), d_after.contiguous())


def _runs_back(ctx: Any, d_out: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
    saved, job = ctx.saved_tensors, ctx.job
    x, kept, known = Terms(*saved[:5]), saved[5 : 5 + ctx.count], SavedScan(*saved[5 + ctx.count :])
    law, call, line = law_of(x), job.call, job.scan.chunks.line
    states, some = known.states.index_select(0, line.order), bool(x.key.shape[1])
    with _ONE_AT_A_TIME:
        reached = law.reach(x, kept, states, d_out, call) if some else Reached(states, ())
    after, d_initial = gradients(job.scan, known, ctx.header, reached.states.index_select(0, line.at), d_after)
    if not some:
        return (*(None if each is None else torch.zeros_like(each) for each in x), d_initial, None)
    with _ONE_AT_A_TIME:
        grads = law.backward(x, kept, reached, states, (d_out, after.index_select(0, line.order)), call)
    return (
        *(None if g is None or each is None else g.to(each.dtype) for g, each in zip(grads, x, strict=True)),
        d_initial,
        None,
    )
