"""Made-up prompts: what is done when something is first met is done before anyone waits for it.

Kernels are compiled for numbers of new tokens, graphs are noted for numbers of rows. Both are met here by running them,
in pages that are given back; nothing is found, kept or counted.
"""

from __future__ import annotations

from attnspan.engine.runner import Runner
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Scheduler

LENGTHS = (8, 64, 512)
"""Of single prompts: kernels differ by how many new tokens a sample has, up to some 64."""


def warmup_batches(runner: Runner) -> list[list[int]]:
    """Lengths of the prompts that are run together, time after time."""
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
