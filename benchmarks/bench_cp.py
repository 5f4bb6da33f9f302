"""Context parallel attention, compute only, on one CUDA device: largest rank x ranks / the best one-device kernel.

Every rank's share is run alone (silent.py) and timed; 1.0 would mean that splitting costs nothing. The ceiling is the
fastest of FlashAttention-4 (where flash-attn-4 is installed), cuDNN and compiled flex_attention over the whole
sequence, in the same process. `auto` and `flash4` are measured beside each other, and torch's own ring where it can
(causal, ungrouped). bf16, 32 heads, head dim 128, 8 ranks; the works with 64:8 heads are those that MagiAttention
publishes, with documents of our own. What a kernel refuses is told with its reason. The file is written after every
work, so that a run that is cut short leaves what it has; the last thing printed is a short table.

Run: python -m benchmarks.bench_cp [work ...]        writes benchmarks/results/cp_compute.md (or to --out FILE)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnspan import Balanced, Causal, Contiguous, Documents, HeadTail, Layout, Plan, SlidingWindow
from attnspan.attention import execute
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.errors import KernelError
from attnspan.kernels import GradientBuffers, MergedOutputs, Spec, bands, flash4
from attnspan.kernels.merge import PartialResult, merge
from attnspan.masks import Mask
from attnspan.masks.algebra import area
from attnspan.masks.tile import tiles_of
from benchmarks.flex_cuda import documents
from benchmarks.report import command, folded, header, progress
from benchmarks.silent import Silent, random_arenas
from benchmarks.torch_ring import ring

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda"
HEADS, DIM, RANKS = 32, 128, 8
PASSES = 2
LONG = 30.0
"""Milliseconds of a call that is timed by hand."""

MAX_RANKS = 8
"""The most ranks of a work that are timed: those with the most pairs."""
Times = tuple[float, float]


class Schedule(NamedTuple):
    """How a rank's share is computed."""

    strategy: str
    kernel: str


AUTO, FLASH4 = Schedule("needed(2)", "auto"), Schedule("needed", "flash4")
ONE_STEP = (Schedule("needed", "auto"), FLASH4)


class Work(NamedTuple):
    """What is attended, how it is split, what one device would compute it with, and the targets: x ranks over one
    device, or TFLOP/s where they are larger. `lengths` and `window` say the mask as FlashAttention takes it."""

    mask: Mask
    layout: Layout
    seq_len: int
    kernels: tuple[str, ...] = ("fa4", "cudnn")
    schedules: tuple[Schedule, ...] = (AUTO, FLASH4)
    heads: int = HEADS
    kv_heads: int = HEADS
    lengths: tuple[int, ...] = ()
    window: int | None = None
    target: tuple[float | None, float | None] = (None, None)

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def flops(self) -> int:
        """Of the forward pass; backward is 2.5 times as much."""
        return 4 * area(self.mask.bands(self.seq_len)) * self.heads * DIM


def works() -> dict[str, Work]:
    """By name; documents are log-normal with a mean of 4k tokens."""
    causal, split = Causal(), HeadTail(RANKS)
    return {
        "causal 32k": Work(causal, split, 32768, target=(1.06, 1.12)),
        "causal 64k": Work(causal, split, 65536, target=(1.04, 1.05)),
        "causal 128k": Work(causal, split, 131072, target=(1.01, 1.03)),
        "grouped 32:8, causal 64k": Work(causal, split, 65536, kv_heads=8, target=(1.04, 1.05)),
        "documents 64k": packed(65536, RANKS, kernels=("fa4", "flex"), target=(1.12, 1.10)),
        "window 4k at 128k": Work(
            SlidingWindow(4095), Contiguous(RANKS), 131072, ("fa4", "flex", "band"), ONE_STEP, window=4095,
            target=(1.10, 1.15),
        ),
        "64:8 heads, causal, 8k a rank": Work(
            causal, split, 65536, ("fa4",), (FLASH4,), heads=64, kv_heads=8, target=(600, None)
        ),
        "64:8 heads, causal, 16k a rank": Work(
            causal, split, 131072, ("fa4",), (FLASH4,), heads=64, kv_heads=8, target=(600, None)
        ),
        "64:8 heads, documents, 8k a rank": packed(65536, RANKS, heads=64, kv_heads=8, target=(520, None)),
        "64:8 heads, documents, 16k a rank": packed(131072, RANKS, heads=64, kv_heads=8, target=(520, None)),
        **{f"documents, 8k a rank, {n} ranks": packed(8192 * n, n, schedules=(FLASH4,)) for n in (2, 16, 64)},
    }  # fmt: skip


