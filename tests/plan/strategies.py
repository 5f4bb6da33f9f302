"""Random layouts and plans, for laws that hold for every plan."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout, RoundRobinByWork, Striped
from attnspan.masks import Mask
from attnspan.plan import Plan
from tests.masks.strategies import masks

STRATEGIES = ["ring", "gather", "needed", "needed(2)", "needed(3)"]


@st.composite
def layouts(draw, mask: Mask, ranks: int, square: bool) -> Layout:
    """Any layout; those that follow a mask's work need one that is square."""
    chunk = draw(st.integers(1, 4))
    plain = [Contiguous(ranks), HeadTail(ranks), Striped(ranks=ranks), Striped(ranks=ranks, chunk=chunk)]
    if not square:
        return draw(st.sampled_from(plain))
    follows = [RoundRobinByWork(mask, ranks=ranks, block=chunk), Balanced(mask, ranks=ranks, chunk=chunk)]
    if mask.rows > 1:
        follows.append(Balanced(mask, ranks=ranks, chunk=chunk, per_row=True))
    return draw(st.sampled_from(plain + follows))


@st.composite
def plans(draw, max_len: int = 32, max_ranks: int = 6, rows: int | None = None) -> Plan:
    """Any mask, layouts and strategy; sometimes keys of another length, sometimes of another layout."""
    seq_len, ranks = draw(st.integers(1, max_len)), draw(st.integers(1, max_ranks))
    kv_len = seq_len if draw(st.integers(0, 2)) else draw(st.integers(1, max_len))
    mask = draw(masks(seq_len, kv_len, depth=2, rows=rows))
    layout = draw(layouts(mask, ranks, seq_len == kv_len))
    own_keys = draw(st.booleans()) if kv_len == seq_len else True
    kv_layout = draw(layouts(mask, ranks, False)) if own_keys else None
    strategy = draw(st.sampled_from(STRATEGIES))
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    if draw(st.booleans()):
        strategy = draw(st.sampled_from(["ulysses", f"ulysses({draw(st.sampled_from(degrees))}) x {strategy}"]))
    return Plan(mask, layout, seq_len, strategy, kv_len, kv_layout)


def positions(runs) -> list[int]:
    """The positions of runs, one after another."""
    return [position for run in runs for position in run.positions]


def computed(plan: Plan, row: int) -> torch.Tensor:
    """How often each pair is computed, over all groups of ranks, (seq_len, kv_len)."""
    grid = torch.zeros(plan.seq_len, plan.kv_len, dtype=torch.int32)
    for group in range(plan.groups):
        rank = group * plan.degree
        queries = torch.tensor(positions(plan.queries(rank, row)), dtype=torch.long)
        for step in plan.steps(rank, row):
            keys = torch.tensor(positions(step.arena), dtype=torch.long)
            for tile in step.tiles:
                q, k = queries[torch.tensor(tile.rows)], keys[torch.tensor(tile.cols)]
                distance = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None]
                grid[q[:, None], k[None, :]] += ((distance >= tile.lo) & (distance <= tile.hi)).int()
    return grid


def used_keys(plan: Plan, group: int, row: int) -> set[int]:
    """The keys that the queries of a group see, from the dense mask."""
    queries = positions(plan.queries(group * plan.degree, row))
    seen = plan.mask.dense(plan.seq_len, plan.kv_len, row if plan.mask.rows > 1 else 0)[queries]
    return set(seen.any(0).nonzero().flatten().tolist())
