"""A self-test of ranks: attention in every strategy against dense float64, bytes against the plan, and the link.

`self_test(world)` is what every rank does, virtual or real; all get findings of their own::

    findings = processes(4).run(self_test)  # by rank
    print([finding.wrong for finding in findings[2].strategies])

The case is small: some packed documents, two query heads on each key head, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter

import torch
from torch import Tensor

from attnspan.attention import Attention
from attnspan.attention.links import group_links
from attnspan.errors import TransportError
from attnspan.layouts import Balanced
from attnspan.masks import Causal, Documents, Mask
from attnspan.plan import Link, Plan, Shape
from attnspan.plan.traffic import received_bytes
from attnspan.transports import Counting, Transport

BOUND = 2e-5
"""An error that a correct run in float32 stays far below, and a wrong one far above: the numbers are about 1."""

LENGTHS, DIM = (37, 70, 21), 32


@dataclass(frozen=True, slots=True)
class Finding:
    """One strategy on one rank: the largest error of out and gradients, and the bytes that came in forward."""

    strategy: str
    error: float
    received: int
    planned: int

    @property
    def wrong(self) -> str:
        """What is wrong; empty if nothing is.

        >>> Finding("ring", 1e-7, 4096, 4096).wrong, Finding("ring", 0.5, 4096, 8192).wrong
        ('', 'error 5.0e-01, above 2e-05; received 4096 bytes, the plan says 8192')
        """
        said = []
        if not self.error <= BOUND:  # not a number is wrong too
            said.append(f"error {self.error:.1e}, above {BOUND:.0e}")
        if self.received != self.planned:
            said.append(f"received {self.received} bytes, the plan says {self.planned}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank found, in how many seconds; the link is that between hosts, if there are several."""

    strategies: tuple[Finding, ...]
    link: Link | None
    seconds: float


def strategies(ranks: int) -> list[str]:
    """Those that so many ranks can run."""
    return ["ring", "gather", "needed(2)", "ulysses", *(["ulysses(2) x ring"] if ranks % 2 == 0 else [])]


@dataclass(frozen=True)
class Trial:
    """What is attended on so many ranks; tokens and heads grow with them, so that every rank has some of each."""

    ranks: int

    @property
    def lengths(self) -> list[int]:
        return [length * max(1, self.ranks // 4) for length in LENGTHS]

    @property
    def shape(self) -> Shape:
        kv_heads = max(2, self.ranks)
        return Shape(heads=2 * kv_heads, kv_heads=kv_heads, head_dim=DIM, dtype="fp32")

    @cached_property
    def mask(self) -> Mask:
        return Causal() & Documents(self.lengths)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """query, key and value of all ranks."""
        draw, kv_heads = torch.Generator().manual_seed(0), self.shape.heads // 2
        heads = (self.shape.heads, kv_heads, kv_heads)
        return [torch.randn(1, h, sum(self.lengths), DIM, generator=draw, device=draw.device) for h in heads]

    @cached_property
    def expected(self) -> list[Tensor]:
        """Out and gradients, in float64."""
        return differentiated([x.double() for x in self.inputs], partial(dense, self.mask))

    def plan(self, strategy: str) -> Plan:
        layout = Balanced(self.mask, ranks=self.ranks, chunk=4)
        return Plan(self.mask, layout, sum(self.lengths), strategy)


def self_test(world: Transport) -> Findings:
    """One rank's part. An error that is raised names the strategy."""
    start, trial, found = perf_counter(), Trial(world.ranks), []
    for strategy in strategies(world.ranks):
        try:
            found.append(run_strategy(trial, strategy, world))
        except Exception as cause:
            raise TransportError(f"{strategy}: {type(cause).__name__}: {cause}") from cause
    links = group_links(world)
    return Findings(tuple(found), links.between or links.inside, perf_counter() - start)


def run_strategy(trial: Trial, strategy: str, world: Transport) -> Finding:
    """One strategy on one rank."""
    plan, counting = trial.plan(strategy), Counting(world)
    attend, own = Attention(plan, counting, keep_keys=False), plan.layout.positions(plan.seq_len)[world.rank]
    received = 0

    def counted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal received
        out = attend(query, key, value)
        assert isinstance(out, Tensor), "no lse was asked for"
        received = counting.received.total()  # of forward alone
        return out

    found = differentiated([x[:, :, own].to(world.device) for x in trial.inputs], counted)
    pairs = zip(found, trial.expected, strict=True)
    error = max(float((a.cpu() - b[:, :, own]).abs().max()) for a, b in pairs)
    return Finding(strategy, error, received, received_bytes(plan, trial.shape, world.rank).forward)


def dense(mask: Mask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as it is defined."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    allowed = mask.dense(query.shape[2]).to(query.device)
    scores: Tensor = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


def differentiated(tensors: list[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Out and the gradients of a loss that looks at all of it."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]
