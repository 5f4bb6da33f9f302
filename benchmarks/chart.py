"""Draws benchmarks/results/cp_compute.md for docs/performance.md: attnspan and torch's ring beside one device.

Run: python -m benchmarks.chart        writes docs/speed.svg
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]+ \| \*\*([\d.]+) / ([\d.]+)\*\* \|", re.MULTILINE)


def best(text: str) -> dict[str, dict[str, tuple[float, float]]]:
    """For every work, forward and forward + backward of our best schedule, and of torch's ring where it ran.

    >>> best("| causal | 1 / 2 | gather | 1 / 2 | **1.04 / 1.08** | 1 / 1 |")
    {'causal': {'attnspan': (1.04, 1.08)}}
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for work, schedule, forward, both in ROW.findall(text):
        if "a rank" in work:  # another number of ranks, or heads
            continue
        who = "torch's ring" if schedule == "torch ring" else "attnspan"
        figures, known = (float(forward), float(both)), found.setdefault(work, {})
        known[who] = min(known.get(who, figures), figures, key=lambda pair: pair[1])
    return found


def main() -> None:
    from matplotlib.figure import Figure

    found = best((ROOT / "benchmarks/results/cp_compute.md").read_text())
    colours = {"attnspan": "#1f6feb", "torch's ring": "#b0b7c3"}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, title, which in zip(
        figure.subplots(1, 2, sharey=True), ("forward", "forward + backward"), (0, 1), strict=True
    ):
        for place, who in ((-0.2, "attnspan"), (0.2, "torch's ring")):
            bars = [(at + place, times[who][which]) for at, times in enumerate(found.values()) if who in times]
            drawn = axes.barh([at for at, _ in bars], [x for _, x in bars], 0.38, color=colours[who], label=who)
            axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(title=title, xlim=(0, 2.2), xlabel="slowest of 8 ranks x 8 / one device")
        axes.set_yticks(range(len(found)), found)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs/speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
