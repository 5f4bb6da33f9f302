"""What it costs that ranks tell each other which operation they are in: attention with and without headers, NCCL.

    PYTHONPATH=src:. python -m benchmarks.headers 2 4

Forward + backward over NCCL ranks, which share one GPU where there are too few; wall time and the host's share of it in
milliseconds, medians of turns in both orders. Results are in benchmarks/log.md.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

import attnspan as span
from attnspan.transports import Distributed, Pending
from tests.processes import spawn

SHAPES = [(1024, 8, 8), (8192, 16, 4), (16384, 32, 8)]  # tokens, heads, key heads
TURNS, CALLS = 12, 3


def measured(world):
    """(tokens, heads, key heads, strategy, {with headers: (wall, host)}) of every case."""
    greet, rows = Distributed._greet, []
    for tokens, heads, kv_heads in SHAPES:
        for strategy in ("gather", "ring", "needed(2)"):
            cp = span.ContextParallel(dist.group.WORLD, seq_len=tokens, mask=span.Causal(), strategy=strategy)
            own = len(cp.positions.flatten())
            q, k, v = (
                torch.randn(1, h, own, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for h in (heads, kv_heads, kv_heads)
            )
            times = {True: [], False: []}
            for turn in range(-2, TURNS):
                for headers in (True, False) if turn % 2 else (False, True):
                    Distributed._greet = greet if headers else lambda self, peers, what: Pending()
                    took = turn_of(cp, q, k, v)
                    if turn >= 0:
                        times[headers].append(took)
            Distributed._greet = greet
            medians = {
                kind: [statistics.median(column) for column in zip(*each, strict=True)] for kind, each in times.items()
            }
            rows.append((tokens, heads, kv_heads, strategy, medians))
    return rows


def turn_of(cp, q, k, v):
    """(wall, host) in milliseconds, of one call."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        cp.attention(q, k, v).sum().backward()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return [(end - began) / CALLS * 1e3 for end in (time.perf_counter(), host)]


if __name__ == "__main__":
    print("| ranks | tokens, heads | strategy | with | without | ratio | host with | host without |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in map(int, sys.argv[1:] or ["2"]):
        for tokens, heads, kv_heads, strategy, medians in spawn(ranks, measured, backend="nccl", timeout=300)[0]:
            (wall, host), (bare, host_bare) = medians[True], medians[False]
            print(
                f"| {ranks} | {tokens}, {heads}:{kv_heads} | {strategy} | {wall:.2f} | {bare:.2f} | {wall / bare:.3f} "
                f"| {host:.2f} | {host_bare:.2f} |"
            )
