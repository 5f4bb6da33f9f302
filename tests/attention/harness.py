"""A problem, what attnspan makes of it on every rank, and what is true.

    problem = Problem(Causal(), HeadTail(ranks=2), 16, "ring", heads=4, kv_heads=2)
    check(problem)  # all at once: run on virtual ranks, compare with the oracle

or, piece by piece::

    found = run(problem)  # Result(out, lse, dq, dk, dv, dsinks): whole tensors, put together from shards
    true = expected(problem)  # the same from dense attention in float64
    errors(found, true)  # {"out": 3e-16, ...}: largest error over the largest true magnitude

A problem is data: the same one has the same tensors in every process, so that on real process groups each rank calls
``on_rank(problem, group)`` and only shards travel back, for ``together(problem, shards)``.

Shapes: query (B, H, S, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), sinks (H,); the loss is sum(out * grad), and
with `through_lse` also sum(lse * grad_lse). Gradients of what a score_mod captured lie one after another in one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.attention import attention
from attnspan.layouts import Layout
from attnspan.masks import Mask
from attnspan.plan import Plan, Strategy
from attnspan.testing import loopback
from tests import oracle


@lru_cache(maxsize=256)
def dense(mask: Mask, q_len: int, kv_len: int, row: int, head: int) -> Tensor:
    """`Mask.dense`, kept: slow to ask for, and the same for every strategy, layout and kernel."""
    return mask.dense(q_len, kv_len, row, head)


class Result(NamedTuple):
    """Of one rank or of the whole; None for a gradient that was not asked for."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    dcaptured: Tensor | None = None


class Tensors(NamedTuple):
    """Everything a problem is computed from, whole."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    grad: Tensor
    grad_lse: Tensor
    captured: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Scoring:
    """A score_mod for the tensors it captures: `of(*captured)` is one, as FlexAttention takes them, of these `shapes`.

    The oracle calls it on whole tensors of indices, (B, 1, 1, 1), (H, 1, 1), (S, 1) and (Sk,), or calls `dense` where
    a function would not broadcast.
    """

    of: Callable[..., Callable]
    shapes: tuple[tuple[int, ...], ...] = ()
    dense: Callable[..., Callable] | None = None


@dataclass(frozen=True)
class Problem:
    """An attention over ranks, forward and backward. See the module's docstring.

    `batch` is that of the plan's rows, or 2. `memory` is how shards lie in memory: "BHSD", "BSHD", "BHDS", or "rows of
    more" (every second row of a larger buffer). `wanted` names the inputs that require gradients, of "qkvsc".
    """

    mask: Mask
    layout: Layout
    seq_len: int
    strategy: Strategy | str = "needed"
    kv_len: int | None = None
    kv_layout: Layout | None = None
    kernel: str = "auto"
    heads: int = 2
    kv_heads: int = 1
    dim: int = 8
    value_dim: int | None = None
    dtype: torch.dtype = torch.float64
    batch: int | None = None
    scale: float | None = None
    sinks: bool = False
    through_lse: bool = False
    dropout_p: float = 0.0
    dropout_seed: int = 0x1234_5678_9ABC_DEF0
    scoring: Scoring | None = None
    wanted: str = "qkvsc"
    memory: str = "BHSD"
    device: str = "cpu"
    seed: int = 0

    @staticmethod
    def of(plan: Plan, **features) -> Problem:
        """The problem of a ready plan."""
        return Problem(plan.mask, plan.layout, plan.seq_len, plan.strategy, plan.kv_len, plan.kv_layout, **features)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.mask, self.layout, self.seq_len, self.strategy, self.kv_len, self.kv_layout)

    @property
    def rows(self) -> int:
        """The batch."""
        return self.batch or (self.plan.batch_rows if self.plan.batch_rows > 1 else 2)

    @cached_property
    def whole(self) -> Tensors:
        """The tensors, of a unit scale, rounded to `dtype`; on the CPU, and the same ones in every process."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(self.dtype)

        n, m, out_dim = self.plan.seq_len, self.plan.key_len, self.value_dim or self.dim
        wide = torch.promote_types(self.dtype, torch.float32)
        return Tensors(
            normal(self.rows, self.heads, n, self.dim),
            normal(self.rows, self.kv_heads, m, self.dim),
            normal(self.rows, self.kv_heads, m, out_dim),
            normal(self.heads) if self.sinks else None,
            normal(self.rows, self.heads, n, out_dim),
            normal(self.rows, self.heads, n).to(wide),
            tuple(normal(*shape) for shape in self.scoring.shapes) if self.scoring else (),
        )

    @cached_property
    def dense(self) -> Tensor:
        """Who sees whom, (B, 1 or H, S, Sk)."""
        n, m, rows = self.plan.seq_len, self.plan.key_len, self.mask.rows
        heads = range(self.mask.heads)
        each = [torch.stack([dense(self.mask, n, m, row, head) for head in heads]) for row in range(rows)]
        return torch.stack([each[row % rows] for row in range(self.rows)])

    @property
    def used_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    def shard(self, x: Tensor, rank: int, side: str = "query") -> Tensor:
        """A rank's part of a whole tensor (B, H, S, ...), on `device`, in memory as `memory` says."""
        layout, length = self._side(side)
        places = [layout.positions(length, row if layout.rows > 1 else 0)[rank] for row in range(self.rows)]
        own = torch.stack(
            [x[row][:, torch.tensor(at, dtype=torch.long, device="cpu")] for row, at in enumerate(places)]
        )
        return laid(own.to(self.device), self.memory)

    def unshard(self, parts: list[Tensor], side: str = "query") -> Tensor:
        """The whole, from every rank's part."""
        layout, length = self._side(side)
        order = [layout.inverse(length, row if layout.rows > 1 else 0) for row in range(self.rows)]
        joined = torch.cat([part.cpu() for part in parts], dim=2)
        return torch.stack([joined[row][:, order[row]] for row in range(self.rows)])

    def _side(self, side: str) -> tuple[Layout, int]:
        plan = self.plan
        return (plan.layout, plan.seq_len) if side == "query" else (plan.key_layout, plan.key_len)


