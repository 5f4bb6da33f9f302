"""Does the timeline tell the truth? Two gloo ranks in network namespaces of their own, over a link of a known rate.

For each of some masks, lengths and links every strategy's step is measured and set beside the plan's prediction. The
rates of tiles and of the link come from `tune`, measured on the same two ranks beforehand: nothing is fitted to the
outcome.

Three claims, one column each: a prediction is within 20 % of the measurement; communication hides under compute where
the plan says so (what the step takes longer than its own compute, measured with the same plan and nothing to carry, is
what the timeline calls exposed); `auto` is within 5 % of the fastest strategy measured, with the table of `tune` and
without one, where it knows the link that it measures itself and the preset's rates.

[Note: links] The namespaces are joined by a veth pair whose ends are shaped by tbf, a token bucket. Where the kernel
has netem, delays are netem's. Where it has not, a message is handed to gloo only after the delay has passed, by a
thread of its own, so that compute goes on meanwhile: `Late`. TCP is told not to begin slowly after a pause, and to use
reno, which takes what a bucket gives.

[Note: one core each] A rank has one thread and one core. Sockets and softirqs want the same cores, so rates are kept
where they take little of them.

Run, as root: python -m benchmarks.shaped_links        writes benchmarks/results/shaped_links.md; --cells 0 3 for some
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, and for the ranks

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attnspan import Balanced, Shape
from attnspan.attention.links import group_links
from attnspan.attention.tuned import GroupTuning, hardware_for
from attnspan.cli.expression import parse
from attnspan.layouts.balanced import fitting_chunk
from attnspan.measure import Bench, Tuning, Workload, tune
from attnspan.measure.tune import linked
from attnspan.plan import predict
from attnspan.transports import Distributed, Pending, Transport, Wrapped
from attnspan.tuning import Table
from benchmarks.report import folded, header, progress
from benchmarks.silent import Silent

RESULT = Path(__file__).parent / "results" / "shaped_links.md"
RANKS = 2
STRATEGIES = ("gather", "needed(1)", "needed(2)", "needed(4)", "ring", "ulysses")
SHAPE = Shape(heads=4, kv_heads=2, head_dim=64, dtype="float32")
REPEATS = 3


@dataclass(frozen=True)
class Wire:
    """Megabits per second, and milliseconds before the first byte."""

    rate: int
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate} Mbit/s" + (f", {self.delay:g} ms" if self.delay else "")


@dataclass(frozen=True)
class Cell:
    """A mask, a length and a link."""

    mask: str
    tokens: int
    wire: Wire

    def work(self) -> Workload:
        mask = parse(self.mask, seq_len=self.tokens)
        return Workload(mask, self.tokens, Balanced(mask, ranks=RANKS, chunk=fitting_chunk(self.tokens, RANKS)), SHAPE)


DOCUMENTS = "causal & documents(2500, 700, 1800, 300, 1500, 1392)"
CELLS = (
    Cell("causal", 8192, Wire(2000)),
    Cell("causal", 8192, Wire(100)),
    Cell("causal", 4096, Wire(100, 20.0)),
    Cell("full", 4096, Wire(100)),
    Cell("full", 4096, Wire(400, 20.0)),
    Cell(DOCUMENTS, 8192, Wire(100)),
    Cell(DOCUMENTS, 8192, Wire(400, 20.0)),
    Cell("causal & window(1023)", 8192, Wire(100)),
    Cell("causal & window(1023)", 8192, Wire(40)),
    Cell("prefix(2k)", 6000, Wire(200)),
)


# ---- a link with a delay, where the kernel has none ------------------------------------------------------------------


class Late(Wrapped):
    """A transport whose messages leave only after `seconds`; one thread hands them on, in order. See [Note: links]."""

    def __init__(self, transport: Transport, seconds: float):
        super().__init__(transport)
        self.seconds = seconds
        self._posts: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._hand_on, daemon=True).start()

    def _hand_on(self) -> None:
        while True:
            due, sends, receives, what, slot = self._posts.get()
            time.sleep(max(0.0, due - time.monotonic()))
            slot.put(self.transport._post(sends, receives, what))

    def _post(self, sends, receives, what) -> Pending:
        slot: queue.Queue[Pending] = queue.Queue()
        self._posts.put((time.monotonic() + self.seconds, sends, receives, what, slot))
        return Pending(lambda: slot.get().wait())


# ---- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str) -> None:
    """Jobs come as lines of JSON and are answered by one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    plain = Distributed(dist.group.WORLD)  # type: ignore[arg-type]
    late: dict[float, Transport] = {0.0: plain}
    table: Table | None = None
    for line in sys.stdin:
        job = json.loads(line)
        delay = job["delay"] if job["late"] else 0.0
        transport = late[delay] if delay in late else late.setdefault(delay, Late(plain, delay))
        if job["what"] == "tune":
            asked = Tuning.of(torch.device("cpu"), heads=SHAPE.heads, kv_heads=SHAPE.kv_heads)
            table = tune(asked, transport)
            answer: Any = table.data()
        elif job["what"] == "link":
            table = linked(table, transport)
            answer = asdict(table.inside)
        else:
            answer = measured(Cell(job["mask"], job["tokens"], Wire(0)), transport, table)
        print(json.dumps(answer), flush=True)


