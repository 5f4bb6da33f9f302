"""Warm-up: runs prompts of zeros before the first request, which compiles kernels and captures graphs.

Kernels are compiled for numbers of new tokens, libraries choose and load theirs by the tokens of a step, and graphs are
captured for numbers of rows. The pages are freed afterwards; nothing is cached or counted.
"""

from __future__ import annotations

from attnspan.engine.model_runner import ModelRunner
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Scheduler

LENGTHS = (8, 64, 512)
"""Lengths of single prompts: kernels differ by the number of new tokens of a sample, up to about 64."""

TOGETHER = 4
"""Prompts that fill a step together, as those of requests do; one that fills it alone comes after them."""


def run_warmup(runner: ModelRunner, scheduler: Scheduler, max_length: int) -> None:
    """Run prompts and a token after each, as far as there is room for them: one for each size, then longer ones alone.

    Where it fails, pages are left to the scheduler's `reset`.
    """
    limits = scheduler.limits
    together = min(TOGETHER, limits.max_sequences)
    full = [limits.max_tokens // together] * together, [limits.max_tokens]
    for lengths in (*([1] * rows for rows in runner.graph_sizes), *([length] for length in LENGTHS), *full):
        for number, length in enumerate(min(length, max_length - 1) for length in lengths):
            if length and scheduler.kv_cache.refusal(length + 1, scheduler.max_chunk) is None:
                sample = Sample(number, [0] * length, length + 1, encoder_prompt=runner.encoder_example)
                scheduler.add(sample)
                sample.unshared = True  # it is neither cached nor found
        while batch := scheduler.schedule():
            runner.prepare(batch)
            runner.run(batch)
            runner.keep_states()
            scheduler.mark_computed(batch)
            for sample in [chunk.sample for chunk in batch if not chunk.sample.remaining]:
                if len(sample.tokens) == sample.max_length:
                    scheduler.remove(sample)
                else:
                    sample.tokens.append(0)
    runner.forget_encoded()
