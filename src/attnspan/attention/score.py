"""A traced score_mod, identified by what it computes.

Users may write a new closure for every step. What counts is the program that it traces to (masks/program.py); tensors
that it captures are inputs of attention, like queries: they may differ from call to call and get gradients. Two
score_mods with the same program, on tensors of the same shapes, are equal: ranks do not agree again, and nothing is
recompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.errors import AttentionError
from attnspan.masks.program import Program
from attnspan.masks.tracing import traced

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A FlexAttention score_mod: (score, batch row, head, query index, key index) -> score."""


class Captured(NamedTuple):
    """The tensors that a score_mod captures, for scores in float32 and in float64."""

    single: list[Tensor]
    double: list[Tensor]

    def for_query(self, query: Tensor) -> list[Tensor]:
        """The tensors for scores of the query's precision."""
        return self.double if query.dtype == torch.float64 else self.single


DTYPES = (torch.float32, torch.float64)
"""What scores are computed in."""


@dataclass(frozen=True, eq=False)
class Score:
    """A score_mod as it was when it was traced: a program for each of the dtypes that scores may have.

    A function may ask for the dtype of a score, and compute or capture something else by it. All are traced at once,
    so that there is one time at which it was read.
    """

    fn: ScoreFunction
    device: torch.device
    dtypes: tuple[torch.dtype, ...] = DTYPES
    _programs: dict[torch.dtype, Program | AttentionError] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise AttentionError(f"score_mod must be a function (score, b, h, q_idx, kv_idx) -> score, got {self.fn!r}")
        for dtype in self.dtypes:
            self._programs[dtype] = self._traced(dtype)
        wrong = [each for each in self._programs.values() if isinstance(each, AttentionError)]
        if len(wrong) == len(self.dtypes):
            raise wrong[0]

    def _traced(self, dtype: torch.dtype) -> Program | AttentionError:
        try:
            return traced(self.fn, "score_mod", score=dtype, device=self.device, error=AttentionError)
        except AttentionError as wrong:  # raised where such scores come, which may be never
            return wrong

    def program(self, dtype: torch.dtype) -> Program:
        found = self._programs[dtype]
        if isinstance(found, AttentionError):
            raise found
        return found

    @property
    def captured(self) -> Captured:
        """The tensors that were found when it was traced."""
        found = (self._programs.get(dtype) for dtype in DTYPES)
        return Captured(*(list(each.captured) if isinstance(each, Program) else [] for each in found))

    @property
    def reads_values(self) -> bool:
        """Whether numbers in its programs are values that tensors had."""
        return any(isinstance(each, Program) and each.reads_values for each in self._programs.values())

    @property
    def key(self) -> str:
        """The same for score_mods that compute the same."""
        found = (each.key if isinstance(each, Program) else str(each) for each in self._programs.values())
        return " ".join(f"{dtype} {each}" for dtype, each in zip(self._programs, found, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and (self.key, self.device) == (other.key, other.device)

    def __hash__(self) -> int:
        return hash((self.key, self.device))
