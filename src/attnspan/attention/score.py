"""A score_mod on its way through an attention: traced, and told apart by what it computes.

Users write a new closure for every step, or one function for all: what matters is the program (masks/program.py) and
the tensors it captured, which are inputs of the attention like queries are, so that they may differ from call to call
and get gradients. Two score_mods with the same program, on tensors of the same shapes, are the same here; nothing is
agreed on or compiled anew for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnspan.errors import AttentionError
from attnspan.masks.program import Program, traced

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A FlexAttention score_mod: (score, batch row, head, query index, key index) -> score."""


@dataclass(frozen=True, eq=False)
class Score:
    """A score_mod as it was when it was traced."""

    fn: ScoreFunction
    device: torch.device
    _programs: dict[torch.dtype, Program] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise AttentionError(f"score_mod must be a function (score, b, h, q_idx, kv_idx) -> score, got {self.fn!r}")
        self.program(torch.float32)

    def program(self, dtype: torch.dtype) -> Program:
        """The program for scores of a dtype."""
        if dtype not in self._programs:
            self._programs[dtype] = traced(self.fn, "score_mod", score=dtype, device=self.device, error=AttentionError)
        return self._programs[dtype]

    @property
    def captured(self) -> list[Tensor]:
        """The tensors that were found when it was traced."""
        return list(self.program(torch.float32).captured)

    @property
    def key(self) -> str:
        """The same for score_mods that compute the same."""
        return self.program(torch.float32).key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and (self.key, self.device) == (other.key, other.device)

    def __hash__(self) -> int:
        return hash((self.key, self.device))
