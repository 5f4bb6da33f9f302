"""The tensors and options of one call of attention on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attnspan.attention.latent import Expander
from attnspan.dtypes import dtype_name
from attnspan.errors import PlanError
from attnspan.kernels import Dropout
from attnspan.plan import Shape


class Inputs(NamedTuple):
    """The tensors of one call on this rank, whether its lse is returned to the model, and dropout.

    Of a latent (B, S, R), key and value are both that latent until `Attention.run` gives it an `expander` (latent.py).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    captured: Sequence[Tensor] = ()  # by the score_mod
    return_lse: bool = False
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    expander: Expander | None = None  # of a latent, which is then a key (B, 1, S, R) beside a value of size 0

    @property
    def key_value(self) -> tuple[Tensor, Tensor]:
        """Key and value as kernels see them, or what stands in for those of a latent."""
        return (self.key, self.value) if self.expander is None else self.expander.stand_ins(self.key)

    @property
    def dropout(self) -> Dropout | None:
        """What kernels drop, or None; before a seed is drawn, by the seed 0."""
        return Dropout(self.dropout_p, self.dropout_seed or 0) if self.dropout_p else None

    @property
    def shape(self) -> Shape | None:
        """What a choice of strategy depends on; None for tensors that will be refused."""
        query, (key, value) = self.query, self.key_value
        latent = None if self.expander is None else self.key.shape[3]
        try:
            sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.shape[0]
            return Shape(*sizes, dtype_name(query.dtype), latent)
        except (IndexError, PlanError):
            return None
