"""Context parallel attention, compute only, on one CUDA device: largest rank x ranks / one device's cuDNN.

Every rank's share is run alone (silent.py) and timed; 1.0 would mean that splitting costs nothing. torch's own ring is
run beside it in the same process. Causal, bf16, 32 heads, head dim 128, 8 ranks.

Run: python -m benchmarks.bench_cp [seq_len ...]        writes benchmarks/results/cp_compute.md (or to --out FILE)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnspan import Causal, HeadTail, Plan
from attnspan.attention import execute
from attnspan.attention.call import Call
from attnspan.attention.lane import Final
from benchmarks.report import header, progress
from benchmarks.silent import Silent, random_arenas
from benchmarks.torch_ring import ring

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, RANKS = 32, 128, 8
PASSES = 2


def timed(fn: Callable[[], object]) -> float:
    """Median milliseconds."""
    from triton.testing import do_bench

    return do_bench(fn, warmup=15, rep=60, return_mode="median")


def one_device(seq_len: int, kv_heads: int) -> tuple[float, float]:
    """Forward, and forward + backward, of one cuDNN call over the whole sequence."""
    q, k, v = (random(h, seq_len).requires_grad_() for h in (HEADS, kv_heads, kv_heads))
    grad = random(HEADS, seq_len)

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != HEADS)
        torch.autograd.grad(out, (q, k, v), grad)

    def forward() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != HEADS)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return timed(forward), timed(both)


def ours(seq_len: int, kv_heads: int, strategy: str, rank: int) -> tuple[float, float]:
    """Forward, and forward + backward, of one rank."""
    plan = Plan(Causal(), HeadTail(ranks=RANKS), seq_len, strategy)
    call = Call(plan, Silent(rank, RANKS, "cuda"))
    rows = plan.layout.tokens(seq_len)[rank]
    q, k, v = (random(h, rows) for h in (HEADS, kv_heads, kv_heads))
    grad = random(HEADS, rows)

    def both() -> None:
        out, lse = execute.forward(call, q, k, v)
        execute.backward(call, q, k, v, Final(grad, None, out, lse))

    with torch.no_grad(), random_arenas():
        return timed(lambda: execute.forward(call, q, k, v)), timed(both)


def torch_ring(seq_len: int, rank: int) -> tuple[float, float]:
    """The same of torch's ring."""
    shards = [tuple(random(HEADS, seq_len // RANKS) for _ in range(3)) for _ in range(RANKS)]
    with torch.no_grad():
        return timed(lambda: ring(rank, shards, False)), timed(lambda: ring(rank, shards, True))


def random(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, DIM, device="cuda", dtype=torch.bfloat16)


def largest(measure: Callable[[int], tuple[float, float]], ranks: range) -> tuple[float, float]:
    """The slowest rank, forward and forward + backward; of each rank the better of two medians, taken apart in time.

    The largest of many noisy figures is biased upwards; one clock dip would otherwise be taken for a slow rank.
    """
    passes = [[measure(rank) for rank in ranks] for _ in range(PASSES)]
    forward, both = ([min(each[rank][i] for each in passes) for rank in range(len(ranks))] for i in range(2))
    return max(forward), max(both)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seq_len", nargs="*", type=int, default=[32768, 65536, 131072])
    parser.add_argument("--out", default=str(RESULTS / "cp_compute.md"))
    parser.add_argument("--strategies", default="gather,needed(1),needed(2),ring")
    args = parser.parse_args()
    lines = []
    rivals = [*args.strategies.split(","), "torch ring"]
    cells = [(n, rival) for n in args.seq_len for rival in rivals]
    base = {n: tuple(map(min, *(one_device(n, HEADS) for _ in range(PASSES)))) for n in args.seq_len}
    for seq_len, rival in progress(cells, "ranks"):
        if rival == "torch ring":
            slowest = largest(lambda rank, n=seq_len: torch_ring(n, rank), range(RANKS))
        else:
            slowest = largest(lambda rank, n=seq_len, s=rival: ours(n, HEADS, s, rank), range(RANKS))
        forward, both = (ms * RANKS / one for ms, one in zip(slowest, base[seq_len], strict=True))
        torch.cuda.empty_cache()
        lines.append(
            f"| {seq_len} | {rival} | {slowest[0]:.2f} | {slowest[1]:.2f} | **{forward:.3f}** | **{both:.3f}** |"
        )
        print(lines[-1], flush=True)
    text = "\n".join(
        [
            *header("Context parallelism, compute only", "python -m benchmarks.bench_cp"),
            f"Causal, bf16, {HEADS} heads, head dim {DIM}, {RANKS} ranks, HeadTail; the slowest rank, alone.",
            "",
            "One device, cuDNN, ms forward / forward + backward: "
            + "; ".join(f"{n}: {f:.2f} / {b:.2f}" for n, (f, b) in base.items()),
            "",
            "| tokens | schedule | fwd ms | fwd+bwd ms | fwd x ranks / one device | fwd+bwd x ranks / one device |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )
    Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
