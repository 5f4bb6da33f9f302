"""What NCCL has of its own, beside the messages that attnspan is made of: whether it would help.

The same bytes by messages (attnspan's transport: a batch, one to and one from every peer), by NCCL's collectives, and
by one batch for each peer instead of one for all; and messages under a large product of matrices, on a stream of
ordinary and of high priority. Ranks that share one GPU talk over loopback sockets.

    PYTHONPATH=src python -m benchmarks.nccl_collectives --out FILE
    PYTHONPATH=src python -m benchmarks.nccl_collectives --device cpu --mib 1 --out FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnspan as span
from attnspan.transports import Transport
from benchmarks.nccl import everyone, synchronise, versions
from benchmarks.report import command, folded, header

RESULT = Path(__file__).parent / "results" / "nccl_collectives.md"
TURNS = 7
ORDER = {
    "all-gather": ("messages", "native", "a batch for each peer"),
    "reduce-scatter": ("messages", "native"),
    "all-to-all": ("messages", "native", "a batch for each peer"),
    "messages under a product": ("ordinary priority", "high priority", "messages alone", "product alone"),
}
Way = Callable[[], object]
Row = tuple[int, float, str, dict[str, float]]  # ranks, MiB, what is done, milliseconds by way


class Buffers:
    """A rank's shard, cut for its peers, and room for those of others."""

    def __init__(self, world: Transport, mib: float, device: torch.device) -> None:
        size = int(mib * 2**20) // 4 // world.ranks * world.ranks
        self.world, self.mine = world, torch.randn(size, device=device)
        self.pieces = list(self.mine.chunk(world.ranks))
        self.gathered = torch.empty(world.ranks, size, device=device)
        self.scattered = torch.empty_like(self.mine)
        self.piece = torch.empty_like(self.pieces[0])
        self.peers = [rank for rank in range(world.ranks) if rank != world.rank]

    # ---- all-gather ----------------------------------------------------------------------------------------------

    def gather_by_messages(self) -> None:
        rows = self.gathered
        sends = [(peer, self.mine) for peer in self.peers]
        self.world.exchange(sends, [(peer, rows[peer]) for peer in self.peers]).wait()
        rows[self.world.rank].copy_(self.mine)

    def gather(self) -> None:
        dist.all_gather_into_tensor(self.gathered.view(-1), self.mine)

    def gather_by_peer(self) -> None:
        each_peer(self.world, lambda peer: self.mine, lambda peer: self.gathered[peer])
        self.gathered[self.world.rank].copy_(self.mine)

    # ---- reduce-scatter ------------------------------------------------------------------------------------------

    def scatter_by_messages(self) -> None:
        """As gradients come home: messages, and their sum in the order of ranks."""
        rows = self.gathered[:, : len(self.piece)]
        sends = [(peer, self.pieces[peer]) for peer in self.peers]
        self.world.exchange(sends, [(peer, rows[peer]) for peer in self.peers]).wait()
        rows[self.world.rank].copy_(self.pieces[self.world.rank])
        torch.sum(rows, dim=0, out=self.piece)

    def scatter(self) -> None:
        dist.reduce_scatter_tensor(self.piece, self.mine)

    # ---- all-to-all ----------------------------------------------------------------------------------------------

    def trade_by_messages(self) -> None:
        rooms = self.scattered.chunk(self.world.ranks)
        sends = [(peer, self.pieces[peer]) for peer in self.peers]
        self.world.exchange(sends, [(peer, rooms[peer]) for peer in self.peers]).wait()
        rooms[self.world.rank].copy_(self.pieces[self.world.rank])

    def trade(self) -> None:
        dist.all_to_all_single(self.scattered, self.mine)

    def trade_by_peer(self) -> None:
        rooms = self.scattered.chunk(self.world.ranks)
        each_peer(self.world, lambda peer: self.pieces[peer], lambda peer: rooms[peer])
        rooms[self.world.rank].copy_(self.pieces[self.world.rank])


