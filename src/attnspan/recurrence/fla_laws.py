"""The recurrences of flash-linear-attention as laws: the parts of the package that each is made of.

A law gives the maps of chunks, and what outputs and gradients are once the scan over ranks has given the states before
chunks (fla.py). Tensors are as there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnspan.recurrence.chunked import RuleInputs
from attnspan.recurrence.fla_package import PartCall
from attnspan.recurrence.programs import Queries, SolvedPieces, can_read, delta_maps, delta_outputs


class LawMaps(NamedTuple):
    """What a law made of tokens alone: what is saved for backward, and what backward computes again."""

    saved: tuple[Tensor | None, ...]
    recomputed: tuple[Tensor, ...]
    a: Tensor
    b: Tensor


class StateGradients(NamedTuple):
    """Gradients of the states before chunks, from outputs alone, and what was computed again for that."""

    states: Tensor
    recomputed: tuple[Tensor, ...]


Grads = tuple[Tensor, Tensor]
"""Gradients of outputs, and of the states after chunks."""


@dataclass(frozen=True)
class Law(ABC):
    """A recurrence of the package, of some tokens; `saved` is what `maps` saved, `states` are those before chunks."""

    x: RuleInputs
    call: PartCall

    @abstractmethod
    def maps(self) -> LawMaps:
        """The maps of the states over each chunk, in the order of the scan."""

    @abstractmethod
    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        """What the tokens read out of the states before chunks, which are in the order of the scan."""

    @abstractmethod
    def state_gradients(self, saved: Any, states: Tensor, grad: Tensor) -> StateGradients:
        """Gradients of the states before chunks, from that of outputs; here and below, as chunks lie on the rank."""

    @abstractmethod
    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        """Gradients of the tokens."""


FORWARD, BACKWARD = (f"ops.common.chunk_delta_h chunk_gated_delta_rule_{each}" for each in ("fwd_h", "bwd_dhu"))
"""The pass over states of the delta rules, and its way back."""


class GatedDeltaLaw(Law):
    """The delta rule, with one decay for a head, or none."""

    def _maps(self, known: SolvedPieces) -> tuple[Tensor, Tensor]:
        return delta_maps(known, self.call.chunks.cu_seqlens, self.call.chunks.order)

    def _read(self, known: SolvedPieces, queries: Queries, states: Tensor) -> Tensor | None:
        """The outputs in one program, where that can hold them."""
        chunks = self.call.chunks
        return delta_outputs(known, queries, states, chunks.cu_seqlens, chunks.order) if can_read(known) else None

    def maps(self) -> LawMaps:
        x, call = self.x, self.call
        g = None if x.decay is None else call.summed(x.decay)
        intra = "ops.gated_delta_rule.chunk_fwd chunk_gated_delta_rule_fwd_intra"
        w, u, inverse = call(intra, k=x.key, v=x.value, g=g, beta=x.beta)
        return LawMaps((g, inverse), (w, u), *self._maps(SolvedPieces(x.key, w, u, g)))

    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        x, call = self.x, self.call
        (g, _), (w, u) = made.saved, made.recomputed
        if (read := self._read(SolvedPieces(x.key, w, u, g), Queries(x.query, None, call.scale), states)) is not None:
            return read
        begin = states.index_select(0, call.chunks.order)
        h, new, _ = call(FORWARD, True, k=x.key, w=w, u=u, g=g, initial_state=begin, output_final_state=False)
        out: Tensor = call("ops.common.chunk_o chunk_fwd_o", q=x.query, k=x.key, v=new, h=h, g=g, scale=call.scale)
        return out

    def state_gradients(self, saved: Any, states: Tensor, grad: Tensor) -> StateGradients:
        x, call = self.x, self.call
        g, inverse = saved
        again = "ops.gated_delta_rule.wy_fast recompute_w_u_fwd"
        w, u = call(again, k=x.key, v=x.value, beta=x.beta, A=inverse, g=g)
        h, new, _ = call(FORWARD, True, k=x.key, w=w, u=u, g=g, initial_state=states, output_final_state=False)
        qk = {"q": x.query, "k": x.key, "g": g, "do": grad, "scale": call.scale}
        d_new = call("ops.common.chunk_o chunk_bwd_dv_local", **qk)
        _, found, _ = call(BACKWARD, True, w=w, dv=d_new, h0=states, dht=None, **qk)
        return StateGradients(found, (w, h, new, d_new))

    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        x, call = self.x, self.call
        (g, inverse), (w, h, new, d_new), (grad, after) = saved, reached.recomputed, grads
        qk = {"q": x.query, "k": x.key, "g": g, "do": grad, "scale": call.scale}
        d_h, _, d_new = call(BACKWARD, True, w=w, dv=d_new, h0=states, dht=after, **qk)
        d_q, d_k, d_w, d_g = call("ops.common.chunk_o chunk_bwd_dqkwg", v=new, w=w, h=h, dv=d_new, dh=d_h, **qk)
        more = "ops.gated_delta_rule.wy_fast prepare_wy_repr_bwd"
        d_k2, d_v, d_beta, d_g2 = call(more, k=x.key, v=x.value, beta=x.beta, g=g, A=inverse, dw=d_w, du=d_new)
        return d_q, d_k + d_k2, d_v, None if g is None else call.summed_back(d_g + d_g2), d_beta


class KDALaw(GatedDeltaLaw):
    """The delta rule, with a decay for each channel."""

    def maps(self) -> LawMaps:
        x, call = self.x, self.call
        g = call.summed(x.decay) if x.decay is not None else None
        tokens = {"q": x.query, "k": x.key, "v": x.value, "gk": g, "beta": x.beta}
        w, u, _, keys, pairs, inverse = call("ops.kda.chunk_intra chunk_kda_fwd_intra", scale=call.scale, **tokens)
        return LawMaps((g, pairs, inverse), (w, u, keys), *self._maps(SolvedPieces(keys, w, u, g)))

    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        x, call = self.x, self.call
        (g, pairs, _), (w, u, keys) = made.saved, made.recomputed
        if (read := self._read(SolvedPieces(keys, w, u, g), Queries(x.query, pairs, call.scale), states)) is not None:
            return read
        begin = states.index_select(0, call.chunks.order)
        h, new, _ = call(FORWARD, True, k=keys, w=w, u=u, gk=g, initial_state=begin, output_final_state=False)
        out: Tensor = call("ops.gla.chunk chunk_gla_fwd_o_gk", q=x.query, v=new, g=g, A=pairs, h=h, scale=call.scale)
        return out

    def state_gradients(self, saved: Any, states: Tensor, grad: Tensor) -> StateGradients:
        x, call = self.x, self.call
        g, pairs, inverse = saved
        again = "ops.kda.wy_fast recompute_w_u_fwd"
        w, u, queries, keys = call(again, q=x.query, k=x.key, v=x.value, beta=x.beta, A=inverse, gk=g)
        h, new, _ = call(FORWARD, True, k=keys, w=w, u=u, gk=g, initial_state=states, output_final_state=False)
        local = "ops.kda.chunk_bwd chunk_kda_bwd_dAv"
        _, d_new = call(local, q=x.query, k=x.key, v=new, do=grad, A=pairs, scale=call.scale)
        ends = {"h0": states, "dht": None, "scale": call.scale}
        _, found, _ = call(BACKWARD, True, q=queries, k=keys, w=w, gk=g, do=grad, dv=d_new, **ends)
        return StateGradients(found, (w, u, queries, keys, new, h))

    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        x, call = self.x, self.call
        (g, pairs, inverse), (w, u, queries, keys, new, h) = saved, reached.recomputed
        made = {"w": w, "u": u, "qg": queries, "kg": keys, "v_new": new, "h": h, "disable_recompute": True}
        tokens = {"q": x.query, "k": x.key, "v": x.value, "beta": x.beta, "g": g, "Aqk": pairs, "Akk": inverse}
        ends = {"initial_state": states, "do": grads[0], "dht": grads[1], "scale": call.scale}
        d_q, d_k, d_v, d_beta, d_g, *_ = call("ops.kda.chunk_bwd chunk_kda_bwd", **tokens, **ends, **made)
        return d_q, d_k, d_v, d_g, d_beta


class DecayLaw(Law):
    """No delta rule, and one decay for a head, or none."""

    GATE: ClassVar[str] = "g"

    def maps(self) -> LawMaps:
        x, call = self.x, self.call
        g = None if x.decay is None else call.summed(x.decay)
        forward = {"k": x.key, "v": x.value, self.GATE: g, "h0": None, "output_final_state": True}
        _, b = call("ops.common.chunk_h chunk_fwd_h", **forward)
        a = b.new_ones(*b.shape[:2], 1, 1) if x.decay is None else call.totals(x.decay)
        return LawMaps((g,), (), *(each.index_select(0, call.chunks.at) for each in (a, b)))

    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        x, call = self.x, self.call
        (g,) = made.saved
        h = self._states(g, states.index_select(0, call.chunks.order))
        out: Tensor = call("ops.common.chunk_o chunk_fwd_o", q=x.query, k=x.key, v=x.value, h=h, g=g, scale=call.scale)
        return out

    def _states(self, g: Tensor | None, states: Tensor) -> Tensor:
        x, call = self.x, self.call
        forward = {"k": x.key, "v": x.value, self.GATE: g, "h0": states, "output_final_state": False}
        found: Tensor = call("ops.common.chunk_h chunk_fwd_h", **forward)[0]
        return found

    def state_gradients(self, saved: Any, states: Tensor, grad: Tensor) -> StateGradients:
        x, call = self.x, self.call
        tokens = {"q": x.query, "k": x.key, "v": x.value, self.GATE: saved[0], "do": grad}
        ends = {"h0": states, "dht": None, "scale": call.scale, "states_in_fp32": True}
        return StateGradients(call("ops.common.chunk_h chunk_bwd_dh", **tokens, **ends)[1], ())

    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        x, call = self.x, self.call
        tokens = {"q": x.query, "k": x.key, "v": x.value, "g": saved[0], "g_gamma": None, "scale": call.scale}
        ends = {"initial_state": states, "do": grads[0], "dht": grads[1]}
        d_q, d_k, d_v, d_g, _ = call("ops.simple_gla.chunk chunk_simple_gla_bwd", **tokens, **ends)
        return d_q, d_k, d_v, None if saved[0] is None else call.summed_back(d_g), None


class GLALaw(DecayLaw):
    """No delta rule, and a decay for each channel."""

    GATE = "gk"

    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        x, call = self.x, self.call
        (g,) = made.saved
        h, pairs = self._states(g, states.index_select(0, call.chunks.order)), self._pairs(g)
        out: Tensor = call(
            "ops.gla.chunk chunk_gla_fwd_o_gk", q=x.query, v=x.value, g=g, A=pairs, h=h, scale=call.scale
        )
        return out

    def _pairs(self, g: Tensor | None) -> Tensor:
        x, call = self.x, self.call
        found: Tensor = call("ops.gla.chunk chunk_gla_fwd_intra_gk", q=x.query, k=x.key, g=g, scale=call.scale)
        return found

    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        x, call = self.x, self.call
        (g,) = saved
        tokens = {"q": x.query, "k": x.key, "v": x.value, "g": None, "g_cumsum": g, "A": self._pairs(g)}
        ends = {"initial_state": states, "h": None, "do": grads[0], "dht": grads[1], "scale": call.scale}
        d_q, d_k, d_v, d_g, _ = call("ops.gla.chunk chunk_gla_bwd", **tokens, **ends)
        return d_q, d_k, d_v, d_g, None


class EmptyLaw(Law):
    """The recurrence of a rank without tokens, which takes part in exchanges all the same."""

    def maps(self) -> LawMaps:
        x = self.x
        (heads, value), key = x.value.shape[2:], x.key.shape[3]
        a = x.key.new_empty(0, heads, key, 1 if x.beta is None else key, dtype=torch.float32)
        return LawMaps((), (), a, x.key.new_empty(0, heads, key, value, dtype=torch.float32))

    def outputs(self, made: LawMaps, states: Tensor) -> Tensor:
        return torch.empty_like(self.x.value)

    def state_gradients(self, saved: Any, states: Tensor, grad: Tensor) -> StateGradients:
        return StateGradients(states, ())

    def backward(self, saved: Any, reached: StateGradients, states: Tensor, grads: Grads) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in self.x)


def law_of(x: RuleInputs, call: PartCall) -> Law:
    """The recurrence of some tokens."""
    channels = x.decay is not None and x.decay.dim() == 4
    if x.beta is None:
        return GLALaw(x, call) if channels else DecayLaw(x, call)
    return KDALaw(x, call) if channels else GatedDeltaLaw(x, call)
