"""The interface of a paged KV cache, on one device (`PagePool`) or over ranks (`ShardedPages`).

`attend` applies sinks and rounds at the end: both need the softmax over all keys, of which `partial` only covers those
of a rank or of a group of rows.   Shapes: out (tokens, heads, value dim), lse (tokens, heads).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnspan.attention.score import ScoreFunction
from attnspan.attention.transforms import check_untransformed
from attnspan.errors import PageError
from attnspan.kernels.merge import with_sinks
from attnspan.masks import Causal, Mask
from attnspan.paged.after_prefix import AfterPrefix

if TYPE_CHECKING:
    from attnspan.paged.step_plan import StepPlan

CAUSAL = Causal()


@dataclass(frozen=True, slots=True, eq=False)
class AttendOptions:
    """The arguments of `attend` besides the tensors; a scale of None is that of the layer's head dim."""

    mask: Mask | AfterPrefix = CAUSAL
    score_mod: ScoreFunction | None = None
    scale: float | None = None
    kernel: str = "auto"


class PagedKVCache(ABC):
    """Keys and values in pages: `write` those of a step's new tokens, and `attend` over them."""

    @abstractmethod
    def plan(self, *, max_sequences: int, max_tokens: int, max_length: int) -> StepPlan:
        """A plan for steps of at most so many sequences and new tokens, of sequences up to `max_length`."""

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor, plan: StepPlan) -> None:
        """Put the new tokens' keys (tokens, key heads, dim) and values where the plan says."""

    @abstractmethod
    def partial(self, layer: int, query: Tensor, plan: StepPlan, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """(out, lse) over the keys there are, not yet rounded, without sinks."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        plan: StepPlan,
        *,
        mask: Mask | AfterPrefix = CAUSAL,
        score_mod: ScoreFunction | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        kernel: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the new tokens' queries (tokens, heads, dim) over all tokens of their sequences.

        The mask speaks of positions in each sequence, counted from its start, and of rows of the plan. `sinks` (heads,)
        is a logit per head that takes part in every softmax and has no value. Returns out (tokens, heads, value dim),
        with `return_lse` also lse (tokens, heads), natural log.
        """
        out, lse = self.partial(layer, query, plan, AttendOptions(mask, score_mod, scale, kernel))
        if sinks is not None:
            _check_sinks(sinks, lse)
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        return (out, lse) if return_lse else out


def _check_sinks(sinks: Tensor, lse: Tensor) -> None:
    """Refuse what is no logit per query head; lse is (tokens, heads)."""
    if not isinstance(sinks, Tensor):
        raise PageError(f"sinks must be a tensor with one logit per query head, ({lse.shape[1]},), got {type(sinks)}")
    if sinks.shape != lse.shape[1:] or not sinks.is_floating_point() or sinks.device != lse.device:
        raise PageError(
            f"sinks must be one logit per query head, ({lse.shape[1]},), on {lse.device}, "
            f"got {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}"
        )
    check_without_gradients("sinks", sinks)


def check_without_gradients(name: str, given: Tensor) -> None:
    """Refuse a tensor that is to be differentiated, or that torch.func has wrapped."""
    if given.requires_grad and torch.is_grad_enabled():
        raise PageError(f"{name} requires grad, and a cache has no gradients; call under torch.no_grad()")
    instead = "a cache has no derivatives, and knows no batched tensors: call it outside"
    check_untransformed(name, given, instead=instead, error=PageError)
