"""Packed documents on one CUDA device, rank by rank: largest rank x ranks / one device's compiled flex_attention.

Documents are log-normal with a mean of 4k tokens, causal, bf16. Every rank's share is run alone (silent.py): compute
only. Beside our layouts and strategies run torch's own choices: keys gathered whole, dealt head-tail or by blocks
sorted by work. "enqueue" is how long it takes to say what is to be done: where it is most of the forward time, the GPU
waits. With a score_mod (ALiBi over the documents, a tanh soft-cap and a table of relative biases over causal ones) the
kernels flex and band compute, each over one device's compiled flex with the same score_mod.

Run: python -m benchmarks.flex_cuda [seq_len]        writes benchmarks/results/flex_cuda.md (or to --out FILE)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attnspan import Balanced, Causal, Documents, HeadTail, Layout, Mask, Plan, RoundRobinByWork
from attnspan.attention import execute
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.attention.score import Score
from attnspan.kernels import MergedOutputs
from benchmarks.report import folded, header
from benchmarks.silent import Silent, random_arenas

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, RANKS = 32, 128, 8
CEILINGS = (1.10, 1.15)
ScoreMod = Callable[..., torch.Tensor]


def documents(seq_len: int) -> list[int]:
    """Log-normal lengths, mean 4k."""
    random = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(int(torch.randn((), generator=random).add(7.8).exp()) + 1)
    lengths[-1] -= sum(lengths) - seq_len
    return lengths


def timed(fn) -> float:
    """Median milliseconds."""
    from triton.testing import do_bench

    return do_bench(fn, warmup=10, rep=40, return_mode="median")


def random(rows: int) -> torch.Tensor:
    return torch.randn(1, HEADS, rows, DIM, device="cuda", dtype=torch.bfloat16)


def alibi() -> ScoreMod:
    slopes = torch.linspace(0.01, 0.5, HEADS, device="cuda")
    return lambda score, b, h, q, k: score - slopes[h] * (q - k)


def soft_cap() -> ScoreMod:
    return lambda score, b, h, q, k: 30.0 * torch.tanh(score / 30.0)


def relative_bias() -> ScoreMod:
    table = torch.randn(HEADS, 257, device="cuda")
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(-128, 128) + 128]


SCORES: dict[str, Callable[[], ScoreMod]] = {"ALiBi": alibi, "soft-cap": soft_cap, "relative bias": relative_bias}


def one_device(mask: Mask, seq_len: int, score_mod) -> tuple[float, float]:
    """Forward, and forward + backward, of compiled flex_attention over the whole sequence."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (random(seq_len).requires_grad_() for _ in range(3))
    grad = random(seq_len)
    block_mask = mask.block_mask(seq_len, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True)

    def forward() -> torch.Tensor:
        return compiled(q, k, v, block_mask=block_mask, score_mod=score_mod)

    def quiet() -> None:
        with torch.no_grad():
            forward()

    return timed(quiet), timed(lambda: torch.autograd.grad(forward(), (q, k, v), grad))


