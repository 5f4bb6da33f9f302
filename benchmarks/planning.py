"""What planning costs: one rank's plan, layout included, from 16k to 16M tokens.

Documents are log-normal with a mean of about 105 tokens (10,000 in a million), ranks are one per 1,024 tokens and
1,024 at most. Each cell is measured in a process of its own, cold: bands, layout, geometry and one rank's steps.

Run: python benchmarks/planning.py        writes benchmarks/results/planning.md
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STRATEGIES = ["ring", "gather", "needed(1)", "needed(4)", "ulysses(4) x needed(2)"]


def lengths_of(seq_len: int, documents: int) -> list[int]:
    """Log-normal lengths that sum to seq_len."""
    rng = random.Random(0)
    raw = [rng.lognormvariate(0, 1) for _ in range(documents)]
    scale = (seq_len - documents) / sum(raw)
    lengths = [1 + int(value * scale) for value in raw]
    lengths[-1] += seq_len - sum(lengths)
    return lengths


def measure(seq_len: int, documents: int, ranks: int, strategy: str) -> dict[str, float]:
    """Seconds and megabytes of one rank's plan, in this fresh process."""
    from attnspan import Balanced, Causal, Documents, Plan

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    mask = Causal() & Documents(lengths_of(seq_len, documents)) if documents else Causal()
    bands = mask.bands(seq_len)
    seen = time.perf_counter()
    layout = Balanced(mask, ranks=ranks)
    layout.shards(seq_len)
    dealt = time.perf_counter()
    steps = Plan(mask, layout, seq_len, strategy).steps(ranks // 2)
    done = time.perf_counter()
    return {
        "bands": len(bands),
        "mask": seen - start,
        "layout": dealt - seen,
        "plan": done - dealt,
        "seconds": done - start,
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024,
        "tiles": sum(len(step.tiles) for step in steps),
    }


def fresh(*args: object) -> dict[str, float]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--one", json.dumps(args)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    from benchmarks.report import header, progress

    sizes = [1 << power for power in range(14, 25, 2)]
    cells = [(n, max(1, n * 10_000 >> 20), min(1024, n >> 10), "needed(1)") for n in sizes]
    cells += [(1 << 20, 10_000, 1024, strategy) for strategy in STRATEGIES if strategy != "needed(1)"]
    cells += [(n, 0, min(1024, n >> 10), "needed(1)") for n in sizes]
    lines = []
    for seq_len, documents, ranks, strategy in progress(cells, "planning"):
        found = fresh(seq_len, documents, ranks, strategy)
        mask = f"causal, {documents} documents" if documents else "causal"
        lines.append(
            f"| {seq_len} | {mask} | {ranks} | {strategy} | {found['bands']:.0f} | {found['mask']:.3f} | "
            f"{found['layout']:.3f} | {found['plan']:.3f} | **{found['seconds']:.3f}** | "
            f"{found['megabytes']:.0f} | {found['tiles']:.0f} |"
        )
    text = "\n".join(
        [
            *header("What planning costs", "python benchmarks/planning.py"),
            "One rank's plan, layout included, cold, in a process of its own. Bar: 1,048,576 tokens, 10,000 documents,",
            "1,024 ranks in under 2 s and 1 GB; growth about linear in bands.",
            "",
            "| tokens | mask | ranks | strategy | bands | mask s | layout s | plan s | total s | MB | tiles |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )
    (ROOT / "benchmarks" / "results" / "planning.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