def laid(x: Tensor, memory: str) -> Tensor:
    """The same numbers with other strides."""
    match memory:
        case "BHSD":
            return x.contiguous()
        case "BSHD":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "BHDS":
            return x.transpose(2, -1).contiguous().transpose(2, -1)
        case "rows of more":
            buffer = x.new_full((*x.shape[:2], 2 * x.shape[2] + 3, *x.shape[3:]), torch.nan)
            buffer[:, :, 3::2] = x
            return buffer[:, :, 3::2]
    raise AssertionError(f"no layout in memory called {memory!r}")


def on_rank(problem: Problem, group, attend: Callable | None = None) -> Result:
    """Forward and backward on one rank of a group, which is anything `attention` takes; shards out.

    `attend(query, key, value, sinks)` -> (out, lse) stands in for the plain call, to try other ways in.
    """
    rank = _rank(group)
    query, key, value, sinks, grad, grad_lse, captured = problem.whole
    captured = [x.clone().to(problem.device).requires_grad_("c" in problem.wanted) for x in captured]
    inputs = {
        "q": problem.shard(query, rank),
        "k": problem.shard(key, rank, "key"),
        "v": problem.shard(value, rank, "key"),
        "s": None if sinks is None else sinks.clone().to(problem.device),
    }
    wanted = [name for name in inputs if name in problem.wanted and inputs[name] is not None]
    for name in wanted:
        inputs[name].requires_grad_()
    if attend is None:
        out, lse = attention(
            *(inputs[name] for name in "qkv"),
            plan=problem.plan,
            group=group,
            kernel=problem.kernel,
            scale=problem.scale,
            score_mod=problem.scoring.of(*captured) if problem.scoring else None,
            sinks=inputs["s"],
            dropout_p=problem.dropout_p,
            dropout_seed=problem.dropout_seed,
            return_lse=True,
            keep_keys=False,
        )
    else:
        out, lse = attend(*inputs.values())
    learned = [x for x in captured if x.requires_grad]
    if not wanted and not learned:
        assert not out.requires_grad, "nothing asked for a gradient"
        return Result(out, lse)
    used = [(out, problem.shard(grad, rank)), (lse, problem.shard(grad_lse, rank))][: 1 + problem.through_lse]
    leaves = [*(inputs[name] for name in wanted), *learned]
    grads = torch.autograd.grad([x for x, _ in used], leaves, [g for _, g in used])
    found = dict(zip(wanted, grads, strict=False))
    return Result(out.detach(), lse.detach(), *(found.get(name) for name in "qkvs"), _flat(grads[len(wanted) :]))


