"""What a step costs the host: an engine over a model whose forward takes no time.

Run: python benchmarks/host_cost.py            256 rows that decode, and fewer
     python benchmarks/host_cost.py --profile  what of it takes how long, for 256 rows

The model attends over no pages and returns the same logits over a small vocabulary, so that what is left is scheduling,
pages, plans, sampling of few numbers, and reporting. Prompts are distinct and computed first; then every row decodes.
Seconds are the processor's; the median and the fastest of the steps of several turns are told.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from attnspan import Engine, SamplingParams
from attnspan.engine import LayerSpec, ModelFingerprint, ModelInfo
from benchmarks.report import command, folded, header

RESULTS = Path(__file__).parent / "results"
VOCABULARY, PROMPT, STEPS, TURNS = 64, 200, 100, 5
CASES = {
    "greedy": SamplingParams(max_new_tokens=STEPS + 8),
    "drawn, temperature and top_p": SamplingParams(max_new_tokens=STEPS + 8, temperature=0.7, top_p=0.9, seed=1),
    "greedy, repetition_penalty": SamplingParams(max_new_tokens=STEPS + 8, repetition_penalty=1.1),
}


class Nothing:
    """A served model that computes nothing."""

    def __init__(self, rows: int) -> None:
        self.module = nn.Linear(1, 1)
        self.logits = torch.zeros(rows, VOCABULARY)
        self.logits[:, 5] = 1.0

    def info(self) -> ModelInfo:
        return ModelInfo((LayerSpec(1, 8),), VOCABULARY, torch.float32, torch.device("cpu"), max_positions=4096)

    def step(self, batch, attention):
        attention.calls = 1  # as if the layer had attended
        return self.logits[: len(batch.tokens) if batch.logits_to_keep is None else len(batch.logits_to_keep)]

    def fingerprint(self) -> ModelFingerprint:
        return ModelFingerprint(self.module)

    def check_ready(self) -> None:
        pass


def decoding(rows: int, params: SamplingParams) -> Engine:
    """An engine whose rows have computed their prompts."""
    pages = rows * (-(-(PROMPT + STEPS + 8) // 16) + 1)
    engine = Engine(Nothing(rows), pages=pages, max_sequences=rows, max_tokens=8192)
    for row in range(rows):
        engine.add([row % VOCABULARY, row // VOCABULARY] + [7] * (PROMPT - 2), params)
    while engine.counts.tokens < rows * PROMPT:
        engine.step()
    return engine


def steps(engine: Engine) -> list[float]:
    times = []
    for _ in range(STEPS):
        began = time.process_time_ns()
        engine.step()
        times.append((time.process_time_ns() - began) / 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    torch.set_num_threads(1)
    if parser.parse_args().profile:
        engine, profile = decoding(256, CASES["greedy"]), cProfile.Profile()
        profile.runcall(steps, engine)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    lines = ["Milliseconds of a step in which every row decodes.", ""]
    lines += ["| rows | " + " | ".join(f"{name}: median | fastest" for name in CASES) + " |"]
    lines += ["|---" * (1 + 2 * len(CASES)) + "|"]
    for rows in (1, 16, 64, 256):
        cells = []
        for params in CASES.values():
            times = [each for _ in range(TURNS) for each in steps(decoding(rows, params))]
            cells += [f"{statistics.median(times):.3f}", f"{min(times):.3f}"]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    top = header("What a step costs the host", command("python benchmarks/host_cost.py"))
    (RESULTS / "host_cost.md").write_text(folded("\n".join([*top, *lines, ""])))


if __name__ == "__main__":
    main()
