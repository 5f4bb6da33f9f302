"""Peak memory of one rank on CUDA, measured, over what the plan predicts (`Plan.memory`).

One rank runs alone, through the real code, with a transport that moves nothing but keeps what travels until it is
waited for, as others do (silent.py). Causal, bf16, 32 heads, 8 ranks, HeadTail; of the ranks the one with the largest
prediction. torch's own ring is run beside it where it can: what it holds of other ranks is one shard at a time.

Run: python -m benchmarks.memory        writes benchmarks/results/memory.md (or to --out FILE); needs CUDA
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attnspan import Causal, HeadTail, Plan
from attnspan.attention import execute
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.kernels import MergedOutputs
from attnspan.plan import Shape
from attnspan.transports import Pending
from benchmarks.report import command, folded, header, progress
from benchmarks.silent import Silent
from benchmarks.torch_ring import ring

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, RANKS = 32, 128, 8
STRATEGIES = (
    "ring",
    "gather",
    "needed(1)",
    "needed(2)",
    "needed(4)",
    "ulysses",
    "ulysses(2) x ring",
    "ulysses(4) x gather",
)


class Keeping(Silent):
    """Keeps what travels until it is waited for."""

    def _post(self, sends, receives, what) -> Pending:
        kept = [sends, receives]
        return Pending(kept.clear)


def measured(plan: Plan, rank: int, shape: Shape, kernel: str) -> tuple[int, int]:
    """The peak of forward and of backward, in bytes."""
    call = BoundPlan(plan, Keeping(rank, RANKS, "cuda"), kernel)
    rows = plan.layout.tokens(plan.seq_len)[rank]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    q, k, v = (
        torch.randn(1, heads, rows, DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, shape.kv_heads, shape.kv_heads)
    )
    torch.cuda.reset_peak_memory_stats()
    out, lse = execute.forward(call, Inputs(q, k, v))
    forward = torch.cuda.max_memory_allocated() - before
    final = MergedOutputs(torch.randn_like(out), None, out, lse)
    torch.cuda.reset_peak_memory_stats()
    execute.backward(call, Inputs(q, k, v), final)
    return forward, torch.cuda.max_memory_allocated() - before


def of_torch(seq_len: int) -> tuple[int, int]:
    """The same of torch's ring, whose shards of other ranks but one are not counted."""
    rows = seq_len // RANKS
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    own = [torch.randn(1, HEADS, rows, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    other = [torch.randn_like(x) for x in own]
    shards = [tuple(own), *([tuple(other)] * (RANKS - 1))]
    before += other[0].numel() * other[0].element_size()  # q of others never travels
    found = []
    for backward in (False, True):
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            ring(0, shards, backward)
        found.append(torch.cuda.max_memory_allocated() - before)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seq_len", nargs="*", type=int, default=[32768, 131072])
    parser.add_argument("--strategy", action="append", help="all of them by default")
    parser.add_argument("--key-heads", action="append", type=int, help=f"8 and {HEADS} by default")
    parser.add_argument("--out", default=str(RESULTS / "memory.md"))
    args = parser.parse_args()
    cells = [
        (seq_len, kv_heads, kernel, strategy)
        for seq_len in args.seq_len
        for kv_heads in args.key_heads or (8, HEADS)
        for kernel in ("auto", "band")
        for strategy in args.strategy or STRATEGIES
    ]
    lines, off = [], []
    for seq_len, kv_heads, kernel, strategy in progress(cells, "plans"):
        plan = Plan(Causal(), HeadTail(RANKS), seq_len, strategy)
        shape = Shape(HEADS, kv_heads, DIM)
        how = {"joint": kernel == "band"}
        rank = max(range(RANKS), key=lambda each: plan.memory(each, shape, backward=True, **how).total)
        row = [f"| {seq_len} | {kv_heads} | {kernel} | {strategy} |"]
        for found, backward in zip(measured(plan, rank, shape, kernel), (False, True), strict=True):
            predicted = plan.memory(rank, shape, backward=backward, **how)
            off.append(abs(found / predicted.total - 1))
            row.append(f" {found / 2**20:.0f} | {predicted.total / 2**20:.0f} | **{found / predicted.total:.3f}** |")
            row.append(f" {predicted.largest} |" if backward else "")
        lines.append("".join(row))
        print(lines[-1], flush=True)
    for seq_len in args.seq_len:
        forward, both = (size / 2**20 for size in of_torch(seq_len))
        lines.append(f"| {seq_len} | {HEADS} | cudnn | torch's ring | {forward:.0f} | | | {both:.0f} | | | |")
        print(lines[-1], flush=True)
    columns = "| tokens | key heads | kernel | strategy | fwd MiB | predicted | ratio | bwd MiB | predicted | ratio |"
    text = "\n".join(
        [
            *header("Peak memory of one rank, measured over predicted", command("python -m benchmarks.memory")),
            f"Causal, bf16, {HEADS} heads, head dim {DIM}, {RANKS} ranks, HeadTail. The caller's own tensors are",
            "counted: query, key and value, in backward also out, lse and the gradient of out.",
            "",
            f"Within 10 %: {sum(each <= 0.1 for each in off)} of {len(off)}; largest deviation {max(off):.1%}.",
            "",
            columns + " largest terms of backward |",
            "|---" * 11 + "|",
            *lines,
            "",
        ]
    )
    Path(args.out).write_text(folded(text))


if __name__ == "__main__":
    main()
