"""Warm-up: prompts of zeros are run before the first request, so that no request waits for what happens only once.

Kernels are compiled for numbers of new tokens, and graphs are captured for numbers of rows. Both happen here, in pages
that are given back; nothing is found, kept or counted.
"""

from __future__ import annotations

from attnspan.engine.runner import Runner
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Scheduler

LENGTHS = (8, 64, 512)
"""Lengths of single prompts: kernels differ by the number of new tokens of a sample, up to about 64."""


def warmup_batches(runner: Runner) -> list[list[int]]:
    """Batches to run one after another, each as the lengths of its prompts."""
    return [*([1] * rows for rows in runner.sizes), *([length] for length in LENGTHS)]


def run_warmup(runner: Runner, scheduler: Scheduler, lengths: list[int]) -> None:
    """Run prompts of these lengths and a token after each, as far as there is room for them.

    Where it fails, pages are left to the scheduler's `reset`.
    """
    for number, length in enumerate(lengths):
        if scheduler.room.refusal(length + 1, scheduler.chunk) is None:
            sample = Sample(number, [0] * length, length + 1)
            scheduler.add(sample)
            sample.unshared = True  # it is neither kept nor found
    while batch := scheduler.step():
        runner.prepare(batch)
        runner.run(batch)
        scheduler.computed(batch)
        for sample in [chunk.sample for chunk in batch if not chunk.sample.rest]:
            if len(sample.tokens) == sample.most:
                scheduler.remove(sample)
            else:
                sample.tokens.append(0)
