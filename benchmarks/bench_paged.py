"""What pages cost: the host's part, the device's part, and torch's PagedAttention in the same run.

Run: python benchmarks/bench_paged.py            the host's part and attention on this machine's CPU, one thread
     python benchmarks/bench_paged.py --cuda     decoding on a CUDA device
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from attnspan.paged import PageAllocator, PageLayer, PagePool, StepPlan
from attnspan.paged.metadata import tensors
from benchmarks.report import header

RESULTS = Path(__file__).parent / "results"
HEADS, KV_HEADS, DIM = 32, 8, 128
DECODES = [(32, 8192), (64, 16384), (128, 4096), (1, 131072)]
UNLIKE = {
    "512 to 16k, 32 rows": [int(512 * 32 ** (row / 31)) for row in range(32)],
    "64k and 31 x 1k": [65536] + [1024] * 31,
}
LAYERS = 8
"""Calls in a graph, as many as layers that follow one another; they read two layers' pages in turn."""


def host_ms(run: Callable[[], object], times: int = 30) -> float:
    """The fastest of a host clock's readings: whatever else a machine does only adds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def allocators() -> list[str]:
    """A batched step of 512 sequences beside torch's reserve, one by one."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    lines = ["## A step of 512 sequences, milliseconds", "",
             "| pages in the pool | attnspan, a token each | attnspan, a page each | torch, a page each |",
             "|---|---|---|---|"]  # fmt: skip
    for pages in (4096, 32768, 262144):
        allocator = PageAllocator(num_pages=pages, page_size=16)
        seqs = [allocator.add() for _ in range(512)]
        allocator.step([(seq, 16) for seq in seqs])
        grow, plain = [], []
        for turn in range(16 * 6):
            batch = [(seq, 1) for seq in seqs]
            start = time.perf_counter()
            allocator.step(batch)
            (plain if turn % 16 else grow).append(time.perf_counter() - start)
        taken = "-"
        if pages <= 32768:
            theirs = PagedAttention(pages, 16, 512, device="cpu")
            rows = [torch.tensor([row]) for row in range(512)]
            for row in rows:
                theirs.reserve(row, torch.tensor([16]))
            grown = [host_ms(lambda n=n, t=theirs, r=rows: reserve(t, r, 16 * n), 1) for n in range(2, 7)]
            taken = f"{min(grown):.1f}"
        lines.append(f"| {pages} | {1e3 * min(plain):.3f} | {1e3 * min(grow):.3f} | {taken} |")
    return lines


def reserve(paged, rows, length: int) -> None:
    """torch's way to make room for many sequences."""
    for row in rows:
        paged.reserve(row, torch.tensor([length]))


