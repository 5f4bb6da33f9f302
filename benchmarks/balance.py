"""How evenly each layout shares the work of each mask of the corpus, and what it costs in bytes and runs.

    python benchmarks/balance.py [--ranks 2 8 64] [--out benchmarks/results/balance.md]

Every mask is measured at 64 chunks of 128 tokens per rank. Beside ours stand torch's own balancers, read as
what they are: lists of indices. Where their shape rules refuse a mask, the table says so.
Numbers: imbalance (largest rank / mean), keys moved when each rank fetches only what it needs (percent of an
all-gather), runs per rank (most / mean), seconds to make the layout (bands of the mask not counted).
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from attnspan.layouts import (
    Balanced,
    Contiguous,
    HeadTail,
    Layout,
    PerDocument,
    RoundRobinByWork,
    Striped,
    moved,
)
from attnspan.masks.profile import RowWork
from benchmarks.corpus import CASES, Case, case

CHUNK = 128
CHUNKS = 64
RANKS = [2, 3, 4, 8, 16, 32, 64]
RESULTS = Path(__file__).parent / "results" / "balance.md"

OURS: dict[str, Callable[[Case, int], Layout | None]] = {
    "Contiguous": lambda it, ranks: Contiguous(ranks),
    "HeadTail": lambda it, ranks: HeadTail(ranks),
    "Striped": lambda it, ranks: Striped(ranks),
    "PerDocument": lambda it, ranks: PerDocument(it.lengths, ranks=ranks) if it.lengths else None,
    "RoundRobin": lambda it, ranks: RoundRobinByWork(it.masks, weights=it.weights, ranks=ranks),
    "Balanced": lambda it, ranks: Balanced(it.masks, weights=it.weights, ranks=ranks),
}


@dataclass(frozen=True)
class Measured:
    """One layout on one mask."""

    imbalance: float
    moved: float
    most_runs: int
    mean_runs: float
    tokens: int  # the largest share less the smallest
    seconds: float


def measure(layout: Layout, it: Case, seq_len: int) -> Measured:
    """Imbalance, traffic and runs of one layout."""
    began = time.perf_counter()
    shards = layout.shards(seq_len)
    seconds = time.perf_counter() - began
    runs, tokens = [len(runs) for runs in shards], layout.tokens(seq_len)
    work = weighted(it, lambda mask: layout.work_per_rank(mask, seq_len))
    keys = weighted(it, lambda mask: moved(mask, layout, seq_len))
    return Measured(
        max(work) * layout.ranks / sum(work),
        100 * sum(keys) / sum(it.weights) / (seq_len * (layout.ranks - 1)),
        max(runs),
        sum(runs) / layout.ranks,
        max(tokens) - min(tokens),
        seconds,
    )


def weighted(it: Case, of: Callable[..., list[int]]) -> list[int]:
    """A number per rank, summed over the masks of a case by their weights."""
    parts = [[weight * n for n in of(mask)] for mask, weight in zip(it.masks, it.weights, strict=True)]
    return [sum(ranks) for ranks in zip(*parts, strict=True)]


def torchs(it: Case, ranks: int, seq_len: int) -> dict[str, str]:
    """The imbalance of torch's balancers, or 'refused'."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
    except ImportError:
        return {}
    found = {"torch head-tail": attempt(lambda: theirs._HeadTailLoadBalancer(seq_len, ranks, "cpu"), it, ranks)}
    if it.lengths:
        lengths = [list(it.lengths)]
        found["torch per-doc"] = attempt(
            lambda: theirs._PerDocumentHeadTailLoadBalancer(lengths, ranks, "cpu"), it, ranks
        )
    if len(it.masks) > 1:
        found["torch PTRR"] = "refused"  # takes one block mask
    else:
        found["torch PTRR"] = attempt(
            lambda: theirs._PTRRLoadBalancer(it.masks[0].block_mask(seq_len), ranks), it, ranks
        )
    return found


def attempt(build: Callable[[], object], it: Case, ranks: int) -> str:
    """The imbalance of an index list, cut into equal shards as torch cuts it."""
    try:
        order = build()._generate_indices()[0].long()  # type: ignore[attr-defined]
    except (AssertionError, NotImplementedError, RuntimeError, ValueError):
        return "refused"
    rows = torch.zeros(len(order), dtype=torch.int64)
    for mask, weight in zip(it.masks, it.weights, strict=True):
        rows += weight * row_counts(mask, len(order))
    work = [int(rows[shard].sum()) for shard in order.chunk(ranks)]
    return f"{max(work) * ranks / sum(work):.4f}"


