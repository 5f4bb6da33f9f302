"""A packed sequence on 8 ranks: its mask, who owns what under each layout, and the plan of each strategy.

Run: make demo
"""

from __future__ import annotations

import attnspan as span
from attnspan.plan.drawing import table

RANKS = 8
LENGTHS = [9000, 700, 2100, 14000, 300, 4500, 1200, 968]
SEQ_LEN = sum(LENGTHS)


def main() -> None:
    mask = span.Causal() & span.Documents(LENGTHS)
    print(f"1. What attends: {len(LENGTHS)} documents packed into {SEQ_LEN} tokens\n")
    print(mask)
    print(f"\n{mask.work(SEQ_LEN):,} of {SEQ_LEN**2:,} pairs, as {len(mask.bands(SEQ_LEN))} bands\n")

    print(f"2. Who owns what, on {RANKS} ranks\n")
    layouts = [
        span.Contiguous(RANKS),
        span.HeadTail(RANKS),
        span.Striped(ranks=RANKS),
        span.PerDocument(LENGTHS, ranks=RANKS),
        span.RoundRobinByWork(mask, ranks=RANKS),
        span.Balanced(mask, ranks=RANKS),
    ]
    print(table(["layout", "imbalance", "keys moved", "most runs"], [measured(mask, layout) for layout in layouts]))
    print(f"\n{layouts[-1]}\n")

    print("3. When and where: three plans for the balanced layout\n")
    for strategy in ("ring", "gather", "needed(2)"):
        print(span.Plan(mask, layouts[-1], SEQ_LEN, strategy), end="\n\n")

    print("4. Which to take: predicted for 32 heads, 8 key heads, head dim 128, bf16\n")
    shape = span.Shape(heads=32, kv_heads=8, head_dim=128)
    print(span.choose(mask, seq_len=SEQ_LEN, ranks=RANKS, shape=shape, hardware="h100-nvlink"))


def measured(mask: span.Mask, layout: span.Layout) -> list[object]:
    """What a layout costs: balance, keys that must move, runs."""
    plan = span.Plan(mask, layout, SEQ_LEN, "needed")
    moved = sum(sum(plan.received(rank).values()) for rank in range(RANKS))
    runs = max(len(layout.runs(SEQ_LEN, rank)) for rank in range(RANKS))
    return [type(layout).__name__, f"{layout.imbalance(mask, SEQ_LEN):.3f}", moved, runs]


if __name__ == "__main__":
    main()