def plans() -> list[str]:
    """A whole step: pages, tables and all that kernels are told; beside torch's block mask."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    lines = ["", "## Describing a step, milliseconds (32768 pages of 16, about 1024 tokens in each sequence)", "",
             "plan.step whole, the allocator's part included; a mask is two numbers, and costs nothing more.", "",
             "| sequences | attnspan, one in 16 takes a page | attnspan, all take a page | "
             "torch, convert_logical_block_mask |",
             "|---|---|---|---|"]  # fmt: skip
    for count in (128, 512):
        usual = step_ms(count, [1024 + row % 16 for row in range(count)])
        all_grow = step_ms(count, [1024] * count, every=16)
        taken = "-"
        if count == 128:
            theirs = PagedAttention(32768, 16, count, device="cpu")
            for row in range(count):
                theirs.reserve(torch.tensor([row]), torch.tensor([1024]))
            logical = create_block_mask(
                lambda b, h, q, k: k <= 1024, count, 1, 1, 1024, device="cpu", BLOCK_SIZE=(1, 16)
            )
            convert = theirs.convert_logical_block_mask
            taken = f"{host_ms(lambda convert=convert, mask=logical: convert(mask), 2):.1f}"
        lines.append(f"| {count} | {usual:.3f} | {all_grow:.3f} | {taken} |")
    return lines


def step_ms(count: int, lengths: list[int], every: int = 1) -> float:
    """The fastest of many steps of one token each, or of every so many of them."""
    allocator = PageAllocator(num_pages=65536, page_size=16)
    plan = StepPlan(PagePool(allocator, [PageLayer(1, 1)]), max_sequences=count, max_tokens=count, max_length=4096)
    batch = [(allocator.add(length), 1) for length in lengths]
    taken = [host_ms(lambda: plan.step(batch), 1) for _ in range(480)]
    return min(taken[::every])


def cpu_attention() -> list[str]:
    """Decoding over pages beside dense SDPA on keys that lie side by side."""
    lines = ["", "## Decoding on the CPU, float32, 8 query heads, 2 key heads, dim 64, milliseconds", "",
             "| batch x length | page | attnspan (gather) | dense SDPA, no pages |", "|---|---|---|---|"]  # fmt: skip
    for count, length in ((8, 2048), (32, 512), (1, 16384)):
        for size in (16, 128):
            pool, plan, _ = filled([length] * count, size, [PageLayer(2, 64)])
            q = torch.randn(count, 8, 64)
            ours = host_ms(lambda pool=pool, q=q, plan=plan: pool.attend(0, q, plan), 15)
            k, v = torch.randn(2, count, 2, length, 64).unbind()
            dense = q.view(count, 2, 4, 64)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            theirs = host_ms(lambda dense=dense, k=k, v=v, sdpa=sdpa: sdpa(dense, k, v), 15)
            lines.append(f"| {count} x {length} | {size} | {ours:.2f} | {theirs:.2f} |")
    return lines


def filled(
    lengths: list[int], size: int, layers: list[PageLayer], dtype: torch.dtype = torch.float32, device: str = "cpu"
):
    """A pool of random keys, its pages in random order, and a plan of one token for each sequence."""
    pages = sum(-(-length // size) + 1 for length in lengths) + 1
    allocator = PageAllocator(num_pages=pages, page_size=size)
    random.Random(0).shuffle(allocator._free)
    pool = PagePool(allocator, layers, dtype=dtype, device=device)
    for tensor in tensors(*pool.keys, *pool.values):
        if tensor.dtype == torch.int8:  # codes; of these none is float8's NaN
            tensor.copy_(torch.randint(0, 100, tensor.shape[1:], dtype=torch.int8, device=device))
        elif tensor.dim() == 3:  # scales
            tensor.uniform_(0.01, 0.02)
        else:
            tensor.normal_()
    plan = StepPlan(pool, max_sequences=len(lengths), max_tokens=len(lengths), max_length=max(lengths) + size)
    seqs = [allocator.add(length - 1) for length in lengths]
    plan.step([(seq, 1) for seq in seqs])
    return pool, plan, seqs


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def device_ms(run: Callable[[int], object], calls: int = LAYERS, times: int = 20) -> float:
    """Of one call, by device events: the median of replays of a graph of `calls` calls, which are told 0 and 1 in turn.

    Where it cannot be captured, of the calls themselves.
    """

    def each() -> None:
        for call in range(calls):
            run(call % 2)

    each()
    torch.cuda.synchronize()
    replay = each
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        replay = graph.replay
    except Exception:
        torch.cuda.synchronize()
    warm = time.perf_counter()
    while time.perf_counter() - warm < 0.03:  # clocks need a moment
        replay()
        torch.cuda.synchronize()
    taken = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / calls)
    return statistics.median(taken)


def copy_bandwidth() -> float:
    """TB/s, read and written, of the fastest copy that torch makes on the device."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    ways = (lambda turn: b.copy_(a), lambda turn: torch.mul(a, 1.0, out=b))
    return 2 * a.nbytes / min(device_ms(way) for way in ways) / 1e9


