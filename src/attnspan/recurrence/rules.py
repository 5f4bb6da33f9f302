"""Recurrent layers by their laws: what each takes, in which shapes, and how it reads in the words of chunked.py.

A rule is a call: the tensors of this rank's tokens, checked against the shapes below. Every law keeps a state for each
document and head, and gives an output for each token::

    GatedDelta   S = exp(decay) S;  S = S + beta key (value - key' S)';  out = scale query' S      decay a number
    KDA          the same                                                                          decay per channel
    GLA          S = exp(decay) S + key value';                          out = scale query' S      decay per channel
    Lightning    the same                                                                          decay a number
    SSD          S = exp(dt A) S + dt x B';                              y = S C + D x             Mamba2's names

Decays are logarithms, at most 0. Everything is computed in float32, or in float64 if any tensor is; the output has the
dtype of the values, states are float32 or float64.

Shapes: B batch rows, S tokens on this rank, H heads, G heads of queries and keys (H is a multiple), K and V head dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from attnspan.dtypes import dtype_name, dtype_or_type
from attnspan.errors import RecurrenceError
from attnspan.recurrence.chunked import RuleInputs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Rule(ABC):
    """A recurrent layer's call: see above."""

    SHAPES: ClassVar[str]
    """The dims of each tensor, a letter each; of one that may have several shapes, all of them. `?`: may be None."""

    @cached_property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The size of every letter, once all tensors fit."""

    @property
    @abstractmethod
    def map_size(self) -> int:
        """How many numbers tell what a run of tokens does to the state of one batch row."""

    if TYPE_CHECKING:  # of one document; a field of some

        @property
        def state_shape(self) -> tuple[int, ...]: ...

    @classmethod
    def shapes(cls) -> dict[str, list[str]]:
        """The shapes that each tensor may have.

        >>> Lightning.shapes()["decay"]
        ['BSH', 'H']
        """
        pairs = (each.split(":") for each in cls.SHAPES.split())
        return {name.removesuffix("?"): forms.split("|") for name, forms in pairs}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without optional ones that were not given."""
        given = {name: getattr(self, name) for name in self.shapes()}
        return {name: x for name, x in given.items() if x is not None or f"{name}?" not in self.SHAPES}

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in."""
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors.values())
        return torch.float64 if wide else torch.float32

    def __str__(self) -> str:
        """What all ranks must have in common."""
        sizes = [f"{letter}={size}" for letter, size in sorted(self.sizes.items()) if letter != "S"]
        dtypes = [f"{name} {dtype_name(tensor.dtype)}" for name, tensor in self.tensors.items()]
        return f"{type(self).__name__} of {', '.join(sizes + dtypes)}{self._options}"

    @property
    def _options(self) -> str:
        options = [field.name for field in fields(self) if field.name not in self.shapes()]
        return "".join(f", {name}={getattr(self, name)!r}" for name in options)


class LinearRule(Rule):
    """A rule that chunked.py knows."""

    MATRIX: ClassVar[bool]
    """Whether a run of tokens acts on the state by a matrix, or by a decay."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        found = fitted(self)
        scale = getattr(self, "scale", None)
        if not (scale is None or (isinstance(scale, Real | Tensor) and not isinstance(scale, bool))):
            raise RecurrenceError(f"scale must be a number, or None for 1 / sqrt(K), got {scale!r}")
        if found["H"] % found["G"]:
            raise RecurrenceError(
                f"heads of values must be a multiple of those of keys, got {found['H']} and {found['G']}"
            )
        return found

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one state: heads, and its two sides."""
        sizes = self.sizes
        return sizes["H"], sizes["K"], sizes["V"]

    @property
    def map_size(self) -> int:
        decay, heads, size = self.tensors.get("decay"), self.sizes["H"], self.sizes["K"]
        if self.MATRIX:
            return heads * size * size
        return heads * size if decay is not None and decay.dim() == 4 else heads

    @property
    def factor(self) -> float:
        """What outputs are multiplied by."""
        return 1.0

    @abstractmethod
    def inputs(self) -> RuleInputs:
        """The tokens in the words of chunked.py, as they came: (B, S, G or H, ...) each, without the factor."""

    def expanded_inputs(self) -> RuleInputs:
        """The same with all heads, in the dtype of the computation."""
        inputs = self.inputs().each(lambda x: x.to(self.dtype))
        heads = inputs.value.shape[2]
        query, key = (_repeated(x, heads) for x in (inputs.query, inputs.key))
        return inputs._replace(query=query, key=key)

    def finish_output(self, out: Tensor) -> Tensor:
        """The output, from what the state gives."""
        return out

    def state_in(self, state: Tensor) -> Tensor:
        """A state as chunked.py has it, (..., K, V)."""
        return state

    def state_out(self, state: Tensor) -> Tensor:
        """The way back."""
        return state


@dataclass(frozen=True, eq=False)
class _Attending(LinearRule):
    """What linear attention and delta rules have in common."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def factor(self) -> float:
        scale: float | None = getattr(self, "scale", None)
        return float(self.key.shape[-1] ** -0.5) if scale is None else scale

    def inputs(self) -> RuleInputs:
        decay, beta = (getattr(self, name, None) for name in ("decay", "beta"))
        return RuleInputs(
            self.query,
            self.key,
            self.value,
            None if decay is None else _per_token(decay, self.value),
            None if beta is None else beta.unsqueeze(-1),
        )

    def finish_output(self, out: Tensor) -> Tensor:
        return out.to(self.value.dtype)


