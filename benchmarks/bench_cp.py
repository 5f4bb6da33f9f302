"""Context parallel attention, compute only, on one CUDA device: largest rank x ranks / the best one-device kernel.

Every rank's share is run alone (silent.py) and timed; 1.0 would mean that splitting costs nothing. torch's own ring is
run beside it in the same process where it can (causal, ungrouped). bf16, 32 heads, head dim 128, 8 ranks.

Run: python -m benchmarks.bench_cp [work ...]        writes benchmarks/results/cp_compute.md (or to --out FILE)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnspan import Balanced, Causal, Contiguous, Documents, HeadTail, Layout, Plan, SlidingWindow
from attnspan.attention import execute
from attnspan.attention.call import Call, Inputs
from attnspan.kernels import Final, Into, Spec, bands
from attnspan.kernels.merge import PartialResult, merge
from attnspan.masks import Mask
from attnspan.masks.tile import tiles_of
from benchmarks.flex_cuda import documents
from benchmarks.report import command, folded, header, progress
from benchmarks.silent import Silent, random_arenas
from benchmarks.torch_ring import ring

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, RANKS = 32, 128, 8
PASSES = 2
Times = tuple[float, float]


class Work(NamedTuple):
    """What is attended, how it is split, what one device would compute it with, and the targets."""

    mask: Mask
    layout: Layout
    seq_len: int
    kernels: tuple[str, ...] = ("cudnn",)
    strategies: tuple[str, ...] = ("needed(2)",)
    kv_heads: int = HEADS
    target: Times = (1.02, 1.04)


def works() -> dict[str, Work]:
    """By name; documents are log-normal with a mean of 4k tokens."""
    causal, split = Causal(), HeadTail(RANKS)
    packed = Causal() & Documents(documents(65536))
    return {
        "causal 32k": Work(causal, split, 32768, target=(1.05, 1.10)),
        "causal 64k": Work(causal, split, 65536),
        "causal 128k": Work(causal, split, 131072, target=(1.00, 1.02)),
        "grouped 32:8, causal 64k": Work(causal, split, 65536, kv_heads=8),
        "documents 64k": Work(
            packed, Balanced(packed, ranks=RANKS), 65536, ("flex",), ("needed", "gather"), target=(1.05, 1.08)
        ),
        "window 4k at 128k": Work(
            SlidingWindow(4095), Contiguous(RANKS), 131072, ("flex", "band"), ("needed",), target=(1.10, 1.15)
        ),
    }


def timed(fn: Callable[[], object]) -> float:
    """Median milliseconds."""
    from triton.testing import do_bench

    return do_bench(fn, warmup=15, rep=60, return_mode="median")


def random(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, DIM, device="cuda", dtype=torch.bfloat16)


# ---- one device ----------------------------------------------------------------------------------------------------


def one_device(work: Work) -> Times:
    """Forward, and forward + backward, of the best kernel over the whole sequence, the better of two medians."""
    return least([ONE_DEVICE[kernel](work) for kernel in work.kernels for _ in range(PASSES)])


def least(times: Sequence[Times]) -> Times:
    forward, both = zip(*times, strict=True)
    return min(forward), min(both)


def inputs(work: Work) -> list[torch.Tensor]:
    return [random(heads, work.seq_len).requires_grad_() for heads in (HEADS, work.kv_heads, work.kv_heads)]


def by_autograd(work: Work, attend: Callable[..., torch.Tensor]) -> Times:
    q, k, v = inputs(work)
    grad = random(HEADS, work.seq_len)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    return timed(forward), timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad))


def by_cudnn(work: Work) -> Times:
    assert work.mask == Causal(), "SDPA's own mask"
    how = {"is_causal": True, "enable_gqa": work.kv_heads != HEADS}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return by_autograd(work, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how))


def by_flex(work: Work) -> Times:
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = work.mask.block_mask(work.seq_len, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True)
    return by_autograd(work, lambda q, k, v: compiled(q, k, v, block_mask=block_mask))


def by_band(work: Work) -> Times:
    q, k, v = (x.detach() for x in inputs(work))
    grad, spec = random(HEADS, work.seq_len), Spec(DIM**-0.5)
    tiles = tuple(tiles_of(work.mask.bands(work.seq_len)))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return bands.forward(spec, q, k, v, tiles, q.dtype)

    def both() -> None:
        into = Into(*(torch.empty_like(x) for x in (q, k, v)))
        bands.backward(spec, Final(grad, None, *forward()), q, k, v, tiles, into)

    return timed(forward), timed(both)


ONE_DEVICE = {"cudnn": by_cudnn, "flex": by_flex, "band": by_band}


# ---- one rank of eight ---------------------------------------------------------------------------------------------


def ours(work: Work, strategy: str, rank: int) -> Times:
    """Forward, and forward + backward, of one rank."""
    plan = Plan(work.mask, work.layout, work.seq_len, strategy)
    call = Call(plan, Silent(rank, RANKS, "cuda"))
    rows = plan.layout.tokens(work.seq_len)[rank]
    q, k, v = (random(heads, rows) for heads in (HEADS, work.kv_heads, work.kv_heads))
    grad = random(HEADS, rows)

    def both() -> None:
        out, lse = execute.forward(call, Inputs(q, k, v))
        execute.backward(call, Inputs(q, k, v), Final(grad, None, out, lse))

    with torch.no_grad(), random_arenas():
        return timed(lambda: execute.forward(call, Inputs(q, k, v))), timed(both)


def torch_ring(work: Work, rank: int) -> Times:
    """The same of torch's ring."""
    shards = [tuple(random(HEADS, work.seq_len // RANKS) for _ in range(3)) for _ in range(RANKS)]
    with torch.no_grad():
        return timed(lambda: ring(rank, shards, False)), timed(lambda: ring(rank, shards, True))


def largest(measure: Callable[[int], Times]) -> Times:
    """The slowest rank, forward and forward + backward; of each rank the better of two medians, taken apart in time.

    The largest of many noisy figures is biased upwards; one clock dip would otherwise be taken for a slow rank.
    """
    passes = [[measure(rank) for rank in range(RANKS)] for _ in range(PASSES)]
    forward, both = zip(*(least(list(each)) for each in zip(*passes, strict=True)), strict=True)
    return max(forward), max(both)


# ---- merging -------------------------------------------------------------------------------------------------------


def merging() -> str:
    """Two partial results of 8k rows joined into a third, over a copy of as many bytes."""

    def part() -> PartialResult:
        return PartialResult(random(HEADS, 8192), torch.randn(1, HEADS, 8192, device="cuda"))

    into, a, b = part(), part(), part()
    moved = 3 * sum(x.numel() * x.element_size() for x in a)
    source = torch.randn(moved // 8, device="cuda")
    target = torch.empty_like(source)
    speeds = [moved / timed(fn) / 1e9 for fn in (lambda: merge(into, a, b), lambda: target.copy_(source))]
    return f"Merge of two partial results: {speeds[0]:.2f} TB/s, {speeds[0] / speeds[1]:.0%} of a copy (target 85 %)."


# ---- the table -----------------------------------------------------------------------------------------------------


def main() -> None:
    known = works()
    parser = argparse.ArgumentParser()
    parser.add_argument("work", nargs="*", default=list(known), help=", ".join(known))
    parser.add_argument("--out", default=str(RESULTS / "cp_compute.md"))
    args = parser.parse_args()
    lines = []
    for name in progress(args.work, "work"):
        work = known[name]
        base = one_device(work)
        rivals = {s: lambda rank, s=s, work=work: ours(work, s, rank) for s in work.strategies}
        if work.kernels == ("cudnn",) and work.kv_heads == HEADS:
            rivals["torch ring"] = lambda rank, work=work: torch_ring(work, rank)
        for rival, measure in rivals.items():
            slowest = largest(measure)
            ratios = [ms * RANKS / one for ms, one in zip(slowest, base, strict=True)]
            lines.append(
                f"| {name} | {base[0]:.2f} / {base[1]:.2f} | {rival} | {slowest[0]:.2f} / {slowest[1]:.2f} | "
                f"**{ratios[0]:.3f} / {ratios[1]:.3f}** | {work.target[0]:.2f} / {work.target[1]:.2f} |"
            )
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    text = "\n".join(
        [
            *header("Context parallelism, compute only", command("python -m benchmarks.bench_cp")),
            f"bf16, {HEADS} heads, head dim {DIM}, {RANKS} ranks, HeadTail (documents: Balanced, window: Contiguous);",
            "the slowest rank, alone, of each the better of two medians. Milliseconds forward / forward + backward,",
            "and the slowest rank x ranks over one device: cuDNN, for documents compiled flex_attention, for the",
            "window the better of compiled flex_attention and `band`.",
            "",
            "| work | one device, ms | schedule | slowest rank, ms | x ranks / one device | target |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            merging(),
            "",
        ]
    )
    Path(args.out).write_text(folded(text))
    print(text.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