def packed(seq_len: int, ranks: int, kernels: tuple[str, ...] = ("fa4",), **differs: object) -> Work:
    """Causal documents, balanced over ranks."""
    lengths = tuple(documents(seq_len))
    mask = Causal() & Documents(list(lengths))
    return Work(
        mask, Balanced(mask, ranks=ranks), seq_len, kernels, lengths=lengths, **{"schedules": ONE_STEP, **differs}
    )


def timed(fn: Callable[[], object]) -> float:
    """Median milliseconds; of three calls where one alone takes as long as do_bench would repeat it."""
    from triton.testing import do_bench

    fn()
    if once(fn) < LONG:
        return do_bench(fn, warmup=15, rep=60, return_mode="median")
    return median(once(fn) for _ in range(3))


def once(fn: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def random(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, DIM, device=DEVICE, dtype=torch.bfloat16)


# ---- one device ----------------------------------------------------------------------------------------------------


class Ceiling(NamedTuple):
    """The fastest kernel of one device, forward and forward + backward, and which they were."""

    times: Times
    kernels: tuple[str, str]

    def __str__(self) -> str:
        names = " / ".join(dict.fromkeys(self.kernels))
        return f"{self.times[0]:.2f} / {self.times[1]:.2f} ({names})"


def one_device(work: Work) -> Ceiling | None:
    """Of each kernel the better of two medians over the whole sequence; None where none of them is installed."""
    able = [kernel for kernel in work.kernels if kernel != "fa4" or flash4.installed() == flash4.VERSION]
    found = {kernel: least([ONE_DEVICE[kernel](work) for _ in range(PASSES)]) for kernel in able}
    for kernel, times in found.items():
        print(f"  one device, {kernel}: {times[0]:.2f} / {times[1]:.2f} ms", flush=True)
    if not found:
        return None
    first, second = (min(found, key=lambda kernel, side=side: found[kernel][side]) for side in (0, 1))
    return Ceiling((found[first][0], found[second][1]), (first, second))


def least(times: Sequence[Times]) -> Times:
    forward, both = zip(*times, strict=True)
    return min(forward), min(both)


def inputs(work: Work) -> list[torch.Tensor]:
    return [random(heads, work.seq_len).requires_grad_() for heads in (work.heads, work.kv_heads, work.kv_heads)]


def by_autograd(work: Work, attend: Callable[..., torch.Tensor]) -> Times:
    q, k, v = inputs(work)
    grad = random(work.heads, work.seq_len)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    return timed(forward), timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad))


def by_cudnn(work: Work) -> Times:
    assert work.mask == Causal(), "SDPA's own mask"
    how = {"is_causal": True, "enable_gqa": work.kv_heads != work.heads}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return by_autograd(work, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how))


def by_flex(work: Work) -> Times:
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = work.mask.block_mask(work.seq_len, device=DEVICE)
    compiled = torch.compile(flex_attention, fullgraph=True)
    return by_autograd(work, lambda q, k, v: compiled(q, k, v, block_mask=block_mask))