def torch_paged(count: int, length: int) -> float:
    """torch's PagedAttention with compiled flex, page 128, one layer, milliseconds."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pages = count * length // 128
    theirs = PagedAttention(pages, 128, count, device="cuda")
    for row in range(count):
        theirs.reserve(torch.tensor([row], device="cuda"), torch.tensor([length], device="cuda"))
    pairs = torch.randn(2, 2, 1, KV_HEADS, pages * 128, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(count, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    logical = create_block_mask(
        lambda b, h, q, k: k < length, count, 1, 1, length, device="cuda", BLOCK_SIZE=(128, 128)
    )
    mask = theirs.convert_logical_block_mask(logical)
    torch._dynamo.reset()
    call = torch.compile(flex_attention, dynamic=False)
    return device_ms(lambda turn: call(q, *pairs[turn], block_mask=mask, enable_gqa=True))


def dense_cudnn(count: int, length: int) -> float:
    """SDPA over keys that lie side by side: what a cache without pages could do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    pairs = torch.randn(2, 2, count, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(count, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return device_ms(
            lambda turn: torch.nn.functional.scaled_dot_product_attention(q, *pairs[turn], enable_gqa=True)
        )


def decoded(lengths: list[int], size: int, quantised: torch.dtype | None = None, kernel: str = "decode", **how: int):
    """(milliseconds of a call, bytes it reads, the plan, its sequences); `how` is for `device_ms`."""
    layers = [PageLayer(KV_HEADS, DIM, quantised=quantised)] * 2
    pool, plan, seqs = filled(lengths, size, layers, torch.bfloat16, "cuda")
    q = torch.randn(len(lengths), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    taken = device_ms(lambda turn: pool.attend(turn, q, plan, kernel=kernel), **how)
    numbers = 2 * sum(lengths) * KV_HEADS
    return taken, numbers * (2 * DIM if quantised is None else DIM + 4), plan, seqs


def cuda_decode(rivals: bool) -> list[str]:
    """Decoding, one layer: milliseconds, bandwidth, and the host's part of a step."""
    copy = copy_bandwidth()
    lines = [f"Device copy: {copy:.2f} TB/s. 32 query heads, 8 key heads, dim 128, bf16; pages in random order.",
             f"Time of a call in a graph of {LAYERS}, which read two layers in turn; `alone`: in a graph of one.",
             "",
             "| batch x length | page | attnspan ms | TB/s | of copy | alone, ms | of copy | plan.step, host ms | "
             "of 32 layers | torch paged flex ms | dense cuDNN ms |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for count, length in DECODES:
        theirs = f"{torch_paged(count, length):.3f}" if rivals else "-"
        dense = f"{dense_cudnn(count, length):.3f}" if rivals else "-"
        for size in (16, 128):
            ours, moved, plan, seqs = decoded([length] * count, size)
            alone, *_ = decoded([length] * count, size, calls=1)
            batch = [(seq, 1) for seq in seqs]
            host = host_ms(lambda plan=plan, batch=batch: plan.step(batch), size)
            torch.cuda.synchronize()
            speed, speed_alone = moved / ours / 1e9, moved / alone / 1e9
            lines.append(
                f"| {count} x {length} | {size} | {ours:.3f} | {speed:.2f} | {speed / copy:.1%} | {alone:.3f} | "
                f"{speed_alone / copy:.1%} | {host:.3f} | {host / (32 * ours):.1%} | {theirs} | {dense} |"
            )
            print(lines[-1], flush=True)
    lines += ["", "Rows that differ in length:", "", "| lengths | page | attnspan ms | TB/s | of copy |",
              "|---|---|---|---|---|"]  # fmt: skip
    for name, lengths in UNLIKE.items():
        for size in (16, 128):
            ours, moved, *_ = decoded(lengths, size)
            speed = moved / ours / 1e9
            lines.append(f"| {name} | {size} | {ours:.3f} | {speed:.2f} | {speed / copy:.1%} |")
    return lines + eight_bits()


def eight_bits() -> list[str]:
    """Pages of 16 in 8 bits, by the kernel that walks them and by the one that copies them."""
    lines = ["", "Pages in 8 bits, page 16, milliseconds; `gather` without a graph:", "",
             "| batch x length | bf16 | int8 | float8_e4m3fn | int8, gather |", "|---|---|---|---|---|"]  # fmt: skip
    for count, length in DECODES:
        lengths = [length] * count
        times = [decoded(lengths, 16, stored)[0] for stored in (None, torch.int8, torch.float8_e4m3fn)]
        times.append(decoded(lengths, 16, torch.int8, "gather", calls=1, times=3)[0])
        lines.append(f"| {count} x {length} | {' | '.join(f'{ms:.3f}' for ms in times)} |")
    return lines


def main() -> None:
    """Write the result file of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without rivals")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.cuda:
        lines = header("Decoding over pages", "python benchmarks/bench_paged.py --cuda") + cuda_decode(not asked.alone)
    else:
        lines = header("What pages cost on the host", "python benchmarks/bench_paged.py")
        lines += allocators() + plans() + cpu_attention()
    out = asked.out or RESULTS / ("paged_cuda.md" if asked.cuda else "paged_cpu.md")
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
