"""Cross-attention between two sessions: queries lie as one says, keys as the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnspan.attention import Attention
from attnspan.parallel.loss import shared
from attnspan.plan import Plan


@dataclass(frozen=True, eq=False)
class Cross:
    """Attention of one session's queries over another's keys; called with a shard of each."""

    attend: Attention
    ranks: int

    @property
    def plan(self) -> Plan:
        """What it does: with strategy "auto", what it last did."""
        return self.attend.call.latest

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """The output for this rank's queries (B, H, S, Dv)."""
        return self.attend(query, key, value, sinks=self._shared(sinks))

    def with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of every row (B, H, S)."""
        return self.attend.with_lse(query, key, value, sinks=self._shared(sinks))

    def _shared(self, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else shared(sinks, self.ranks)
