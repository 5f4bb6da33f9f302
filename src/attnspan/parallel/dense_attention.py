"""Attention of one device in plain torch, under a session: what `check_model` compares with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnspan.attention.inputs import Inputs
from attnspan.attention.latent import Expand, made_of
from attnspan.attention.pass_timer import PassTimer
from attnspan.attention.uses import Uses
from attnspan.dtypes import lse_dtype
from attnspan.layouts import Contiguous
from attnspan.parallel.session import ContextParallel
from attnspan.parallel.session_spec import Masks
from attnspan.plan import Plan
from attnspan.transports import Transport


@dataclass
class DenseAttention:
    """Attention of one device by torch's matmul and softmax, in the place of an `Attention`."""

    plan: Plan
    scale: float | None = None
    uses: Uses = field(default_factory=Uses)

    @property
    def bound(self) -> DenseAttention:
        """Where uses are counted."""
        return self

    @property
    def latest(self) -> Plan:
        """The only plan."""
        return self.plan

    def variant(self, *, scale: float | None = None, check_before_forward: object = None) -> DenseAttention:
        """With another scale; there is nothing to check before a forward pass."""
        return replace(self, scale=self.scale if scale is None else scale)

    def run(self, inputs: Inputs, expand: Expand | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse), as `Attention.run`."""
        if expand is not None:
            key, value = made_of(expand, inputs.key)
            inputs = inputs._replace(key=key, value=value)
        self.uses.add_forward(self.plan, inputs.shape, PassTimer(inputs.query.device))
        query, key, value, sinks = inputs[:4]
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        allowed = self._allowed(query.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return weights[..., : value.shape[2]] @ value, scores.to(lse_dtype(query.dtype)).logsumexp(-1)

    def _allowed(self, device: torch.device) -> Tensor:
        plan, mask = self.plan, self.plan.mask
        rows = [
            torch.stack([mask.dense(plan.seq_len, plan.key_len, row, head) for head in range(mask.heads)])
            for row in range(mask.rows)
        ]
        return torch.stack(rows).to(device)


def one_device(world: Transport, seq_len: int, mask: Masks) -> ContextParallel:
    """A session of one rank whose attention is dense."""
    session = ContextParallel(world, seq_len=seq_len, mask=mask, layout=Contiguous(1))
    named: dict[str, Any] = session.attentions.named
    for name, attend in named.items():
        named[name] = DenseAttention(attend.plan, session.options.scale)
    return session