def each_peer(world: Transport, given: Callable[[int], Tensor], room: Callable[[int], Tensor]) -> None:
    """A batch of two messages for every distance around the ring, one batch after another."""
    for distance in range(1, world.ranks):
        target, source = (world.rank + distance) % world.ranks, (world.rank - distance) % world.ranks
        pair = [dist.P2POp(dist.isend, given(target), target), dist.P2POp(dist.irecv, room(source), source)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def ways(buffers: Buffers) -> dict[str, list[Way]]:
    """What is done, and the ways in the order of ORDER."""
    return {
        "all-gather": [buffers.gather_by_messages, buffers.gather, buffers.gather_by_peer],
        "reduce-scatter": [buffers.scatter_by_messages, buffers.scatter],
        "all-to-all": [buffers.trade_by_messages, buffers.trade, buffers.trade_by_peer],
    }


def under_product(world: Transport, mib: float, device: torch.device) -> list[Way]:
    """All-to-all messages while the device multiplies, posted before it, on groups of either priority."""
    buffers = Buffers(world, mib, device)
    size = 8192 if device.type == "cuda" else 256
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    into = torch.empty_like(left)

    def product() -> None:
        for _ in range(8):
            torch.mm(left, left, out=into)

    def messages(group: dist.ProcessGroup) -> list[Any]:
        rooms = buffers.scattered.chunk(world.ranks)
        batch = [dist.P2POp(dist.isend, buffers.pieces[peer], peer, group) for peer in buffers.peers]
        return dist.batch_isend_irecv([*batch, *(dist.P2POp(dist.irecv, rooms[p], p, group) for p in buffers.peers)])

    def both(group: dist.ProcessGroup) -> None:
        posted = messages(group)
        product()
        for work in posted:
            work.wait()

    def alone(group: dist.ProcessGroup) -> None:
        for work in messages(group):
            work.wait()

    plain, urgent = (group_of(priority) for priority in (False, True))
    return [partial(both, plain), partial(both, urgent), partial(alone, plain), product]


def group_of(high_priority: bool) -> dist.ProcessGroup:
    """All ranks, in a group of their own."""
    nccl = dist.get_backend() == "nccl"
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority) if nccl else None
    group = dist.new_group(pg_options=options)
    assert isinstance(group, dist.ProcessGroup), "of all ranks"
    return group


def measured(run: Sequence[Way], device: torch.device) -> list[float]:
    """Milliseconds of each way: they take turns; of every turn the slowest rank, the median of all turns."""
    times: list[list[float]] = [[] for _ in run]
    for turn in range(TURNS + 1):
        for way, each in zip(run, times, strict=True):
            synchronise(device)
            everyone(None)
            start = time.perf_counter()
            way()
            synchronise(device)
            seconds = max(everyone(time.perf_counter() - start))
            if turn:  # the first makes connections
                each.append(seconds)
    return [1e3 * statistics.median(each) for each in times]


def on_rank(world: Transport, sizes: Sequence[float], device: str) -> list[Row]:
    """Every rank's part; all return the same rows."""
    on, rows = torch.device(device), []
    for mib in sizes:
        todo = {**ways(Buffers(world, mib, on)), "messages under a product": under_product(world, mib, on)}
        for what, run in todo.items():
            rows.append((world.ranks, mib, what, dict(zip(ORDER[what], measured(run, on), strict=True))))
    return rows


def page(rows: Sequence[Row], program: str) -> str:
    lines = [
        *header("NCCL's own collectives, batches and priorities", program),
        f"Wall milliseconds, the slowest rank, median of {TURNS} turns; {versions()} products. MiB: a rank's shard.",
        "",
    ]
    for what, names in ORDER.items():
        head = ["ranks", "MiB", *names]
        lines += [f"## {what}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for ranks, mib, done, found in rows:
            if done == what:
                lines.append(f"| {ranks} | {mib:g} | " + " | ".join(f"{found[name]:.2f}" for name in names) + " |")
        lines.append("")
    return folded("\n".join(lines))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--mib", nargs="+", type=float, default=[1, 8, 64], metavar="M", help="of a rank's shard")
    args = parser.parse_args(given)
    rows: list[Row] = []
    for ranks in args.ranks:
        group = span.testing.processes(ranks, "nccl" if args.device == "cuda" else "gloo", timeout=300)
        rows += group.run(on_rank, args.mib, args.device)[0]
    program = (
        command("python -m benchmarks.nccl_collectives") if given is None else "python -m benchmarks.nccl_collectives"
    )
    args.out.write_text(page(rows, program))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