def enqueued(fn) -> float:
    """Milliseconds until a call returns, not until it is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        fn()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    return (ended - start) / 5 * 1e3


def ours(plan: Plan, kernel: str, score: Score | None, rank: int) -> tuple[float, float, float]:
    """Forward, and forward + backward, of one rank; and how long forward takes to be enqueued."""
    call = BoundPlan(plan, Silent(rank, RANKS, "cuda"), kernel, score=score)
    rows = plan.layout.tokens(plan.seq_len)[rank]
    q, k, v, grad = (random(rows) for _ in range(4))
    inputs = Inputs(q, k, v, captured=[] if score is None else score.captured.for_query(q))

    def both() -> None:
        out, lse = execute.forward(call, inputs)
        execute.backward(call, inputs, MergedOutputs(grad, None, out, lse))

    with torch.no_grad(), random_arenas():
        forward = timed(lambda: execute.forward(call, inputs))
        return forward, timed(both), enqueued(lambda: execute.forward(call, inputs))


def rows(mask: Mask) -> list[tuple[str, Mask, Layout, str, str, str]]:
    """(name, mask, layout, strategy, kernel, name of the score_mod)."""
    balanced, causal, zigzag = Balanced(mask, ranks=RANKS), Causal(), HeadTail(RANKS)
    dealt = RoundRobinByWork(mask, ranks=RANKS)
    return [
        ("Balanced, needed", mask, balanced, "needed", "flex", ""),
        ("Balanced, needed", mask, balanced, "needed", "auto", ""),
        ("Balanced, gather", mask, balanced, "gather", "flex", ""),
        ("torch: head-tail, gather", mask, zigzag, "gather", "flex", ""),
        ("torch: by work, gather", mask, dealt, "gather", "flex", ""),
        ("Balanced, needed", mask, balanced, "needed", "band", "ALiBi"),
        ("Balanced, needed", mask, balanced, "needed", "flex", "ALiBi"),
        ("torch: head-tail, gather", mask, zigzag, "gather", "flex", "ALiBi"),
        *(
            ("causal, head-tail, gather", causal, zigzag, "gather", kernel, name)
            for name in ("soft-cap", "relative bias")
            for kernel in ("band", "flex")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seq_len", nargs="?", type=int, default=65536)
    parser.add_argument("--score", nargs="+", default=None, help=f"only rows with these: {', '.join(SCORES)}, or ''")
    parser.add_argument("--out", default=str(RESULTS / "flex_cuda.md"))
    args = parser.parse_args()
    lengths = documents(args.seq_len)
    mask = Causal() & Documents(lengths)
    scores = {name: Score(made(), torch.device("cuda", 0)) for name, made in SCORES.items()}
    text = [
        *header("Packed documents on CUDA, compute only", "python -m benchmarks.flex_cuda"),
        f"{args.seq_len} tokens, {len(lengths)} documents (log-normal, mean 4k), causal, bf16, {HEADS} heads, "
        f"head dim {DIM}, {RANKS} ranks; the slowest rank, alone, x ranks / one device's compiled flex_attention. "
        f"Bar with Balanced: {CEILINGS[0]} forward, {CEILINGS[1]} forward + backward.",
        "",
    ]
    base: dict[str, tuple[float, float]] = {}
    table = [
        "| schedule | score_mod | kernel | imbalance | enqueue ms | fwd ms | fwd+bwd ms | fwd x ranks / one | "
        "both x ranks / one |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, over, layout, strategy, kernel, biased in rows(mask):
        if args.score is not None and biased not in args.score:
            continue
        score = scores.get(biased)
        if biased not in base:
            base[biased] = one_device(over, args.seq_len, score.fn if score is not None else None)
            with_mod = f", {biased}" if biased else ""
            text += [f"One device{with_mod}: {base[biased][0]:.2f} / {base[biased][1]:.2f} ms.", ""]
        plan = Plan(over, layout, args.seq_len, strategy)
        try:
            found = [ours(plan, kernel, score, rank) for rank in range(RANKS)]
        except Exception as error:
            table.append(f"| {name} | {biased} | {kernel} | {type(error).__name__}: {str(error)[:120]} | | | | | |")
            print(table[-1], flush=True)
            continue
        slowest = [max(each[i] for each in found) for i in range(3)]
        ratios = [ms * RANKS / one for ms, one in zip(slowest, base[biased], strict=False)]
        table.append(
            f"| {name} | {biased} | {kernel} | {plan.imbalance():.3f} | "
            f"{slowest[2]:.2f} | {slowest[0]:.2f} | {slowest[1]:.2f} | "
            f"**{ratios[0]:.3f}** | **{ratios[1]:.3f}** |"
        )
        print(table[-1], base[biased], flush=True)
        torch.cuda.empty_cache()
        Path(args.out).write_text(folded("\n".join([*text, *table, ""])))


if __name__ == "__main__":
    main()