@dataclass(frozen=True, eq=False)
class GatedDelta(_Attending):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo-Hybrid; without decay, DeltaNet.

    query and key (B, S, G, K), value (B, S, H, V), decay and beta (B, S, H). Keys are normalised by the caller. `scale`
    is 1 / sqrt(K) if not given. States are (documents, H, K, V).
    """

    decay: Tensor | None
    beta: Tensor
    scale: float | None = None

    MATRIX = True
    SHAPES = "query:BSGK key:BSGK value:BSHV decay?:BSH beta:BSH"


@dataclass(frozen=True, eq=False)
class KDA(_Attending):
    """Kimi delta attention: the gated delta rule with a decay for every channel of the keys, (B, S, H, K).

    The rest is as in `GatedDelta`.
    """

    decay: Tensor
    beta: Tensor
    scale: float | None = None

    MATRIX = True
    SHAPES = "query:BSGK key:BSGK value:BSHV decay:BSHK beta:BSH"


@dataclass(frozen=True, eq=False)
class GLA(_Attending):
    """Gated linear attention: a decay for every channel of the keys, (B, S, H, K), and no delta rule."""

    decay: Tensor
    scale: float | None = None

    MATRIX = False
    SHAPES = "query:BSGK key:BSGK value:BSHV decay:BSHK"


@dataclass(frozen=True, eq=False)
class Lightning(_Attending):
    """Linear attention with one decay for each head, (H,), as in MiniMax, or for each token and head, (B, S, H).

    Without a decay it is plain linear attention. MiniMax does not scale: ``scale=1.0``.
    """

    decay: Tensor | None = None
    scale: float | None = None

    MATRIX = False
    SHAPES = "query:BSGK key:BSGK value:BSHV decay?:BSH|H"


@dataclass(frozen=True, eq=False)
class SSD(LinearRule):
    """Mamba2's state space layer, by the names of its kernel: x (B, S, H, V), dt (B, S, H) after bias and softplus, A
    (H,) below 0, B and C (B, S, G, K), D (H,) or none. States are (documents, H, V, K).
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None

    MATRIX = False
    SHAPES = "x:BSHV dt:BSH A:H B:BSGK C:BSGK D?:H"

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one state: heads, and its two sides."""
        sizes = self.sizes
        return sizes["H"], sizes["V"], sizes["K"]

    def inputs(self) -> RuleInputs:
        x, dt, a = (each.to(self.dtype) for each in (self.x, self.dt, self.A))
        step = dt.unsqueeze(-1)
        return RuleInputs(self.C, self.B, x * step, step * a.unsqueeze(-1), None)

    def finish_output(self, out: Tensor) -> Tensor:
        if self.D is not None:
            out = out + self.x.to(self.dtype) * self.D.to(self.dtype).unsqueeze(-1)
        return out.to(self.x.dtype)

    def state_in(self, state: Tensor) -> Tensor:
        return state.mT

    def state_out(self, state: Tensor) -> Tensor:
        return state.mT


def fitted(rule: Rule) -> dict[str, int]:
    """The size of every letter of a rule's shapes; raises if tensors do not fit one another."""
    sizes: dict[str, int] = {}
    for name, tensor in rule.tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
            got = dtype_or_type(tensor)
            raise RecurrenceError(f"{name} must be a tensor of float32, bfloat16, float16 or float64, got {got}")
        forms = rule.shapes()[name]
        letters = next((form for form in forms if len(form) == tensor.dim()), forms[0])
        expected = [sizes.get(letter, size) for letter, size in zip(letters, tensor.shape, strict=False)]
        if len(letters) != tensor.dim() or list(tensor.shape) != expected:
            known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
            shapes = " or ".join("(" + ", ".join(form) + ")" for form in forms)
            raise RecurrenceError(
                f"{name} must be {shapes}{' with ' if known else ''}{known}, got shape {tuple(tensor.shape)}"
            )
        if 0 in [size for letter, size in zip(letters, tensor.shape, strict=True) if letter != "S"]:
            raise RecurrenceError(f"{name} must have a batch, heads and a head dim, got shape {tuple(tensor.shape)}")
        sizes |= zip(letters, tensor.shape, strict=True)
    return sizes


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Heads of queries and keys as often as there are heads of values for each."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], 2)


def _per_token(decay: Tensor, value: Tensor) -> Tensor:
    """A decay as (B, S, H, 1) or (B, S, H, K)."""
    if decay.dim() == 1:
        return decay.view(1, 1, -1, 1).expand(*value.shape[:3], 1)
    return decay.unsqueeze(-1) if decay.dim() == 3 else decay
