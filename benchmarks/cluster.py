"""What a cluster does, in one command that anyone can run and send back: the self-test, then every strategy measured.

Under torchrun on one host or several, or alone for a try on a laptop. Rank 0 writes one page: hardware, versions,
the link as measured, a self-test against dense float64, and for each workload every strategy beside its prediction.
Nothing about the machine goes into it but the names of devices, how many ranks and hosts there are, and versions.

    torchrun --nproc-per-node 8 -m benchmarks.cluster --out cluster.md
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m benchmarks.cluster
    python -m benchmarks.cluster --ranks 2 --tokens-per-rank 512      # two processes on this machine

docs/cluster.md says where results go.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnspan import Balanced, Causal, Documents, SlidingWindow
from attnspan.attention.links import group_links
from attnspan.attention.tuned import group_tuning
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Mask
from attnspan.measure import Bench, Measured, Ranks, Workload
from attnspan.measure.checkup import self_test
from attnspan.plan import Shape
from attnspan.plan.drawing import in_seconds
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object
from benchmarks.report import command, folded, header

STRATEGIES = ("auto", "ring", "gather", "needed(1)", "needed(2)", "ulysses")


@dataclass(frozen=True)
class ClusterJob:
    """What every rank does."""

    tokens: int  # per rank
    shape: Shape
    repeats: int

    def works(self, ranks: int) -> Iterator[tuple[str, Mask]]:
        """Workloads by name, over all ranks."""
        total = self.tokens * ranks
        documents = [total // 2, total // 64, total // 8]
        yield "causal", Causal()
        yield "packed documents", Causal() & Documents([*documents, total - sum(documents)])
        yield "window of 4096", SlidingWindow(4095)


def on_rank(job: ClusterJob, transport: Transport) -> dict[str, Any]:
    """One rank's part; all get the same but for times of their own."""
    tested = self_test(transport)
    wrong = [f"{each.strategy}: {each.wrong}" for each in tested.strategies if each.wrong]
    told = all_gather_object(transport, (socket.gethostname(), wrong), "findings")
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, mask in job.works(transport.ranks):
        length = job.tokens * transport.ranks
        layout = Balanced(mask, ranks=transport.ranks, chunk=fitting_chunk(length, transport.ranks))
        bench = Bench(Workload(mask, length, layout, job.shape), transport, group_tuning(transport), job.repeats)
        able = [each for each in STRATEGIES if each != "ulysses" or transport.ranks <= job.shape.heads]
        rows[name] = [each.data() for each in bench.run(able)]
    links = group_links(transport)
    return {
        "ranks": transport.ranks,
        "hosts": len({host for host, _ in told}),
        "wrong": [f"rank {rank}, {each}" for rank, (_, wrong) in enumerate(told) for each in wrong],
        "links": {"inside a host": str(links.inside), "between hosts": str(links.between)},
        "rows": rows,
    }


def page(job: ClusterJob, found: dict[str, Any]) -> str:
    """The result as a page."""
    shape, nccl = (
        job.shape,
        f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_available() else "",
    )
    hosts = f"{found['hosts']} host" + "s" * (found["hosts"] > 1)
    lines = header(f"{found['ranks']} ranks on {hosts}", command("python -m benchmarks.cluster"))
    lines += [
        f"{job.tokens} tokens per rank, {shape.heads} heads on {shape.kv_heads} key heads, head dim {shape.head_dim}, "
        f"{shape.dtype}, forward and backward; the median of {job.repeats} repeats of the slowest rank{nccl}.",
        "",
        "Self-test against dense float64: " + ("; ".join(found["wrong"]) or "passed on every rank") + ".",
        "",
    ]
    lines += [f"- link {where}: {link}" for where, link in found["links"].items() if link != "None"]
    for name, rows in found["rows"].items():
        lines += ["", f"## {name}", ""]
        lines += ["| strategy | measured | predicted | on the wire | waits |", "|---|---|---|---|---|"]
        for row in (Measured(**each) for each in rows):
            label = f"auto: {row.chosen}" if row.chosen else row.strategy
            times = (row.seconds, row.predicted, row.wire, row.waits)
            lines.append(f"| {label} | " + (row.refused or " | ".join(map(in_seconds, times))) + " |")
    return folded("\n".join(lines)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a cluster, and write a page to send back.")
    parser.add_argument("--out", type=Path, default=Path("cluster.md"), help="where the page goes")
    parser.add_argument("--ranks", type=int, help="processes to start here, without torchrun")
    parser.add_argument("--tokens-per-rank", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default CUDA if there is one")
    given = parser.parse_args()
    where = Ranks(given.ranks, given.device)
    shape = Shape(given.heads, given.kv_heads, 128, dtype="bfloat16")
    shape = shape if where.device == "cuda" else replace(shape, dtype="float32")
    job = ClusterJob(given.tokens_per_rank, shape, given.repeats)
    found = where.run(partial(on_rank, job))
    if found is not None:
        given.out.write_text(page(job, found), encoding="utf-8")
        print(f"written to {given.out}; docs/cluster.md says how to send it back")


if __name__ == "__main__":
    main()
