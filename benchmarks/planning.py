"""What planning costs: session, layout, choice and own steps of a new pack, on one core.

Packs are log-normal and new each time, in a process that has planned others. One rank of a virtual group is planned
for, in the middle of it; strategy "auto". Times are of the process's CPU: what a quiet core takes, where others compute
beside.

Run: python -m benchmarks.planning            writes benchmarks/results/planning.md
     python -m benchmarks.planning --choices  prints the section of choices alone
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BARS = [  # tokens, documents, ranks, batch rows, the most milliseconds
    (1 << 17, 500, 8, 1, 10),
    (1 << 17, 500, 64, 1, 30),
    (1 << 17, 500, 512, 1, 60),
    (1 << 20, 10_000, 64, 1, 100),
    (1 << 17, 500, 64, 8, None),
]


def lengths_of(seq_len: int, documents: int, seed: int) -> list[int]:
    from benchmarks.packs import pack

    return pack("lognormal", seq_len, documents, seed)


def clock() -> float:
    return time.process_time()


def new_packs(seq_len: int, documents: int, ranks: int, rows: int, packs: int) -> dict[str, object]:
    """Milliseconds of each part for new packs, one after another."""
    import attnspan as span
    from attnspan.attention.inputs import Inputs
    from attnspan.attention.tuned import _AGREED, NO_TUNING
    from attnspan.transports.loopback import Post, World

    world = World(Post(ranks, 60.0), ranks // 2, torch.device("cpu"))
    _AGREED[world.group] = {"cpu": NO_TUNING}  # what the ranks would tell each other once: that none has a table
    drawn = [[lengths_of(seq_len, documents, rows * seed + row) for row in range(rows)] for seed in range(packs)]
    query, key = (torch.empty(rows, heads, 1, 128, device="meta", dtype=torch.bfloat16) for heads in (32, 8))
    first, found = None, []
    for lengths in drawn:
        times = [clock()]
        mask = span.Causal() & span.Documents(lengths)
        make = first.with_mask if first else lambda mask: span.ContextParallel(world, seq_len=seq_len, mask=mask)
        session = make(mask)
        times.append(clock())
        call = session.attentions.named[""].bound.for_inputs(Inputs(query, key, key))
        times.append(clock())
        for row in range(rows):
            call.plan.steps(ranks // 2, row)
        times.append(clock())
        first = first or session
        parts = [1000 * (b - a) for a, b in pairwise(times)]
        found.append((*parts, sum(parts)))
    return {
        "parts": [median(column) for column in zip(*found[1:], strict=True)],
        "longest": max(each[1] for each in found[1:]),
        "first": found[0][-1],
    }


def growth(seq_len: int, documents: int, ranks: int) -> dict[str, float]:
    """Milliseconds and megabytes of one rank's plan with a fixed strategy; the median of three packs."""
    from attnspan import Balanced, Causal, Documents, Plan
    from attnspan.layouts.balanced import fitting_chunk

    base, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for seed in range(4):
        lengths = lengths_of(seq_len, documents, seed) if documents else None
        times = [clock()]
        mask = Causal() & Documents(lengths) if lengths else Causal()
        bands, _ = mask.band_columns(seq_len)
        times.append(clock())
        layout = Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks))
        layout.shards(seq_len)
        times.append(clock())
        steps = Plan(mask, layout, seq_len, "needed(2)").steps(ranks // 2)
        times.append(clock())
        found.append([1000 * (b - a) for a, b in pairwise(times)])
    mask_ms, layout_ms, steps_ms = (
        median(column) for column in zip(*(found[1:] if lengths else found[:1]), strict=True)
    )
    return {
        "bands": len(bands.q0),
        "mask": mask_ms,
        "layout": layout_ms,
        "steps": steps_ms,
        "tiles": sum(len(step.tiles) for step in steps),
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024,
    }


FIRST = 20000
"""The first seed of the packs for which choices are compared; none was looked at when the choice was written."""


def regrets(name: str, ranks: int, packs: int) -> dict[str, object]:
    """Predicted time of what "auto" takes over that of what `choose` takes, which walks through every strategy on every
    rank; and the milliseconds of both. Random packs of 128k tokens."""
    from attnspan import Balanced, Causal, Documents, Plan
    from attnspan.layouts.balanced import fitting_chunk
    from attnspan.plan import Hardware, Shape, choose
    from attnspan.plan.kind import strategy_for
    from benchmarks.packs import pack

    draw, found, seq_len = random.Random(f"{name} {ranks} {FIRST}"), [], 1 << 17
    for seed in range(FIRST, FIRST + packs):
        shape = draw.choice([Shape(32, 8), Shape(32, 32, 64), Shape(8, 1)])
        hardware = Hardware.of(draw.choice(["h100-nvlink", "cpu-gloo"]))
        mask = Causal() & Documents(pack(name, seq_len, round(2 ** draw.uniform(2, 10)), seed))
        layout = Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks))
        layout.shards(seq_len)
        times = [clock()]
        taken = strategy_for(Plan(mask, layout, seq_len), shape, hardware)
        times.append(clock())
        how = {"seq_len": seq_len, "ranks": ranks, "layouts": [layout], "sampled": ranks}
        anew = choose(mask, shape=shape, hardware=hardware, **how)
        times.append(clock())
        seconds = next(each.seconds for each in anew.candidates if each.plan.strategy == taken)
        found.append((seconds / anew.candidates[0].seconds, *(1000 * (b - a) for a, b in pairwise(times))))
    over, taking, comparing = zip(*found[1:], strict=True)  # the first pack of a process also loads code
    return {
        "packs": len(over),
        "mean": fmean(over),
        "worst": max(over),
        "over": sum(each > 1.05 for each in over),
        "taking": median(taking),
        "longest": max(taking),
        "comparing": median(comparing),
    }