def _flat(grads: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([x.flatten() for x in grads]) if grads else None


def run(problem: Problem, on: Callable[[Problem, object], Result] = on_rank) -> Result:
    """Forward and backward on as many virtual ranks as the layout has, put together."""
    worlds = loopback(problem.layout.ranks, problem.device)
    return together(problem, worlds.run(lambda world: on(problem, world)))


def together(problem: Problem, shards: list[Result]) -> Result:
    """The whole from every rank's shards. Gradients of sinks and of captured tensors must be whole, and the same bits,
    on every rank."""
    out, lse, dq, dk, dv, dsinks, dcaptured = (list(parts) for parts in zip(*shards, strict=True))

    def whole(parts, side):
        return None if parts[0] is None else problem.unshard(parts, side)

    assert all(torch.equal(each, dsinks[0]) for each in dsinks if each is not None), "ranks differ in dsinks"
    assert all(torch.equal(each, dcaptured[0]) for each in dcaptured if each is not None), "ranks differ in dcaptured"
    alike = [None if parts[0] is None else parts[0].cpu() for parts in (dsinks, dcaptured)]
    return Result(
        problem.unshard(out), problem.unshard(lse), whole(dq, "query"), whole(dk, "key"), whole(dv, "key"), *alike
    )


def expected(problem: Problem) -> Result:
    """Dense attention in float64, and its gradients by autograd; a sink is one more key, which all see, of value 0."""
    query, key, value, sinks, grad, grad_lse, captured = problem.whole
    leaves = [x.double().clone().requires_grad_() for x in (query, key, value, sinks) if x is not None]
    learned = [x.double().clone().requires_grad_() for x in captured]
    q, k, v, *sink = leaves
    k, v = oracle.per_query_head(k, q), oracle.per_query_head(v, q)
    scores, mask = q @ k.mT * problem.used_scale, problem.dense
    if problem.scoring:
        scores = oracle.scored((problem.scoring.dense or problem.scoring.of)(*learned), scores)
        mask = mask & (scores != -torch.inf)
    drop = torch.ones(())
    if problem.dropout_p:
        drop = oracle.dropped(problem.dropout_p, problem.dropout_seed, tuple(scores.shape))
    if sink:
        scores = torch.cat([scores, sink[0][None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:3], 1)], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
        drop = torch.nn.functional.pad(drop, (0, 1)) if drop.dim() else drop
    out, lse = oracle.dense(scores, mask, [(mask, v)], drop)
    used = [(out, grad.double()), (lse, grad_lse.double())][: 1 + problem.through_lse]
    grads = torch.autograd.grad([x for x, _ in used], [*leaves, *learned], [g for _, g in used])
    found = {name: x for name, x in zip("qkvs"[: len(leaves)], grads, strict=False) if name in problem.wanted}
    dcaptured = _flat(grads[len(leaves) :]) if "c" in problem.wanted else None
    return Result(out.detach(), lse.detach(), *(found.get(name) for name in "qkvs"), dcaptured)


def errors(found: Result, true: Result) -> dict[str, float]:
    """By quantity, the largest error over the largest true magnitude: rounding scales with the terms of a sum, not
    with what is left when they cancel. lse is a logarithm, so its error is already relative: it is taken as it stands
    where the magnitude is below 1. Rows that see nothing must be exactly so."""
    empty = true.lse == -torch.inf
    assert (found.lse == -torch.inf).equal(empty), "lse must be -inf where a row sees nothing, and only there"
    assert not found.out[empty].any(), "out must be 0 where a row sees nothing"
    found = found._replace(lse=found.lse.masked_fill(empty, 0.0))
    true = true._replace(lse=true.lse.masked_fill(empty, 0.0))
    off = {}
    for name, x, y in zip(Result._fields, found, true, strict=True):
        assert (x is None) == (y is None), f"{name} is {'missing' if x is None else 'not asked for'}"
        if x is None or y is None:
            continue
        assert x.shape == y.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(y.shape)}"
        largest = float(y.abs().max()) if y.numel() else 0.0
        error = float((x.double() - y).abs().max()) if y.numel() else 0.0
        off[name] = error / (max(largest, 1.0) if name == "lse" else largest or 1.0)
    return off


BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6}
"""For `errors`. float64: sums of some hundred terms. float32: the bar of the library. Half precision is measured
against torch's own attention, in test_numerics.py; where only a blunder is to be told from rounding, `COARSE` does."""

COARSE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check(problem: Problem, on: Callable[[Problem, object], Result] = on_rank) -> None:
    """Run on virtual ranks and compare with the oracle."""
    compare(problem, run(problem, on))


def compare(problem: Problem, found: Result) -> None:
    """A result against the oracle; NaN is never within a bound."""
    bound = BOUNDS.get(problem.dtype) or COARSE[problem.dtype]
    off = errors(found, expected(problem))
    wide = torch.promote_types(problem.dtype, torch.float32)
    assert (found.out.dtype, found.lse.dtype) == (problem.dtype, wide)
    assert all(x is None or x.dtype == problem.dtype for x in found[2:]), "gradients have their inputs' dtype"
    assert all(error <= bound for error in off.values()), f"{off} exceed {bound}"


def _rank(group) -> int:
    """This process's rank in anything that `attention` takes for a group."""
    from attnspan.transports.group import transport_of

    return transport_of(group).rank