def measured(cell: Cell, transport: Transport, table: Table) -> list[dict[str, Any]]:
    """Every strategy and auto; beside each its own compute alone, with nothing to carry."""
    work = cell.work()
    known = GroupTuning(table)
    hardware = hardware_for(known, SHAPE, transport.device)
    chosen = work.plan("auto", hardware)
    untuned = work.plan("auto", hardware_for(GroupTuning(links=group_links(transport)), SHAPE, transport.device))
    rows = []
    for strategy in STRATEGIES:
        found = Bench(work, transport, known, REPEATS).measured(strategy, "auto")
        alone = Bench(work, Silent(transport.rank, RANKS, "cpu"), known, 1).measured(strategy, "auto")
        both = transport.all_gather_bytes(json.dumps(alone.seconds).encode(), "measurements")
        plan = work.plan(strategy, hardware)
        lines = [predict(plan, rank, SHAPE, hardware, backward=True) for rank in range(RANKS)]
        slowest = max(lines, key=lambda each: each.seconds)
        link = sum(event.stop - event.start for event in slowest.events if event.lane == "link")
        rows.append(
            {
                **found.data(),
                "alone": max(map(json.loads, both)),
                "computing": slowest.computing,
                "link": link,
                "auto": plan == chosen,
                "untuned": plan == untuned,
            }
        )
    return rows


# ---- namespaces ------------------------------------------------------------------------------------------------------


class Namespaces:
    """Two network namespaces joined by a shaped link; they end with the block."""

    def __init__(self) -> None:
        self.names = [f"span{os.getpid()}{end}" for end in "ab"]
        self.netem = False

    def __enter__(self) -> Namespaces:
        try:
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        one, other = self.names
        run("ip", "link", "add", "v0", "netns", one, "type", "veth", "peer", "name", "v0", "netns", other)
        for index, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "v0")
            for device in ("lo", "v0"):
                run("ip", "-n", name, "link", "set", device, "up")
            inside = ("ip", "netns", "exec", name)
            run(
                *inside, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_congestion_control=reno"
            )
        probe = ("tc", "-n", one, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        self.netem = subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def shape(self, wire: Wire) -> None:
        """Both ways alike."""
        for name in self.names:
            bucket = ("tbf", "rate", f"{wire.rate}mbit", "burst", "128kb", "latency", "400ms")
            if self.netem and wire.delay:
                run(
                    "tc",
                    "-n",
                    name,
                    "qdisc",
                    "replace",
                    "dev",
                    "v0",
                    "root",
                    "handle",
                    "1:",
                    "netem",
                    "delay",
                    f"{wire.delay}ms",
                )
                run("tc", "-n", name, "qdisc", "replace", "dev", "v0", "parent", "1:1", *bucket)
            else:
                run("tc", "-n", name, "qdisc", "replace", "dev", "v0", "root", *bucket)

    def start(self, rank: int, store: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "benchmarks.shaped_links", "--rank", str(rank), "--store", store]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[rank], "taskset", "-c", str(rank), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "v0", "LOCAL_WORLD_SIZE": str(RANKS), "ATTNSPAN_TUNING": "none"},
        )


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Ranks:
    """The two processes, asked together; rank 0 answers."""

    def __init__(self, spaces: Namespaces, store: str):
        self.spaces, self.ranks = spaces, [spaces.start(rank, store) for rank in range(RANKS)]

    def ask(self, what: str, wire: Wire, **job: Any) -> Any:
        line = json.dumps({"what": what, "delay": wire.delay / 1e3, "late": not self.spaces.netem, **job})
        for rank in self.ranks:
            assert rank.stdin is not None
            print(line, file=rank.stdin, flush=True)
        answers = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            answer = rank.stdout.readline()
            if not answer:
                raise SystemExit(f"rank {number} ended; its error is above")
            answers.append(json.loads(answer))
        return answers[0]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


# ---- the report ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", default="")
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)), help="some of them, by number")
    parser.add_argument("--out", default=str(RESULT))
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.store)
        return
    cells = [CELLS[index] for index in args.cells]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Namespaces() as spaces:
        ranks = Ranks(spaces, f"{folder}/store")
        try:
            spaces.shape(Wire(1000))
            table = Table.of(ranks.ask("tune", Wire(1000)), "tune")
            found = []
            for cell in progress(cells, "cells"):
                spaces.shape(cell.wire)
                link = ranks.ask("link", cell.wire)
                found.append((cell, link, ranks.ask("cell", cell.wire, mask=cell.mask, tokens=cell.tokens)))
                print(*lines_of(*found[-1]), sep="\n", flush=True)
        finally:
            ranks.end()
    text = page(table, found, spaces.netem, time.monotonic() - start)
    Path(args.out).write_text(folded(text))
    print(verdict(found))


