"""What latents save on the wire, and what they cost: DeepSeek-V3's attention over many ranks, planned.

    python -m benchmarks.latent [--tokens 131072] [--ranks 64] [--hardware h100-nvlink] [--out FILE]

A token's keys and values are 128 heads of 192 + 128 numbers; its latent, with the rotated part of its key, is 576.
Nothing runs: bytes are those that the wire is counted to carry (tests/attention/test_latent.py), memory is held to
allocations (tests/plan/test_memory_counted.py), and times are the cost model's, for a preset.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.plan import Plan, Shape, choose, predict
from attnspan.plan.cost import Hardware
from attnspan.plan.drawing import in_bytes, in_seconds
from attnspan.plan.traffic import received_bytes

SIZES = {"heads": 128, "head_dim": 192, "v_head_dim": 128}
SHAPES = {"keys": Shape(**SIZES), "latent": Shape(**SIZES, latent=576)}
STRATEGIES = ["ring", "needed(4)", "gather", "ulysses"]
RESULTS = Path(__file__).parent / "results" / "latent.md"


def rows(tokens: int, ranks: int, machine: Hardware) -> list[list[str]]:
    """A line for each strategy and what travels: of the busiest of some ranks, one layer, bf16."""
    found = []
    for strategy in STRATEGIES:
        for what, shape in SHAPES.items():
            if strategy == "ulysses" and (shape.latent or ranks > shape.heads):
                continue
            plan = Plan(Causal(), HeadTail(ranks), tokens, strategy)
            looked = sorted({0, ranks // 2, ranks - 1})
            moved = [received_bytes(plan, shape, rank, rounds=machine.rounds) for rank in looked]
            memory = max(plan.memory(rank, shape, backward=True).total for rank in looked)
            times = [predict(plan, rank, shape, machine, backward=True) for rank in looked]
            slowest = max(times, key=lambda each: each.seconds)
            most = [max(each[way] for each in moved) for way in (0, 1)]
            line = [strategy, what, *map(in_bytes, most), in_bytes(memory)]
            found.append([*line, in_seconds(slowest.seconds), in_seconds(slowest.exposed)])
    return found


def text(tokens: int, ranks: int, machine: Hardware) -> str:
    head = ["strategy", "travels", "received forward", "backward", "peak memory", "predicted", "of that waiting"]
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows(tokens, ranks, machine))]
    taken = {
        what: choose(Causal(), seq_len=tokens, ranks=ranks, shape=shape, hardware=machine, layouts=[HeadTail(ranks)])
        for what, shape in SHAPES.items()
    }
    auto = [
        f"`auto` with {what}: {c.plan.strategy!r}, {in_seconds(c.candidates[0].seconds)}." for what, c in taken.items()
    ]
    return "\n".join(lines) + "\n\n" + "\n".join(auto)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hardware", default="h100-nvlink")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = Hardware.of(args.hardware)
    found = text(args.tokens, args.ranks, machine)
    title = (
        f"{date.today()}, planned for {machine.name} ({machine.note}).\n"
        f"DeepSeek-V3's attention, causal, {args.tokens:,} tokens on {args.ranks} ranks, head-tail, bf16: one layer,\n"
        "forward and backward, on one rank.\n"
        f"`python -m benchmarks.latent --tokens {args.tokens} --ranks {args.ranks} --hardware {args.hardware}`"
    )
    print(found)
    if args.out:
        args.out.write_text(f"# Latents on the wire\n\n{title}\n\n{found}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