def by_band(work: Work) -> Times:
    q, k, v = (x.detach() for x in inputs(work))
    grad, spec = random(work.heads, work.seq_len), Spec(DIM**-0.5)
    tiles = tuple(tiles_of(work.mask.bands(work.seq_len)))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return bands.forward(spec, q, k, v, tiles, q.dtype)

    def both() -> None:
        into = GradientBuffers(*(torch.empty_like(x) for x in (q, k, v)))
        bands.backward(spec, MergedOutputs(grad, None, *forward()), q, k, v, tiles, into)

    return timed(forward), timed(both)


def by_fa4(work: Work) -> Times:
    """FlashAttention-4 as it is called without us: (B, S, H, D), or documents one after another."""
    calls = flash4.interface()
    sizes = [work.heads, work.kv_heads, work.kv_heads, work.heads]
    q, k, v, grad = (random(heads, work.seq_len).transpose(1, 2).contiguous() for heads in sizes)
    out, lse = torch.empty_like(q), q.new_empty(1, work.heads, work.seq_len, dtype=torch.float32)
    options = {"softmax_scale": DIM**-0.5, "window_size_left": work.window, "window_size_right": 0}
    if work.lengths:
        starts = torch.tensor([0, *accumulate(work.lengths)], dtype=torch.int32, device=DEVICE)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": max(work.lengths), "max_seqlen_k": max(work.lengths)}
        q, k, v, grad, out, lse = (x[0] for x in (q, k, v, grad, out, lse))
    grads = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}

    def forward() -> None:
        calls._flash_attn_fwd(q, k, v, out=out, lse=lse, **options)

    def both() -> None:
        forward()
        calls._flash_attn_bwd(q, k, v, out, grad, lse, **grads, **options)

    return timed(forward), timed(both)


ONE_DEVICE = {"fa4": by_fa4, "cudnn": by_cudnn, "flex": by_flex, "band": by_band}


# ---- one rank ----------------------------------------------------------------------------------------------------


def ours(work: Work, schedule: Schedule, rank: int) -> Times:
    """Forward, and forward + backward, of one rank."""
    plan = Plan(work.mask, work.layout, work.seq_len, schedule.strategy)
    call = BoundPlan(plan, Silent(rank, work.ranks, DEVICE), schedule.kernel)
    rows = plan.layout.tokens(work.seq_len)[rank]
    q, k, v = (random(heads, rows) for heads in (work.heads, work.kv_heads, work.kv_heads))
    grad = random(work.heads, rows)

    def both() -> None:
        out, lse = execute.forward(call, Inputs(q, k, v))
        execute.backward(call, Inputs(q, k, v), MergedOutputs(grad, None, out, lse))

    with torch.no_grad(), random_arenas():
        return timed(lambda: execute.forward(call, Inputs(q, k, v))), timed(both)