COLUMNS = {
    "measured": lambda row, best: f"{row['seconds']:.3f}",
    "predicted": lambda row, best: f"{row['predicted']:.3f}",
    "ratio": lambda row, best: f"**{row['seconds'] / row['predicted']:.2f}**",
    "alone": lambda row, best: f"{row['alone']:.3f}",
    "computing, predicted": lambda row, best: f"{row['computing']:.3f}",
    "link": lambda row, best: f"{row['link']:.3f}",
    "waited": lambda row, best: f"{row['seconds'] - row['alone']:.3f}",
    "exposed, predicted": lambda row, best: f"{row['exposed']:.3f}",
    "over the fastest": lambda row, best: f"{row['seconds'] / best:.2f}",
}


def lines_of(cell: Cell, link: dict[str, float], rows: list[dict[str, Any]]) -> list[str]:
    best = min(row["seconds"] for row in rows)
    rate = f"{link['bandwidth'] / 1e6:.1f} MB/s, {link['latency'] * 1e3:.2f} ms"
    lines = []
    for index, row in enumerate(rows):
        told = f"{cell.mask}, {cell.tokens}, {cell.wire} ({rate})" if index == 0 else ""
        autos = [name for name, marked in (("auto", row["auto"]), ("without a table", row["untuned"])) if marked]
        cells = [told, row["strategy"] + (f" ({', '.join(autos)})" if autos else "")]
        lines.append(f"| {' | '.join([*cells, *(column(row, best) for column in COLUMNS.values())])} |")
    return lines


def verdict(found: list[tuple[Cell, dict[str, float], list[dict[str, Any]]]]) -> str:
    rows = [row for _, _, each in found for row in each]
    ratios = [row["seconds"] / row["predicted"] for row in rows]
    close = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
    autos, untuned = ([over_the_fastest(each, how) for _, _, each in found] for how in ("auto", "untuned"))
    hidden = [(row["link"] - row["exposed"], row["link"] - (row["seconds"] - row["alone"])) for row in rows]
    said = [(plan, real) for plan, real in hidden if plan > 0.02]
    return "\n".join(
        [
            f"- Within 20 % of the prediction: **{close} of {len(rows)}** steps (measured / predicted "
            f"{min(ratios):.2f} to {max(ratios):.2f}).",
            f"- `auto` over the fastest measured: **at most {max(autos):.3f}** in {len(autos)} cells "
            f"({', '.join(f'{each:.3f}' for each in autos)}).",
            f"- `auto` without a table, by the link that it measures itself: **at most {max(untuned):.3f}** "
            f"({', '.join(f'{each:.3f}' for each in untuned)}).",
            f"- Hidden communication, where the plan hides more than 20 ms ({len(said)} steps): the plan says "
            f"{sum(plan for plan, _ in said):.2f} s in all, measured were {sum(real for _, real in said):.2f} s.",
        ]
    )


def over_the_fastest(rows: list[dict[str, Any]], how: str) -> float:
    """What auto took, over the fastest."""
    return next(row["seconds"] for row in rows if row[how]) / min(row["seconds"] for row in rows)


def page(table: Table, found: list[Any], netem: bool, took: float) -> str:
    delays = "netem." if netem else "holding messages back in a thread (this kernel has no netem)."
    return "\n".join(
        [
            *header("The timeline against shaped links", "python -m benchmarks.shaped_links"),
            "Two gloo ranks of one thread, each in a network namespace and on a core of its own; float32, "
            f"{SHAPE.heads} heads on {SHAPE.kv_heads} key heads, head dim {SHAPE.head_dim}, Balanced; forward + "
            f"backward, median of {REPEATS}, the slower rank. {took:.0f} s in all; load average at the end "
            f"{os.getloadavg()[0]:.1f}.",
            f"Rates by tbf, delays by {delays}",
            "Predictions: the plan's timeline, with tiles and links measured by `tune` on the same ranks beforehand.",
            "",
            verdict(found),
            "",
            "Seconds. Alone: the same plan's compute, measured with nothing to carry. Waited: measured less alone. "
            "Exposed: what the timeline says of it. Link: how long the link is busy, as predicted.",
            "",
            f"| mask, tokens, link (as measured) | strategy | {' | '.join(COLUMNS)} |",
            "|---" * (2 + len(COLUMNS)) + "|",
            *(line for each in found for line in lines_of(*each)),
            "",
            "Tiles, as measured on both ranks at once:",
            "",
            "```",
            table.explain(),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
