"""A packed sequence on 8 ranks: its mask, who owns what under each layout, the plan of each strategy, and a run.

Run: make demo
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import attnspan as span
from attnspan.plan.drawing import table

RANKS = 8
LENGTHS = [9000, 700, 2100, 14000, 300, 4500, 1200, 968]
SEQ_LEN = sum(LENGTHS)
STRATEGIES = ["ring", "gather", "needed(2)", "ulysses", "ulysses(2) x ring"]


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

    small = span.Causal() & span.Documents([length // 16 for length in LENGTHS])
    print(f"\n5. And it computes: {RANKS} virtual ranks against one device, the same pack at a sixteenth\n")
    print(table(["strategy", "largest error of out", "of the gradients"], [compared(small, s) for s in STRATEGIES]))


def compared(mask: span.Mask, strategy: str) -> list[object]:
    """Attention over virtual ranks beside dense attention on one device: the largest differences."""
    seq_len = mask.natural_len
    layout = span.Balanced(mask, ranks=RANKS, chunk=16)
    positions = [torch.tensor(shard) for shard in layout.positions(seq_len)]
    full = [torch.randn(1, heads, seq_len, 32, requires_grad=True) for heads in (8, 8, 8)]
    expected = F.scaled_dot_product_attention(*full, attn_mask=mask.dense(seq_len))
    expected_grads = torch.autograd.grad(expected.sum(), full)

    def run(world):
        own = positions[world.rank]
        shards = [x.detach()[:, :, own].requires_grad_() for x in full]
        out = span.attention(*shards, mask=mask, layout=layout, seq_len=seq_len, group=world, strategy=strategy)
        grads = torch.autograd.grad(out.sum(), shards)
        found, true = [out.detach(), *grads], [expected.detach(), *expected_grads]
        return [float((a - b[:, :, own]).abs().max()) for a, b in zip(found, true, strict=True)]

    errors = span.testing.loopback(RANKS).run(run)
    return [strategy, f"{max(e[0] for e in errors):.1e}", f"{max(max(e[1:]) for e in errors):.1e}"]


def measured(mask: span.Mask, layout: span.Layout) -> list[object]:
    """What a layout costs: balance, keys that must move, runs."""
    plan = span.Plan(mask, layout, SEQ_LEN, "needed")
    moved = sum(sum(plan.received(rank).values()) for rank in range(RANKS))
    runs = max(len(layout.runs(SEQ_LEN, rank)) for rank in range(RANKS))
    return [type(layout).__name__, f"{layout.imbalance(mask, SEQ_LEN):.3f}", moved, runs]


if __name__ == "__main__":
    main()