def row_counts(mask: object, seq_len: int) -> torch.Tensor:
    """The work of every row, for index lists that are no runs."""
    tally = RowWork(mask.bands(seq_len))  # type: ignore[attr-defined]
    counts = torch.zeros(seq_len, dtype=torch.int64)
    edges = [0, *(e for e in tally.edges if 0 < e < seq_len), seq_len]
    for start, stop in pairwise(edges):
        slope = tally.at(start + 1) - tally.at(start) if stop - start > 1 else 0
        counts[start:stop] = tally.at(start) + slope * torch.arange(stop - start)
    return counts


def table(cases: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int, dict[str, Measured | None], dict[str, str]]]:
    """Everything measured, case by case."""
    for name, ranks in cases:
        seq_len = CHUNKS * CHUNK * ranks
        it = case(name, seq_len)
        for mask in it.masks:
            mask.bands(seq_len)
        layouts = {label: build(it, ranks) for label, build in OURS.items()}
        found = {label: measure(layout, it, seq_len) if layout else None for label, layout in layouts.items()}
        yield name, ranks, found, torchs(it, ranks, seq_len)


def written(rows: list[tuple[str, int, dict[str, Measured | None], dict[str, str]]], command: str) -> str:
    """The tables as markdown."""
    theirs = ["torch head-tail", "torch per-doc", "torch PTRR"]
    lines = [
        "# Balance of layouts over the mask corpus",
        "",
        f"{date.today()}, {cpu()}, {platform.system()} {platform.machine()}, Python {platform.python_version()},",
        f"torch {torch.__version__}. Command: `{command}`. {CHUNKS} chunks of {CHUNK} tokens per rank.",
        "",
        *summary(rows),
        "",
        "## Imbalance: the largest rank's work / mean",
        "",
        "torch's columns are its own balancers' index lists cut into equal shards; `refused` where its shape rules",
        "do not allow the mask, `-` where the layout does not apply.",
        "",
        *grid(["mask", "ranks", *OURS, *theirs]),
    ]
    for name, ranks, found, others in rows:
        ours = [f"{m.imbalance:.4f}" if m else "-" for m in found.values()]
        lines.append(line([name, ranks, *ours, *(others.get(label, "-") for label in theirs)]))
    lines += ["", "## Keys moved when each rank fetches only what it needs, percent of an all-gather", ""]
    lines += grid(["mask", "ranks", *OURS])
    for name, ranks, found, _ in rows:
        lines.append(line([name, ranks, *(f"{m.moved:.2f}" if m else "-" for m in found.values())]))
    lines += ["", "## Runs per rank (most / mean), spread of token counts, and seconds to make the layout", ""]
    lines += grid(["mask", "ranks", "RoundRobin runs", "Balanced runs", "tokens ±", "RoundRobin s", "Balanced s"])
    for name, ranks, found, _ in rows:
        dealt, best = found["RoundRobin"], found["Balanced"]
        assert dealt, "applies to every mask"
        assert best, "applies to every mask"
        runs = [f"{m.most_runs} / {m.mean_runs:.2f}" for m in (dealt, best)]
        lines.append(line([name, ranks, *runs, best.tokens, f"{dealt.seconds:.3f}", f"{best.seconds:.3f}"]))
    return "\n".join(lines) + "\n"


def summary(rows: list[tuple[str, int, dict[str, Measured | None], dict[str, str]]]) -> list[str]:
    """Balanced's worst figures, and whether a rival ever beats it."""
    best = [(name, ranks, found["Balanced"], found) for name, ranks, found, _ in rows]
    worst = max(best, key=lambda row: row[2].imbalance)  # type: ignore[union-attr]
    runs = max(m.most_runs for _, _, m, _ in best if m)
    mean = max(m.mean_runs for _, _, m, _ in best if m)
    beaten = [
        f"{name} on {ranks}"
        for name, ranks, m, found in best
        for rival in ("HeadTail", "RoundRobin")
        if m and (other := found[rival]) and m.imbalance > other.imbalance
    ]
    assert worst[2], "applies to every mask"
    return [
        f"Balanced: worst imbalance {worst[2].imbalance:.4f} ({worst[0]} on {worst[1]} ranks); at most {runs} runs",
        f"on a rank, at most {mean:.2f} on average over the ranks of a case. HeadTail or RoundRobinByWork is better:",
        f"{', '.join(beaten) or 'never'}.",
    ]


def grid(names: list[str]) -> list[str]:
    return [line(names), line(["---"] * len(names))]


def line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def cpu() -> str:
    with suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


def shown(rows: Iterator[object], total: int) -> Iterator[object]:
    """With a progress bar, where rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        return rows
    return iter(track(rows, description="balance", total=total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = [(name, ranks) for name in CASES for ranks in options.ranks]
    rows = list(shown(table(cases), len(cases)))
    text = written(rows, " ".join(["python", "benchmarks/balance.py", *sys.argv[1:]]))  # type: ignore[arg-type]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print("\n".join(text.splitlines()[2:8]))


if __name__ == "__main__":
    main()