def fairness(first: int, packs: int) -> list[tuple[float, int, float]]:
    """(imbalance, most runs of a rank, the part of a fair share that the heaviest row is) of random packs."""
    from attnspan import Balanced
    from attnspan.layouts.balanced import fitting_chunk
    from tests.layouts.test_balanced import random_pack

    found = []
    for seed in range(first, first + packs):
        mask, seq_len, ranks, heaviest = random_pack(seed)
        layout = Balanced(mask, ranks=ranks, chunk=fitting_chunk(seq_len, ranks))
        found.append((layout.imbalance(mask, seq_len), max(map(len, layout.shards(seq_len))), heaviest))
    return found


MEASURES: dict[str, Callable[..., object]] = {
    "new_packs": new_packs,
    "growth": growth,
    "regrets": regrets,
    "fairness": fairness,
}


def fresh(name: str, *args: object) -> dict:
    """A measurement in a new process, on one thread."""
    command = [sys.executable, "-m", "benchmarks.planning", "--one", json.dumps([name, *args])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env).stdout)


def loop() -> float:
    """Milliseconds of a loop in Python, to compare machines and their load."""
    start, total = clock(), 0
    for i in range(1_000_000):
        total += i * i % 7
    return 1000 * (clock() - start)


def bar_lines() -> list[str]:
    from benchmarks.report import progress

    lines = []
    for seq_len, documents, ranks, rows, bar in progress(BARS, "new packs"):
        found = fresh("new_packs", seq_len, documents, ranks, rows, 24)
        session, choice, steps, total = found["parts"]
        met = "" if bar is None else "yes" if total <= bar else "no"
        lines.append(
            f"| {seq_len} | {rows} x {documents} | {ranks} | {session:.1f} | {choice:.1f} | {steps:.1f} | "
            f"**{total:.1f}** | {bar or ''} | {met} | {found['longest']:.1f} | {found['first']:.0f} |"
        )
    return lines


def growth_lines() -> list[str]:
    from benchmarks.report import progress

    sizes = [1 << power for power in range(14, 25, 2)]
    cells = [(n, max(1, n * 10_000 >> 20), min(1024, max(8, n >> 10))) for n in sizes]
    cells += [(1 << 20, 10_000, ranks) for ranks in (8, 64, 512)]
    cells += [(n, 0, min(1024, n >> 10)) for n in (1 << 16, 1 << 20, 1 << 24)]
    lines = []
    for seq_len, documents, ranks in progress(cells, "growth"):
        found = fresh("growth", seq_len, documents, ranks)
        total = found["mask"] + found["layout"] + found["steps"]
        lines.append(
            f"| {seq_len} | {documents or 'causal'} | {ranks} | {found['bands']:.0f} | {found['mask']:.1f} | "
            f"{found['layout']:.1f} | {found['steps']:.1f} | **{total:.1f}** | {found['megabytes']:.0f} | "
            f"{found['tiles']:.0f} |"
        )
    return lines