def torch_ring(work: Work, rank: int) -> Times:
    """The same of torch's ring."""
    shards = [tuple(random(HEADS, work.seq_len // RANKS) for _ in range(3)) for _ in range(RANKS)]
    with torch.no_grad():
        return timed(lambda: ring(rank, shards, False)), timed(lambda: ring(rank, shards, True))


def largest(measure: Callable[[int], Times], ranks: Sequence[int]) -> Times:
    """The slowest rank, forward and forward + backward; of each rank the better of two medians, taken apart in time.

    The largest of many noisy figures is biased upwards; one clock dip would otherwise be taken for a slow rank.
    """
    passes = [[measure(rank) for rank in ranks] for _ in range(PASSES)]
    forward, both = zip(*(least(list(each)) for each in zip(*passes, strict=True)), strict=True)
    return max(forward), max(both)


def busiest(work: Work) -> list[int]:
    """The ranks to time."""
    plan = Plan(work.mask, work.layout, work.seq_len, "needed")
    pairs = {rank: sum(step.area for step in plan.steps(rank)) for rank in range(work.ranks)}
    return sorted(sorted(pairs, key=lambda rank: -pairs[rank])[:MAX_RANKS])


# ---- merging -------------------------------------------------------------------------------------------------------


def merging() -> str:
    """Two partial results of 8k rows joined into a third, over a copy of as many bytes."""

    def part() -> PartialResult:
        return PartialResult(random(HEADS, 8192), torch.randn(1, HEADS, 8192, device=DEVICE))

    into, a, b = part(), part(), part()
    moved = 3 * sum(x.numel() * x.element_size() for x in a)
    source = torch.randn(moved // 8, device=DEVICE)
    target = torch.empty_like(source)
    speeds = [moved / timed(fn) / 1e9 for fn in (lambda: merge(into, a, b), lambda: target.copy_(source))]
    return f"Merge of two partial results: {speeds[0]:.2f} TB/s, {speeds[0] / speeds[1]:.0%} of a copy (target 85 %)."


# ---- the table -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table: a schedule of a work, or why there is none."""

    work: str
    schedule: str
    ceiling: str = ""
    slowest: str = ""
    ratio: str = ""
    rate: str = ""
    target: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


TITLES = Row(
    "work", "schedule", "one device, ms", "slowest rank, ms", "x ranks / one device", "TFLOP/s per GPU", "target"
)


def measured(name: str, work: Work) -> Iterator[Row]:
    """A row for each schedule of a work."""
    base, ranks = one_device(work), busiest(work)
    rivals = {
        f"{schedule.strategy}, {schedule.kernel}": lambda rank, schedule=schedule: ours(work, schedule, rank)
        for schedule in work.schedules
    }
    if work.mask == Causal() and work.heads == work.kv_heads:
        rivals["torch ring"] = lambda rank: torch_ring(work, rank)
    for rival, measure in rivals.items():
        try:
            slowest = largest(measure, ranks)
        except KernelError as refused:
            yield Row(name, rival, ratio=f"refused: {refused}")
            continue
        yield row(name, work, rival, base, slowest)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def row(name: str, work: Work, rival: str, base: Ceiling | None, slowest: Times) -> Row:
    ratio = ""
    if base is not None:
        forward, both = (ms * work.ranks / one for ms, one in zip(slowest, base.times, strict=True))
        ratio = f"**{forward:.3f} / {both:.3f}**"
    rates = (work.flops * factor / work.ranks / ms / 1e9 for factor, ms in zip((1, 3.5), slowest, strict=True))
    target = " / ".join("-" if each is None else f"{each:g}" for each in work.target)
    return Row(
        name, rival, "" if base is None else str(base), f"{slowest[0]:.2f} / {slowest[1]:.2f}", ratio,
        " / ".join(f"{rate:.0f}" for rate in rates), target,
    )  # fmt: skip


def page(rows: Sequence[Row], last: str = "") -> str:
    """The result file."""
    return "\n".join(
        [
            *header("Context parallelism, compute only", command("python -m benchmarks.bench_cp")),
            f"bf16, {HEADS} heads, head dim {DIM}, {RANKS} ranks, HeadTail (documents: Balanced, window: Contiguous);",
            "the slowest rank, alone, of each the better of two medians. Milliseconds forward / forward + backward,",
            "and the slowest rank x ranks over one device: the fastest of the kernels that are named.",
            f"flash-attn-4: {flash4.installed() or 'not installed'}.",
            "",
            str(TITLES),
            "|---" * len(TITLES) + "|",
            *map(str, rows),
            "",
            *([last, ""] if last else []),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    known = works()
    parser = argparse.ArgumentParser()
    parser.add_argument("work", nargs="*", default=list(known), help=", ".join(known))
    parser.add_argument("--out", default=str(RESULTS / "cp_compute.md"))
    args = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in progress(args.work, "work"):
        print(name, flush=True)
        for each in measured(name, known[name]):
            rows.append(each)
            print(f"  {each}", flush=True)
        Path(args.out).write_text(folded(page(rows)))
    Path(args.out).write_text(folded(page(rows, merging())))
    for each in rows:
        print(f"{each.work}: {each.schedule}: {each.ratio or each.rate} (target {each.target})", flush=True)


if __name__ == "__main__":
    main()