def choice_lines() -> list[str]:
    from benchmarks.packs import PACKS
    from benchmarks.report import progress

    lines = [
        "## The choice, against a comparison of all strategies on all ranks",
        "",
        "Predicted time of the strategy that auto takes for a pack (plan/forecast.py), over that of the one that "
        "`choose` takes, which walks through every strategy rank by rank; and the milliseconds of both, without the "
        "layout. 128k tokens, 4 to 1,024 documents, three shapes, h100-nvlink and cpu-gloo. Packs of seeds from "
        f"{FIRST} on, which were not looked at when the choice was written.",
        "",
        "| documents | ranks | packs | mean | worst | packs over 1.05 | auto | longest | choose |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, name in progress([(ranks, name) for ranks in (8, 64) for name in PACKS], "choices"):
        found = fresh("regrets", name, ranks, 41 if ranks == 8 else 13)
        lines.append(
            f"| {name} | {ranks} | {found['packs']} | {found['mean']:.4f} | {found['worst']:.3f} | {found['over']} | "
            f"{found['taking']:.1f} | {found['longest']:.1f} | {found['comparing']:.0f} |"
        )
    return lines


def fairness_lines() -> list[str]:
    from benchmarks.report import progress

    found = [each for first in progress(range(0, 1000, 250), "fairness") for each in fresh("fairness", first, 250)]
    light, heavy = ([each for each in found if (each[2] <= 0.02) == wanted] for wanted in (True, False))
    return [
        f"| {name} | {len(some)} | {max(each[0] for each in some):.4f} | {sum(each[0] > 1.02 for each in some)} | "
        f"{max(each[1] for each in some)} |"
        for name, some in (("at most 2 % of a fair share", light), ("more", heavy))
    ]


def main() -> None:
    from benchmarks.report import folded, header

    before, load = loop(), os.getloadavg()[0]
    bars, grown, choices, fair = bar_lines(), growth_lines(), choice_lines(), fairness_lines()
    text = folded(
        "\n".join(
            [
                *header("What planning costs", "python -m benchmarks.planning"),
                "One core, CPU time in milliseconds, medians. The machine is shared: when the run began its load "
                f"average was {load:.1f}, and a loop of a million `total += i * i % 7` took {before:.0f} ms, then "
                f"{loop():.0f} ms when it ended.",
                "",
                "## A new pack with strategy auto",
                "",
                "Log-normal documents, 32 heads, 8 key heads. `session` is masks, layout and positions (`with_mask`), "
                "`choice` the strategy, `steps` those of one rank. `longest choice` is the longest of 23 packs, `cold "
                "process` the whole for the first pack of a process.",
                "",
                "| tokens | documents | ranks | session | choice | steps | total | bar | met | longest choice | "
                "cold process |",
                "|---|---|---|---|---|---|---|---|---|---|---|",
                *bars,
                "",
                "## Growth",
                "",
                "Strategy needed(2), the median of three packs in a process of its own.",
                "",
                "| tokens | documents | ranks | bands | mask | layout | steps | total | MB | tiles |",
                "|---|---|---|---|---|---|---|---|---|---|",
                *grown,
                "",
                *choices,
                "",
                "## Balanced on 1,000 random packs",
                "",
                "256 or 512 ranks of 128 to 4,096 tokens, 16 to 16,384 documents of seven distributions. Where one row "
                "sees more keys than 2 % of a rank's fair share of pairs, a token is more than the unevenness that is "
                "allowed.",
                "",
                "| heaviest row | packs | largest imbalance | packs over 1.02 | most runs of a rank |",
                "|---|---|---|---|---|",
                *fair,
                "",
            ]
        )
    )
    (ROOT / "benchmarks" / "results" / "planning.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, *args = json.loads(sys.argv[2])
        print(json.dumps(MEASURES[name](*args)))
    elif sys.argv[1:2] == ["--choices"]:
        print("\n".join(choice_lines()))
    else:
        main()
